"""Split-MNIST, class-incremental: five tasks of two digits, one pass over each, and a memory of the past.

    python benchmarks/split_mnist.py --output results/split_mnist.csv                # FASTFF_DATA: the data sets
    python benchmarks/split_mnist.py choice --output results/split_mnist.csv         # settings, by validation
    python benchmarks/split_mnist.py causes --output results/split_mnist.csv         # then `second`, `third`
    python benchmarks/split_mnist.py --samples 2000 --seeds 0 --memories 200         # a try: seconds

Models: an FFF of 16 leaves of 8, its tree placed on the first task, and a dense layer of width 128. Each step has
`batch` new images and as many of the memory. Methods:

none     no memory
uniform  a reservoir
class    a class-balanced random memory
region   the memory of `fastff.regions.Replay`; for the dense layer a tree placed on the first task divides the inputs
gdumb    a new model trained on a class-balanced random memory alone

`choice`, `causes`, `second` and `third` use seeds from 100 on and 5,000 held-out training images. Accuracy is in
percent, over all ten digits. Rows that the file has are not measured again.
"""

import argparse
import dataclasses
import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from csv_rows import about, append, read
from torch import Tensor, nn

import fastff
from fastff.progress import progress
from fastff.regions.replay import Replay

TASKS = [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
KEY = ("part", "model", "method", "memory", "settings", "seed")
Row = dict[str, object]
Part = tuple[Tensor, Tensor]


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to train. `tree`: the data that place it, first (task) or all; moving: it trains too. `strategy`, `near`: of
    region replay. `epochs`, `gdumb_rate`: of GDumb."""

    rate: float = 1e-3
    batch: int = 32
    tree: str = "first"
    moving: bool = False
    sharing: float = 0.0
    strategy: str = "herding"
    near: bool = False
    epochs: int = 30
    gdumb_rate: float = 3e-3

    def changes(self) -> str:
        """What differs from the defaults, as JSON."""
        standard = dataclasses.asdict(Settings())
        return json.dumps({k: v for k, v in dataclasses.asdict(self).items() if standard[k] != v})


# By `choice`, for a frozen tree and the dense layer; a tree that trains, by `causes`; the rest by `second` and `third`.
FIRST = Settings(rate=3e-4, epochs=100)
MOVING = dataclasses.replace(FIRST, moving=True)
CHOSEN = {
    "fff": dataclasses.replace(MOVING, near=True),
    "dense": dataclasses.replace(FIRST, near=True),
}
# The methods of the FFF for which another rate is better.
RATES = {"none": 1e-3, "uniform": 1e-3, "gdumb": 1e-3}


# Models and memories


def build(kind: str, x: Tensor, s: Settings) -> nn.Module:
    """A fresh model; the tree of an FFF is placed on x."""
    if kind == "dense":
        return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    layer = fastff.FFF(784, 10, depth=4, leaf_width=8, decision="straight_through", sharing=s.sharing)
    fastff.initialize_tree_(layer, x)
    return layer if s.moving else layer.freeze_tree_()


class Uniform:
    """A reservoir: every sample of the stream is in the memory with the same probability."""

    def __init__(self, budget: int, seed: int) -> None:
        self.budget, self.seen, self.generator = budget, 0, torch.Generator().manual_seed(seed)
        self.x, self.y = torch.zeros(budget, 784), torch.zeros(budget, dtype=torch.int64)

    def see(self, x: Tensor, y: Tensor) -> None:
        for i in range(len(x)):
            at = (
                self.seen
                if self.seen < self.budget
                else int(torch.randint(self.seen + 1, (), generator=self.generator))
            )
            if at < self.budget:
                self.x[at], self.y[at] = x[i], y[i]
            self.seen += 1

    def end_task(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        pass

    def draw(self, near: Tensor) -> Part:
        at = torch.randint(
            max(min(self.seen, self.budget), 1), (len(near) if self.seen else 0,), generator=self.generator
        )
        return self.x[at], self.y[at]


class Regions:
    """The memory of `fastff.regions.Replay`; with one leaf, a class-balanced memory without regions."""

    def __init__(self, layer: fastff.FFF, budget: int, seed: int, s: Settings, strategy: str = "") -> None:
        self.near, self.moving = s.near, s.moving
        self.memory = Replay(layer, budget, strategy=strategy or s.strategy, seed=seed)  # type: ignore[arg-type]

    def see(self, x: Tensor, y: Tensor) -> None:
        pass

    def end_task(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        hardness = None
        if self.memory.strategy == "hardest":
            with torch.no_grad():
                hardness = nn.functional.cross_entropy(model.eval()(x), y, reduction="none")
        self.memory.add_(x, y, hardness)

    def draw(self, near: Tensor) -> Part:
        if self.near and self.moving:
            self.memory.reroute_()
        return self.memory.draw(len(near), near=near if self.near else None)


def memory_for(method: str, model: nn.Module, first: Tensor, budget: int, seed: int, s: Settings) -> Any:
    if method == "none":
        return None
    if method == "uniform":
        return Uniform(budget, seed)
    if method == "class":
        return Regions(
            fastff.FFF(784, 1, depth=0, leaf_width=1), budget, seed, dataclasses.replace(s, near=False), "random"
        )
    if isinstance(model, fastff.FFF):
        return Regions(model, budget, seed, s)
    selector = fastff.FFF(784, 1, depth=4, leaf_width=1)
    fastff.initialize_tree_(selector, first)
    return Regions(selector, budget, seed, s)


# Training


def learn(model: nn.Module, tasks: Sequence[Part], memory: Any, s: Settings) -> None:
    """One pass over the tasks, one after the other."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=s.rate)
    for x, y in tasks:
        for at in torch.randperm(len(x)).split(s.batch):
            new_x, new_y = x[at], y[at]
            old_x, old_y = memory.draw(new_x) if memory is not None else (new_x[:0], new_y[:0])
            loss = nn.functional.cross_entropy(model.train()(torch.cat([new_x, old_x])), torch.cat([new_y, old_y]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if memory is not None:
                memory.see(new_x, new_y)
        if memory is not None:
            memory.end_task(model, x, y)


def gdumb(kind: str, tasks: Sequence[Part], budget: int, seed: int, s: Settings) -> nn.Module:
    """A new model, trained on a class-balanced random memory alone."""
    memory = Replay(fastff.FFF(784, 1, depth=0, leaf_width=1), budget, strategy="random", seed=seed)
    for x, y in tasks:
        memory.add_(x, y)
    x, y = memory.x, memory.labels
    model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    steps, recipe = s.epochs * -(-len(x) // s.batch), None
    if kind == "fff":
        model = fastff.FFF(784, 10, depth=4, leaf_width=8)
        recipe = fastff.Recipe(model, x, steps=steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=s.gdumb_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(s.epochs):
        for at in torch.randperm(len(x)).split(s.batch):
            loss = nn.functional.cross_entropy(model.train()(x[at]), y[at]) + (recipe.loss() if recipe else 0.0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if recipe:
                recipe.step()
    return model


def measure(o: argparse.Namespace, data: "Data", row: Row, s: Settings) -> Row:
    """Train one model and test it on all ten digits."""
    kind, method, budget, seed = (row[name] for name in ("model", "method", "memory", "seed"))
    torch.manual_seed(seed)
    begin = time.perf_counter()
    train, test = data.parts(held_out=row["part"] != "table")
    tasks = [
        (train[0][at], train[1][at])
        for at in (torch.isin(train[1], torch.tensor(pair)).nonzero()[:, 0] for pair in TASKS)
    ]
    if method == "gdumb":
        model = gdumb(kind, tasks, budget, seed, s)
    else:
        first = train[0] if s.tree == "all" else tasks[0][0]
        model = build(kind, first, s)
        learn(model, tasks, memory_for(method, model, first, budget, seed, s), s)
    with torch.no_grad():
        right = model.eval()(test[0]).argmax(-1) == test[1]
    by_task = [right[torch.isin(test[1], torch.tensor(pair))].double().mean().item() for pair in TASKS]
    found = {"accuracy": round(100 * right.double().mean().item(), 2)}
    found |= {f"task{i}": round(100 * value, 2) for i, value in enumerate(by_task, 1)}
    return (
        row
        | found
        | {"samples": len(train[0]), "tested": len(test[0]), "seconds": round(time.perf_counter() - begin, 1)}
    )


class Data:
    """MNIST, standardised. The last 5,000 training images can be held out."""

    def __init__(self, root: Path | None, samples: int) -> None:
        from fastff_reproduce.data import load

        data = load("mnist", root)
        x, tx = (part.x.reshape(len(part.x), -1).float() / 255 for part in (data.train, data.test))
        mean, std = x.mean(), x.std()
        self.x, self.y = (x - mean) / std, data.train.y.long()
        self.test = (tx - mean) / std, data.test.y.long()
        self.samples = samples

    def parts(self, held_out: bool) -> tuple[Part, Part]:
        cut = len(self.x) - 5000
        end = min(self.samples or cut, cut) if held_out else self.samples or len(self.x)
        return (self.x[:end], self.y[:end]), (self.x[cut:], self.y[cut:]) if held_out else self.test


# What is measured


def cells(o: argparse.Namespace) -> Iterator[tuple[Row, Settings]]:
    """The rows of a part, and the settings of each."""
    for seed, kind in itertools.product(o.seeds, ("fff", "dense")):
        for method, memory, settings in {
            "table": table,
            "choice": choice,
            "causes": causes,
            "second": second,
            "third": third,
        }[o.part](o, kind):
            row: Row = {"part": o.part, "model": kind, "method": method, "memory": memory}
            yield row | {"settings": settings.changes(), "seed": seed}, settings


def table(o: argparse.Namespace, kind: str) -> Iterator[tuple[str, int, Settings]]:
    own = {m: dataclasses.replace(CHOSEN[kind], rate=r) for m, r in RATES.items()} if kind == "fff" else {}
    yield "none", 0, own.get("none", CHOSEN[kind])
    for memory, method in itertools.product(o.memories, ("uniform", "class", "region", "gdumb")):
        yield method, memory, own.get(method, CHOSEN[kind])


def choice(o: argparse.Namespace, kind: str) -> Iterator[tuple[str, int, Settings]]:
    """The rate by uniform replay, so that the settings favour the baseline; GDumb's rate and epochs by itself."""
    for rate in (1e-4, 3e-4, 1e-3, 3e-3, 1e-2):
        yield "uniform", 500, Settings(rate=rate)
    for rate, epochs in itertools.product((1e-3, 3e-3), (30, 100)):
        yield "gdumb", 500, Settings(gdumb_rate=rate, epochs=epochs)


def causes(o: argparse.Namespace, kind: str) -> Iterator[tuple[str, int, Settings]]:
    """One experiment for each suspected cause: what is stored, how the tree divides, what is drawn."""
    base = FIRST
    for memory in o.memories:
        yield "uniform", memory, base
        yield "class", memory, base
        for strategy, near in itertools.product(("random", "herding", "hardest"), (False, True)):
            yield "region", memory, dataclasses.replace(base, strategy=strategy, near=near)
        yield "region", memory, dataclasses.replace(base, tree="all")
        if kind == "fff":
            yield "region", memory, dataclasses.replace(base, moving=True)
            yield "uniform", memory, dataclasses.replace(base, moving=True)


def second(o: argparse.Namespace, kind: str) -> Iterator[tuple[str, int, Settings]]:
    """With a tree that trains: rate and sharing by uniform replay, then what is stored and drawn."""
    base = MOVING
    for memory in o.memories if kind == "fff" else ():
        for change in ({"rate": 1e-3}, {"rate": 3e-3}, {"sharing": 0.5}, {"sharing": 0.95}):
            yield "uniform", memory, dataclasses.replace(base, **change)  # type: ignore[arg-type]
        yield "class", memory, base
        for strategy, near in itertools.product(("random", "herding"), (False, True)):
            yield "region", memory, dataclasses.replace(base, strategy=strategy, near=near)


def third(o: argparse.Namespace, kind: str) -> Iterator[tuple[str, int, Settings]]:
    """The rate of each method by itself: three rates, where the parts before have not measured them."""
    base = {"fff": MOVING, "dense": FIRST}[kind]
    for memory, rate in itertools.product(o.memories, (1e-4, 3e-4, 1e-3)):
        if kind == "fff" and rate == 1e-4:
            yield "uniform", memory, dataclasses.replace(base, rate=rate)
        for method, near in (("class", False), ("region", False), ("region", True)):
            if rate != base.rate:
                yield method, memory, dataclasses.replace(base, rate=rate, near=near)


def key(row: Row) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in KEY)


def line(row: Row) -> str:
    tasks = ", ".join(str(row[f"task{i}"]) for i in range(1, 6))
    what = (
        f"{row['part']} {row['model']} {row['method']}, memory {row['memory']}, {row['settings']}, seed {row['seed']}"
    )
    return f"{what}: {row['accuracy']} % ({tasks})"


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", default="table", choices=("table", "choice", "causes", "second", "third"))
    parser.add_argument("--seeds", type=numbers, help="default: 0 to 4; of the other parts 100 and 101")
    parser.add_argument("--memories", type=numbers, default=[200, 500, 2000])
    parser.add_argument("--samples", type=int, default=0, help="training images; 0: all")
    parser.add_argument("--data", type=Path, help="folder of the data sets; also FASTFF_DATA")
    parser.add_argument("--output", type=Path, help="CSV file of the rows")
    parser.add_argument("--commit", default="", help="of the checkout, if git cannot say")
    o = parser.parse_args(given)
    o.seeds = o.seeds or ([0, 1, 2, 3, 4] if o.part == "table" else [100, 101])
    return o


def main(given: Sequence[str] | None = None) -> None:
    o = arguments(given)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    known = {key(row): row for row in read(o.output)}
    wanted = list(cells(o))
    missing = [(row, s) for row, s in wanted if key(row) not in known]
    data = Data(o.data, o.samples) if missing else None
    origin = about("cpu", "python benchmarks/split_mnist.py", o.commit)  # of the code that was imported
    with progress("models", len(missing), unit="models") as advance:
        for row, settings in missing:
            found = measure(o, data, row, settings) | origin
            known[key(row)] = found
            if o.output:
                append(o.output, [found])
            advance(text=line(found))
    for row, _ in wanted:
        print(line(known[key(row)]))


if __name__ == "__main__":
    main()
