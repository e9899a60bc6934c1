"""The table of large layers: an FFF beside dense layers, a mixture of experts and torch's grouped_mm."""

import argparse
from collections.abc import Sequence
from functools import partial

import torch
from large_cells import Cell, Entry, Row, dense_entry, grouped_entry, lines, moe_entry, number, rows_of, time_all, tiny

from fastff.bench import Case, Result
from fastff.bench.measuring import own_stream
from fastff.bench.models import Problem
from fastff.bench.workbench import Workbench

# in = out, leaf width, depth, activation: the target in microseconds of each batch, on an H200 in bfloat16.
TARGETS = {
    (4096, 64, 6, "relu"): {1: 12, 16: 15, 64: 20, 512: 32},
    (4096, 64, 8, "relu"): {1: 13, 64: 24, 4096: 105},
    (4096, 128, 7, "swiglu"): {1: 14, 32: 36, 4096: 180},
    (4096, 512, 5, "swiglu"): {1: 20, 32: 80, 4096: 280},
    (8192, 100, 5, "gelu"): {256: 42},
    (2048, 64, 7, "relu"): {1: 10, 64: 16, 4096: 48},
}
MODELS = ("FF", "FFF", "same neurons", "MoE", "grouped_mm")


def layers(device: str) -> list[Case]:
    """The layers of the table, with a batch of 1."""
    return [Case(n, n, leaf, depth, 1, "bfloat16", device, 1, act) for n, leaf, depth, act in TARGETS]


def cells(options: argparse.Namespace) -> list[Cell]:
    found = []
    for (features, leaf, depth, activation), batches in TARGETS.items():
        for batch, target in batches.items():
            case = Case(features, features, leaf, depth, batch, "bfloat16", options.device, 1, activation)
            title = str(case)
            case = tiny(case) if options.tiny else case
            found.append(Cell(title, partial(measure, title, case, target, options)))
    return found


def measure(title: str, case: Case, target: float, options: argparse.Namespace) -> list[Row]:
    problem = Problem(case)
    with own_stream(case.device), torch.inference_mode():
        workbench = Workbench(problem, None, options.budget)
        entries = [
            Entry(Result("FF", "")),
            Entry(Result("FFF", "auto")),
            dense_entry("same neurons", workbench, case.depth + case.leaf_width),
            moe_entry(workbench),
            grouped_entry(workbench),
        ]
        found = time_all(workbench, entries, options)
    rows = rows_of("table", title, found)
    return [row | ({"target_us": target} if row["model"] == "FFF" else {}) for row in rows]


def summary(rows: Sequence[Row]) -> str:
    shown, misses = [], []
    for cell in dict.fromkeys(row["cell"] for row in rows):
        by = {row["model"]: row for row in rows if row["cell"] == cell}
        fff = by["FFF"]
        shown.append(
            [
                cell.removesuffix(f", {fff['dtype']}, {fff['device']}"),
                *(number(by[model]["median_us"]) if model in by else "-" for model in MODELS),
                number(fff["target_us"]),
                number(fff["speedup_dense"]),
                number(fff["floor_us"]),
                number(fff["times_floor"]),
            ]
        )
        if fff["status"] != "ok" or not fff["median_us"] or float(fff["median_us"]) > float(fff["target_us"]):
            misses.append(f"{cell}: {number(fff['median_us'])} us of {number(fff['target_us'])} {fff['status']}")
        misses += [f"{cell}: {row['model']} {row['status']}: {row['note']}" for row in by.values() if _failed(row)]
    names = ["layer, microseconds", *MODELS, "target", "over FF", "floor", "x floor"]
    return "\n".join([lines(shown, names), f"{len(misses)} misses", *misses])


def _failed(row: Row) -> bool:
    return row["status"] != "ok" and row["model"] != "FFF"
