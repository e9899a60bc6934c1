"""The layers of the paper's Tables 1 and 3 on this machine, called from Python and as CUDA graphs, beside the paper."""

import argparse
from collections.abc import Sequence
from functools import partial

import torch
from large_cells import Cell, Entry, Row, lines, number, rows_of, time_all, tiny

from fastff.bench import Case, Result, presets
from fastff.bench.measuring import own_stream
from fastff.bench.models import Problem
from fastff.bench.workbench import Workbench

MODES = ("eager", "graph")


def cells(options: argparse.Namespace) -> list[Cell]:
    base = Case(768, 768, 32, 5, 2048, "float32", options.device)
    found = []
    for case in [*presets.table1(base), *presets.table3(base)]:
        for mode in MODES if options.device == "cuda" else MODES[:1]:
            title = f"{case}, {mode}"
            small = tiny(case) if options.tiny else case
            found.append(Cell(title, partial(measure, title, small, mode, paper(case), options)))
    return found


def paper(case: Case) -> float:
    """The paper's speed-up over FF. Two data sets of Table 1 have one shape: the larger number counts."""
    if case.out_features == 128:
        return presets.TABLE3[case.leaf_width]
    at = presets.WIDTHS.index(case.training_width)
    names = [name for name, inputs in presets.DATASETS.items() if inputs == case.in_features]
    return max(presets.TABLE1[name][case.leaf_width][at] for name in names)


def measure(title: str, case: Case, mode: str, target: float, options: argparse.Namespace) -> list[Row]:
    problem = Problem(case)
    with own_stream(case.device), torch.inference_mode():
        workbench = Workbench(problem, None, options.budget, eager=mode == "eager")
        found = time_all(workbench, [Entry(Result("FF", "")), Entry(Result("FFF", "auto"))], options)
    rows = rows_of("eager", title, found, mode=mode)
    return [row | ({"target_speedup": target} if row["model"] == "FFF" else {}) for row in rows]


def summary(rows: Sequence[Row]) -> str:
    shown, behind = [], []
    for cell in dict.fromkeys(row["cell"] for row in rows):
        by = {row["model"]: row for row in rows if row["cell"] == cell}
        ours, theirs = by["FFF"]["speedup_dense"], by["FFF"]["target_speedup"]
        times = [number(by[model]["median_us"]) for model in ("FF", "FFF")]
        shown.append([cell, *times, number(ours), number(theirs)])
        if not ours or float(ours) < float(theirs):
            behind.append(f"{cell}: {number(ours)} of {number(theirs)} {by['FFF']['status']}")
    table = lines(shown, ["layer, microseconds", "FF", "FFF", "over FF", "paper"])
    return "\n".join([table, f"{len(behind)} behind the paper", *behind])
