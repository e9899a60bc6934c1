"""Edit MNIST classifiers: 100 misclassified test digits corrected one after the other, in an FFF and in a dense layer.

    python benchmarks/edit_mnist.py --output results/edit_mnist.csv               # FASTFF_DATA: the data sets
    python benchmarks/edit_mnist.py choice --output results/edit_mnist.csv        # the rate of fine-tuning
    python benchmarks/edit_mnist.py --steps 100 --edits 5 --seeds 0               # a try: seconds

Models: an FFF of 16 leaves of 8 trained with `fastff.Recipe`, and a dense layer of width 128. An edit makes the right
class lead by a margin of 1. Methods:

closed       `fastff.regions.edit_class_`: the smallest change of the weights
keep         the same with keep=5000 training images: the smallest change of their outputs
hold         as keep; earlier edits of the same leaf are asked for again with each new one
fine-tuning  steps of SGD on all parameters until the class leads; in an FFF only the visited leaf gets gradients

Columns, in percent unless they say otherwise:

after, end          edited digits with the right class: right after their own edit, and after all edits
copies_before, copies_end   5 shifted and rotated copies of each edited digit: share with the right class
same_each, same_end other test digits with bit-identical outputs: across one edit (mean), and after all edits
accuracy_before, accuracy_end   on the other test digits
milliseconds        per edit, median
undone              whether undoing all edits, newest first, restored every bit of every parameter

`choice` uses misclassified digits among 5,000 held-out training images. Rows that the file has are not measured again.
"""

import argparse
import copy
import itertools
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from csv_rows import about, append, read
from torch import Tensor, nn

import fastff
from fastff.progress import progress
from fastff.regions import Edit, edit_class_

KEY = ("part", "model", "method", "rate", "edits", "steps", "seed")
MARGIN, MOST_STEPS, COPIES, HELD_OUT = 1.0, 500, 5, 5000
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
CHOSEN = {"fff": 3e-4, "dense": 3e-4}  # by `choice`: the largest within 0.2 points of the best accuracy afterwards
Row = dict[str, object]
Part = tuple[Tensor, Tensor]


class Data:
    """MNIST, standardised. The last 5,000 training images are held out."""

    def __init__(self, root: Path | None) -> None:
        from fastff_reproduce.data import load

        data = load("mnist", root)
        x, other = (part.x.reshape(len(part.x), -1).float() / 255 for part in (data.train, data.test))
        mean, std = x.mean(), x.std()
        x, y = (x - mean) / std, data.train.y.long()
        self.train, self.held_out = (x[:-HELD_OUT], y[:-HELD_OUT]), (x[-HELD_OUT:], y[-HELD_OUT:])
        self.test, self.background = ((other - mean) / std, data.test.y.long()), float(-mean / std)


