"""Tables of sampled training: sampled_step.csv, sampled_gradient.csv, sampled_search.csv, sampled_mnist.csv."""

import json
import statistics

from rows import Row, matching, mean, one, read, table

STEPS = ("dense", "straight_through", "sampled-mixture-1", "sampled-mixture-{depth}", "sampled-even-1")
DEPTHS = (5, 8, 10, 12)


def label(way: str) -> str:
    """The words for a way of benchmarks/sampled_*.py."""
    if not way.startswith("sampled-"):
        return way.replace("_", "-")
    _, estimator, count = way.split("-")
    return f"`{estimator}`, {count} alternative{'s' * (count != '1')}"


def step() -> str:
    """Milliseconds of a step, and over dense."""
    body = []
    for depth in DEPTHS:
        cells = [str(depth), str(2**depth)]
        for way in STEPS:
            name = way.format(depth=depth)
            rows = [row for row in read("sampled_step") if row["depth"] == str(depth) and row["way"] == name]
            over = rows[-1]["over_dense"] if rows and way != "dense" else ""
            cells.append(
                f"{float(rows[-1]['median_ms']):.0f}" + (f" ({float(over):.2f}x)" if over else "") if rows else ""
            )
        body.append([*cells, f"{float(one('sampled_step', depth=depth, way=STEPS[2])['peak_mb']):.0f}"])
    ways = ["dense", "straight-through", "`mixture`, 1 alternative", "`mixture`, one a level", "`even`, 1 alternative"]
    return table(["depth", "leaves", *ways, "peak MB, 1 alternative"], body)


def gradient() -> str:
    """Bias and deviation at temperature 1 and 10."""
    body = []
    for depth in (4, 7):
        for estimator in ("mixture", "even"):
            for alternatives in (1, 2, depth):
                known = {"depth": depth, "estimator": estimator, "alternatives": alternatives}
                cells = [str(depth), f"`{estimator}`", str(alternatives)]
                for temperature in (1.0, 10.0):
                    row = one("sampled_gradient", temperature=temperature, **known)
                    cells += [f"{float(row['bias']):.2f}", f"{float(row['deviation']):.2f}"]
                body.append(cells)
    header = ["depth", "estimator", "alternatives", "bias, T = 1", "deviation, T = 1", "bias, T = 10"]
    return table([*header, "deviation, T = 10"], body)


NAMES = {"mnist": "MNIST", "fashionmnist": "FashionMNIST", "cifar10": "CIFAR10"}
NEURONS, SHARING = 16, 0.8  # in the table over depths: neurons of inference


def with_error(rows: list[Row], column: str) -> str:
    """The mean, and the standard error of the mean; of one value, that."""
    values = [float(row[column]) for row in rows]
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.fmean(values):.2f} ± {statistics.stdev(values) / len(values) ** 0.5:.2f}"


def accuracy() -> str:
    """Hard test accuracy, and leaves in use."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in read("sampled_mnist"):
        if int(row["depth"]) + int(row["leaf_width"]) != NEURONS:
            groups.setdefault(
                tuple(row[name] for name in ("dataset", "depth", "leaf_width", "way", "temperature")), []
            ).append(row)
    order = list(NAMES)
    body = []
    for key in sorted(
        groups, key=lambda key: (order.index(key[0]), int(key[1]), -int(key[2]), key[3] != "straight_through", key[3:])
    ):
        dataset, depth, width, way, last = key
        rows = groups[key]
        used = min(int(row["leaves_used"]) for row in rows)
        cells = [NAMES[dataset], depth, width, label(way), f"{float(last):g}", with_error(rows, "accuracy")]
        seconds = statistics.median(float(row["seconds"]) for row in rows)
        cells += [f"{mean(rows, 'train_accuracy'):.2f}", f"{used} of {2 ** int(depth)}", f"{seconds:.0f}"]
        body.append([*cells, str(len(rows))])
    header = ["data", "depth", "leaf width", "decision", "last temperature"]
    return table([*header, "test", "training", "leaves in use", "seconds", "seeds"], body)


def depths() -> str:
    """Test accuracy of trees with the same neurons of inference, and the time that they train."""
    body = []
    for depth in (0, 4, 6, 8, 10, 12):
        width = NEURONS - depth
        cells = [str(depth) if depth else "0 (dense)", str(width), f"{2**depth * width:,}"]
        for dataset in ("mnist", "fashionmnist"):
            known = {"dataset": dataset, "depth": depth, "leaf_width": width}
            known |= {"sharing": SHARING, "way": f"sampled-mixture-{depth}"} if depth else {"way": "straight_through"}
            rows = matching("sampled_mnist", **known)
            used = min(int(row["leaves_used"]) for row in rows)
            cells += [with_error(rows, "accuracy"), f"{used:,}"]
            cells.append(f"{statistics.median(float(row['seconds']) for row in rows):.0f}")
        body.append(cells)
    header = ["depth", "leaf width", "neurons trained"]
    for name in ("MNIST", "FashionMNIST"):
        header += [f"{name}, test", "leaves in use", "seconds"]
    return table(header, body)


def sharing() -> str:
    """Validation accuracy by depth and shared part of the leaves' gradients."""
    groups: dict[tuple[int, int, str], dict[float, Row]] = {}
    for row in read("sampled_search"):
        depth, width = (int(n) for n in row["cell"].split(":")[1].split("x"))
        way = json.loads(row["way"])
        straight, part = way.pop("decision", "") == "straight_through", way.pop("sharing", 0.0)
        usual = way == {"alternatives": depth, "temperature": [1, 3]} or (straight and not way)
        if depth + width == NEURONS and usual and row["library"] != "balance over temperature":
            groups.setdefault((depth, width, "straight-through" if straight else "sampled"), {})[part] = row
    body = []
    for (depth, width, decision), rows in sorted(groups.items()):
        values = [rows[part]["validation"] if part in rows else "" for part in (0.0, 0.8, 0.95)]
        body.append([str(depth), str(width), decision, *(f"{float(v):.2f}" if v else "-" for v in values)])
    return table(["depth", "leaf width", "decision", "sharing 0", "0.8", "0.95"], body)


def search() -> str:
    """Validation accuracy of the decisions, balance losses and temperatures that were trained three times or more."""
    groups: dict[tuple[str, str, str], dict[str, list[Row]]] = {}
    for row in read("sampled_search"):
        way = json.loads(row["way"])
        decision = "straight-through" if way.pop("decision", "") else f"`mixture`, {way.pop('alternatives', 1)}"
        last = f"{way.pop('temperature', [1, 1])[1]:g}"
        sees = "paths" if decision[0] == "`" and row["library"] == "compared" else "nodes"
        sees = "nodes" if way.pop("balance_from", "") == "nodes" else sees
        if row["library"] in ("compared", "few nodes") and not way:
            groups.setdefault((decision, sees, last), {}).setdefault(row["cell"], []).append(row)
    body = []
    for key, cells in sorted(groups.items(), key=lambda group: (group[0][0] != "straight-through", group[0])):
        rows = [cells.get(f"mnist:7x{width}", []) for width in (8, 1)]
        if min(map(len, rows)) >= 3:
            body.append([*key, *(with_error(own, "validation") for own in rows)])
    header = ["decision, alternatives", "balance sees", "last temperature", "leaves of 8", "leaves of 1"]
    return table(header, body)


TABLES = {
    "sampled-step": step,
    "sampled-gradient": gradient,
    "sampled-accuracy": accuracy,
    "sampled-depths": depths,
    "sampled-search": search,
    "sampled-sharing": sharing,
}
