"""Tables of sampled training: sampled_step.csv, sampled_gradient.csv and sampled_mnist.csv."""

from rows import matching, mean, one, read, table

WAYS = {
    "dense": "dense",
    "straight_through": "straight-through",
    "sampled-mixture-1": "`mixture`, 1 alternative",
    "sampled-mixture-3": "`mixture`, 3 alternatives",
    "sampled-even-1": "`even`, 1 alternative",
}
STEPS = ("dense", "straight_through", "sampled-mixture-1", "sampled-even-1")
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
    return table(["depth", "leaves", *(WAYS[way] for way in STEPS), "peak MB, `mixture`"], body)


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
    """Hard test accuracy, and leaves in use."""
    body = []
    sizes = dict.fromkeys((row["depth"], row["leaf_width"]) for row in read("sampled_mnist"))
    for depth, width in sizes:
        for way in dict.fromkeys(row["way"] for row in matching("sampled_mnist", depth=depth, leaf_width=width)):
            rows = matching("sampled_mnist", depth=depth, leaf_width=width, way=way)
            used = min(int(row["leaves_used"]) for row in rows)
            cells = [depth, width, WAYS[way], f"{mean(rows, 'accuracy'):.2f}", f"{mean(rows, 'train_accuracy'):.2f}"]
            body.append([*cells, f"{used} of {2 ** int(depth)}", str(len(rows))])
    return table(["depth", "leaf width", "decision", "test", "training", "leaves in use", "seeds"], body)


TABLES = {"sampled-step": step, "sampled-gradient": gradient, "sampled-mnist": mnist}
