"""Every way to launch the Triton hard pass, timed at random sizes; and the constants of the cost model, fitted to that.

    python benchmarks/launch_cost.py measure --output results/launch_cost.csv     # on a GPU
    python benchmarks/launch_cost.py fit results/launch_cost.csv                  # prints the constants, and errors

`measure` compiles all kernels first, in several processes and without running them. It then times each way at each size
in CUDA graphs on rotated inputs, after its output was checked against float64. `--variants N` also draws N other launch
parameters for each way at the sizes of large_table.py, a Llama and the paper. Both parts stop in time if asked to.

`fit` prints constants fitted to all sizes: to the times, and to who is fastest. Before that it fits two thirds of the
sizes, and says how well the constants do on the others.
"""

import argparse
import csv
import functools
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import large_sweep
import large_table
import torch
from compile_ahead import Job, compile_all, run_way, size_of_case
from csv_rows import about, append
from torch import Tensor

import fastff
from fastff.backends import triton_cost, triton_tile
from fastff.backends.triton_choice import launches
from fastff.backends.triton_size import Size
from fastff.bench import Case, presets
from fastff.bench.correctness import judge, tree_answer
from fastff.bench.models import Problem, dense
from fastff.bench.runners import GraphRunner
from fastff.functional import Leaves, Tree
from fastff.progress import progress

SECONDS, ROUNDS = 0.02, (3, 15)  # of each way
MOST_BYTES = 4e9  # of the weights of a random size
CHECKED = 32  # samples of each output
HOPELESS = 3  # times the predicted best: ways beyond are not timed
SIZE = ("in", "out", "leaf_width", "depth", "batch", "activation", "dtype")


def named_cases() -> list[tuple[str, Case, bool]]:
    """The sizes with targets: large layers, a Llama, 768 wide, int8, and the paper's tables."""
    found = []
    for (features, leaf, depth, activation), batches in large_table.TARGETS.items():
        found += [
            ("table", Case(features, features, leaf, depth, batch, "bfloat16", "cuda", 1, activation), False)
            for batch in batches
        ]
    for batch in (1, 16, 512, 8192):
        found.append(("llama", Case(2048, 2048, 256, 5, batch, "bfloat16", "cuda", 1, "swiglu"), False))
    for depth, batch in ((5, 2048), (5, 16384), (8, 2048), (8, 16384), (12, 2048)):
        found.append(("768", Case(768, 768, 32, depth, batch, "bfloat16", "cuda"), False))
    found.append(("int8", Case(4096, 4096, 64, 8, 64, "bfloat16", "cuda"), True))
    base = Case(768, 768, 32, 5, 2048, "float32", "cuda")
    found += [("paper", case, False) for case in [*presets.table3(base), *presets.table1(base)]]
    return found


def random_cases(count: int, seed: int) -> list[tuple[str, Case, bool]]:
    options = argparse.Namespace(seed=seed, sizes=4 * count, tiny=False, device="cuda")
    cases = [case for case in large_sweep.cases(options) if case.parameter_bytes <= MOST_BYTES]
    return [("random", case, False) for case in cases[:count]]


def jobs_of(kind: str, case: Case, is_int8: bool, variants: int) -> list[Job]:
    """The ways to run a case that may be the fastest; with variants, other launch parameters too."""
    size, jobs, draw = size_of_case(case, is_int8), [], random.Random(str(case))
    ways = launches(size)
    us = {way: triton_cost.predict(size, way, launch) for way, launch in ways.items()}
    for way, launch in ways.items():
        if us[way] > HOPELESS * min(us.values()) or (kind == "paper" and way not in ("tiny", "alone")):
            continue
        one: Any = triton_tile.choose(size, True) if way == "tiny" else launch._replace(pdl=True)
        jobs.append(Job(case, is_int8, kind, way, one, True))
        seen = {one}
        for _ in range(variants if kind != "random" and us[way] < 2 * min(us.values()) else 0):
            other = _vary(size, way, one, draw)
            if other not in seen:
                seen.add(other)
                jobs.append(Job(case, is_int8, kind, way, other, False))
    return [*jobs, Job(case, is_int8, kind, "FF", None, True)]


