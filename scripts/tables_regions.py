"""Tables of regions: explore_page.csv, edit_mnist.csv and split_mnist.csv."""

import json
import statistics
from collections.abc import Callable, Sequence

from rows import Row, matching, mean, one, read, table

MODELS = {"fff": "FFF", "dense": "dense"}
MEMORIES = (200, 500, 2000)
STANDARD = {"rate": 1e-3, "epochs": 30}  # settings that rows leave out
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


def at_rate(rate: float, **values: object) -> list[Row]:
    """The rows of the test seeds with these values, trained at this rate."""
    rows = matching("split_mnist", part="table", **values)
    return [row for row in rows if (STANDARD | json.loads(row["settings"]))["rate"] == rate]


def split_mnist() -> str:
    """Each method at the rate that validation chose."""
    body = []
    for model in MODELS:
        for method, title in REPLAYS.items():
            rate = 1e-3 if model == "fff" and method in ("none", "uniform", "gdumb") else 3e-4
            sizes = [0] * len(MEMORIES) if method == "none" else MEMORIES
            cells = [accuracies(at_rate(rate, model=model, method=method, memory=size)) for size in sizes]
            body.append([MODELS[model], title, *cells])
    return table(["", "method", *(f"memory {size}" for size in MEMORIES)], body)


def split_rate() -> str:
    """The first table: the FFF's methods at the rate of uniform replay, of the seeds that were run."""
    body = []
    for method in ("uniform", "class", "region"):
        rows = [at_rate(1e-3, model="fff", method=method, memory=size) for size in MEMORIES]
        seeds = {row["seed"] for row in at_rate(1e-3, model="fff", method="region", memory=MEMORIES[0])}
        body.append([REPLAYS[method], *(accuracies([row for row in part if row["seed"] in seeds]) for part in rows)])
    return table(["method", *(f"memory {size}" for size in MEMORIES)], body)


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
    """Each method by its rate, and GDumb by rate and epochs."""
    near: dict[str, object] = {"near": True}
    body = []
    for method, rates, changes in (
        ("uniform", (1e-4, 3e-4, 1e-3, 3e-3, 1e-2), {}),
        ("class", (1e-4, 3e-4, 1e-3), {}),
        ("region", (1e-4, 3e-4, 1e-3), near),
    ):
        for rate in rates:
            cells = [validation(column, method, {"rate": rate} | changes) for column in COLUMNS]
            body.append([f"{REPLAYS[method]}, rate {rate:g}", *cells])
    for share in (0.5, 0.95):
        shared = {"rate": 3e-4, "sharing": share}
        cells = [validation(column, "uniform", shared) for column in COLUMNS]
        body.append([f"uniform replay, rate 0.0003, sharing {share:g}", *cells])
    for rate, epochs in ((1e-3, 30), (1e-3, 100), (3e-3, 30), (3e-3, 100)):
        long = {"epochs": epochs} | ({"gdumb_rate": rate} if rate == 1e-3 else {})
        fff, dense = (validation(column, "gdumb", long) for column in ("FFF, frozen tree", "dense"))
        body.append([f"GDumb, rate {rate:g}, {epochs} epochs", "", fff, dense])  # its tree trains
    return table(["", *COLUMNS], body)


def split_causes() -> str:
    body = []
    for title, (method, changes) in CAUSES.items():
        body.append([title, *(validation(column, method, {"rate": 3e-4} | changes) for column in COLUMNS)])
    return table(["memory", *COLUMNS], body)


def explore() -> str:
    """Pages of three trees: how long they take to make, to load and to move in."""
    body = []
    for leaves in (16, 128, 1024):
        row = one("explore_page", leaves=leaves, inputs=20000)
        size = f"{int(row['bytes']) / 1e6:.1f} MB"
        times = [f"{float(row['make_s']):.1f} s", f"{row['load_ms']} ms", f"{float(row['move_p50_ms']):.0f} ms"]
        body.append([f"{leaves:,}", size, *times, f"{float(row['move_p95_ms']):.0f} ms"])
    return table(["leaves", "page", "made in", "loaded in", "a move, median", "95th percentile"], body)


TABLES: dict[str, Callable[[], str]] = {
    "explore": explore,
    "edit-mnist": edit_mnist,
    "split-mnist": split_mnist,
    "split-mnist-rate": split_rate,
    "split-mnist-choice": split_choice,
    "split-mnist-causes": split_causes,
}
