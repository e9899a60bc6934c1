"""Tables of accuracies: the paper's experiments and the ablation, from learning.csv and entropies.csv.

A row belongs to an experiment if it was trained exactly as `fastff reproduce` trains it now: with the same settings.
"""

import functools
import json
from collections.abc import Callable, Sequence

from rows import Row, mean, read, table

from fastff_reproduce import paper
from fastff_reproduce.experiments import EXPERIMENTS
from fastff_reproduce.runs import Case
from fastff_reproduce.settings import Settings, completed

WIDTHS, LEAVES = (16, 32, 64, 128), (8, 4, 2, 1)
TABLE1 = {"usps": "USPS", "mnist": "MNIST", "fashionmnist": "FashionMNIST"}
# The rows of table3 by recipe fastff are of trainings without mixed images, which --set repeats.
UNMIXED = {
    "rate": 1e-3,
    "epochs": 600,
    "fit_images": Settings().fit_images,
    "augment": 1.0,
    "mirror": False,
    "shift": 0.0,
    "cutmix": 0.0,
    "mixup": 0.0,
    "smoothing": 0.0,
    "warmup": 0,
    "evaluate_every": 0,
    "teacher_share": 0.25,
    "teacher_rate": 0.0,
    "teacher_decay": 0.25,
}


def as_case(row: Row) -> Case:
    numbers = {name: int(row[name]) for name in ("width", "leaf_width", "depth", "seed")}
    words = {name: row[name] for name in ("dataset", "model", "recipe", "goal")}
    return Case(**words, **numbers, settings=completed(json.loads(row["settings"])))


@functools.cache
def stored() -> dict[str, Row]:
    return {as_case(row).key: row for row in read("learning")}


@functools.cache
def trained(experiment: str, recipe: str = "fastff", seeds: int = 10) -> list[tuple[Case, Row]]:
    """The stored trainings of an experiment, in its order."""
    changes = UNMIXED if (experiment, recipe) == ("table3", "fastff") else {}
    cases = EXPERIMENTS[experiment].cases(recipes=[recipe], seeds=range(seeds), changes=changes)
    found = [(case, stored()[case.key]) for case in cases if case.key in stored()]
    for model in dict.fromkeys(case.model for case in cases):
        if all(case.model != model for case, _ in found):
            raise LookupError(
                f"results/learning.csv has no {model} of {experiment} with today's settings of recipe {recipe}. "
                "Train it again, or rename the settings in the file as in the package."
            )
    return found


def cell(experiment: str, column: str, recipe: str = "fastff", **place: object) -> float | None:
    """The mean of a column over the seeds of one place; None if nothing is stored there."""
    rows = [
        row
        for case, row in trained(experiment, recipe)
        if all(getattr(case, name) == value for name, value in place.items()) and row[column]
    ]
    return mean(rows, column) if rows else None


def shown(value: float | None, theirs: float | None = None, form: str = ".1f") -> str:
    if value is None:
        return ""
    return f"{value:{form}}" if theirs is None else f"{value:{form}} ({theirs:.1f})"


def beside(dataset: str, model: str, width: int, leaf: int, column: str, recipe: str, experiment: str) -> str:
    """Our mean, and in brackets the paper's number."""
    value = cell(experiment, column, recipe, dataset=dataset, model=model, width=width, leaf_width=leaf)
    return shown(value, getattr(paper.beside(dataset, model, width, leaf), column))


def table1(dataset: str, recipe: str) -> str:
    header = ["", *(f"{column}, w = {width}" for column in ("G_A", "M_A") for width in WIDTHS)]
    body = []
    for leaf in (*LEAVES, 0):
        cells = [
            beside(dataset, "FFF" if leaf else "FF", width, leaf or width, column, recipe, "table1")
            for column in ("G_A", "M_A")
            for width in WIDTHS
        ]
        body.append([f"l = {leaf}" if leaf else "dense", *cells])
    return table(header, body)


