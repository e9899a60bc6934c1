r"""Why sampled training is behind straight-through training in deep trees: one training per cause and per remedy.

    python benchmarks/sampled_search.py --ways '{"alternatives": 3}' '{"decision": "straight_through"}' \
        --cells mnist:7x8 --output results/sampled_search.csv                         # FASTFF_DATA: the data sets

Everything is chosen by the accuracy on 10,000 held-out training images, with seeds from 100 on. The tables use seeds
below 100, all training images, and the test set once (sampled_mnist.py).

Written before the first training. At depth 7 (MNIST, leaves of 8), sampled training with one alternative was 1.1 points
behind. Three likely causes, and what would show each:

(a) The tree's gradient from the task varies too much: Adam divides by the root of a second moment that is mostly
    noise, so boundaries jitter, and leaves learn samples that leave again. Then more alternatives help, and so does a
    lower rate of the nodes, which straight-through training does not need.
(b) The balance loss is worse: its gradient comes from a few random paths. Then sampled training with the balance loss
    of all nodes ("balance_from": "nodes") catches up, and straight-through training with the balance loss of sampled
    paths ("paths") falls behind.
(c) The start decides: with soft decisions early on, one alternative says least, and leaves start with the wrong
    samples. Then straight-through decisions for the first epochs ("first") are enough.

Written before the second search. With 16 neurons of inference, depth 6 is best, and deeper trees fall behind, also in
training accuracy: depth 10 with leaves of 6 reaches 92.4 on MNIST and leaves a tenth of its leaves unused. Causes:

(d) A leaf sees too few samples: 59 of 60,000 images at depth 10. Then gradients that leaves share help ("sharing").
(e) The tree's gradient varies too much over ten levels. Then straight-through decisions, which have none of that
    variance, are far better at the same size.
(f) Leaves die early, and take their share of the samples along. Then a stronger balance loss helps ("balance").

What came out: docs/research/sampled.md. The column `library` says what the library did: "mean of 100 batches", its
balance loss when this began; "mean by level" (fastff/shares.py); "compared", with the alternatives
compared with each other, too (fastff/backends/sampled.py); "few nodes", also with the logits of all nodes where these
are few (fastff/backends/paths.py); "balance over temperature", as now (fastff.Recipe).
"""

import argparse
import copy
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from csv_rows import about, append, read
from sampled_mnist import Part, accuracy, data
from torch import Tensor, nn

import fastff
from fastff import functional, shares
from fastff.backends import paths
from fastff.tree import level_sizes, log_flow

HELD_OUT = 10_000
KEY = ("cell", "way", "epochs", "batch", "seed")
# What a way may set, and what holds otherwise.
DEFAULTS: dict[str, object] = {
    "decision": "sampled",
    "estimator": "mixture",
    "alternatives": 1,
    "rate": 3e-3,
    "node_rate": 1.0,  # over rate
    "node_beta2": 0.999,
    "average": 0.0,  # decay of a running mean of the weights per step; 0: none
    "balance": 0.3,
    "temperature": (1.0, 1.0),
    "logit_std": 1.0,
    "sharing": 0.0,
    "balance_from": "own",  # or "nodes", "paths", or what `varied` takes
    "first": 0,  # epochs of straight-through decisions before
}


class Watched:
    """The input that the layer's last forward saw, with the recipe's noise."""

    def __init__(self, layer: fastff.FFF) -> None:
        self.x: Tensor | None = None
        layer.register_forward_pre_hook(self.take)

    def take(self, _: nn.Module, given: tuple[Tensor, ...]) -> None:
        self.x = given[0]


def varied(layer: fastff.FFF, kind: dict[str, float], running: list[Tensor]) -> Tensor:
    """The balance loss on the layer's own paths, with another running mean.

    keep      part of the mean that stays, per batch
    window    or: samples that a node remembers, about
    visited   read the visited paths alone
    flat      no gradient through the probability to reach a node
    """
    assert layer.last_path is not None
    assert layer.last_leaf is not None
    assert layer.last_weight is not None
    path, leaf, weight = layer.last_path, layer.last_leaf, layer.last_weight
    if kind.get("visited"):
        path, leaf, weight = path[:, :1], leaf[:, :1], torch.ones_like(weight[:, :1])
    if kind.get("flat"):
        sides = torch.sigmoid(torch.stack([-path, path], -1)) * weight[..., None, None]
        node = paths.nodes(leaf.flatten(), layer.depth).flatten()
        new = sides.new_zeros(layer.num_nodes, 2).index_add_(0, node, sides.flatten(0, 2) / len(path))
    else:
        new = shares.node_shares(path, leaf, weight)
    sizes = level_sizes(layer.depth)
    level = torch.arange(layer.depth).repeat_interleave(torch.tensor(sizes)).unsqueeze(1)
    keep = torch.full((layer.num_nodes, 1), kind.get("keep", 0.99))
    if "window" in kind:
        keep = (1 - len(path) / kind["window"] / 2.0**level).clamp(min=0)
    old = running[0] if running else torch.zeros_like(new)
    running[:] = [old * keep + (1 - keep) * new.detach()]
    total = torch.stack([part.sum() for part in running[0].split(sizes)])[level]
    sides = running[0] / total + (new - new.detach()) + 1e-12
    uneven = sides.sum(-1).log() - sides.log().mean(-1)
    return torch.stack([part.mean() for part in uneven.split(sizes)]).sum()


