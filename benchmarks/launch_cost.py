"""Every way to launch the Triton hard pass at random sizes, and the constants of the cost model fitted to the times.

    python benchmarks/launch_cost.py measure --sizes 300 --output results/launch_cost.csv     # on a GPU
    python benchmarks/launch_cost.py fit results/launch_cost.csv                              # prints the constants

`fit` uses two thirds of the sizes and reports on the others: the error of the prediction, and how much longer the
predicted best way takes than the best one.
"""

import argparse
import csv
import statistics
from pathlib import Path

import large_sweep
import torch
from csv_rows import about, append

from fastff.backends import aten, triton_cost, triton_hard
from fastff.backends.triton_choice import Size, launches, size_of
from fastff.bench import Case
from fastff.bench.models import Problem
from fastff.bench.runners import GraphRunner
from fastff.progress import progress

_SECONDS = 0.02  # for each way


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    measured = parts.add_parser("measure", help="time all ways, on a GPU")
    measured.add_argument("--sizes", type=int, default=300)
    measured.add_argument("--seed", type=int, default=1, help="seed of the sizes; the sweep of large_layers.py takes 0 (1)")
    measured.add_argument("--part", default="0/1", dest="share", help="only every n-th size, as i/n, to compile ahead in several processes")
    measured.add_argument("--compile", action="store_true", help="run each way once and time none")
    measured.add_argument("--output", type=Path, required=True)
    fitted = parts.add_parser("fit", help="fit the constants")
    fitted.add_argument("rows", type=Path)
    options = parser.parse_args()
    measure(options) if options.part == "measure" else fit(options)


def measure(options: argparse.Namespace) -> None:
    options.device, options.tiny = "cuda", False
    where = about("cuda", "benchmarks/launch_cost.py", "")
    index, count = map(int, options.share.split("/"))
    cases = large_sweep.cases(options)[index::count]
    with progress("ways", len(cases), unit="sizes") as advance:
        for case in cases:
            try:
                found = times(case, options.compile)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                advance(text=f"{case}: {error}"[:80])
                continue
            if not options.compile:
                append(options.output, [where | row(case, way, us) for way, us in found.items()])
            torch.cuda.empty_cache()
            advance(text=str(case))


def times(case: Case, compile_only: bool) -> dict[str, float | str]:
    """The microseconds of each way, of the dense layer with a mask, and of the dense layer alone."""
    inputs = max(1, min(6, int(3000 / large_sweep.dense_us(case)), int(2**30 / (case.batch * case.in_features))))
    problem = Problem(case, inputs=inputs)
    x, tree, leaves, activation = problem.inputs[0], problem.tree, problem.leaves, case.activation
    calls = {}
    for way, launch in launches(size_of(x, tree, leaves)).items():
        launch = launch._replace(pdl=True)
        calls[way] = lambda x, launch=launch: triton_hard.hard(x, tree, leaves, activation, launch)[0]
    found: dict[str, float | str] = {}
    with torch.inference_mode():
        if compile_only:
            for way, call in calls.items():
                try:
                    call(x)
                except Exception as error:
                    found[way] = str(error)
            torch.cuda.synchronize()
            return found
        calls["masked"] = lambda x: aten.masked(x, aten.route(x, tree, activation), leaves, activation)
        calls["dense"] = lambda x: aten.leaf_hidden(x, leaves, activation).flatten(1) @ leaves.out_weight.flatten(0, 1)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            scratch = torch.empty(2**27, dtype=torch.int8, device="cuda")
            for way, call in calls.items():
                try:
                    runner = GraphRunner(call, problem.inputs, "auto", scratch)
                    once = runner.sample(1)
                    rounds = max(3, min(15, int(1e6 * _SECONDS / max(once * inputs, 60))))
                    found[way] = statistics.median(runner.sample(1) for _ in range(rounds))
                    del runner
                except Exception as error:  # a compiler may raise anything
                    found[way] = f"{type(error).__name__}: {error}"[:100]
    return found


def row(case: Case, way: str, us: float | str) -> dict[str, object]:
    size = {
        "batch": case.batch, "in": case.in_features, "out": case.out_features, "depth": case.depth,
        "leaf_width": case.leaf_width, "activation": case.activation, "dtype": case.dtype,
    }  # fmt: skip
    return size | {"way": way, "us": us if isinstance(us, str) else round(us, 2)}


def fit(options: argparse.Namespace) -> None:
    raise SystemExit("not yet")


if __name__ == "__main__":
    main()
