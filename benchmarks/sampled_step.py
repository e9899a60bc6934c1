"""A whole training step (forward, backward, optimizer) of sampled, straight-through and dense layers of equal width.

    python benchmarks/sampled_step.py --output results/sampled_step.csv                       # CPU, batch 2048
    python benchmarks/sampled_step.py --depths 5 --batch 256 --repetitions 3                  # a try
    python benchmarks/sampled_step.py --device cuda --output results/sampled_step_gpu.csv     # see sampled_gpu.py

768 -> 2**depth * 32 -> 768 by default. The dense layer and straight-through decisions use fused AdamW,
sampled ones fastff.optim.LazyAdamW. Trees are balanced on the data first. All ways of a size alternate in one process
on rotating inputs, and medians are compared: on a busy machine only the ratio means something. `over_dense` is that
ratio; dense layers beyond --most-dense neurons are not built. Peak memory is what a step holds beyond parameters and
moments: activations, temporaries and gradients. A sampled output that is not the hard pass's is an error.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import sampled_gpu
import torch
from csv_rows import about, append
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import fastff

WAYS = ("dense", "straight_through", "sampled-mixture-1", "sampled-even-1")


class Way:
    """One model with its optimizer."""

    def __init__(self, name: str, o: argparse.Namespace, depth: int, data: Tensor) -> None:
        width, features = o.leaf_width, o.features
        decision, *rest = name.split("-")
        self.model: nn.Module
        if decision == "dense":
            self.model = fastff.baselines.FF(features, features, width=width << depth)
        else:
            estimator, alternatives = (rest[0], int(rest[1])) if rest else ("mixture", 1)
            options = {"decision": decision, "estimator": estimator, "alternatives": alternatives}
            self.model = fastff.FFF(features, features, depth=depth, leaf_width=width, **options)  # type: ignore[arg-type]
            fastff.initialize_tree_(self.model, data.flatten(0, 1))
            check(self.model, data[0])
        sampled = decision == "sampled"
        self.optimizer = (
            fastff.optim.LazyAdamW(self.model) if sampled else torch.optim.AdamW(self.model.parameters(), fused=True)
        )

    def step(self, x: Tensor, grad: Tensor) -> None:
        x = x.detach().requires_grad_()
        self.model(x).backward(grad)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed(self, x: Tensor, grad: Tensor) -> float:
        begin = time.perf_counter()
        self.step(x, grad)
        return 1e3 * (time.perf_counter() - begin)

    def peak(self, x: Tensor, grad: Tensor) -> int:
        """The most bytes that a step holds at once, beyond those at its start."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
            self.step(x, grad)
        events = [event for event in run.profiler.kineto_results.events() if event.name() == "[memory]"]
        held = most = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            held += event.nbytes()
            most = max(most, held)
        return most


@torch.no_grad()
def check(model: nn.Module, x: Tensor) -> None:
    """Raise unless training and evaluation give the same output."""
    if getattr(model, "decision", "") == "sampled":
        torch.testing.assert_close(model.train()(x), model.eval()(x), rtol=1e-3, atol=1e-4)
        model.train()


def measure(o: argparse.Namespace, depth: int) -> list[dict[str, object]]:
    torch.manual_seed(0)
    data, grad = torch.randn(3, o.batch, o.features), torch.randn(o.batch, o.features) / o.batch
    names = [name for name in o.ways.split(",") if name != "dense" or o.leaf_width << depth <= o.most_dense]
    names = [name for name in names if name != "straight_through" or o.leaf_width << depth <= o.most_dense]
    ways = {name: Way(name, o, depth, data) for name in names}
    peaks = {}
    for name, way in ways.items():
        way.step(data[0], grad)  # makes the moments
        peaks[name] = way.peak(data[1], grad)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(o.repetitions):
        for name, way in ways.items():
            times[name].append(way.timed(data[i % len(data)], grad))
    medians = {name: statistics.median(found) for name, found in times.items()}
    rows: list[dict[str, object]] = []
    for name, found in times.items():
        row: dict[str, object] = {"way": name, "depth": depth, "leaf_width": o.leaf_width, "features": o.features}
        row |= {"batch": o.batch, "threads": torch.get_num_threads(), "repetitions": o.repetitions}
        row |= {"least_ms": round(min(found), 2), "median_ms": round(medians[name], 2)}
        row |= {"over_dense": round(medians[name] / medians["dense"], 4) if "dense" in medians else ""}
        row |= {"peak_mb": round(peaks[name] / 1e6, 1)}
        rows.append(row)
        print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return rows


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cuda: sampled_gpu.py says what is measured")
    parser.add_argument("--dtype", default="bfloat16", help="of the GPU's rows")
    parser.add_argument("--modes", default="eager,graph", help="of a GPU")
    parser.add_argument("--depths", help="5,8; on a GPU 5,8,10,15")
    parser.add_argument("--ways", help="some of the ways, with commas between them")
    parser.add_argument("--leaf-width", type=int, default=32)
    parser.add_argument("--features", type=int, default=768)
    parser.add_argument("--batch", type=int, help="2048; on a GPU 16384")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--most-dense", type=int, help="neurons of the largest dense layer: 8192; on a GPU 32768")
    parser.add_argument("--output", type=Path, help="CSV file of the rows")
    parser.add_argument("--commit", default="", help="of the checkout, if git cannot say")
    o = parser.parse_args(given)
    on_gpu = o.device != "cpu"
    o.depths = o.depths or ("5,8,10,15" if on_gpu else "5,8")
    o.ways = o.ways or ("" if on_gpu else ",".join(WAYS))  # sampled_gpu.names has its own
    o.batch, o.most_dense = o.batch or (16384 if on_gpu else 2048), o.most_dense or (32768 if on_gpu else 8192)
    origin = about(o.device, "python benchmarks/sampled_step.py", o.commit)
    for rows in sampled_gpu.measure(o) if on_gpu else (measure(o, int(depth)) for depth in o.depths.split(",")):
        if o.output:
            append(o.output, [row | origin for row in rows])


if __name__ == "__main__":
    main()
