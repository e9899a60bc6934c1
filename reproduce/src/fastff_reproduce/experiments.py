"""The paper's experiments as lists of trainings."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from . import data
from .runs import Case
from .settings import FASTFF, PAPER, Settings
from .teacher import dense

RECIPES = ("paper", "fastff")
Cases = Callable[..., list[Case]]


class Experiment(NamedTuple):
    name: str
    title: str
    about: str
    cases: Cases


class Plan(NamedTuple):
    """What a user asks for; None: as in the paper."""

    datasets: Sequence[str] | None
    widths: Sequence[int] | None
    leaf_widths: Sequence[int] | None
    recipes: Sequence[str]
    seeds: Sequence[int]
    changes: Mapping[str, Any]
    models: Sequence[str] | None

    def check(self) -> None:
        for name in self.datasets or ():
            if name not in data.NAMES:
                raise ValueError(f"unknown data set {name!r}; choose from {', '.join(data.NAMES)}.")
        for name in self.recipes:
            if name not in RECIPES:
                raise ValueError(f"unknown recipe {name!r}; choose from {', '.join(RECIPES)}.")
        for what, numbers in (("width", self.widths), ("leaf width", self.leaf_widths)):
            for number in numbers or ():
                if number < 1:
                    raise ValueError(f"a {what} is at least 1; got {number}.")

    def refuse_widths(self, of: str) -> None:
        if self.widths:
            raise ValueError(f"the widths of this experiment follow from its {of}; choose leaf widths.")


def _cases(make: Callable[[Plan], list[Case]]) -> Cases:
    def cases(
        datasets: Sequence[str] | None = None,
        widths: Sequence[int] | None = None,
        leaf_widths: Sequence[int] | None = None,
        recipes: Sequence[str] = RECIPES,
        seeds: Sequence[int] = range(10),
        changes: Mapping[str, Any] | None = None,
        models: Sequence[str] | None = None,
    ) -> list[Case]:
        plan = Plan(datasets, widths, leaf_widths, recipes, seeds, changes or {}, models)
        plan.check()
        made = make(plan)
        for model in models or ():
            if all(case.model != model for case in made):
                there = dict.fromkeys(case.model for case in make(plan._replace(models=None)))
                raise ValueError(f"the experiment has no model {model!r}; it has {', '.join(there) or 'none'}.")
        return made

    return cases


def _trainings(plan: Plan, cases: Sequence[Case], paper: Settings, ours: Settings = FASTFF) -> list[Case]:
    """The trainings of the cases, for every recipe and seed.

    The paper's recipe measures M_A and G_A in one training. Ours generalises with weight decay and transposition, and
    memorises without.
    """
    made = []
    if "taught" in plan.changes:
        raise ValueError("taught is for transformers: table3 and entropy_vit.")
    for case, recipe, seed in itertools.product(cases, plan.recipes, plan.seeds):
        one = dataclasses.replace(case, recipe=recipe, seed=seed)
        if recipe == "paper":
            made.append(dataclasses.replace(one, goal="both", settings=paper.changed(plan.changes).items()))
            continue
        free = dataclasses.replace(ours, weight_decay=0.0, transposition=0.0)
        made.append(dataclasses.replace(one, goal="G_A", settings=ours.changed(plan.changes).items()))
        made.append(dataclasses.replace(one, goal="M_A", settings=free.changed(plan.changes).items()))
    return made


def _case(plan: Plan, dataset: str, model: str, width: int, leaf_width: int) -> list[Case]:
    """One model on one data set; none if the plan leaves it out."""
    if plan.models and model not in plan.models:
        return []
    depth = depth_of(width, leaf_width) if model.endswith("FFF") else 0
    return [Case(dataset, model, width, leaf_width, depth, "", "both", 0)]


def depth_of(width: int, leaf_width: int) -> int:
    """Of the tree with so many leaf neurons in all."""
    leaves = width // leaf_width
    if leaves * leaf_width != width or leaves & (leaves - 1):
        raise ValueError(f"a width of {width} is not a power of two times the leaf width {leaf_width}.")
    return leaves.bit_length() - 1


def _table1(plan: Plan) -> list[Case]:
    made = []
    for dataset in plan.datasets or ("usps", "mnist", "fashionmnist"):
        for width in plan.widths or (16, 32, 64, 128):
            made += _trainings(plan, _case(plan, dataset, "FF", width, width), PAPER)
            for leaf in plan.leaf_widths or (8, 4, 2, 1):
                made += _trainings(plan, _case(plan, dataset, "FFF", width, leaf), PAPER)
    return made


def _inference_counterparts(plan: Plan) -> list[Case]:
    paper = dataclasses.replace(PAPER, hardening=0.0)
    made = []
    plan.refuse_widths("leaf widths and depths")
    for dataset in plan.datasets or ("svhn", "cifar10", "cifar100"):
        sizes = set()
        for depth in (2, 6):
            for leaf in plan.leaf_widths or (2, 4, 6, 8, 16, 32):
                made += _trainings(plan, _case(plan, dataset, "FFF", leaf << depth, leaf), paper)
                sizes.add(leaf + depth)
        for size in sorted(sizes):
            made += _trainings(plan, _case(plan, dataset, "FF", size, size), paper)
    return made


# The paper's Table 2 has its own recipe.
TABLE2 = PAPER.changed(
    {
        "optimizer": "adam",
        "rate": 1e-3,
        "batch": 4096,
        "precision": "high",
        "epochs": 7000,
        "patience": 350,
        "plateau": 250,
    }
)

# Ours for leaves of a hundred thousand weights. FF and MoE want a lower rate, which sharing raises.
WIDE = Settings(
    rate=5e-3, weight_decay=0.2, averaging=0.995, batch=128, precision="high", epochs=16, noise=0.4, sharing=0.95
)
DENSE = dataclasses.replace(WIDE, rate=1e-3, weight_decay=0.1, batch=256)
COLOURED = ("svhn", "cifar10", "cifar100")  # photographs: no pixel is nearly always black
MIRRORED = ("cifar10", "cifar100")  # the images that mean the same left to right


def _table2(plan: Plan) -> list[Case]:
    leaves, made = plan.leaf_widths or (32,), []
    for dataset in plan.datasets or ("cifar10",):
        inputs = {"by_pixel": dataset in COLOURED, "mirror": dataset in MIRRORED}
        trees, others = (ours.changed(inputs) for ours in (WIDE, DENSE))
        for width in plan.widths or (64, 128, 256, 512, 1024):
            made += _trainings(plan, _case(plan, dataset, "FF", width, width), TABLE2, others)
            made += _trainings(plan, _case(plan, dataset, "MoE", width, 16), TABLE2, others)
            for leaf in leaves:
                made += _trainings(plan, _case(plan, dataset, "FFF", width, leaf), TABLE2, trees)
    return made


def _entropy_mnist(plan: Plan) -> list[Case]:
    made = []
    plan.refuse_widths("leaf widths and depths")
    for dataset in plan.datasets or ("mnist",):
        for leaf in plan.leaf_widths or (8,):
            for depth in (2, 3, 4):
                made += _trainings(plan, _case(plan, dataset, "FFF", leaf << depth, leaf), PAPER)
    return made


# The paper's Table 3, too. It does not say how large a batch is, nor how long a training: ours lasts as long as a
# halved rate has some time to help.
TABLE3 = PAPER.changed(
    {
        "optimizer": "adam",
        "rate": 4e-4,
        "batch": 512,
        "precision": "high",
        "epochs": 500,
        "patience": 100,
        "plateau": 50,
        "plateau_of": "validation",
        "augment": 1.0,
        "hardening": 0.0,
    }
)
# Its three levels of hardening. h = infinity is a tree that does not train; so that the soft pass agrees with the hard
# one all the same, the leaf that evaluation uses trains alone, as the authors' code does with "hardened" training.
LEVELS = (
    dataclasses.replace(TABLE3, hardening=5.0),
    dataclasses.replace(TABLE3, hardening=10.0),
    dataclasses.replace(TABLE3, frozen=True, decision="straight_through", final_temperature=100.0),
)
# Ours in a transformer, which is trained with dense blocks first: with more weight decay and fewer epochs, since those
# are soon at their best. Trees learn slowly what they answer.
VIT = Settings(
    rate=1e-3,
    weight_decay=0.05,
    batch=512,
    precision="high",
    epochs=600,
    augment=1.0,
    taught=0.25,
    twin_decay=0.25,
    noise=0.0,
)


def _transformers(plan: Plan, cases: Sequence[Case], paper: Sequence[Settings]) -> list[Case]:
    """The trainings of vision transformers; the paper measures G_A alone."""
    made = []
    for case, recipe in itertools.product(cases, plan.recipes):
        for settings in paper if recipe == "paper" else [VIT]:
            changed = settings.changed(plan.changes)
            if changed.taught and "weight_decay" in plan.changes and list(plan.models or ()) == ["ViT-FF"]:
                raise ValueError("weight_decay is that of trees here, and twin_decay that of FF, which teaches them.")
            for seed in plan.seeds:
                one = dataclasses.replace(case, recipe=recipe, goal="G_A", seed=seed, settings=changed.items())
                made.append(dense(one) if case.model == "ViT-FF" and changed.taught else one)
    return list(dict.fromkeys(made))  # a change may make two levels of hardening the same


def _table3(plan: Plan) -> list[Case]:
    made = []
    for dataset in plan.datasets or ("cifar10",):
        for width in plan.widths or (128,):
            made += _transformers(plan, _case(plan, dataset, "ViT-FF", width, width), [TABLE3])
            for leaf in plan.leaf_widths or (32, 16, 8, 4, 2, 1):
                made += _transformers(plan, _case(plan, dataset, "ViT-FFF", width, leaf), LEVELS)
    return made


def _entropy_vit(plan: Plan) -> list[Case]:
    paper = dataclasses.replace(TABLE3, hardening=0.10)
    made = []
    plan.refuse_widths("leaf widths and a depth of 2")
    for dataset in plan.datasets or ("cifar10",):
        for leaf in plan.leaf_widths or (32,):
            made += _transformers(plan, _case(plan, dataset, "ViT-FFF", leaf << 2, leaf), [paper])
    return made


# What each part of our recipe is worth: the recipe with one part changed.
CHANGES: dict[str, dict[str, Any]] = {
    "without noise": {"noise": 0.0},
    "without a balanced start": {"balanced": False},  # nor is the tree rebalanced
    "without rebalancing": {"min_share": 0.0},
    "without the balance loss": {"balance": 0.0},
    "without weight decay": {"weight_decay": 0.0},
    "without means of weights": {"averaging": 0.0},
    "without input dropout": {"input_dropout": 0.0},
    "without standardised inputs": {"standardise": False},
    "with soft decisions, temperature 1 to 100": {"decision": "soft", "last_temperature": 100.0},
    "with transposition 0.05": {"transposition": 0.05},
    "with the hardening loss, h = 0.3": {"hardening": 0.3},
    "with a falling rate": {"schedule": "cosine"},
    "with SGD at a rate of 1": {"optimizer": "sgd", "rate": 1.0, "weight_decay": 3e-4},  # the same decay of a step
}


def _ablation(plan: Plan) -> list[Case]:
    made = []
    if "fastff" not in plan.recipes:
        raise ValueError("the ablation is of recipe fastff.")
    for dataset in plan.datasets or ("usps", "mnist", "fashionmnist"):
        for width in plan.widths or (128,):
            for leaf in plan.leaf_widths or (8, 1):
                for case in _case(plan, dataset, "FFF", width, leaf):
                    for recipe, change in {"fastff": {}, **CHANGES}.items():
                        settings = FASTFF.changed(plan.changes).changed(change).items()
                        made += [
                            dataclasses.replace(case, recipe=recipe, goal="G_A", seed=seed, settings=settings)
                            for seed in plan.seeds
                        ]
    return made


EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            "table1",
            "Table 1: training counterparts",
            "FFF beside FF of the same training width on USPS, MNIST and FashionMNIST",
            _cases(_table1),
        ),
        Experiment(
            "inference_counterparts",
            "Inference counterparts",
            "FFF beside FF of the same inference size on SVHN, CIFAR10 and CIFAR100",
            _cases(_inference_counterparts),
        ),
        Experiment(
            "table2",
            "Table 2: FF, MoE and FFF",
            "three kinds of layer of the same training width on CIFAR10, with the epochs to train",
            _cases(_table2),
        ),
        Experiment(
            "entropy_mnist",
            "Hardening on MNIST",
            "the entropy of the decisions over the epochs, at depths 2, 3 and 4",
            _cases(_entropy_mnist),
        ),
        Experiment(
            "table3",
            "Table 3: vision transformers",
            "transformers with FFF layers of ever smaller leaves beside one with FF layers, on CIFAR10",
            _cases(_table3),
        ),
        Experiment(
            "entropy_vit",
            "Hardening in a vision transformer",
            "the entropy of the decisions in each of its four layers over the epochs",
            _cases(_entropy_vit),
        ),
        Experiment(
            "ablation",
            "What each part of the recipe is worth",
            "our recipe with one part changed, at the widest size of Table 1 and leaves of 8 neurons and of 1",
            _cases(_ablation),
        ),
        Experiment(
            "speed",
            "Speed",
            "the time of a forward pass of FF, MoE and FFF, from rows of fastff bench and not from trainings: fastff "
            "bench blocks, fastff bench table1 and fastff bench table3, each with --output results/inference.csv",
            _cases(lambda _: []),
        ),
        Experiment(
            "regions",
            "Regions",
            "the paper's first figure: how FF, MoE and FFF divide a plane among their neurons",
            _cases(lambda _: []),
        ),
    )
}
