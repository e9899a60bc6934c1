"""The cost of training ten seeds of a case at once, over training one seed.

Trains cells of Table 1 with our recipe, set-up and evaluation included. One and ten seeds alternate in one process, and
their medians are compared.

    python benchmarks/ensemble.py --dataset usps --device cuda      # on a GPU a step is a CUDA graph
    python benchmarks/ensemble.py --device cpu --steps 200
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from csv_rows import about, append

from fastff_reproduce.data import load
from fastff_reproduce.experiments import EXPERIMENTS
from fastff_reproduce.runs import Case
from fastff_reproduce.trainer import train

SEEDS = (1, 10)


def cells(options: argparse.Namespace, seeds: int) -> dict[str, list[Case]]:
    """The trainings for test accuracy of a dense layer and of trees, by name."""
    found: dict[str, list[Case]] = {}
    for case in EXPERIMENTS["table1"].cases(
        datasets=[options.dataset],
        widths=[options.width],
        leaf_widths=[int(leaf) for leaf in options.leaf_widths.split(",")],
        recipes=["fastff"],
        seeds=range(seeds),
        changes={} if options.steps is None else {"steps": options.steps},
    ):
        if case.goal == "G_A":
            found.setdefault(case.title, []).append(case)
    return found


def seconds(cases: list[Case], options: argparse.Namespace) -> float:
    begin = time.perf_counter()
    train(cases, device=options.device, root=options.data)
    return time.perf_counter() - begin


def row(cases: list[Case], times: list[float], one: float, options: argparse.Namespace) -> dict[str, object]:
    case = cases[0]
    measured = {
        "dataset": case.dataset,
        "model": case.model,
        "width": case.width,
        "leaf_width": case.leaf_width,
        "depth": case.depth,
        "steps": dict(case.settings)["steps"],
        "seeds": len(cases),
        "median_s": round(statistics.median(times), 3),
        "least_s": round(min(times), 3),
        "most_s": round(max(times), 3),
        "ratio": round(statistics.median(times) / one, 3),
        "repetitions": len(times),
    }
    return measured | about(options.device, "python benchmarks/ensemble.py", options.commit)


def main() -> None:
    formats = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], formatter_class=formats)
    parser.add_argument("--dataset", default="digits", help="one of `fastff reproduce list`")
    parser.add_argument("--data", type=Path, help="folder of the data sets; also FASTFF_DATA")
    parser.add_argument("--width", type=int, default=128, help="training width")
    parser.add_argument("--leaf-widths", default="8,1", help="leaf widths of the trees, separated by commas")
    parser.add_argument("--steps", type=int, help="steps of a training; Table 1's otherwise")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="device to train on")
    parser.add_argument("--repetitions", type=int, default=3, help="timed repetitions of each training")
    parser.add_argument("--commit", default="", help="commit to store in the rows outside of a checkout")
    parser.add_argument("--output", type=Path, help="append the rows to this CSV file")
    options = parser.parse_args()
    if options.repetitions < 1:
        parser.error(f"--repetitions must be at least 1; got {options.repetitions}.")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device.")
    if options.output and not options.output.parent.is_dir():
        parser.error(f"--output needs an existing folder; got {options.output}.")
    try:
        groups = {count: cells(options, count) for count in SEEDS}
        load(options.dataset, options.data)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    rows = []
    for name in groups[1]:
        times: dict[int, list[float]] = {count: [] for count in SEEDS}
        for repetition in range(options.repetitions + 1):
            for count in SEEDS:
                spent = seconds(groups[count][name], options)
                if repetition:  # the first one reads data and compiles
                    times[count].append(spent)
        one, ten = (statistics.median(times[count]) for count in SEEDS)
        print(f"{name}: one seed {one:.2f} s, ten {ten:.2f} s, {ten / one:.2f}x", flush=True)
        rows += [row(groups[count][name], times[count], one, options) for count in SEEDS]
    if options.output:
        append(options.output, rows)


if __name__ == "__main__":
    main()
