"""Tables of soft training that sheds leaves: shedding_step.csv and shedding_mnist.csv."""

from rows import matching, mean, one, read, table

EPSILONS = ("0.01", "0.1")


def step() -> str:
    """The time of a step over plain soft training's, leaves kept, mass left out and error of the tree's gradient."""
    body = []
    for depth, temperature in dict.fromkeys((row["depth"], row["temperature"]) for row in read("shedding_step")):
        for epsilon in EPSILONS:
            row = one("shedding_step", depth=depth, temperature=temperature, epsilon=epsilon)
            kept = f"{float(row['kept_leaves']):.1f} of {2 ** int(depth)}"
            ratio = f"{float(row['over_soft']):.2f}x" + (" (all leaves run)" if row["runs_all"] == "True" else "")
            errors = [f"{float(row[name]):.4f}" for name in ("most_dropped", "output_error", "tree_error")]
            body.append([depth, f"{float(temperature):g}", epsilon, kept, ratio, *errors])
    header = ["depth", "temperature", "epsilon", "leaves kept", "step over soft", "most mass left out"]
    return table([*header, "output error", "tree gradient error"], body)


def mnist() -> str:
    """Hard test accuracy and the time of the steps, with and without epsilon."""
    body = []
    for depth, width, epsilon in dict.fromkeys(
        (row["depth"], row["leaf_width"], row["epsilon"]) for row in read("shedding_mnist")
    ):
        rows = matching("shedding_mnist", depth=depth, leaf_width=width, epsilon=epsilon)
        each = [[float(kept) for kept in row["kept_leaves"].split()] for row in rows]
        kept = ", ".join(f"{sum(epoch) / len(epoch):.1f}" for epoch in zip(*each, strict=True))
        cells = [depth, width, epsilon, f"{mean(rows, 'accuracy'):.2f}", f"{mean(rows, 'train_accuracy'):.2f}"]
        body.append([*cells, kept, f"{mean(rows, 'over_soft'):.2f}x", str(len(rows))])
    header = ["depth", "leaf width", "epsilon", "test", "training", "leaves kept after each epoch", "time over soft"]
    return table([*header, "seeds"], body)


TABLES = {"shedding-step": step, "shedding-mnist": mnist}
