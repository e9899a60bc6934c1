"""What `sampled_step.py --device cuda` measures: training steps on a GPU, each way eager and in a CUDA graph.

dense              one layer of the training width, in the same dtype
straight_through   an FFF that runs all leaves
sampled-*          sampled decisions by Triton's kernels; `-torch`: by torch operations; `-balance`: with the balance
                   loss; `-lazy`: with fastff.optim.LazyAdamW
top1-loop          a router, then torch.sort and one pair of products per expert, as scattermoe's loop does it
top1-grouped       the same with torch's grouped_mm

All but `-lazy` have AdamW of torch, fused. A router of top1 is one matrix for all experts, so it is left out beyond
1024 of them. At depth 15, torch operations would launch one product after another for 10,000 visited leaves: `-torch`
is left out there, unless --ways names it. A way that cannot run here is skipped with its reason, and a wrong one named,
without a time. Eager steps of all depths come first. Then the graphs of a depth alternate in a process of their own. If
one of them cannot be captured, each gets its own process, which a failed capture may ruin; a way that asks the host has
no graph.

Add `-compiled` to a way (in --ways) for the same under torch.compile, which takes half a minute for each depth.

Predictions for an H200 (4.3 TB/s, 790 TFLOP/s in bfloat16), bfloat16, batch 16384, 768 -> 768, leaves of 32, written
before any run; milliseconds of forward, backward and optimizer in a graph, sampled as `mixture` with one alternative.
`first`: the first kernels. `now`: after what their profile showed; at depths 8 and 10 with the profiler, and at depth
15 an eager step with LazyAdamW.

                 dense                        sampled
    depth   floor   expected    found    floor   expected    first    now
        5    0.20       0.35     0.41     0.08       0.50      1.4   0.28
        8    1.6        2.2      2.3      0.13       0.60      1.7   0.47
       10    6.3        8.4      8.3      0.31       0.95      2.6   0.91
       15  200           -         -      7.4       10        24     10

Floors. Dense: 12 * batch * 768 * width FLOP. Sampled: twelve passes over (batch, 768) numbers, 0.3 GB, and 20 bytes for
each weight: read twice, its gradient written, and 14 in dense AdamW.

What the profile showed at depth 5 (results/sampled_profile.csv). The first kernels took 1,246 us: 244 launches, where
70 were expected, a third of the time in operations on (batch, depth) numbers, in float32 copies of outputs and in the
running shares; five sorts, 140 us; products of 32 neurons with 768 columns at a sixth of the bandwidth, 45 us each, as
a program had one tile of columns and waited for it; sums over spans that were too short, 130 us to add them up. Now one
kernel has all walks and draws, one sort is left, alternatives give no output (triton_sampled.py), short rows stay while
columns pass (13 us), and spans are four times as long: 254 us, 37 of them in AdamW. Tiles were chosen from about
400 variants at depths 5, 8, 10 and 15, whose times were not kept.
"""

import argparse
import contextlib
import functools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

import fastff

WAYS = (
    "dense", "straight_through", "sampled-mixture-1", "sampled-mixture-1-balance", "sampled-mixture-1-lazy",
    "sampled-even-1", "sampled-mixture-1-torch", "top1-loop", "top1-grouped",
)  # fmt: skip
MOST_EXPERTS = 1024


class Wrong(Exception):
    """A way gives other numbers than it should."""


class Top1(nn.Module):
    """A mixture of experts in -> width -> in, of which one runs for each sample."""

    def __init__(self, features: int, width: int, experts: int, grouped: bool, **place: Any) -> None:
        super().__init__()
        self.router = nn.Linear(features, experts, **place)
        self.first = nn.Parameter(torch.randn(experts, features, width, **place) / features**0.5)
        self.second = nn.Parameter(torch.randn(experts, width, features, **place) / width**0.5)
        self.grouped = grouped

    def forward(self, x: Tensor) -> Tensor:
        share, expert = self.router(x).softmax(-1).max(-1)
        ordered, order = expert.sort()
        rows = x[order]
        if self.grouped:
            grouped = getattr(nn.functional, "grouped_mm", None) or torch._grouped_mm
            ends = torch.searchsorted(ordered, torch.arange(len(self.first), device=x.device), right=True).int()
            y = grouped(torch.relu(grouped(rows, self.first, offs=ends)), self.second, offs=ends)
        else:
            counts = expert.bincount(minlength=len(self.first)).tolist()
            parts = zip(rows.split(counts), self.first.unbind(), self.second.unbind(), strict=True)
            y = torch.cat([torch.relu(part @ first) @ second for part, first, second in parts])
        return torch.empty_like(y).index_copy(0, order, y) * share.unsqueeze(1)