def balance(layer: fastff.FFF, x: Tensor, kind: object, running: list[Tensor]) -> Tensor:
    """The balance loss from all nodes, or from sampled paths, whatever the layer's own decision."""
    if isinstance(kind, dict):
        return varied(layer, kind, running)
    if kind == "nodes":
        sides = torch.logsumexp(log_flow(layer.node_logits(x)), 0)
        uneven = torch.logsumexp(sides, -1) - sides.mean(-1)
    else:
        found = functional.sampled(x, layer.tree, layer.leaves)
        batch = shares.node_shares(found.logits, found.leaf, found.weight)
        running[:] = [shares.update(running[0] if running else None, batch)]
        uneven = shares.unevenness(running[0], batch)
    return torch.stack([part.mean() for part in uneven.split(level_sizes(layer.depth))]).sum()


def train(x: Tensor, y: Tensor, depth: int, width: int, way: dict[str, object], epochs: int, batch: int, seed: int):  # type: ignore[no-untyped-def]
    """The trained layer, and the seconds that it took."""
    s = DEFAULTS | way
    torch.manual_seed(seed)
    estimator: Any = s["estimator"]
    layer = fastff.FFF(x.shape[1], int(y.max()) + 1, depth=depth, leaf_width=width, estimator=estimator)
    steps, per_epoch = epochs * (len(x) // batch), len(x) // batch
    own = s["balance_from"] == "own"
    recipe = fastff.Recipe(
        layer,
        x,
        steps=steps,
        decision="straight_through" if s["first"] else s["decision"],  # type: ignore[arg-type]
        alternatives=int(str(s["alternatives"])),
        balance=float(str(s["balance"])) if own else 0.0,
        temperature=tuple(s["temperature"]),  # type: ignore[arg-type]
        logit_std=float(str(s["logit_std"])),
        sharing=float(str(s["sharing"])),
    )
    watched, running = Watched(layer), list[Tensor]()
    rate = float(str(s["rate"]))
    nodes = {"params": layer.tree_parameters(), "lr": rate * float(str(s["node_rate"]))}
    nodes["betas"] = (0.9, float(str(s["node_beta2"])))
    optimizer = torch.optim.AdamW([{"params": layer.leaf_parameters()}, nodes], lr=rate, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    decay, mean = float(str(s["average"])), copy.deepcopy(layer)
    order, count, begin = torch.Generator().manual_seed(seed), 0, time.perf_counter()
    for epoch in range(epochs):
        if epoch == s["first"]:
            layer.decision = s["decision"]  # type: ignore[assignment]
        for at in torch.randperm(len(x), generator=order)[: per_epoch * batch].split(batch):
            loss = nn.functional.cross_entropy(layer(x[at]), y[at]) + recipe.loss()
            if not own:
                assert watched.x is not None
                loss = loss + float(str(s["balance"])) * balance(layer, watched.x, s["balance_from"], running)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            recipe.step()
            count += 1
            if decay:
                with torch.no_grad():
                    keep = min(decay, count / (count + 10))
                    for a, b in zip(mean.parameters(), layer.parameters(), strict=True):
                        a.lerp_(b, 1 - keep)
    if decay:
        recipe.finish_(mean)
        layer = mean
    return layer.eval(), time.perf_counter() - begin


def split(part: Part) -> tuple[Part, Part]:
    """What is trained on, and what is held out: the same for every seed."""
    x, y = part
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    held = min(HELD_OUT, len(x) // 6)
    return (x[order[held:]], y[order[held:]]), (x[order[:held]], y[order[:held]])


def measure(cell: str, way: dict[str, object], o: argparse.Namespace, seed: int, parts: tuple[Part, Part]) -> dict:  # type: ignore[type-arg]
    depth, width = (int(n) for n in cell.split(":")[1].split("x"))
    (x, y), held = parts
    layer, seconds = train(x, y, depth, width, way, o.epochs, o.batch, seed)
    used = fastff.usage(layer, held[0])[""]
    key: dict[str, object] = dict(
        zip(KEY, (cell, json.dumps(way, sort_keys=True), o.epochs, o.batch, seed), strict=True)
    )
    return key | {
        "library": "balance over temperature",
        "validation": round(accuracy(layer, held), 2),
        "training": round(accuracy(layer, (x, y)), 2),
        "leaves_used": used.leaves_used,
        "seconds": round(seconds, 1),
    }


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default="mnist:7x8", help="dataset:depth x leaf width, comma separated")
    parser.add_argument("--ways", nargs="*", default=[], help="JSON: what differs from DEFAULTS")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seeds", default="100")
    parser.add_argument("--data", type=Path, help="folder of the data sets; also FASTFF_DATA")
    parser.add_argument("--output", type=Path, help="CSV file of the rows")
    parser.add_argument("--commit", default="", help="of the checkout, if git cannot say")
    o = parser.parse_args(given)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    origin = about("cpu", "python benchmarks/sampled_search.py", o.commit)
    parts = {name: split(data(name, o.data)[0]) for name in {cell.split(":")[0] for cell in o.cells.split(",")}}
    for seed in o.seeds.split(","):
        for way in (json.loads(text) for text in o.ways):
            for cell in o.cells.split(","):
                key = (cell, json.dumps(way, sort_keys=True), str(o.epochs), str(o.batch), seed)
                if any(tuple(row[name] for name in KEY) == key for row in read(o.output)):
                    continue
                row = measure(cell, way, o, int(seed), parts[cell.split(":")[0]])
                print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
                if o.output:
                    append(o.output, [row | origin])


if __name__ == "__main__":
    main()
