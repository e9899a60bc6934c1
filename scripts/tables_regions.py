"""Tables of regions: edit_mnist.csv and split_mnist.csv."""

import json
import statistics
from collections.abc import Callable, Sequence

from rows import Row, matching, mean, read, table

MODELS = {"fff": "FFF", "dense": "dense"}
EDITS = {
    "closed": "least change",
    "keep": "least change, `keep`",
    "hold": "`keep`, earlier edits held",
    "fine-tuning": "fine-tuning",
}
REPLAYS = {
    "none": "no replay",
    "uniform": "uniform replay",
    "class": "class-balanced replay",
    "region": "region replay",
    "gdumb": "GDumb",
}


def edit_mnist() -> str:
    header = ["", "method", "right after", "at the end", "copies", "same output, one edit", "all edits", "accuracy"]
    body = []
    for model in MODELS:
        for method, title in EDITS.items():
            rows = matching("edit_mnist", part="table", model=model, method=method)

            def number(name: str, digits: int = 1, rows: Sequence[Row] = rows) -> str:
                return f"{mean(rows, name):.{digits}f}"

            cells = [number("after"), number("end"), f"{number('copies_before')} to {number('copies_end')}"]
            cells += [number("same_each"), number("same_end")]
            cells += [f"{number('accuracy_before', 2)} to {number('accuracy_end', 2)}", number("milliseconds")]
            undone = {row["undone"] for row in rows}
            body.append([MODELS[model], title, *cells, "" if undone == {""} else "yes" if undone == {"yes"} else "no"])
    return table([*header, "ms per edit", "undone"], body)


def accuracies(rows: Sequence[Row]) -> str:
    values = [float(row["accuracy"]) for row in rows]
    return f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f}"


def split_mnist() -> str:
    memories = sorted({int(row["memory"]) for row in matching("split_mnist", part="table")} - {0})
    body = []
    for model in MODELS:
        for method, title in REPLAYS.items():
            sizes = [0] if method == "none" else memories
            cells = [
                accuracies(matching("split_mnist", part="table", model=model, method=method, memory=size))
                for size in sizes
            ]
            body.append([MODELS[model], title, *(cells if method != "none" else cells * len(memories))])
    return table(["", "method", *(f"memory {size}" for size in memories)], body)


COLUMNS = {"FFF, frozen tree": {}, "FFF, trained tree": {"moving": True}, "dense": {}}
CAUSES: dict[str, tuple[str, dict[str, object]]] = {
    "uniform": ("uniform", {}),
    "class-balanced": ("class", {}),
    "region, random": ("region", {"strategy": "random"}),
    "region, herding": ("region", {}),
    "region, hardest": ("region", {"strategy": "hardest"}),
    "region, random, `near`": ("region", {"strategy": "random", "near": True}),
    "region, herding, `near`": ("region", {"near": True}),
    "region, hardest, `near`": ("region", {"strategy": "hardest", "near": True}),
    "region, herding, tree placed on all digits": ("region", {"tree": "all"}),
}
STANDARD = {"rate": 1e-3, "epochs": 30}


def validation(column: str, method: str, changes: dict[str, object]) -> str:
    """The mean validation accuracy at a memory of 500; empty if it was not measured."""
    wanted, found = STANDARD | COLUMNS[column] | changes, {}
    for row in read("split_mnist"):
        own = STANDARD | json.loads(row["settings"])
        if method != "gdumb":
            own["epochs"] = wanted["epochs"]
        same = (row["model"], row["method"], row["memory"]) == ("fff" if "FFF" in column else "dense", method, "500")
        if same and row["part"] != "table" and own == wanted:
            found[row["seed"]] = row
    return f"{mean(found.values(), 'accuracy'):.1f}" if found else ""


def split_choice() -> str:
    """Uniform replay by rate, and GDumb by rate and epochs."""
    body = [
        [f"uniform replay, rate {rate:g}", *(validation(column, "uniform", {"rate": rate}) for column in COLUMNS)]
        for rate in (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
    ]
    for share in (0.5, 0.95):
        changes = {"rate": 3e-4, "sharing": share}
        body.append(
            [f"rate 0.0003, sharing {share:g}", *(validation(column, "uniform", changes) for column in COLUMNS)]
        )
    for rate, epochs in ((1e-3, 30), (1e-3, 100), (3e-3, 30), (3e-3, 100)):
        changes = {"epochs": epochs} | ({"gdumb_rate": rate} if rate == 1e-3 else {})
        fff, dense = (validation(column, "gdumb", changes) for column in ("FFF, frozen tree", "dense"))
        body.append([f"GDumb, rate {rate:g}, {epochs} epochs", "", fff, dense])  # its tree trains
    return table(["", *COLUMNS], body)


def split_causes() -> str:
    body = []
    for title, (method, changes) in CAUSES.items():
        body.append([title, *(validation(column, method, {"rate": 3e-4} | changes) for column in COLUMNS)])
    return table(["memory", *COLUMNS], body)


TABLES: dict[str, Callable[[], str]] = {
    "edit-mnist": edit_mnist,
    "split-mnist": split_mnist,
    "split-mnist-choice": split_choice,
    "split-mnist-causes": split_causes,
}
