"""Random sizes: an FFF beside the dense layer of its training width and a dense layer of as many neurons.

The sizes are seeded. Kernels of all sizes are compiled ahead. The output of every FFF is checked against float64 at
some samples.
"""

import argparse
import math
import random
import statistics
import warnings
from collections.abc import Sequence
from functools import partial

import torch
from compile_ahead import chosen, compile_all
from large_cells import Cell, Entry, Row, dense_entry, lines, number, rows_of, time_all

from fastff import activations
from fastff.bench import Case, Measurement, Result
from fastff.bench.case import lacking
from fastff.bench.measuring import own_stream
from fastff.bench.models import Problem
from fastff.bench.workbench import Workbench

DTYPES = ("bfloat16", "float16", "float32")
MOST_BYTES, MOST_US = 12e9, 20e3  # of the weights; of a call of the dense layer, by estimate
FLOPS = {"bfloat16": 5e14, "float16": 5e14, "float32": 4e13}  # per second, of a dense layer on an H200
BYTES = 4e12  # per second
_CHECKED = 64  # samples of each output
_MOST_INPUTS, _ROTATION_US = 8, 4000.0  # inputs that take turns: as many as the dense layer runs in this time


def cases(options: argparse.Namespace) -> list[Case]:
    """The sizes, the same for the same seed."""
    draw = random.Random(options.seed)
    found: dict[Case, None] = {}
    while len(found) < options.sizes:
        case = _draw(draw, options)
        if case.parameter_bytes <= MOST_BYTES and dense_us(case) <= MOST_US:
            found[case] = None
    return list(found)


def _draw(draw: random.Random, options: argparse.Namespace) -> Case:
    def between(low: int, high: int) -> int:
        """Any number, with the logarithm spread evenly; half of the wide ones are multiples of 64."""
        value = round(math.exp(draw.uniform(math.log(low), math.log(high))))
        return 64 * round(value / 64) if low >= 64 and draw.random() < 0.5 else value

    features, leaf, depth, batch = (8, 64), (1, 16), (1, 5), (1, 64)
    if not options.tiny:
        features, leaf, depth, batch = (64, 8192), (1, 1024), (1, 12), (1, 16384)
    return Case(
        between(*features),
        between(*features),
        between(*leaf),
        draw.randint(*depth),
        between(*batch),
        draw.choice(DTYPES),
        options.device,
        1,
        draw.choice([*activations.PLAIN, *activations.GATED]),
    )


def dense_us(case: Case) -> float:
    """About the time of the dense layer on an H200."""
    weights = case.leaf_numel * case.num_leaves
    hidden = 3 * case.batch * case.training_width * case.itemsize
    return 1e6 * max(2 * weights * case.batch / FLOPS[case.dtype], (weights * case.itemsize + hidden) / BYTES)


def cells(options: argparse.Namespace) -> list[Cell]:
    return [Cell(str(case), partial(measure, case, options)) for case in cases(options)]


def measure(case: Case, options: argparse.Namespace) -> list[Row]:
    if lack := lacking(case):
        result = Result("FFF", "auto")
        result.skip(lack)
        return rows_of("sweep", str(case), Measurement(case, [result]))
    inputs = max(1, min(_MOST_INPUTS, int(_ROTATION_US / dense_us(case)), int(2**31 / (case.batch * case.in_features))))
    problem = Problem(case, inputs=inputs)
    with own_stream(case.device), torch.inference_mode(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        workbench = Workbench(problem, None, options.budget, most=_CHECKED)
        fff = Result("FFF", "auto")
        entries = [Entry(Result("FF", "")), dense_entry("same neurons", workbench, case.depth + case.leaf_width)]
        found = time_all(workbench, [*entries, Entry(fff)], options)
    failed = [str(each.message) for each in said if issubclass(each.category, RuntimeWarning)]
    if failed:
        fff.status, fff.note = "raised", "; ".join(failed)
    return rows_of("sweep", str(case), found)


def compile_ahead(options: argparse.Namespace, wanted: Sequence[str]) -> set[str]:
    """Compile the kernels of the cells with these titles in several processes: the titles of those that are ready."""
    sizes = [case for case in cases(options) if str(case) in wanted]
    if options.device != "cuda" or not options.processes or not sizes:
        return set(wanted)
    ready = compile_all([chosen(case) for case in sizes], options.processes, options.compile_seconds)
    return {str(job.case) for job in ready}


def summary(rows: Sequence[Row]) -> str:
    fff = [row for row in rows if row["model"] == "FFF"]
    ok = [row for row in fff if row["status"] == "ok" and row["median_us"]]
    us = {(row["cell"], row["model"]): float(row["median_us"]) for row in rows if row["median_us"]}
    ratios = {}
    for name, label in (("FF", "dense"), ("same neurons", "same neurons")):
        ratios[label] = [us[row["cell"], "FFF"] / us[row["cell"], name] for row in ok if (row["cell"], name) in us]
    ratios["byte floor"] = [float(row["times_floor"]) for row in ok if row["times_floor"]]
    shown = [[f"FFF over {label}", *map(number, _spread(some))] for label, some in ratios.items() if some]
    said = [lines(shown, ["times", "best", "median", "p90", "worst", "sizes", "above 1"])]
    slow = sorted((row for row in ok if row["speedup_dense"] and float(row["speedup_dense"]) < 1), key=_speedup)
    said.append(f"{len(fff)} sizes; {len(slow)} slower than dense:")
    said += [f"  {1 / _speedup(row):.2f} times dense, {number(row['median_us'])} us: {_where(row)}" for row in slow]
    failed = [row for row in fff if row["status"] != "ok"]
    said.append(f"{len(failed)} that raised, are wrong or were skipped:")
    said += [f"  {row['status']}: {_where(row)}" for row in failed]
    return "\n".join(said)


def _spread(ratios: list[float]) -> list[float]:
    ratios = sorted(ratios)
    p90 = ratios[int(0.9 * (len(ratios) - 1))]
    return [ratios[0], statistics.median(ratios), p90, ratios[-1], len(ratios), sum(ratio > 1 for ratio in ratios)]


def _speedup(row: Row) -> float:
    return float(row["speedup_dense"])


def _where(row: Row) -> str:
    return f"{row['cell']} ({row['note'][:160]})"