class Way:
    """One model with its optimizer."""

    def __init__(self, name: str, o: argparse.Namespace, depth: int, x: Tensor) -> None:
        width, features, leaves = o.leaf_width, o.features, 2**depth
        decision, *rest = name.split("-")
        sampled = decision == "sampled"
        self.backend = "auto" if not sampled else "aten" if "torch" in rest else "triton"
        self.balance = "balance" in rest
        place: dict[str, Any] = {"device": x.device, "dtype": x.dtype}
        if decision == "top1" and leaves > MOST_EXPERTS:
            raise ValueError(f"a router of more than {MOST_EXPERTS} experts")
        if decision in ("dense", "straight_through") and width << depth > o.most_dense:
            raise ValueError(f"more than {o.most_dense} neurons")
        model: nn.Module
        if decision == "top1":
            model = Top1(features, width, leaves, rest[0] == "grouped", **place)
        elif decision == "dense":
            model = fastff.baselines.FF(features, features, width=width << depth, **place)
        else:
            place |= {"estimator": rest[0], "alternatives": int(rest[1])} if sampled else {}
            model = fastff.FFF(features, features, depth=depth, leaf_width=width, decision=decision, **place)  # type: ignore[arg-type]
            nn.init.zeros_(model.node_bias)  # about as many samples to the left as to the right
        self.model = model.train()
        if sampled:
            self.check(x)
        self.run = torch.compile(self.model) if name.endswith("-compiled") else self.model
        on_gpu = {"capturable": True} if x.is_cuda else {}
        self.optimizer: torch.optim.Optimizer = (
            fastff.optim.LazyAdamW(self.model)
            if "lazy" in rest
            else torch.optim.AdamW(self.model.parameters(), fused=True, **on_gpu)
        )

    def check(self, x: Tensor) -> None:
        """Raise Wrong unless the output is the hard pass's, and the leaves get the gradient that torch gives them."""
        rounding = torch.finfo(x.dtype).eps
        layer, found = self.model.freeze_tree_(), []  # type: ignore[operator]
        with torch.no_grad():
            exact = layer.eval()(x)
        for backend in (self.backend, "aten"):
            with choice(x, backend):
                layer.train().zero_grad()
                y = layer(x)
                y.square().sum().backward()
            found.append([y.detach(), *(p.grad for p in layer.leaf_parameters())])
        for ours, theirs in zip(*found, strict=True):
            if not (ours - theirs).norm() <= 8 * rounding * theirs.norm():
                raise Wrong("gradients differ")
        if not (found[0][0] - exact).norm() <= 8 * rounding * exact.norm():
            raise Wrong("the output is not the hard pass's")
        layer.unfreeze_tree_().zero_grad()

    def step(self, x: Tensor, grad: Tensor) -> None:
        self.optimizer.zero_grad()
        x.grad = None
        with choice(x, self.backend):
            y = self.run(x)
            if self.balance:
                torch.autograd.backward([y, fastff.balance_loss(self.model)], [grad, None])
            else:
                y.backward(grad)
        self.optimizer.step()


def choice(x: Tensor, backend: str) -> fastff.backend:
    """Choose what runs a step. Without a GPU, tests say what runs."""
    return fastff.backend(backend if x.is_cuda else "auto")


def names(o: argparse.Namespace, depth: int) -> list[str]:
    """The ways that are tried at a depth."""
    return o.ways.split(",") if o.ways else [name for name in WAYS if depth <= 10 or "-torch" not in name]


def asks_host(name: str) -> bool:
    return "-torch" in name or "-lazy" in name or name.startswith("top1-loop")


