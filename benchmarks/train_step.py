"""The cost of a training step of an FFF over a dense feedforward layer of the same training width.

Forward and backward with gradients of all parameters and of the input, 768 -> 768, batch 256 by default. All models of
a size alternate in one process on rotating inputs, and medians are compared: on a noisy machine only the ratio means
something. On a GPU the step is replayed as a CUDA graph. Peak memory counts what the step holds beyond the parameters:
activations, temporaries and gradients.

    python benchmarks/train_step.py                                       # CPU, float32
    python benchmarks/train_step.py --device cuda --dtype bfloat16 --compile
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from csv_rows import append
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import fastff
from fastff.provenance import checkout, machine


def models(in_features: int, out_features: int, leaf_width: int, depth: int, public: bool) -> dict[str, nn.Module]:
    width = leaf_width << depth
    found: dict[str, nn.Module] = {
        "dense": fastff.baselines.FF(in_features, out_features, width=width),
        "fastff": fastff.FFF(in_features, out_features, depth=depth, leaf_width=leaf_width),
    }
    if public:
        from fastfeedforward import FFF

        found["fastfeedforward 0.2.1"] = FFF(in_features, leaf_width, out_features, depth)
    return found


def step(model: nn.Module, x: Tensor, grad: Tensor) -> None:
    """Forward and backward, from no gradients to all of them."""
    for parameter in model.parameters():
        parameter.grad = None
    x = x.detach().requires_grad_()
    model(x).backward(grad)


def peak(model: nn.Module, x: Tensor, grad: Tensor) -> int:
    """The most bytes that a step holds at once, beyond those at its start."""
    step(model, x, grad)
    model.zero_grad(set_to_none=True)
    if x.is_cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(model, x, grad)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        step(model, x, grad)
    events = [event for event in run.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


class Replay:
    """The step on each input as a CUDA graph: device time without launches."""

    def __init__(self, model: nn.Module, data: Tensor, grad: Tensor) -> None:
        self.graphs = []
        for x in data:
            step(model, x, grad)
            model.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            self.graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(self.graphs[-1]):
                step(model, x, grad)

    def timed(self, i: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.graphs[i % len(self.graphs)].replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


class Call:
    def __init__(self, model: nn.Module, data: Tensor, grad: Tensor) -> None:
        self.model, self.data, self.grad = model, data, grad
        for i in range(3):
            step(model, data[i], grad)

    def timed(self, i: int) -> float:
        begin = time.perf_counter()
        step(self.model, self.data[i % len(self.data)], self.grad)
        return 1e3 * (time.perf_counter() - begin)


def measure(options: argparse.Namespace, leaf_width: int, depth: int, public: bool) -> list[dict[str, object]]:
    dtype = getattr(torch, options.dtype)
    torch.manual_seed(0)
    found = models(options.features, options.features, leaf_width, depth, public)
    data = torch.randn(4, options.batch, options.features).to(options.device, dtype)
    grad = torch.randn(options.batch, options.features).to(options.device, dtype)
    runs, peaks = {}, {}
    for name, model in found.items():
        model.to(options.device, dtype).train()
        if options.compile:
            torch._dynamo.reset()
            model = torch.compile(model)
        peaks[name] = peak(model, data[0], grad)
        runs[name] = (Replay if options.device == "cuda" else Call)(model, data, grad)
    repetitions = {name: 3 if "0.2.1" in name else options.repetitions for name in runs}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(options.repetitions):
        for name, run in runs.items():
            if i < repetitions[name]:
                times[name].append(run.timed(i))
    rows = []
    for name in runs:
        low, _, _, high = statistics.quantiles(times[name], n=5)
        rows.append(
            {
                "benchmark": "train_step",
                "device": machine(options.device),
                "threads": torch.get_num_threads() if options.device == "cpu" else "",
                "torch": torch.__version__,
                "commit": checkout(),
                "dtype": options.dtype,
                "compile": options.compile,
                "in": options.features,
                "out": options.features,
                "batch": options.batch,
                "leaf_width": leaf_width,
                "depth": depth,
                "model": name,
                "median_ms": round(statistics.median(times[name]), 4),
                "p20_ms": round(low, 4),
                "p80_ms": round(high, 4),
                "ratio": round(statistics.median(times[name]) / statistics.median(times["dense"]), 3),
                "peak_bytes": peaks[name],
                "memory_ratio": round(peaks[name] / peaks["dense"], 3),
                "repetitions": repetitions[name],
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--compile", action="store_true", help="torch.compile on both sides")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--features", type=int, default=768, help="inputs and outputs of the layer")
    parser.add_argument("--repetitions", type=int, default=60)
    parser.add_argument("--sizes", default="32:5,8:7,32:7", help="leaf_width:depth, separated by commas")
    parser.add_argument(
        "--public", default="32:7", help="the size at which fastfeedforward 0.2.1 runs too; empty: nowhere"
    )
    parser.add_argument("--output", type=Path, help="append the rows to this CSV file")
    options = parser.parse_args()
    if options.device == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # graphs cannot be captured on the default one
    rows = []
    for size in options.sizes.split(","):
        leaf_width, depth = map(int, size.split(":"))
        for row in measure(options, leaf_width, depth, public=size == options.public):
            rows.append(row)
            cost = f"{row['median_ms']:>10} ms  {row['ratio']:>8}x dense  memory {row['memory_ratio']}x"
            print(f"l={leaf_width:<3} d={depth:<3} {row['model']:<22} {cost}", flush=True)
    if options.output:
        append(options.output, rows)


if __name__ == "__main__":
    main()
