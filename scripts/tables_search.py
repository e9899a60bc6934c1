"""Tables of the searches that chose the recipes: search.csv, which `benchmarks/search.py` trains again."""

import json
from collections.abc import Callable, Iterable

from rows import Row, read, table

from fastff_reproduce.experiments import EXPERIMENTS
from fastff_reproduce.settings import shortened

EIGHT = "100 101 102 103 104 105 106 107"  # seeds that no table uses
VIT = {"augment": 1.0, "batch": 512, "precision": "high", "rate": 1e-3, "weight_decay": 0.05}
TREE = VIT | {"noise": 0.0}


def recipe(experiment: str, **changes: object) -> dict[str, object]:
    """The settings of an experiment's trees for G_A by recipe fastff, with some changed: as search.csv has them."""
    case, *_ = EXPERIMENTS[experiment].cases(recipes=["fastff"], seeds=[0], models=["FFF"], changes=changes)
    return shortened(case.settings)


def find(settings: dict[str, object], **place: object) -> Row | None:
    """The row of these settings; of several trainings the last."""
    wanted = {name: str(value) for name, value in place.items()}
    found = [row for row in read("search") if wanted.items() <= row.items() and json.loads(row["settings"]) == settings]
    return found[-1] if found else None


def both(row: Row | None) -> str:
    """Accuracy on validation images, then on test images."""
    return f"{float(row['validation']):.1f}, {float(row['G_A']):.1f}" if row else ""


def on_images(lines: Iterable[tuple[str, dict[str, object]]], leaf_width: int, seeds: str = EIGHT) -> str:
    body = []
    for name, changes in lines:
        settings = recipe("table1", **changes)
        place = {"width": 128, "leaf_width": leaf_width, "seeds": seeds}
        cells = [both(find(settings, dataset=dataset, **place)) for dataset in ("mnist", "fashionmnist")]
        if not all(cells):
            raise LookupError(f"results/search.csv has no row for {name!r}: {settings}")
        body.append([name, *cells])
    return table(["", "MNIST: validation, test", "FashionMNIST: validation, test"], body)


def search_length() -> str:
    """How the recipe of Table 1 grew; l = 8."""
    first = {"schedule": "cosine", "batch": 256, "input_dropout": 0.0}
    falling = {"schedule": "cosine"}
    short = falling | {"steps": 8400}
    return on_images(
        [
            ("16,800 steps of 256, no input dropout", first),
            ("16,800 steps of 256", falling | {"batch": 256}),
            ("8,400 steps of 512, no input dropout", short | {"input_dropout": 0.0}),
            ("8,400 steps of 512", short),
            ("8,400 steps of 512, input dropout 0.4", short | {"input_dropout": 0.4}),
            ("16,800 steps of 512", falling),
            ("16,800 steps of 512, constant rate: the recipe", {}),
        ],
        8,
    )


def search_around() -> str:
    """The recipe with one or two numbers changed; l = 8."""
    more = {"averaging": 0.999}
    return on_images(
        [
            ("the recipe", {}),
            ("averaging 0.999", more),
            ("averaging 0.9998", {"averaging": 0.9998}),
            ("averaging 0.999, rate 2e-3", more | {"rate": 2e-3}),
            ("averaging 0.999, rate 4e-3", more | {"rate": 4e-3}),
            ("averaging 0.999, noise 1.2", more | {"noise": 1.2}),
            ("averaging 0.999, weight decay 0.05", more | {"weight_decay": 0.05}),
            ("averaging 0.999, weight decay 0.2", more | {"weight_decay": 0.2}),
            ("averaging 0.999, balance 0.1", more | {"balance": 0.1}),
            ("averaging 0.999, batch 1024", more | {"batch": 1024}),
            ("averaging 0.999, 25,200 steps", more | {"steps": 25200}),
            ("sharing 0.3", {"sharing": 0.3}),
            ("sharing 0.5", {"sharing": 0.5}),
            ("sharing 0.8", {"sharing": 0.8}),
        ],
        8,
    )


def search_sharing() -> str:
    return on_images([("the recipe", {}), ("sharing 0.5", {"sharing": 0.5})], 1)


def search_fresh_seeds() -> str:
    """The recipe on seeds that took no part in any choice."""
    return on_images([("the recipe, seeds 10 to 19", {})], 8, " ".join(map(str, range(10, 20))))