# Values that launch parameters may take, by way.
VALUES: dict[str, dict[str, Sequence[Any]]] = {
    "tiny": {"loads": (16, 24, 40), "top": (1, 2, 3), "round": (1, 2), "tile": ((16, 8, 4), (8, 16, 4), (32, 8, 8))},
    "alone": {"warps": (4, 8), "round": (2, 3), "fence": (True, False)},
    "spread": {
        "block": (2, 4, 8, 16), "leaf_warps": (2, 4, 8), "n": (64, 128, 256, 512, 1024, 2048), "warps": (4, 8, 16),
        "out_k": (8, 16, 32, 64, 128), "fence": (True, False),
    },
    "whole": {"leaf_tile": (16, 32, 64), "k": (32, 64, 128), "stages": (3, 4, 5), "span": (128, 256, 512, 1024, 2048)},
    "split whole": {
        "splits": (1, 2, 4, 8, 16), "product_tile": (16, 32, 64), "leaf_tile": (16, 32, 64), "k": (32, 64, 128),
        "stages": (3, 4, 5), "span": (128, 256, 512, 1024, 2048),
    },
    "dense": {"pdl": (False,)},
    "tiles": {
        "leaf_tile": (16, 32, 64), "k": (64, 128, 256), "n": (64, 128, 256), "stages": (2, 3, 4, 5),
        "leaf_warps": (2, 4, 8), "per": (1.0, 1.5, 2.0), "pdl": (False,), "tile": (16, 32, 64),
        "group_k": (64, 128, 256), "group_warps": (4, 8), "top": (5, 6, 8),
    },
    "spread tiles": {
        "leaf_tile": (16, 32, 64, 128), "k": (64, 128, 256), "n": (64, 128, 256), "stages": (2, 3, 4, 5, 7),
        "out_stages": (2, 3, 4), "out_k": (64, 128), "span": (256, 512, 1024, 2048), "block": (16, 32, 64, 128),
        "leaf_warps": (2, 4, 8), "per": (1.0, 1.5, 2.0),
    },
}  # fmt: skip
PRODUCT = {"product_tile": (16, 32, 64, 128), "product_k": (64, 128), "splits": (1, 2, 4, 8, 16), "tile": (16, 32)}


