"""Layers of the sizes of language models, beside what a user would run instead.

    python benchmarks/large_layers.py table --output results/large_layers.csv
    python benchmarks/large_layers.py sweep --sizes 300 --output results/large_layers.csv
    python benchmarks/large_layers.py table --device cpu --tiny       # a try without a GPU

Parts: `table` (dense layers, MoE and torch's grouped_mm at sizes with targets), `sweep` (random sizes), `skew` (uneven
leaves), `llama` (a whole model; needs transformers), `eager` (the paper's Tables 1 and 3, also without CUDA graphs).
Every output is checked against float64 before its time counts. All models of a cell are timed in turn.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

import large_eager
import large_llama
import large_skew
import large_sweep
import large_table
import torch
from csv_rows import about, append, read
from large_cells import Cell, Row, first_line, row

from fastff.bench import Result
from fastff.progress import progress

PARTS: dict[str, ModuleType] = {
    "table": large_table,
    "sweep": large_sweep,
    "skew": large_skew,
    "llama": large_llama,
    "eager": large_eager,
}
# Seconds and samples of all models of a cell together.
BUDGET = {"table": 4.0, "sweep": 0.2, "skew": 3.0, "llama": 4.0, "eager": 2.0}
SAMPLES = {"table": 60, "sweep": 9, "skew": 40, "llama": 30, "eager": 50}
SAME = ("machine", "commit", "part", "cell")  # of rows of one measurement


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=text)
    parser.add_argument("part", choices=PARTS, help="what to measure")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"], help="device to measure on (cuda)")
    parser.add_argument("--output", type=Path, help="append the rows to this CSV file")
    parser.add_argument("--resume", action="store_true", help="keep the cells that --output has from this commit")
    parser.add_argument("--match", default="", help='only cells whose title has this text, such as "l=512"')
    parser.add_argument("--budget", type=float, help="seconds to time all models of a cell")
    parser.add_argument("--samples", type=int, help="samples of each model, if the budget allows")
    parser.add_argument("--sizes", type=int, default=300, help="sweep: number of sizes (300)")
    parser.add_argument("--seed", type=int, default=0, help="sweep: seed of the sizes (0)")
    parser.add_argument("--processes", type=int, default=16, help="sweep: processes that compile; 0: none (16)")
    parser.add_argument(
        "--compile-seconds", type=float, default=3600, help="sweep: leave out what is not compiled then"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="measure no further cell after this time")
    parser.add_argument("--commit", default="", help="commit of the rows; by default the checkout's")
    parser.add_argument("--tiny", action="store_true", help="small layers, for a try")
    options = parser.parse_args(given)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU that torch can use. Use --device cpu --tiny.")
    if options.resume and not options.output:
        parser.error("--resume needs --output.")
    if options.sizes < 1:
        parser.error(f"--sizes must be at least 1; got {options.sizes}.")
    options.budget = options.budget or (1.0 if options.tiny else BUDGET[options.part])
    options.samples = options.samples or (5 if options.tiny else SAMPLES[options.part])
    return options


def finished(path: Path, where: Row, part: str) -> dict[str, list[Row]]:
    """The rows of each cell that was measured on this machine with this commit."""
    found: dict[str, list[Row]] = {}
    for old in read(path):
        if all(old.get(name) == str((where | {"part": part})[name]) for name in SAME[:3]):
            found.setdefault(old["cell"], []).append(dict(old))
    return found


def run(
    part: str, cells: Sequence[Cell], done: dict[str, list[Row]], where: Row, save: Callable, end: float = math.inf
) -> list[Row]:
    """The rows of all cells, up to a time by the monotonic clock.

    A cell that raises gets a row that says so, and the others go on while the device does.
    """
    rows: list[Row] = []
    with progress(part, len(cells), unit="cells") as advance:
        for cell in cells:
            advance(0, text=cell.title)
            if cell.title in done:
                rows += done[cell.title]
            elif time.monotonic() < end:
                fresh = [where | each for each in _measured(part, cell)]
                save(fresh)
                rows += fresh
                _check_device(fresh)
            advance(text=cell.title)
    return rows


def _measured(part: str, cell: Cell) -> list[Row]:
    try:
        return cell.measure()
    except Exception as error:  # a compiler may raise anything
        result = Result("FFF", "auto", "raised", note=first_line(error))
        return [row(part, cell.title, {}, result)]


def _check_device(rows: Sequence[Row]) -> None:
    if all(each["status"] == "ok" for each in rows) or not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise SystemExit(f"the GPU failed at {rows[0]['cell']}: {error} Run again with --resume.") from None


def main() -> None:
    options = arguments()
    part = PARTS[options.part]
    where = about(options.device, "benchmarks/large_layers.py", options.commit)
    cells = [cell for cell in part.cells(options) if options.match in cell.title]
    if not cells:
        raise SystemExit(f"{options.part} has no cell with {options.match!r} in its title.")
    done = finished(options.output, where, options.part) if options.resume else {}
    if options.part == "sweep":
        ready = large_sweep.compile_ahead(options, [cell.title for cell in cells if cell.title not in done])
        cells = [cell for cell in cells if cell.title in ready or cell.title in done]
    save = partial(append, options.output) if options.output else lambda rows: None
    rows = run(options.part, cells, done, where, save, time.monotonic() + options.seconds)
    print(part.summary(rows))


if __name__ == "__main__":
    sys.exit(main())
