"""What the parts of large_layers.py share: cells to measure, the peers of an FFF, rows, and tables of rows."""

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastff import activations, bench
from fastff.backends import Request, choose, run
from fastff.baselines import FF
from fastff.bench.correctness import Answer, dense_answer, gate_answer
from fastff.bench.models import Call, Problem
from fastff.bench.results import Measurement, Result
from fastff.bench.runners import Runner
from fastff.bench.timing import interleave
from fastff.bench.workbench import Workbench
from fastff.functional import Leaves
from fastff.tree import num_leaves, num_nodes

Row = dict[str, Any]

SIZE = ["in", "out", "leaf_width", "depth", "activation", "batch", "tokens", "dtype"]
FOUND = [
    *["model", "spread", "status", "median_us", "p20_us", "p80_us", "samples", "target_us", "speedup_dense"],
    *["target_speedup", "times_even", "times_leaf_dense", "floor_us", "times_floor", "error", "allowed_error", "note"],
]
COLUMNS = ["part", "cell", "mode", *SIZE, *FOUND]


class Cell(NamedTuple):
    """One size, measured in one go: all its models are timed in turn."""

    title: str
    measure: Callable[[], list[Row]]


class Entry(NamedTuple):
    """A model of a cell. One that the Workbench does not know has ways to run it and the right output."""

    result: Result
    calls: Sequence[Call] | None = None
    answer: Answer | None = None


def row(part: str, cell: str, size: Row, result: Result, **more: Any) -> Row:
    """A row of the output. What a part does not know stays empty."""
    times = result.times
    known = {
        "part": part,
        "cell": cell,
        "mode": "graph" if size.get("device") == "cuda" else "eager",
        "model": result.model,
        "status": result.status,
        "median_us": times and times.median,
        "p20_us": times and times.p20,
        "p80_us": times and times.p80,
        "samples": times and times.samples,
        "error": result.error,
        "allowed_error": result.allowed,
        "note": result.note,
    }
    found = size | known | more
    return {name: _text(found.get(name)) for name in COLUMNS}


def _text(value: Any) -> Any:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value


def time_all(workbench: Workbench, entries: Sequence[Entry], options: argparse.Namespace) -> Measurement:
    """All models of a cell, checked, then timed in turn."""
    results = [entry.result for entry in entries]
    runners = {}
    for entry in entries:
        runner = prepare(workbench, entry)
        if runner is not None:
            runners[entry.result.model] = runner
    finish(results, runners, options)
    case = workbench.case
    return Measurement(case, results, workbench.leaves, workbench.nodes, bandwidth(case.device, options.tiny))


def prepare(workbench: Workbench, entry: Entry) -> Runner | None:
    """A runner with the right output; otherwise None, and the result says why."""
    try:
        return workbench.prepare(*entry)
    except Exception as error:  # a compiler may raise anything; the other models go on
        entry.result.status, entry.result.note = "raised", first_line(error)
    return None


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def finish(results: Sequence[Result], runners: dict[str, Runner], options: argparse.Namespace) -> None:
    """Time the runners in turn, and give their times to the results of the same model."""
    times, skipped = interleave(runners, budget=options.budget, samples=options.samples)
    for result in results:
        result.times = times.get(result.model)
        if result.model in skipped:
            result.skip(skipped[result.model])


def rows_of(part: str, cell: str, found: Measurement, **more: Any) -> list[Row]:
    """The rows of a measurement: speed-ups over FF, and the byte floor of the FFF."""
    made = []
    for result in found.results:
        ratios: Row = {"speedup_dense": found.speedup(result, "FF"), "floor_us": found.floor_us}
        ratios["times_floor"] = found.times_floor(result) if result.model == "FFF" else None
        made.append(row(part, cell, found.case.columns, result, **ratios, **more))
    return made


@functools.cache
def bandwidth(device: str, tiny: bool) -> float:
    return bench.bandwidth(device, 2**24 if tiny else 2**29)


def dense_of(problem: Problem, width: int) -> FF:
    """A dense layer of this width, with weights of its own."""
    case = problem.case
    size = {"width": width, "activation": case.activation, "device": case.device, "dtype": case.torch_dtype}
    with torch.inference_mode(False):
        return FF(case.in_features, case.out_features, **size).eval().requires_grad_(False)


def dense_entry(name: str, workbench: Workbench, width: int) -> Entry:
    """A dense layer of this width and its right output."""
    model = dense_of(workbench.problem, width)
    gate = (None, None) if model.gate is None else (model.gate.weight[None], model.gate.bias[None])
    leaves = Leaves(model.up.weight[None], model.up.bias[None], model.down.weight.T[None], None, *gate)
    answer = dense_answer(workbench.checked_inputs, leaves, workbench.case.activation, model.down.bias)
    return Entry(Result(name, ""), [model], answer)


def moe_entry(workbench: Workbench) -> Entry:
    """A mixture of experts with k = 1 whose experts are the leaves: a product, an argmax, and the leaves' kernel."""
    problem, activation = workbench.problem, workbench.case.activation
    answer = gate_answer(workbench.checked_inputs, problem.gate, problem.leaves, activation)

    def forward(x: Tensor) -> Tensor:
        leaf = F.linear(x, problem.gate).argmax(-1)
        request = Request.make("visit", x, None, problem.leaves, activation, leaf=leaf)
        y: Tensor = run(choose(request)[0], request)
        return y

    return Entry(Result("MoE", ""), [forward], answer)