def _vary(size: Size, way: str, launch: Any, draw: random.Random) -> Any:
    """The launch with a few other parameters, drawn at random, that fit into shared memory by a rough count.

    The launch itself, if no draw fits.
    """
    values = VALUES[way] | (PRODUCT if way.endswith("tiles") and launch.splits else {})
    for _ in range(200):
        changed = {name: draw.choice(values[name]) for name in draw.sample(sorted(values), min(3, len(values)))}
        if way == "tiny":
            if "tile" in changed:
                changed |= dict(zip(("samples", "lanes", "warps"), changed.pop("tile"), strict=True))
            return launch._replace(**changed)
        if "top" in changed:
            changed["top"] = min(changed["top"], size.depth)
        tile = changed.get("leaf_tile", launch.leaf_tile)
        if "per" in changed or "leaf_tile" in changed:
            changed["per"] = max(1, round(changed.get("per", 1.5) * size.per_leaf / tile))
        other = launch._replace(**changed)
        block = other.block if way == "spread tiles" else 1 << (size.leaf_width - 1).bit_length()
        first = other.stages * other.k * (tile + block * (1 + size.gated)) * size.bytes
        second = other.out_stages * other.out_k * (other.n + tile) * size.bytes if way == "spread tiles" else 0
        sums = tile * block * (1 + size.gated) * 4
        if not other.grouped or (max(first, second) <= 190 * 1024 and sums <= 256 * 128 * other.leaf_warps // 4):
            return other
    return launch


def measure(options: argparse.Namespace) -> None:
    where = about("cuda", "benchmarks/launch_cost.py", "")
    named = [case for case in named_cases() if case[0] in options.named.split(",")]
    cases = named + random_cases(options.sizes, options.seed)
    by_case = [jobs_of(*case, options.variants) for case in cases]
    # Defaults of all sizes first, so that what the clock cuts off are variants.
    jobs = sorted((job for some in by_case for job in some), key=lambda job: not job.is_default)
    ready = compile_all(jobs, options.processes, options.compile_seconds)
    end = time.monotonic() + options.seconds
    with progress("sizes", len(by_case), unit="sizes") as advance, torch.no_grad():
        for some in by_case:
            if time.monotonic() > end:
                print("out of time")
                break
            rows = times([job for job in some if job in ready])
            append(options.output, [where | row for row in rows])
            print(_line(some[0].case, rows), flush=True)
            torch.cuda.empty_cache()
            advance(text=str(some[0].case))


def _line(case: Case, rows: Sequence[dict[str, Any]]) -> str:
    """The times of a case, way by way; of variants the fastest."""
    found = {}
    for row in rows:
        name = f"{row['way']}{'' if row['default'] else '*'}"
        if row["us"] != "":
            found[name] = min(row["us"], found.get(name, math.inf))
    return f"{case}: " + ", ".join(f"{name} {us:.1f}" for name, us in found.items())


def times(jobs: Sequence[Job]) -> list[dict[str, object]]:
    """A row for each job of one case."""
    case = jobs[0].case
    inputs = max(1, min(8, int(4000 / large_sweep.dense_us(case)), int(2**30 / (case.batch * case.in_features))))
    problem = Problem(case, inputs=inputs)
    tree, leaves, activation = problem.tree, problem.leaves, case.activation
    if jobs[0].is_int8:
        fastff.quantize_(problem.layer)
        leaves = problem.layer.leaves
    answer, _ = tree_answer(problem.inputs[0], tree, leaves, activation, CHECKED)
    found = []
    with torch.cuda.stream(torch.cuda.Stream()):
        scratch = torch.empty(2**28, dtype=torch.int8, device="cuda")
        for job in jobs:
            call: Callable[[Tensor], Tensor]
            if job.launch is None:
                if job.is_int8:
                    continue
                call = dense(problem)[-1]
            else:
                call = functools.partial(_output, job, tree, leaves)
            us, note = math.nan, ""
            try:
                runner = GraphRunner(call, problem.inputs, "auto", scratch)
                if job.launch is not None and not (verdict := judge(runner.output(0), answer)).right:
                    note = f"wrong: error {verdict.error:.2g}, allowed {verdict.allowed:.2g}"
                else:
                    once = runner.sample(1)
                    rounds = max(ROUNDS[0], min(ROUNDS[1], int(1e6 * SECONDS / max(once * inputs, 60))))
                    us = statistics.median(runner.sample(1) for _ in range(rounds))
                del runner
            except Exception as error:  # a compiler may raise anything
                note = f"{type(error).__name__}: {error}".splitlines()[0][:100]
            found.append(_row(job, us, note))
            if note:
                print(case, job.way, note, flush=True)
    return found


def _output(job: Job, tree: Tree, leaves: Leaves, x: Tensor) -> Tensor:
    return run_way(job, x, tree, leaves)[0]


def _row(job: Job, us: float, note: str) -> dict[str, object]:
    case, launch = job.case, "" if job.launch is None else _changed(job.launch)
    values = (
        case.in_features, case.out_features, case.leaf_width, case.depth, case.batch, case.activation, case.dtype,
    )  # fmt: skip
    known = {"kind": job.kind, "weights": "int8" if job.is_int8 else case.dtype, "way": job.way}
    return dict(zip(SIZE, values, strict=True)) | known | {
        "default": int(job.is_default), "us": "" if math.isnan(us) else round(us, 2), "note": note, "launch": launch,
    }  # fmt: skip


def fit(options: argparse.Namespace) -> None:
    with options.rows.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["us"] and _is_current(row)]
    sizes: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        sizes.setdefault(tuple(row[name] for name in (*SIZE, "weights", "kind")), {})[row["way"]] = float(row["us"])
    keys = sorted(sizes)
    if options.check:
        _print_errors(sizes, keys, not_all=False)
        return
    random.Random(0).shuffle(keys)
    held = keys[: len(keys) // 3]
    for kept, shown in ((keys[len(held) :], held), (keys, keys)):
        constants = fit_choice(sizes, kept)
        triton_cost.CONSTANTS.clear()
        triton_cost.CONSTANTS.update(constants)
        triton_cost.fastest.cache_clear()
        print(f"# fitted to {len(kept)} sizes, tried on {'the same' if shown is keys else f'{len(held)} others'}")
        _print_errors(sizes, shown, not_all=shown is held)
    print("CONSTANTS = {")
    for key, values in constants.items():
        print(f'    ("{key[0]}", {key[1]}): {json.dumps(values)},')
    print("}")


def _print_errors(sizes: dict[tuple[Any, ...], dict[str, float]], keys: Sequence[Any], not_all: bool) -> None:
    """How far predictions are off by way, and how much longer the chosen way takes than the fastest."""
    ratios: dict[tuple[str, int], list[float]] = {}
    regret = []
    for key in keys:
        size, measured = size_of_key(key), {way: us for way, us in sizes[key].items() if way != "FF"}
        ways = launches(size)
        for way, us in measured.items():
            ratios.setdefault((way, size.bytes), []).append(triton_cost.predict(size, way, ways[way]) / us)
        way = triton_cost.fastest(size).way
        if way in measured and len(measured) > 1:  # there was a choice
            best = min(measured, key=measured.__getitem__)
            ff_us = sizes[key].get("FF", math.inf)
            regret.append((measured[way] / measured[best], measured[way] / ff_us, way, best, *key))
    for (way, size_bytes), found in sorted(ratios.items()):
        print(f"# {way}, {size_bytes} bytes: {len(found)} sizes; predicted / measured: "
              f"median {statistics.median(found):.2f}, {min(found):.2f} to {max(found):.2f}")  # fmt: skip
    regret.sort(reverse=True)
    times = [each[0] for each in regret]
    slower = sum(each[1] > 1 for each in regret)
    print(f"# chosen over fastest: the fastest for {sum(t == 1 for t in times)} of {len(times)}, "
          f"p90 {times[len(times) // 10]:.2f}, worst {times[0]:.2f}; slower than FF: {slower}")  # fmt: skip
    if not_all:
        return
    for title, by in (("behind", 0), ("FF", 1)):
        for each in sorted(regret, key=lambda each: -each[by])[:12]:
            print(f"# {title}", f"{each[0]:.2f} {each[1]:.2f}", *each[2:])


def fit_choice(sizes: dict[tuple[Any, ...], dict[str, float]], keys: Sequence[Any]) -> dict[Any, dict[str, float]]:
    """Constants by which the fastest way is chosen: first each way's own times, then who is ahead of whom."""
    import numpy

    ways = sorted({way for key in keys for way in sizes[key]} - {"FF"})
    names: dict[Any, list[str]] = {}
    matrices, start = {}, {}
    for way in ways:
        for size_bytes in (2, 4):
            given = [key for key in keys if way in sizes[key] and size_of_key(key).bytes == size_bytes]
            given = [key for key in given if way in launches(size_of_key(key))]
            if not given:
                continue
            found = [triton_cost.quantities(size_of_key(k), way, launches(size_of_key(k))[way]) for k in given]
            kind = way, size_bytes
            names[kind] = sorted({name for each in found for name, value in each.items() if value})
            matrix = numpy.array([[each.get(name, 0) for name in names[kind]] for each in found])
            us = numpy.array([sizes[key][way] for key in given])
            best = numpy.array([min(t for w, t in sizes[key].items() if w != "FF") for key in given])
            named = numpy.array([1 if key[-1] == "random" else 3 for key in given])
            start[kind] = solve(matrix, us, named * best / us)
            matrices[kind] = given, torch.tensor(matrix), torch.tensor(us)
    found = refine(matrices, start)
    return {
        kind: {name: float(f"{v:.3g}") for name, v in zip(names[kind], found[kind], strict=True) if v > 1e-6}
        for kind in start
    }


def refine(matrices: dict[Any, Any], start: dict[Any, Any]) -> dict[Any, list[float]]:
    """The constants changed so that the fastest way is predicted to be the fastest, and times stay close."""
    scale = {kind: 1 / (matrix.max(0).values + 1e-30) for kind, (_, matrix, _) in matrices.items()}
    logs = {kind: torch.log(torch.tensor(c) / scale[kind] + 1e-2).requires_grad_() for kind, c in start.items()}
    keys = sorted({key for given, _, _ in matrices.values() for key in given})
    row = {key: i for i, key in enumerate(keys)}
    weight = torch.tensor([1.0 if key[-1] == "random" else 3.0 for key in keys])
    optimizer = torch.optim.Adam([*logs.values()], lr=0.02)
    for _ in range(1500):
        predicted = torch.full((len(keys), len(matrices)), math.inf, dtype=torch.float64)
        took = torch.ones_like(predicted)
        closeness = torch.zeros((), dtype=torch.float64)
        for i, (kind, (given, matrix, us)) in enumerate(matrices.items()):
            at = torch.tensor([row[key] for key in given])
            log = torch.log(matrix @ (logs[kind].exp() * scale[kind]))
            predicted = predicted.index_put((at, torch.tensor(i)), log + (math.log(1.25) if kind[0] == "dense" else 0))
            took[at, i] = us
            closeness = closeness + torch.nn.functional.huber_loss(log, us.log(), delta=0.3, reduction="sum")
        share = torch.softmax(-predicted / 0.05, 1)  # of each way, were the choice made with some doubt
        best = took.masked_fill(predicted.isinf(), math.inf).min(1, keepdim=True).values
        behind = (share * torch.log(took / best)).sum(1)
        loss = (weight * behind).sum() + 0.1 * closeness
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {kind: (log.exp() * scale[kind]).tolist() for kind, log in logs.items()}


def solve(matrix: Any, us: Any, weight: Any) -> Any:
    """Constants >= 0 whose sums are close to the times, by the logarithm of their ratio; outliers count less."""
    import numpy
    from scipy.optimize import least_squares, nnls

    start, _ = nnls(matrix / us[:, None], numpy.ones(len(us)))
    scale = 1 / (matrix.max(0) + 1e-30)

    def error(constants: Any) -> Any:
        return numpy.sqrt(weight) * numpy.log((matrix @ (constants * scale) + 1e-3) / us)

    start = start / scale + 1e-3
    return least_squares(error, start, bounds=(0, numpy.inf), loss="soft_l1", f_scale=0.3).x * scale


def _is_current(row: dict[str, str]) -> bool:
    """Whether the row was measured with today's launch parameters. Rows from before they changed do not count."""
    size, way = size_of_key((*(row[name] for name in SIZE), row["weights"], "")), row["way"]
    if way == "FF" or way not in launches(size):
        return way == "FF"
    launch: Any = triton_tile.choose(size, True) if way == "tiny" else launches(size)[way]._replace(pdl=True)
    return _changed(launch) == row["launch"]


def _changed(launch: Any) -> str:
    """The parameters of a launch that differ from the defaults. Others have no effect, or are as always."""
    unimportant = ("per", "splits", "product_tile", "product_nodes", "product_k")  # a few microseconds more or less
    default = type(launch)(launch[0]) if isinstance(launch, triton_tile.TileLaunch) else type(launch)()
    found = {name: value for name, value in launch._asdict().items() if value != getattr(default, name)}
    return json.dumps({name: value for name, value in found.items() if name not in unimportant})


def size_of_key(key: tuple[Any, ...]) -> Size:
    features, out, leaf, depth, batch, activation, dtype, weights, _ = key
    case = Case(int(features), int(out), int(leaf), int(depth), int(batch), dtype, "cpu", 1, activation)
    return size_of_case(case, weights == "int8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    measured = parts.add_parser("measure", help="time all ways, on a GPU")
    measured.add_argument("--sizes", type=int, default=100, help="random sizes (100)")
    measured.add_argument("--seed", type=int, default=1, help="of the sizes; large_layers.py sweep takes 0 (1)")
    measured.add_argument("--named", default="", help="also sizes with targets: table, llama, 768, int8, paper")
    measured.add_argument("--variants", type=int, default=0, help="other launch parameters of each way to try (0)")
    measured.add_argument("--processes", type=int, default=16, help="processes that compile (16)")
    measured.add_argument("--compile-seconds", type=float, default=3600, help="stop compiling after this many seconds")
    measured.add_argument("--seconds", type=float, default=3600, help="stop measuring after this many seconds")
    measured.add_argument("--output", type=Path, required=True, help="append the rows to this CSV file")
    fitted = parts.add_parser("fit", help="fit the constants")
    fitted.add_argument("rows", type=Path)
    fitted.add_argument("--check", action="store_true", help="fit nothing, and try the constants of the package")
    options = parser.parse_args()
    measure(options) if options.part == "measure" else fit(options)


if __name__ == "__main__":
    main()
