"""FF, MoE and FFF on scikit-learn's digits by two recipes, what they cost at the size of BERT, and a page of it all.

    python examples/demo.py            # under a minute on 2 cores
    python examples/demo.py --quick    # seconds: a few steps of one seed, and one size

The trainings are those of `fastff reproduce table1` and `table2`, but shorter and on data that comes with scikit-learn.
A tree trained by the paper's recipe sends nearly all samples to a few leaves; by ours it uses them all. At 64 -> 10
there is little to save, so the second table times layers of 768 -> 768 with random weights. All results are kept in
the store: run it again, or after a kill, and it trains what is missing. `fastff report` makes the page again.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fastff.bench import rows as bench
from fastff.bench.measure import Measurement, measure
from fastff.bench.presets import BERT
from fastff_reproduce import engine, html_report
from fastff_reproduce.experiments import EXPERIMENTS
from fastff_reproduce.recipes import FASTFF
from fastff_reproduce.results_table import show
from fastff_reproduce.runs import Case
from fastff_reproduce.store import Store, about

WIDTH, LEAF_WIDTHS = 64, (8, 2)


def trainings(steps: int, seeds: Sequence[int]) -> list[Case]:
    """FF and FFF by the paper's recipe and by ours; MoE by ours alone, for the paper's takes it long."""
    part = {"datasets": ["digits"], "widths": [WIDTH], "seeds": seeds, "changes": {"steps": steps}}
    cases = EXPERIMENTS["table1"].cases(**part, leaf_widths=LEAF_WIDTHS)
    part["changes"] = {"steps": steps, "rate": FASTFF.rate}  # that of Table 2 is for more steps
    return cases + EXPERIMENTS["table2"].cases(**part, recipes=["fastff"], models=["MoE"])


def measured(depths: Sequence[int], batches: Sequence[int]) -> list[Measurement]:
    """FF and FFF in turn, a few seconds at most for each size; outputs are checked first."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    found = []
    # Redrawn when something is done, and not by a thread of its own: that would disturb what is timed.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as bar:
        task = bar.add_task("timing at 768 -> 768", total=len(depths) * len(batches))
        for depth in depths:
            for batch in batches:
                case = dataclasses.replace(BERT, depth=depth, batch=batch)
                found.append(measure(case, models=("FF", "FFF"), backends=("auto",), budget=3.0, samples=30))
                bar.update(task, advance=1, refresh=True)
    return found


def speed_table(found: Sequence[Measurement]) -> Table:
    table = Table(
        title="Where it pays: 768 -> 768, leaf width 32, random weights",
        caption="Neurons: of the FFF at inference, of the FF at all times.",
    )
    for header in ("depth", "neurons", "batch", "time, FF", "time, FFF", "speed-up"):
        table.add_column(header, justify="right")
    for one in found:
        case, (ff, fff) = one.case, one.results
        neurons = f"{case.leaf_width + case.depth} of {case.training_width}"
        times = [f"{result.times.median:,.0f} µs" if result.times else result.status for result in (ff, fff)]
        speed_up = one.speedup(fff, "FF")
        table.add_row(str(case.depth), neurons, str(case.batch), *times, f"{speed_up:.1f}x" if speed_up else "")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", type=Path, default=Path("fastff.sqlite"), help="results (default: fastff.sqlite)")
    parser.add_argument("--output", type=Path, default=Path("page.html"), help="the page (default: page.html)")
    parser.add_argument("--quick", action="store_true", help="a few steps of one seed, and one size: seconds")
    options = parser.parse_args()

    console, threads = Console(), torch.get_num_threads()
    steps, seeds = (100, range(1)) if options.quick else (400, range(3))
    command = "python examples/demo.py" + (" --quick" if options.quick else "")
    same = f"fastff reproduce table1 --dataset digits --widths {WIDTH} --leaf-widths {','.join(map(str, LEAF_WIDTHS))}"
    made_by = about("cpu") | {"command": f"{command}  # {same} --runs {len(seeds)} --set steps={steps}, and a MoE"}
    with Store(options.store) as store:
        # Steps this small gain nothing from a second thread, and a MoE's lose much by it: 600 steps of three of them
        # (width 128) took 4 s with 1 thread and 30 to 67 s with 2 (2 cores of a Xeon, shared with other work).
        torch.set_num_threads(1)
        results = engine.run(trainings(steps, seeds), store, device="cpu", root=None, about=made_by)
        torch.set_num_threads(threads)
        records = store.records()
    show("table1", "FF, FFF and MoE", results)

    found = measured((5,), (1,)) if options.quick else measured((5, 8, 10), (1, 256))
    console.print(speed_table(found))
    load = max(one.other_load or 0.0 for one in found)
    if load > 0.2:
        console.print(f"Other processes kept up to {load:.1f} cores busy meanwhile: a quiet machine has other times.")
    where = bench.about("cpu", command, made_by["commit"])
    console.print(f"{where['machine']}, {threads} threads; torch {where['torch']}, fastff {where['fastff']}, float32")

    rows = [row for one in found for row in bench.rows_of(one, where)]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(html_report.page(records, rows, regions=False), encoding="utf-8")
    console.print(f"The page with all of it: {options.output}", soft_wrap=True)


if __name__ == "__main__":
    main()
