"""FFF layers on a CPU: one sample beside dense layers, layers of the sizes of language models, and int8 leaves.

    python benchmarks/cpu_layers.py --threads 1 --output results/cpu_layers.csv
    python benchmarks/cpu_layers.py --match "768 -> 768"
    python benchmarks/cpu_layers.py --tiny                # a try

Models: FF (dense, of the training width), FFF, a dense layer of the neurons that one sample of the FFF uses, and the
same FFF with int8 leaves and in bfloat16. Every output is checked against float64 before its time counts. All models of
a size are timed in turn: on a busy machine only their ratios mean something.
"""

import argparse
import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from csv_rows import about, append
from large_cells import Cell, Entry, Row, dense_entry, finish, first_line, lines, number, prepare, tiny
from torch import Tensor

import fastff
from fastff.bench import Case, Result
from fastff.bench.correctness import tree_answer
from fastff.bench.hardware import OtherLoad
from fastff.bench.models import Problem
from fastff.bench.workbench import Workbench
from fastff.progress import progress

SAMPLES = 60
# The model that a column compares with.
RATIOS = {"over_dense": "FF", "over_same_neurons": "same neurons", "over_float32": "FFF"}


def cells(options: argparse.Namespace) -> list[Cell]:
    """The sizes: dense layers beside the FFF, then int8 and bfloat16 beside float32."""
    dense = [Case(768, 768, 32, depth, 1) for depth in (3, 5, 8)]
    for leaf_width, depth, activation in ((64, 6, "relu"), (128, 7, "swiglu")):
        for dtype in ("float32", "bfloat16"):
            sizes = [(4096, 4096, leaf_width, depth, batch, dtype, "cpu", 1, activation) for batch in (1, 4, 16, 64)]
            dense += [Case(*size) for size in sizes]
    narrow = [Case(768, 768, 32, depth, batch) for depth in (8, 10) for batch in (1, 256)]
    found = []
    for part, cases, entries in (("dense", dense, dense_entries), ("int8", narrow, int8_entries)):
        for case in cases:
            size = tiny(case) if options.tiny else case
            found.append(Cell(f"{part}: {case}", partial(measure, part, size, entries, options)))
    return found


def measure(
    part: str, case: Case, entries_of: Callable[[Workbench], list[Entry]], options: argparse.Namespace
) -> list[Row]:
    problem, load = Problem(case), OtherLoad()
    problem.layer.requires_grad_(False)
    with torch.inference_mode():
        workbench = Workbench(problem, None, options.budget)
        entries = entries_of(workbench)
        runners = {entry.result.model: prepare(workbench, entry) for entry in entries}
        results = [entry.result for entry in entries]
        finish(results, {name: runner for name, runner in runners.items() if runner is not None}, options)
    return [row(part, case, result, results) | {"other_load": f"{load.cores() or 0:.2f}"} for result in results]


def dense_entries(workbench: Workbench) -> list[Entry]:
    neurons = workbench.case.depth + workbench.case.leaf_width
    same = dense_entry("same neurons", workbench, neurons)
    return [Entry(Result("FF", "")), Entry(Result("FFF", "auto")), same]


def int8_entries(workbench: Workbench) -> list[Entry]:
    problem, activation, x = workbench.problem, workbench.case.activation, workbench.checked_inputs
    with torch.inference_mode(False):
        int8, bfloat16 = copy.deepcopy(problem.layer), copy.deepcopy(problem.layer).bfloat16()
        fastff.quantize_(int8)
    inputs = {id(given): given.bfloat16() for given in problem.inputs}

    def run_bfloat16(given: Tensor) -> Tensor:
        return bfloat16(inputs[id(given)])

    answers = {
        "FFF int8": tree_answer(x, int8.tree, int8.leaves, activation)[0],
        "FFF bfloat16": tree_answer(x.bfloat16(), bfloat16.tree, bfloat16.leaves, activation)[0],
    }
    calls = {"FFF int8": int8, "FFF bfloat16": run_bfloat16}
    return [
        Entry(Result("FFF", "auto")),
        *(Entry(Result(name, "auto"), [call], answers[name]) for name, call in calls.items()),
    ]


def row(part: str, case: Case, result: Result, results: Sequence[Result]) -> Row:
    """A row of the output. `case` has the size; a model of another dtype says so in its name."""
    by = {other.model: other.times for other in results}
    times = result.times
    found: Row = {"part": part, "size": str(case)} | case.columns
    del found["device"], found["node_width"]
    found |= {"model": result.model, "threads": torch.get_num_threads(), "status": result.status}
    for name in ("median", "p20", "p80"):
        found[f"{name}_us"] = "" if times is None else f"{getattr(times, name):.2f}"
    found["samples"] = "" if times is None else times.samples
    for name, model in RATIOS.items():
        other = None if model == result.model or (part == "dense" and name == "over_float32") else by.get(model)
        found[name] = "" if times is None or other is None else f"{other.median / times.median:.3f}"
    numbers = {"error": result.error, "allowed_error": result.allowed}
    found |= {name: "" if value is None else f"{value:.3g}" for name, value in numbers.items()}
    return found | {"note": result.note}


def summary(rows: Sequence[Row]) -> str:
    """All models of all sizes, and how many times faster they are than the others."""
    shown = []
    for each in rows:
        ratios = [number(each[name]) for name in RATIOS]
        shown.append([each["size"], each["model"], number(each["median_us"]), *ratios, each["status"]])
    names = ["size", "model", "us", *RATIOS, "status"]
    return lines(shown, names)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="append the rows to this CSV file")
    parser.add_argument("--match", default="", help='only sizes whose title has this text, such as "int8"')
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch's threads (its default)")
    parser.add_argument("--budget", type=float, default=4.0, help="seconds to time all models of a size (4)")
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"samples of a model, if time allows ({SAMPLES})")
    parser.add_argument("--tiny", action="store_true", help="small layers, for a try")
    options = parser.parse_args(given)
    if options.threads < 1:
        parser.error(f"--threads must be at least 1; got {options.threads}.")
    return options


def main() -> None:
    options = arguments()
    chosen = [cell for cell in cells(options) if options.match in cell.title]
    if not chosen:
        raise SystemExit(f"no size has {options.match!r} in its title.")
    torch.set_num_threads(options.threads)
    where, rows = about("cpu", "benchmarks/cpu_layers.py"), []
    with progress("sizes", len(chosen), unit="sizes") as advance:
        for cell in chosen:
            advance(0, text=cell.title)
            try:
                fresh = cell.measure()
            except (RuntimeError, MemoryError) as error:  # no memory, for one: the other sizes go on
                print(f"{cell.title}: {first_line(error)}")
                continue
            rows += fresh
            if options.output:
                append(options.output, [where | each for each in fresh])
            advance(text=cell.title)
    print(summary(rows))


if __name__ == "__main__":
    main()