def search_wide() -> str:
    """How the settings of Table 2 were chosen; CIFAR10."""
    before = {"weight_decay": 0.3, "averaging": 0.0}
    lines = [
        ("weight decay 0.3, no averaging", before),
        ("weight decay 0.3", {"weight_decay": 0.3}),
        ("no averaging", {"averaging": 0.0}),
        ("no averaging, sharing 0.93", {"averaging": 0.0, "sharing": 0.93}),
        ("no averaging, noise 0.6", {"averaging": 0.0, "noise": 0.6}),
        ("Table 2's settings", {}),
        ("averaging 0.998", {"averaging": 0.998}),
        ("averaging 0.998, rate 7e-3", {"averaging": 0.998, "rate": 7e-3}),
        ("input dropout 0.1", {"input_dropout": 0.1}),
        ("constant rate", {"schedule": "constant"}),
        ("constant rate of 2.5e-3, averaging 0.998", {"schedule": "constant", "averaging": 0.998, "rate": 2.5e-3}),
    ]
    body = []
    for name, changes in lines:
        settings = recipe("table2", **changes)
        place = {"dataset": "cifar10", "leaf_width": 32, "seeds": EIGHT}
        body.append([name, *(both(find(settings, width=width, **place)) for width in (256, 512, 1024))])
    return table(["validation, test", "w = 256", "w = 512", "w = 1024"], body)


def search_vit() -> str:
    """Transformers whose trees start on their own, without a dense teacher; one seed."""
    lines = [
        ("dense, 128 neurons", 128, 128, VIT | {"epochs": 60}),
        ("dense, 128 neurons", 128, 128, VIT | {"epochs": 200}),
        ("dense, 8 neurons", 8, 8, VIT | {"epochs": 60}),
        ("dense, 8 neurons", 8, 8, VIT | {"epochs": 200}),
        ("FFF, 16 leaves of 8", 128, 8, TREE | {"epochs": 60}),
        ("FFF, 16 leaves of 8, sharing 0.77", 128, 8, TREE | {"epochs": 200, "sharing": 0.769}),
        ("FFF, 128 leaves of 1", 128, 1, TREE | {"epochs": 60}),
    ]
    body = []
    for name, width, leaf, settings in lines:
        row = find(settings, width=width, leaf_width=leaf)
        if row is None:
            raise LookupError(f"results/search.csv has no row for {name!r}: {settings}")
        body.append([name, row["epochs"], f"{float(row['validation']):.1f}", f"{float(row['G_A']):.1f}"])
    return table(["feedforward blocks", "epochs", "validation", "test"], body)


def search_vit_decay() -> str:
    """The dense transformer by weight decay and strength of augmentation; 150 epochs, one seed."""
    found = [r for r in read("search") if r["model"] == "ViT-FF" and r["epochs"] == "150"]
    rows = [r for r in found if "augment" in json.loads(r["settings"])]  # not those with mixed images
    settings = [json.loads(row["settings"]) for row in rows]
    pairs = sorted(zip(settings, rows, strict=True), key=lambda pair: -float(pair[1]["validation"]))
    body = [
        [str(s["weight_decay"]), str(s["augment"]), f"{float(r['validation']):.1f}", f"{float(r['G_A']):.1f}"]
        for s, r in pairs
    ]
    return table(["weight decay", "augmentation", "validation", "test"], body)


def search_vit_trees() -> str:
    """Trees of 16 leaves of 8, fitted to a dense transformer, trained on its answers; one setting changed, one seed."""
    images = {"cutmix": 0.5, "mixup": 0.5, "smoothing": 0.1, "shift": 0.125, "mirror": True, "warmup": 5}
    teacher = {"teacher_decay": 0.1, "teacher_rate": 2e-3, "teacher_share": 3.75}
    base = {name: value for name, value in TREE.items() if name != "augment"} | images | teacher
    base |= {"epochs": 40, "evaluate_every": 10}
    lines: list[tuple[str, dict[str, object]]] = [
        ("the recipe then: 2,048 images to fit, rate 1e-3", {}),
        ("fit: 16,384 images", {"fit_images": 16384}),
        ("fit: 2,000 steps on each block's outputs", {"fit_steps": 2000}),
        ("fit: both", {"fit_images": 16384, "fit_steps": 2000}),
        ("few samples a leaf: sharing 0.5", {"sharing": 0.5}),
        ("few samples a leaf: sharing 0.8", {"sharing": 0.8}),
        ("few samples a leaf: noise 0.4", {"noise": 0.4}),
        ("optimisation: rate 5e-4", {"rate": 5e-4}),
        ("optimisation: rate 2e-3", {"rate": 2e-3}),
        ("optimisation: weight decay 0.1", {"weight_decay": 0.1}),
        ("optimisation: averaging 0.998", {"averaging": 0.998}),
        ("optimisation: soft decisions, temperature to 30", {"decision": "soft", "training_temperature": 30.0}),
    ]
    body = []
    for name, changes in lines:
        row = find(base | changes, leaf_width=8, model="ViT-FFF")
        if row is None:
            raise LookupError(f"results/search.csv has no row for {name!r}: {base | changes}")
        body.append([name, row["epochs"], f"{float(row['validation']):.1f}"])
    return table(["", "epochs", "validation"], body)


TABLES: dict[str, Callable[[], str]] = {
    "search-length": search_length,
    "search-around": search_around,
    "search-sharing": search_sharing,
    "search-fresh-seeds": search_fresh_seeds,
    "search-wide": search_wide,
    "search-vit": search_vit,
    "search-vit-decay": search_vit_decay,
    "search-vit-trees": search_vit_trees,
}