def accuracy() -> str:
    """Table 1 at training width 128: test accuracy, and in brackets the paper's best of ten. Below the trees, the dense
    layer of about the inference size of the first one, and the dense layer of their training width."""
    trees = [(str(leaf), "FFF", 128, leaf, leaf + (128 // leaf).bit_length() - 1) for leaf in LEAVES]
    body = []
    for label, model, width, leaf, neurons in [*trees, *(("dense", "FF", width, width, width) for width in (16, 128))]:
        cells = [beside(name, model, width, leaf, "G_A", "fastff", "table1") for name in TABLE1]
        body.append([label, f"{neurons} of {width}", *cells])
    return table(["leaf width", "neurons used", *TABLE1.values()], body)


def table2(recipe: str, widths: Sequence[int] = (64, 128, 256, 512, 1024)) -> str:
    models = (("FFF", 32), ("FF", 0), ("MoE", 16))
    names = [f"{column}: {name}" for column in ("G_A", "M_A") for name in ("FFF", "dense", "MoE")]
    body = []
    for width in widths:
        cells = [
            beside("cifar10", model, width, leaf or width, column, recipe, "table2")
            for column in ("G_A", "M_A")
            for model, leaf in models
        ]
        epochs = [cell("table2", "ETT", recipe, model=model, width=width) for model, _ in models]
        body.append([str(width), *cells, ", ".join(shown(value, form=".0f") for value in epochs)])
    return table(["width", *names, "epochs to train"], body)


def accuracy_wide() -> str:
    body = []
    for width in (64, 256, 1024):
        neurons = str(32 + (width // 32).bit_length() - 1)
        fff = beside("cifar10", "FFF", width, 32, "G_A", "fastff", "table2")
        dense = beside("cifar10", "FF", width, width, "G_A", "fastff", "table2")
        body.append([str(width), neurons, fff, dense])
    return table(["training width", "neurons used by FFF", "FFF", "dense layer"], body)


def accuracy_vit() -> str:
    """Table 3 by our recipe: each tree beside the dense transformer of the same seed."""
    dense = {case.seed: float(row["G_A"]) for case, row in trained("table3") if case.model == "ViT-FF"}
    header = ["feedforward blocks", "neurons per token", "seeds", "accuracy", "points behind dense", "in the paper"]
    body = [["dense, 128 neurons", "128", str(len(dense)), shown(sum(dense.values()) / len(dense)), "", ""]]
    first = paper.TABLE3[paper.FF].G_A
    for leaf in (32, 8, 1):
        rows = {c.seed: r for c, r in trained("table3") if c.model == "ViT-FFF" and c.leaf_width == leaf}
        behind = [dense[seed] - float(row["G_A"]) for seed, row in rows.items()]
        size = next(iter(rows.values()))["inference_size"]
        value, theirs = mean(rows.values(), "G_A"), first - paper.TABLE3[leaf].G_A
        name = f"FFF, {128 // leaf} leaves of {leaf}"
        body.append([name, size, str(len(rows)), shown(value), shown(sum(behind) / len(behind)), f"{theirs:.1f}"])
    return table(header, body)


def table3_paper() -> str:
    """Table 3 by the paper's recipe, one seed; h = inf is a tree that does not train."""
    found = trained("table3", "paper")
    dense = next(float(row["G_A"]) for case, row in found if case.model == "ViT-FF")
    header = ["feedforward blocks", "h", "accuracy", "points behind dense", "in the paper", "leaves used", "gap"]
    body = [["dense, 128 neurons", "", f"{dense:.1f}", "", "", "", ""]]
    for leaf in (32, 8, 1):
        for case, row in found:
            if case.model == "ViT-FFF" and case.leaf_width == leaf:
                settings = dict(case.settings)
                h = "∞" if settings["frozen"] else f"{settings['hardening']:g}"
                value = float(row["G_A"])
                theirs = f"{paper.TABLE3[paper.FF].G_A - paper.TABLE3[leaf].G_A:.1f}"
                used = f"{row['leaves_used']} of {128 // leaf}"
                name = f"FFF, {128 // leaf} leaves of {leaf}"
                gap = f"{float(row['soft_hard_gap']):.2f}"
                body.append([name, h, f"{value:.1f}", f"{dense - value:.1f}", theirs, used, gap])
    return table(header, body)


def counterparts(recipe: str) -> str:
    """Trees of depth 2 and 6 beside a dense layer with as many neurons as they use."""
    sizes = sorted({case.width for case, _ in trained("inference_counterparts", recipe) if case.model == "FF"})
    header = ["neurons used", *(f"{c}: {m}" for c in ("G_A", "M_A") for m in ("depth 2", "depth 6", "dense"))]
    body = []
    for size in sizes:
        places = [{"model": "FFF", "leaf_width": size - depth, "depth": depth} for depth in (2, 6)]
        places.append({"model": "FF", "width": size})
        cells = [cell("inference_counterparts", c, recipe, **place) for c in ("G_A", "M_A") for place in places]
        body.append([str(size), *map(shown, cells)])
    return table(header, body)


def ablation() -> str:
    """Mean test accuracy over five seeds: the recipe with one part changed."""
    found = trained("ablation", seeds=5)
    places = [(name, leaf) for name in TABLE1 for leaf in (8, 1)]
    body = []
    for recipe in dict.fromkeys(case.recipe for case, _ in found):
        cells = []
        for dataset, leaf in places:
            rows = [r for c, r in found if (c.recipe, c.dataset, c.leaf_width) == (recipe, dataset, leaf)]
            cells.append(shown(mean(rows, "G_A")))
        body.append(["the recipe" if recipe == "fastff" else recipe, *cells])
    return table(["", *(f"{TABLE1[name]}, l = {leaf}" for name, leaf in places)], body)


def hardening() -> str:
    """The mean entropy of the decisions after the first epoch that was evaluated and at the end; leaves used at the
    end, in the layer that uses fewest. Over seeds: from the lowest to the highest."""
    header = ["model", "recipe", "entropy at first", "entropy at the end", "leaves used at the end"]
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for row in read("entropies"):
        groups.setdefault((row["model"], int(row["depth"]), row["recipe"]), []).append(row)
    body = []
    for (model, depth, recipe), rows in groups.items():
        histories = [json.loads(row["history"]) for row in rows]
        first, last = (span([_flat(h["entropy"][i]) for h in histories]) for i in (0, -1))
        used = sorted(int(row["leaves_used"]) for row in rows)
        leaves = f"{used[0]} to {used[-1]}" if used[0] != used[-1] else f"{used[0]}"
        name = f"MNIST, depth {depth}" if model == "FFF" else "transformer on CIFAR10, depth 2"
        body.append([name, recipe, first, last, f"{leaves} of {1 << depth}"])
    return table(header, body)


def _flat(values: object) -> list[float]:
    return [float(v) for v in values] if isinstance(values, list) else [float(str(values))]


def span(values: Sequence[Sequence[float]]) -> str:
    flat = [value for some in values for value in some]
    low, high = f"{min(flat):.2f}", f"{max(flat):.2f}"
    return low if low == high else f"{low} to {high}"


TABLES: dict[str, Callable[[], str]] = {
    "accuracy": accuracy,
    "accuracy-wide": accuracy_wide,
    "accuracy-vit": accuracy_vit,
    "table3-paper": table3_paper,
    "ablation": ablation,
    "hardening": hardening,
}
for _recipe in ("fastff", "paper"):
    for _dataset in TABLE1:
        TABLES[f"table1-{_dataset}-{_recipe}"] = functools.partial(table1, _dataset, _recipe)
    TABLES[f"table2-{_recipe}"] = functools.partial(table2, _recipe)
    TABLES[f"counterparts-{_recipe}"] = functools.partial(counterparts, _recipe)
