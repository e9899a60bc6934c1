"""Skew: the layers of the table with samples spread evenly over leaves, by Zipf's law, and all in one leaf."""

import argparse
from collections.abc import Sequence
from functools import partial

import torch
from large_cells import Cell, Entry, Row, bandwidth, dense_entry, finish, lines, number, prepare, row, tiny
from large_table import layers
from torch import Tensor

import fastff
from fastff.bench import Case, Measurement, Result
from fastff.bench.measuring import own_stream
from fastff.bench.models import Problem
from fastff.bench.workbench import Workbench
from fastff.tree import level

BATCHES = (512, 4096, 16384)
SPREADS = ("even", "zipf", "one leaf")
LIMIT = 1.5  # times the even case, or times a dense layer of the leaf's width
_CHECKED = 256  # samples of each output


def cells(options: argparse.Namespace) -> list[Cell]:
    found = []
    for layer in layers(options.device):
        for batch in BATCHES:
            case = Case(**{**layer.__dict__, "batch": batch})
            title = str(case)
            case = tiny(case) if options.tiny else case
            found.append(Cell(title, partial(measure, title, case, options)))
    return found


def measure(title: str, case: Case, options: argparse.Namespace) -> list[Row]:
    problems = {spread: skewed(case, spread) for spread in SPREADS}
    names = {spread: f"FFF {spread}" for spread in SPREADS}
    with own_stream(case.device), torch.inference_mode():
        results, runners, found = [], {}, {}
        for spread, problem in problems.items():
            workbench = Workbench(problem, None, options.budget, most=_CHECKED)
            result = Result("FFF", "auto")
            runner = prepare(workbench, Entry(result))
            result.model = names[spread]
            results.append(result)
            found[spread] = Measurement(case, [result], workbench.leaves, workbench.nodes)
            found[spread].bandwidth = bandwidth(case.device, options.tiny)
            if runner is not None:
                runners[result.model] = runner
        dense = dense_entry("FF of leaf width", workbench, case.leaf_width)
        runner = prepare(workbench, dense)
        results.append(dense.result)
        if runner is not None:
            runners[dense.result.model] = runner
        finish(results, runners, options)
    us = {result.model: result.times.median for result in results if result.times}
    rows = []
    for spread, each in found.items():
        result = each.results[0]
        own, even, leaf = (us.get(name) for name in (result.model, names["even"], dense.result.model))
        ratios = {
            "times_even": own and even and own / even,
            "times_leaf_dense": own and leaf and own / leaf,
            "floor_us": each.floor_us,
            "times_floor": each.times_floor(result),
        }
        rows.append(row("skew", title, case.columns, result, spread=spread, **ratios) | {"model": "FFF"})
    return [*rows, row("skew", title, case.columns, dense.result)]


def skewed(case: Case, spread: str) -> Problem:
    """A problem whose samples reach the leaves in given shares, through the layer's own decisions.

    Feature m of a sample holds the turn that it takes at level m, as -1 or 1; the nodes of level m read that feature,
    and a little of the others.
    """
    problem = Problem(case)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        set_tree_(problem.layer)
        for x in problem.inputs:
            leaf = draw(spread, case.batch, case.num_leaves, generator).to(x.device)
            for m in range(case.depth):
                x[:, m] = 2.0 * (leaf >> (case.depth - m - 1) & 1) - 1
    return problem


def set_tree_(layer: fastff.FFF) -> None:
    """Nodes that read one feature for each level. A logit is -1 or 1, and up to 0.1 standard deviations beside it."""
    layer.node_weight.normal_(0, 0.1 / layer.in_features**0.5)
    layer.node_bias.zero_()
    for m in range(layer.depth):
        layer.node_weight[level(m), : layer.depth] = 0
        layer.node_weight[level(m), m] = 1


def draw(spread: str, batch: int, leaves: int, generator: torch.Generator) -> Tensor:
    """The leaf of each sample, (batch,): as evenly as possible, in shares of 1/rank, or the same for all."""
    ranks = torch.randperm(leaves, generator=generator)
    if spread == "one leaf":
        return ranks[:1].expand(batch)
    if spread == "even":
        return ranks[torch.arange(batch) % leaves][torch.randperm(batch, generator=generator)]
    shares = 1 / torch.arange(1, leaves + 1)
    return ranks[torch.multinomial(shares, batch, replacement=True, generator=generator)]


def summary(rows: Sequence[Row]) -> str:
    shown, misses = [], []
    for cell in dict.fromkeys(each["cell"] for each in rows):
        by = {each["spread"]: each for each in rows if each["cell"] == cell}
        shown.append([cell, *(number(by[name]["median_us"]) for name in (*SPREADS, ""))])
        for spread in SPREADS:
            ratios = [float(by[spread][name] or "inf") for name in ("times_even", "times_leaf_dense")]
            shown[-1] += [number(ratio) for ratio in ratios] if spread != "even" else []
            if min(ratios) > LIMIT or by[spread]["status"] != "ok":
                misses.append(f"{cell}, {spread}: {by[spread]['status']} {min(ratios):.2f} {by[spread]['note'][:100]}")
    ratios = [f"{spread} / {name}" for spread in SPREADS[1:] for name in ("even", "dense")]
    names = ["layer, microseconds", *SPREADS, "FF of leaf width", *ratios]
    return "\n".join([lines(shown, names), f"{len(misses)} beyond {LIMIT} times both, or wrong", *misses])
