"""Train FF, MoE and FFF on scikit-learn's digits, time FFF at BERT's size, and write a page with all results.

    python examples/demo.py            # about a minute on 2 cores
    python examples/demo.py --quick    # seconds: a few steps of one seed, and one size

The trainings are short versions of `fastff reproduce table1` and `table2`, on data that comes with scikit-learn. With
the paper's recipe a tree sends most samples to a few leaves; with ours it uses all leaves. A layer of 64 -> 10 has
little to save, so the second table times layers of 768 -> 768 with random weights. The store keeps all results: run the
demo again, or after a kill, and it trains only what is missing. `fastff report` writes the page again.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from fastff.atomic import replacing
from fastff.bench import Measurement, measure
from fastff.bench import rows as bench
from fastff.bench.presets import BERT
from fastff.progress import progress
from fastff_reproduce import engine, html_report
from fastff_reproduce.experiments import EXPERIMENTS
from fastff_reproduce.recipes import FASTFF
from fastff_reproduce.results_table import show
from fastff_reproduce.runs import Case
from fastff_reproduce.store import Store, about

WIDTH, LEAF_WIDTHS = 64, (8, 2)


def trainings(steps: int, seeds: Sequence[int]) -> list[Case]:
    """FF and FFF with the paper's recipe and with ours; MoE with ours alone, since the paper's takes long."""
    part = {"datasets": ["digits"], "widths": [WIDTH], "seeds": seeds, "changes": {"steps": steps}}
    cases = EXPERIMENTS["table1"].cases(**part, leaf_widths=LEAF_WIDTHS)
    part["changes"] = {"steps": steps, "rate": FASTFF.rate}  # Table 2's rate is for more steps
    return cases + EXPERIMENTS["table2"].cases(**part, recipes=["fastff"], models=["MoE"])


def measured(depths: Sequence[int], batches: Sequence[int]) -> list[Measurement]:
    """FF and FFF in turn, a few seconds at most for each size. Outputs are checked first."""
    cases = [dataclasses.replace(BERT, depth=depth, batch=batch) for depth in depths for batch in batches]
    found = []
    with progress("timing at 768 -> 768", len(cases)) as advance:
        for case in cases:
            found.append(measure(case, models=("FF", "FFF"), backends=("auto",), budget=3.0, samples=30))
            advance()
    return found


def speed_table(found: Sequence[Measurement]) -> Table:
    table = Table(
        title="Where it pays: 768 -> 768, leaf width 32, random weights",
        caption="Neurons: used by an FFF at inference, of an FF's total.",
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
    parser.add_argument(
        "--store", type=Path, default=Path("fastff.sqlite"), help="file for results (default: fastff.sqlite)"
    )
    parser.add_argument("--output", type=Path, default=Path("report.html"), help="page to write (default: report.html)")
    parser.add_argument("--quick", action="store_true", help="a few steps of one seed, one size: takes seconds")
    options = parser.parse_args()

    console, threads = Console(), torch.get_num_threads()
    steps, seeds = (100, range(1)) if options.quick else (400, range(3))
    command = "python examples/demo.py" + (" --quick" if options.quick else "")
    same = f"fastff reproduce table1 --dataset digits --widths {WIDTH} --leaf-widths {','.join(map(str, LEAF_WIDTHS))}"
    made_by = about("cpu") | {"command": f"{command}  # {same} --runs {len(seeds)} --set steps={steps}, and a MoE"}
    with Store(options.store) as store:
        # A second thread does not help steps this small, and it slows a MoE down: 600 steps of three seeds (width 128)
        # took 4 s with 1 thread and 30 to 67 s with 2 (2 cores of a Xeon, shared with other work).
        torch.set_num_threads(1)
        results = engine.run(trainings(steps, seeds), store, device="cpu", root=None, about=made_by)
        torch.set_num_threads(threads)
        records = store.records()
    show("table1", "FF, FFF and MoE", results)

    found = measured((5,), (1,)) if options.quick else measured((5, 8, 10), (1, 256))
    console.print(speed_table(found))
    load = max(one.other_load or 0.0 for one in found)
    if load > 0.2:
        console.print(f"Other processes used up to {load:.1f} cores meanwhile. Times on a quiet machine differ.")
    where = bench.about("cpu", command, made_by["commit"])
    console.print(f"{where['machine']}, {threads} threads; torch {where['torch']}, fastff {where['fastff']}, float32")

    rows = [row for one in found for row in bench.rows_of(one, where)]
    with progress("drawing the page", None), replacing(options.output) as file:
        file.write(html_report.page(records, rows))
    console.print(f"Page with all results: {options.output}", soft_wrap=True)


if __name__ == "__main__":
    main()
