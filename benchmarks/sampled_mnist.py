"""Sampled against straight-through training on MNIST or FashionMNIST: accuracy, leaves in use, seconds.

    python benchmarks/sampled_mnist.py --output results/sampled_mnist.csv        # FASTFF_DATA: the data sets
    python benchmarks/sampled_mnist.py --sizes 4x8 --ways sampled-mixture-1 --epochs 1 --seeds 0     # a try

A way is `straight_through`, or `sampled`, an estimator of `fastff.sampling` and the number of alternatives, such as
sampled-mixture-4. Every way has the same recipe (`fastff.Recipe` with its defaults), AdamW, cosine schedule and order
of the data for a seed. `lazy` at the end, as in sampled-mixture-4-lazy, takes fastff.optim.LazyAdamW instead.
Accuracy is the hard pass's, in percent, on the test set, after the last epoch. Rows that the file has are not measured
again.
"""

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from csv_rows import about, append, read
from torch import Tensor, nn

import fastff
from fastff.progress import progress

KEY = ("dataset", "depth", "leaf_width", "way", "epochs", "batch", "rate", "temperature", "sharing", "seed")
WAYS = ("straight_through", "sampled-mixture-1", "sampled-even-1")
Row = dict[str, object]
Part = tuple[Tensor, Tensor]


def data(name: str, root: Path | None) -> tuple[Part, Part]:
    """The training and the test set, standardised by the training set's mean and deviation."""
    from fastff_reproduce.data import load

    found = load(name, root)
    x, other = (part.x.reshape(len(part.x), -1).float() / 255 for part in (found.train, found.test))
    mean, deviation = x.mean(), x.std()
    return ((x - mean) / deviation, found.train.y), ((other - mean) / deviation, found.test.y)


def build(x: Tensor, classes: int, depth: int, leaf_width: int, way: str) -> tuple[fastff.FFF, dict[str, object]]:
    """A layer, and how a Recipe trains it."""
    decision, *rest = way.split("-")
    estimator, alternatives = (rest[0], int(rest[1])) if rest else ("mixture", 1)
    layer = fastff.FFF(x.shape[1], classes, depth=depth, leaf_width=leaf_width, estimator=estimator)  # type: ignore[arg-type]
    return layer, {"decision": decision, "alternatives": alternatives}


def measure(train: Part, test: Part, row: Row) -> Row:
    torch.manual_seed(int(str(row["seed"])))
    x, y = train
    epochs, batch = int(str(row["epochs"])), int(str(row["batch"]))
    depth, leaf_width = int(str(row["depth"])), int(str(row["leaf_width"]))
    layer, settings = build(x, int(y.max()) + 1, depth, leaf_width, str(row["way"]))
    steps = epochs * (len(x) // batch)
    settings |= {"temperature": (1.0, float(str(row["temperature"]))), "sharing": float(str(row["sharing"]))}
    recipe = fastff.Recipe(layer, x, steps=steps, **settings)  # type: ignore[arg-type]
    rate, lazy = float(str(row["rate"])), str(row["way"]).endswith("-lazy")
    optimizer = (
        fastff.optim.LazyAdamW(layer, lr=rate) if lazy else torch.optim.AdamW(layer.parameters(), lr=rate, fused=True)
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    begin = time.perf_counter()
    order = torch.Generator().manual_seed(int(str(row["seed"])))
    for _ in range(epochs):
        for at in torch.randperm(len(x), generator=order)[: len(x) // batch * batch].split(batch):
            loss = nn.functional.cross_entropy(layer(x[at]), y[at]) + recipe.loss()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            recipe.step()
    if isinstance(optimizer, fastff.optim.LazyAdamW):
        optimizer.catch_up_()
    seconds = time.perf_counter() - begin
    layer.eval()
    used = fastff.usage(layer, test[0])[""]
    return row | {
        "accuracy": round(accuracy(layer, test), 2),
        "train_accuracy": round(accuracy(layer, train), 2),
        "leaves_used": used.leaves_used,
        "smallest_share": round(used.smallest_share, 3),
        "seconds": round(seconds, 1),
        "threads": torch.get_num_threads(),
    }


@torch.inference_mode()
def accuracy(layer: fastff.FFF, part: Part) -> float:
    x, y = part
    return 100 * float((layer(x).argmax(-1) == y).float().mean())


def line(row: Row) -> str:
    size = f"{row['dataset']} depth {row['depth']} l={row['leaf_width']} {row['way']}"
    size += f" T={row['temperature']} sharing {row['sharing']} seed {row['seed']}"
    leaves = f"{row['leaves_used']} of {2 ** int(str(row['depth']))} leaves"
    return f"{size}: {row['accuracy']} % (training {row['train_accuracy']}), {leaves}, {row['seconds']} s"


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="mnist", choices=("mnist", "fashionmnist", "cifar10"))
    parser.add_argument("--sizes", default="4x8", help="depth x leaf width, comma separated")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--temperature", type=float, default=1.0, help="of the decisions at the end; 1 at the start")
    parser.add_argument("--sharing", type=float, default=0.0, help="of each leaf's gradient, as in fastff.Recipe")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--data", type=Path, help="folder of the data sets; also FASTFF_DATA")
    parser.add_argument("--output", type=Path, help="CSV file of the rows")
    parser.add_argument("--commit", default="", help="of the checkout, if git cannot say")
    return parser.parse_args(given)


def cells(o: argparse.Namespace) -> list[Row]:
    sizes = [tuple(int(n) for n in size.split("x")) for size in o.sizes.split(",")]
    return [
        dict(
            zip(
                KEY,
                (o.dataset, depth, width, way, o.epochs, o.batch, o.rate, o.temperature, o.sharing, seed),
                strict=True,
            )
        )
        for seed in o.seeds.split(",")
        for depth, width in sizes
        for way in o.ways.split(",")
    ]


def main(given: Sequence[str] | None = None) -> None:
    o = arguments(given)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    known: dict[tuple[str, ...], Row] = {tuple(row[name] for name in KEY): dict(row) for row in read(o.output)}
    wanted = cells(o)
    missing = [row for row in wanted if tuple(str(row[name]) for name in KEY) not in known]
    origin = about("cpu", "python benchmarks/sampled_mnist.py", o.commit)
    train, test = data(o.dataset, o.data) if missing else (None, None)
    with progress("models", len(missing), unit="models") as advance:
        for row in missing:
            assert train is not None
            assert test is not None
            found = measure(train, test, row) | origin
            known[tuple(str(row[name]) for name in KEY)] = found
            if o.output:
                append(o.output, [found])
            advance(text=line(found))
    for row in wanted:
        print(line(known[tuple(str(row[name]) for name in KEY)]))


if __name__ == "__main__":
    main()