def grouped_entry(workbench: Workbench) -> Entry:
    """The tree with its leaves run by torch's grouped_mm: the FFF's output."""
    return Entry(Result("grouped_mm", ""), grouped_mm(workbench.problem), workbench.answers["FFF"])


def grouped_mm(problem: Problem) -> list[Call]:
    """The hard pass with torch's own kernels, in both layouts of the second matrix.

    Routing is two products and an argmax: the signs of all nodes times a matrix that counts, for each leaf, the turns
    on its path that were taken. Then samples are sorted by leaf, and grouped_mm multiplies each with its own leaf.
    Leaf widths are padded to multiples of 8, since its rows must begin at multiples of 16 bytes, and nodes to a power
    of two, which is faster.
    """
    tree, leaves, activation = problem.tree, _padded(problem.leaves), problem.case.activation
    product = getattr(F, "grouped_mm", None) or torch._grouped_mm
    turns, lefts = path_matrix(problem.case.depth, leaves.in_weight)
    turns, node_weight, node_bias = F.pad(turns, (0, 1)), F.pad(tree.weight, (0, 0, 0, 1)), F.pad(tree.bias, (0, 1))
    gated = leaves.gate_weight is not None
    first = (
        torch.cat([leaves.in_weight, leaves.gate_weight], 1) if gated else leaves.in_weight
    )  # (leaves, l or 2 l, in)
    first_bias = torch.cat([leaves.in_bias, leaves.gate_bias], 1) if gated else leaves.in_bias
    first = first.mT  # (leaves, in, l or 2 l)
    one = turns.new_ones(())
    numbers = torch.arange(1, len(leaves.in_weight) + 1, device=first.device)

    def forward(x: Tensor, second: Tensor) -> Tensor:
        right = torch.heaviside(F.linear(x, node_weight, node_bias), one)  # (batch, nodes)
        leaf = F.linear(right, turns, lefts).argmax(-1)
        ordered, order = leaf.sort()
        ends = torch.searchsorted(ordered, numbers, out_int32=True)
        hidden = product(x[order], first, offs=ends) + first_bias[ordered]
        hidden = activations.apply(activation, *hidden.chunk(2 if gated else 1, -1))
        y = product(hidden, second, offs=ends) + leaves.out_bias[ordered]
        return torch.empty_like(y).index_copy_(0, order, y)

    seconds = (leaves.out_weight, leaves.out_weight.mT.contiguous().mT)
    return [functools.partial(forward, second=second) for second in seconds]


def path_matrix(depth: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """turns (leaves, nodes) and lefts (leaves,), which count the turns taken on the path to each leaf.

    With r_i = 1 where node i goes right and 0 elsewhere, turns @ r + lefts is `depth` for the leaf that is reached.
    """
    turns = torch.zeros(num_leaves(depth), num_nodes(depth))
    lefts = torch.zeros(num_leaves(depth))
    leaf = torch.arange(num_leaves(depth))
    for m in range(depth):
        node, bit = num_nodes(m) + (leaf >> (depth - m)), leaf >> (depth - m - 1) & 1
        turns[leaf, node] = 2.0 * bit - 1
        lefts += 1 - bit
    return turns.to(like), lefts.to(like)


def _padded(leaves: Leaves) -> Leaves:
    """The leaves with zeros up to a width that is a multiple of 8. No activation turns 0 into anything that counts."""
    missing = -leaves.in_weight.shape[1] % 8
    if not missing:
        return leaves
    sides = {"in_weight": (0, 0, 0, missing), "gate_weight": (0, 0, 0, missing), "out_weight": (0, 0, 0, missing)}
    sides |= {"in_bias": (0, missing), "gate_bias": (0, missing)}
    parts = leaves._asdict()
    return leaves._replace(**{k: F.pad(parts[k], side) for k, side in sides.items() if parts[k] is not None})


def tiny(case: bench.Case) -> bench.Case:
    """A small case of the same kind, for a quick try on a CPU."""
    size = {"in": max(16, case.in_features // 128), "out": max(16, case.out_features // 128)}
    leaf_width, depth, batch = max(1, case.leaf_width // 16), min(case.depth, 3), min(case.batch, 33)
    return bench.Case(*size.values(), leaf_width, depth, batch, case.dtype, case.device, 1, case.activation)


def lines(rows: Sequence[Sequence[Any]], names: Sequence[str]) -> str:
    """A table for a terminal: the first column to the left, the others to the right."""
    texts = [list(names), *[[str(value) for value in each] for each in rows]]
    widths = [max(len(text[i]) for text in texts) for i in range(len(names))]
    return "\n".join(
        "  ".join(t.ljust(w) if i == 0 else t.rjust(w) for i, (t, w) in enumerate(zip(text, widths, strict=True)))
        for text in texts
    )


def number(text: Any) -> str:
    """A number of a row in three digits; a dash if there is none."""
    return "-" if text in ("", None) else f"{float(text):.3g}" if float(text) < 1000 else f"{float(text):.0f}"
