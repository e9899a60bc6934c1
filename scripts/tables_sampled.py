"""Tables of sampled training: sampled_step.csv, sampled_gradient.csv, sampled_search.csv, sampled_mnist.csv."""

import json

from rows import matching, mean, one, read, table

WAYS = {
    "dense": "dense",
    "straight_through": "straight-through",
    "sampled-mixture-1": "`mixture`, 1 alternative",
    "sampled-mixture-3": "`mixture`, 3 alternatives",
    "sampled-even-1": "`even`, 1 alternative",
}
STEPS = ("dense", "straight_through", "sampled-mixture-1", "sampled-mixture-3", "sampled-even-1")
DEPTHS = (5, 8, 10, 12)


def step() -> str:
    """Milliseconds of a step, and over dense."""
    body = []
    for depth in DEPTHS:
        cells = [str(depth), str(2**depth)]
        for way in STEPS:
            rows = [row for row in read("sampled_step") if row["depth"] == str(depth) and row["way"] == way]
            ratio = (
                f" ({float(rows[-1]['over_dense']):.2f}x)" if rows and rows[-1]["over_dense"] and way != "dense" else ""
            )
            cells.append(f"{float(rows[-1]['median_ms']):.0f}{ratio}" if rows else "")
        body.append([*cells, f"{float(one('sampled_step', depth=depth, way=STEPS[2])['peak_mb']):.0f}"])
    return table(["depth", "leaves", *(WAYS[way] for way in STEPS), "peak MB, 1 alternative"], body)


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


def mnist() -> str:
    """Hard test accuracy, and leaves in use: means over the seeds that all ways of a cell have."""
    body = []
    names = {"mnist": "MNIST", "fashionmnist": "FashionMNIST"}
    cells = dict.fromkeys((row["dataset"], row["depth"], row["leaf_width"]) for row in read("sampled_mnist"))
    for dataset, depth, width in sorted(
        cells, key=lambda cell: (cell[0] == "fashionmnist", int(cell[1]), -int(cell[2]))
    ):
        rows = matching("sampled_mnist", dataset=dataset, depth=depth, leaf_width=width)
        ways = sorted(
            {(row["way"], row["temperature"]) for row in rows}, key=lambda way: (list(WAYS).index(way[0]), way[1])
        )
        found = {way: [row for row in rows if (row["way"], row["temperature"]) == way] for way in ways}
        seeds = set.intersection(*({row["seed"] for row in own} for own in found.values()))
        for way, last in ways:
            own = [row for row in found[way, last] if row["seed"] in seeds]
            used = min(int(row["leaves_used"]) for row in own)
            texts = [names[dataset], depth, width, WAYS[way], f"{float(last):g}", f"{mean(own, 'accuracy'):.2f}"]
            texts += [f"{mean(own, 'train_accuracy'):.2f}", f"{used} of {2 ** int(depth)}", str(len(seeds))]
            body.append(texts)
    header = ["data", "depth", "leaf width", "decision", "last temperature"]
    return table([*header, "test", "training", "leaves in use", "seeds"], body)


def search() -> str:
    """Validation and training accuracy of one training each, in the order in which they were made."""
    body = []
    for row in read("sampled_search"):
        way = json.loads(row["way"])
        decision = "straight-through" if way.pop("decision", "") else f"sampled, {way.pop('alternatives', 1)}"
        changes = ", ".join(f"`{name}` {json.dumps(value)}" for name, value in way.items())
        depth, width = row["cell"].split(":")[1].split("x")
        cells = [depth, width, decision, changes, row["library"], row["validation"], row["training"]]
        body.append(cells)
    header = [
        "depth",
        "leaf width",
        "decision, alternatives",
        "changed",
        "balance and baseline",
        "validation",
        "training",
    ]
    return table(header, body)


TABLES = {"sampled-step": step, "sampled-gradient": gradient, "sampled-mnist": mnist, "sampled-search": search}
