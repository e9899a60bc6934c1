"""The experiments of the paper, and the ablation of our recipe: which models are trained on which data sets."""

import dataclasses
from typing import NamedTuple

from .recipes import CHANGES, DENSE, FASTFF, LEVELS, PAPER, TABLE2, TABLE3, VIT, WIDE
from .runs import Case
from .sweep import Cases, Selection, one_model, sweep, trainings, transformers

COLOURED = ("svhn", "cifar10", "cifar100")  # photographs: no pixel is nearly always black
MIRRORED = ("cifar10", "cifar100")  # images with the same meaning when flipped left to right


class Experiment(NamedTuple):
    name: str
    title: str
    about: str
    cases: Cases


def _table1(selection: Selection) -> list[Case]:
    made = []
    for dataset in selection.datasets or ("usps", "mnist", "fashionmnist"):
        for width in selection.widths or (16, 32, 64, 128):
            made += trainings(selection, one_model(selection, dataset, "FF", width, width), PAPER)
            for leaf in selection.leaf_widths or (8, 4, 2, 1):
                made += trainings(selection, one_model(selection, dataset, "FFF", width, leaf), PAPER)
    return made


def _inference_counterparts(selection: Selection) -> list[Case]:
    paper = dataclasses.replace(PAPER, hardening=0.0)
    made = []
    selection.refuse_widths("leaf widths and depths")
    for dataset in selection.datasets or ("svhn", "cifar10", "cifar100"):
        sizes = set()
        for depth in (2, 6):
            for leaf in selection.leaf_widths or (2, 4, 6, 8, 16, 32):
                made += trainings(selection, one_model(selection, dataset, "FFF", leaf << depth, leaf), paper)
                sizes.add(leaf + depth)
        for size in sorted(sizes):
            made += trainings(selection, one_model(selection, dataset, "FF", size, size), paper)
    return made


def _table2(selection: Selection) -> list[Case]:
    leaves, made = selection.leaf_widths or (32,), []
    for dataset in selection.datasets or ("cifar10",):
        inputs = {"by_pixel": dataset in COLOURED, "mirror": dataset in MIRRORED}
        trees, others = (ours.changed(inputs) for ours in (WIDE, DENSE))
        for width in selection.widths or (64, 128, 256, 512, 1024):
            made += trainings(selection, one_model(selection, dataset, "FF", width, width), TABLE2, others)
            made += trainings(selection, one_model(selection, dataset, "MoE", width, 16), TABLE2, others)
            for leaf in leaves:
                made += trainings(selection, one_model(selection, dataset, "FFF", width, leaf), TABLE2, trees)
    return made


def _entropy_mnist(selection: Selection) -> list[Case]:
    made = []
    selection.refuse_widths("leaf widths and depths")
    for dataset in selection.datasets or ("mnist",):
        for leaf in selection.leaf_widths or (8,):
            for depth in (2, 3, 4):
                made += trainings(selection, one_model(selection, dataset, "FFF", leaf << depth, leaf), PAPER)
    return made


def _table3(selection: Selection) -> list[Case]:
    made = []
    for dataset in selection.datasets or ("cifar10",):
        ours = VIT.changed({"mirror": dataset in MIRRORED})
        for width in selection.widths or (128,):
            made += transformers(selection, one_model(selection, dataset, "ViT-FF", width, width), [TABLE3], ours)
            for leaf in selection.leaf_widths or (32, 16, 8, 4, 2, 1):
                made += transformers(selection, one_model(selection, dataset, "ViT-FFF", width, leaf), LEVELS, ours)
    return made


def _entropy_vit(selection: Selection) -> list[Case]:
    paper = dataclasses.replace(TABLE3, hardening=0.10)
    made = []
    selection.refuse_widths("leaf widths and a depth of 2")
    for dataset in selection.datasets or ("cifar10",):
        ours = VIT.changed({"mirror": dataset in MIRRORED})
        for leaf in selection.leaf_widths or (32,):
            made += transformers(selection, one_model(selection, dataset, "ViT-FFF", leaf << 2, leaf), [paper], ours)
    return made


def _ablation(selection: Selection) -> list[Case]:
    made = []
    if "fastff" not in selection.recipes:
        raise ValueError(f"the ablation changes recipe fastff; got {', '.join(selection.recipes)}. Leave --recipe out.")
    for dataset in selection.datasets or ("usps", "mnist", "fashionmnist"):
        for width in selection.widths or (128,):
            for leaf in selection.leaf_widths or (8, 1):
                for case in one_model(selection, dataset, "FFF", width, leaf):
                    for recipe, change in {"fastff": {}, **CHANGES}.items():
                        settings = FASTFF.changed(selection.changes).changed(change).items()
                        made += [
                            dataclasses.replace(case, recipe=recipe, goal="G_A", seed=seed, settings=settings)
                            for seed in selection.seeds
                        ]
    return made


EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            "table1",
            "Table 1: training counterparts",
            "FFF and FF of the same training width on USPS, MNIST and FashionMNIST",
            sweep(_table1),
        ),
        Experiment(
            "inference_counterparts",
            "Inference counterparts",
            "FFF and FF of the same inference size on SVHN, CIFAR10 and CIFAR100",
            sweep(_inference_counterparts),
        ),
        Experiment(
            "table2",
            "Table 2: FF, MoE and FFF",
            "the three layers at the same training width on CIFAR10, with the epochs they train",
            sweep(_table2),
        ),
        Experiment(
            "entropy_mnist",
            "Hardening on MNIST",
            "entropy of the decisions by epoch, at depths 2, 3 and 4",
            sweep(_entropy_mnist),
        ),
        Experiment(
            "table3",
            "Table 3: vision transformers",
            "vision transformers with FFF layers, by leaf width, and one with FF layers, on CIFAR10",
            sweep(_table3),
        ),
        Experiment(
            "entropy_vit",
            "Hardening in a vision transformer",
            "entropy of the decisions in each of the four layers, by epoch",
            sweep(_entropy_vit),
        ),
        Experiment(
            "ablation",
            "Ablation of our recipe",
            "our recipe with one part changed, at training width 128 and leaf widths 8 and 1",
            sweep(_ablation),
        ),
        Experiment(
            "speed",
            "Speed",
            "the time of a forward pass of FF, MoE and FFF. No training: run fastff bench blocks, fastff bench table1 "
            "and fastff bench table3, each with --output results/inference.csv",
            sweep(lambda _: []),
        ),
        Experiment(
            "regions",
            "Regions",
            "the paper's first figure: how FF, MoE and FFF divide a plane between their neurons",
            sweep(lambda _: []),
        ),
    )
}