def trained(kind: str, train: Part, steps: int, seed: int) -> fastff.FFF:
    """An FFF by the recipe, or a dense layer, which is an FFF of depth 0: AdamW with a falling rate."""
    torch.manual_seed(seed)
    depth, width = (4, 8) if kind == "fff" else (0, 128)
    layer, (x, y) = fastff.FFF(784, 10, depth=depth, leaf_width=width), train
    recipe = fastff.Recipe(layer, x, steps=steps) if kind == "fff" else None
    optimizer = torch.optim.AdamW(layer.parameters(), lr=2e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    order: list[Tensor] = []
    for _ in range(steps):
        order = order or list(torch.randperm(len(x)).split(256))
        at = order.pop()
        loss = nn.functional.cross_entropy(layer.train()(x[at]), y[at]) + (recipe.loss() if recipe else 0.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if recipe:
            recipe.step()
    return layer.eval()


def copies_of(x: Tensor, background: float, seed: int) -> Tensor:
    """Copies of images (images, 784), shifted by up to 2 pixels and rotated by up to 10 degrees: (images, 5, 784)."""
    draw = torch.Generator().manual_seed(seed)
    count = len(x) * COPIES
    angle = (torch.rand(count, generator=draw) * 2 - 1) * math.radians(10)
    shift = (torch.rand(count, 2, generator=draw) * 2 - 1) * 2 * 2 / 28  # the grid is from -1 to 1
    matrix = torch.stack([angle.cos(), -angle.sin(), shift[:, 0], angle.sin(), angle.cos(), shift[:, 1]], -1)
    grid = nn.functional.affine_grid(matrix.view(-1, 2, 3), [count, 1, 28, 28], align_corners=False)
    images = (x - background).view(-1, 1, 28, 28).repeat_interleave(COPIES, 0)
    return nn.functional.grid_sample(images, grid, align_corners=False).view(len(x), COPIES, 784) + background


@torch.no_grad()
def outputs(layer: fastff.FFF, x: Tensor) -> Tensor:
    return torch.cat([layer(part) for part in x.split(2000)])


def right(layer: fastff.FFF, copies: Tensor, classes: Tensor) -> float:
    """The share of copies (digits, 5, 784) with the right class."""
    found = outputs(layer, copies.flatten(0, 1)).argmax(-1).view(len(classes), -1)
    return float((found == classes.unsqueeze(1)).double().mean())


# Methods: correct x[i] (classes y[i]), knowing the digits before it


def fine_tune(layer: fastff.FFF, x: Tensor, y: Tensor, rate: float) -> None:
    """Steps of SGD until the class leads by the margin."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=rate)
    for _ in range(MOST_STEPS):
        output = layer(x)
        others = output.scatter(1, y.unsqueeze(1), -torch.inf).amax(1)
        if (output.gather(1, y.unsqueeze(1))[:, 0] - others >= MARGIN).all():
            return
        optimizer.zero_grad()
        nn.functional.cross_entropy(output, y).backward()
        optimizer.step()


def correct(layer: fastff.FFF, method: str, x: Tensor, y: Tensor, i: int, keep: Tensor, rate: float) -> Edit | None:
    if method == "fine-tuning":
        fine_tune(layer, x[i : i + 1], y[i : i + 1], rate)
        return None
    if method == "closed":
        return edit_class_(layer, x[i], y[i], margin=MARGIN)
    leaf = layer.route(x[: i + 1])
    at = (leaf == leaf[i]).nonzero()[:, 0] if method == "hold" else torch.tensor([i])
    return edit_class_(layer, x[at], y[at], margin=MARGIN, keep=keep[layer.route(keep) == leaf[i]])


def measure(layer: fastff.FFF, row: Row, data: Data) -> Row:
    """Correct the digits one after the other."""
    method, count, seed = str(row["method"]), int(str(row["edits"])), int(str(row["seed"]))
    layer, (x, y) = copy.deepcopy(layer), data.test if row["part"] == "table" else data.held_out
    draw = torch.Generator().manual_seed(seed)
    keep = data.train[0][torch.randperm(len(data.train[0]), generator=draw)[:5000]]
    first = outputs(layer, x)
    wrong = (first.argmax(1) != y).nonzero()[:, 0]
    edited = wrong[torch.randperm(len(wrong), generator=draw)[:count]]
    other = torch.ones(len(x), dtype=torch.bool).index_fill_(0, edited, False)
    digits, classes, copies = x[edited], y[edited], copies_of(x[edited], data.background, seed)
    state = copy.deepcopy(layer.state_dict())
    general = [right(layer, copies, classes)]
    records, seconds, after, same, last = [], [], [], [], first
    for i in range(len(edited)):
        begin = time.perf_counter()
        records.append(correct(layer, method, digits, classes, i, keep, float(str(row["rate"] or 0))))
        seconds.append(time.perf_counter() - begin)
        now = outputs(layer, x)
        after.append(bool(now[edited[i]].argmax() == classes[i]))
        same.append(float((now == last).all(1)[other].double().mean()))
        last = now
    general.append(right(layer, copies, classes))
    found = {
        "digits": len(edited),
        "after": statistics.fmean(after),
        "end": float((last[edited].argmax(1) == classes).double().mean()),
        "copies_before": general[0],
        "copies_end": general[1],
        "same_each": statistics.fmean(same),
        "same_end": float((last == first).all(1)[other].double().mean()),
        "accuracy_before": float((first.argmax(1) == y)[other].double().mean()),
        "accuracy_end": float((last.argmax(1) == y)[other].double().mean()),
    }
    found = {name: value if name == "digits" else round(100 * value, 3) for name, value in found.items()}
    middle = round(1e3 * statistics.median(seconds), 3)
    return row | found | {"milliseconds": middle, "undone": undone(layer, records, state)}


def undone(layer: fastff.FFF, records: Sequence[Edit | None], state: dict[str, Tensor]) -> str:
    """Whether undoing all edits restores every bit; empty for fine-tuning, which has no records."""
    if None in records:
        return ""
    for record in reversed(records):
        assert record is not None
        record.undo()
    now = layer.state_dict()
    same = all(torch.equal(now[name].view(torch.int32), state[name].view(torch.int32)) for name in state)
    return "yes" if same else "no"


# What is measured


def cells(o: argparse.Namespace) -> Iterator[Row]:
    for seed, kind in itertools.product(o.seeds, ("fff", "dense")):
        methods = [("fine-tuning", rate) for rate in RATES]
        if o.part == "table":
            methods = [("closed", ""), ("keep", ""), ("hold", ""), ("fine-tuning", CHOSEN[kind])]
        for method, rate in methods:
            row: Row = {"part": o.part, "model": kind, "method": method, "rate": rate}
            yield row | {"edits": o.edits, "steps": o.steps, "seed": seed}


def key(row: Row) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in KEY)


def line(row: Row) -> str:
    names = ("after", "end", "copies_before", "copies_end", "same_each", "same_end", "accuracy_before", "accuracy_end")
    numbers = ", ".join(f"{name} {row[name]}" for name in names)
    rate = f" {row['rate']}" if row["rate"] else ""
    return (
        f"{row['model']} {row['method']}{rate}, seed {row['seed']}: {numbers}, {row['milliseconds']} ms {row['undone']}"
    )


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", default="table", choices=("table", "choice"))
    parser.add_argument("--seeds", type=numbers, help="default: 0,1,2; of choice 100")
    parser.add_argument("--edits", type=int, default=100, help="misclassified digits to correct")
    parser.add_argument("--steps", type=int, default=3000, help="training steps")
    parser.add_argument("--data", type=Path, help="folder of the data sets; also FASTFF_DATA")
    parser.add_argument("--output", type=Path, help="CSV file of the rows")
    parser.add_argument("--commit", default="", help="of the checkout, if git cannot say")
    o = parser.parse_args(given)
    o.seeds = o.seeds or ([0, 1, 2] if o.part == "table" else [100])
    return o


def main(given: Sequence[str] | None = None) -> None:
    o = arguments(given)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    known = {key(row): row for row in read(o.output)}
    wanted = list(cells(o))
    missing = [row for row in wanted if key(row) not in known]
    data, model, made = Data(o.data) if missing else None, None, None
    origin = about("cpu", "python benchmarks/edit_mnist.py", o.commit)  # of the code that was imported
    with progress("models", len(missing), unit="rows") as advance:
        for row in missing:
            if made != (row["model"], row["seed"]):
                made = row["model"], row["seed"]
                advance(0, text=f"training {made[0]}, seed {made[1]}")
                model = trained(str(row["model"]), data.train, o.steps, row["seed"])
            found = measure(model, row, data) | origin
            known[key(row)] = found
            if o.output:
                append(o.output, [found])
            advance(text=line(found))
    for row in wanted:
        print(line(known[key(row)]))


if __name__ == "__main__":
    main()