def batch(o: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """An input and the output's gradient."""
    torch.manual_seed(0)
    x = torch.randn(o.batch, o.features, device=o.device, dtype=getattr(torch, o.dtype), requires_grad=True)
    return x, torch.randn_like(x) / o.batch


def in_graph(run: Callable[[], None]) -> Callable[[], None]:
    """The same work as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def timed(run: Callable[[], None], device: torch.device) -> float:
    """Milliseconds."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin)


def measure(o: argparse.Namespace) -> Iterator[list[dict[str, object]]]:
    """Rows: the eager ones of each depth, then the graphs' of each."""
    depths, on_gpu = [int(depth) for depth in o.depths.split(",")], torch.device(o.device).type == "cuda"
    if on_gpu:
        with ProcessPoolExecutor(len(depths), multiprocessing.get_context("spawn")) as processes:
            list(processes.map(functools.partial(compile_ahead, o), depths))
    eager = {}
    for depth in depths:
        if "eager" in o.modes:
            eager[depth] = measure_eager(o, depth)
            yield eager[depth]
    for depth in depths:
        if "graph" in o.modes and on_gpu:
            yield measure_graphs(o, depth, eager.get(depth))


def compile_ahead(o: argparse.Namespace, depth: int) -> None:
    """Run each way once: kernels are then compiled, for all depths at the same time."""
    x, grad = batch(o)
    for name in names(o, depth):
        if "-torch" not in name and not name.startswith("top1"):
            with contextlib.suppress(Exception):  # it will be named when it is timed
                Way(name, o, depth, x).step(x, grad)


def measure_eager(o: argparse.Namespace, depth: int) -> list[dict[str, object]]:
    """Rows of one depth. Ways that can run alternate; those that cannot are named."""
    x, grad = batch(o)
    ways: dict[str, Way] = {}
    peaks: dict[str, float] = {}
    for name in names(o, depth):
        try:
            way = Way(name, o, depth, x)
            for _ in range(2):
                way.step(x, grad)
            peaks[name] = round(peak(way, x, grad), 1)
            ways[name] = way
        except Exception as error:  # a compiler may raise anything
            refuse(depth, name, error)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(o.repetitions):
        for name, way in ways.items():
            times[name].append(timed(lambda way=way: way.step(x, grad), x.device))  # type: ignore[misc]
    return rows_of(o, depth, "eager", times, peaks)


def measure_graphs(o: argparse.Namespace, depth: int, eager: list[dict[str, object]] | None) -> list[dict[str, object]]:
    """Rows of the ways that ran in eager, each in a CUDA graph; in turns, or each in a process of its own."""
    torch.cuda.empty_cache()  # room for the other process
    peaks = {str(row["way"]): float(str(row["peak_mb"])) for row in eager or ()}
    tried = names(o, depth) if eager is None else peaks
    ways, times = [name for name in tried if not asks_host(name)], {}
    try:
        times = apart(o, depth, ways)
    except Exception:  # such as the end of the process
        for name in ways:
            try:
                times |= apart(o, depth, [name])
            except Exception as error:
                refuse(depth, f"{name} in a graph", error)
    return rows_of(o, depth, "graph", times, peaks)


def apart(o: argparse.Namespace, depth: int, ways: list[str]) -> dict[str, list[float]]:
    """`graph_times` in another process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(graph_times, o, depth, ways).result()


def graph_times(o: argparse.Namespace, depth: int, ways: list[str]) -> dict[str, list[float]]:
    """Milliseconds of each run of each graph; the graphs take turns."""
    x, grad = batch(o)
    made = {name: (Way(name, o, depth, x), x.detach().requires_grad_()) for name in ways}  # graphs do not keep these
    runs = {name: in_graph(functools.partial(way.step, own, grad)) for name, (way, own) in made.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(1 + o.repetitions):
        for name, run in runs.items():
            times[name].append(timed(run, x.device))
    return {name: found[1:] for name, found in times.items()}


def refuse(depth: int, name: str, error: Exception) -> None:
    why = f"wrong: {error}" if isinstance(error, Wrong) else f"skipped: {type(error).__name__}: {error}"
    print(f"depth {depth}, {name}: {why.splitlines()[0][:140]}", flush=True)


def rows_of(
    o: argparse.Namespace, depth: int, mode: str, times: dict[str, list[float]], peaks: dict[str, float]
) -> list[dict[str, object]]:
    """A row for each way, which is also printed."""
    medians = {name: statistics.median(found) for name, found in times.items()}
    dense = medians.get("dense")
    rows: list[dict[str, object]] = []
    for name, found in times.items():
        row: dict[str, object] = {"way": name, "mode": mode, "depth": depth, "leaf_width": o.leaf_width}
        row |= {"features": o.features, "batch": o.batch, "dtype": o.dtype, "repetitions": o.repetitions}
        row |= {"least_ms": round(min(found), 3), "median_ms": round(medians[name], 3)}
        row |= {"over_dense": round(medians[name] / dense, 4) if dense else "", "peak_mb": peaks.get(name, "")}
        rows.append(row)
        ratio = f"{row['over_dense']:.2f}x" if dense else ""
        print(f"{depth:>5} {name:<24} {mode:<6} {row['median_ms']:>9} ms {ratio:>7} {row['peak_mb']:>9} MB", flush=True)
    return rows


def peak(way: Way, x: Tensor, grad: Tensor) -> float:
    """The most MB that a step holds at once beyond parameters and moments; 0 without a GPU."""
    if not x.is_cuda:
        return 0.0
    way.optimizer.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    way.step(x, grad)
    return (torch.cuda.max_memory_allocated() - before) / 1e6
