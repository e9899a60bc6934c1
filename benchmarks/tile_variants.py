"""Launch parameters of the kernels for tiny layers (triton_tile.py), at the sizes of the paper's Tables 1 and 3.

Times every variant in CUDA graphs on rotated inputs, in turn with the dense layer and with what `auto` runs. A variant
whose output is wrong against float64, or that does not compile, has no time.

    python benchmarks/tile_variants.py                       # Tables 1 and 3, batch 2048, float32
    python benchmarks/tile_variants.py --dtype bfloat16 --tables 3

Predictions for an H200, float32, batch 2048, written down before the first measurement. About 2 us are the launch; 0.3
to 0.6 us the input; each round of the walk 0.25 us; then the leaf, bound by the 128 bytes that a multiprocessor moves
from its L1 cache in a cycle, or by about 7 TB/s from L2.

    128 -> 128   leaf 32    16     8     4     2     1         784 -> 10, width 128   leaf 8    1
    us            5.4   4.4   3.8   3.5   3.4   3.4                                    7.5  6.8

Predicted winners: `rows` with 16 lanes a sample and 8 warps (the default), with pdl and prefetch (0.3 to 0.6 us less
than without); 8 lanes and 4 warps within 10 %; at 784 features tiles of 32 samples level with tiles of 16. In 16 bits
`leaf` wins at leaves of 32.
"""

import argparse
import math

import torch

from fastff.backends import triton_tile
from fastff.backends.triton_tile import Launch
from fastff.bench.case import Case
from fastff.bench.correctness import judge, tree_answer
from fastff.bench.models import Problem, dense
from fastff.bench.presets import TABLE1, TABLE3, table1, table3
from fastff.bench.runners import GraphRunner, Runner
from fastff.bench.timing import interleave

TILES = [(16, 16, 8), (16, 8, 4), (8, 32, 8), (8, 16, 4), (32, 8, 8), (32, 16, 16)]  # samples, lanes, warps
WALKS = [(1, 1), (2, 1), (2, 2), (3, 2), (4, 3)]  # levels at the top, in a round


def variants(problem: Problem) -> dict[str, Launch]:
    """The launches to time, by name. The first is the default."""
    chosen = triton_tile.choose(problem.inputs[0], problem.leaves)
    found = {"default": chosen, "no pdl": chosen._replace(pdl=False), "no prefetch": chosen._replace(prefetch=False)}
    rows = chosen if chosen.way == "rows" else Launch("rows", pdl=chosen.pdl)
    for samples, lanes, warps in TILES:
        found[f"rows {samples}/{lanes}/{warps}"] = rows._replace(samples=samples, lanes=lanes, warps=warps)
    for top, levels in WALKS:
        found[f"walk {top}+{levels}"] = rows._replace(top=top, round=levels)
    for loads in (16, 24, 40):
        found[f"loads {loads}"] = rows._replace(loads=loads)
    if problem.case.num_leaves <= 8:
        for samples, warps in ((16, 4), (32, 4), (64, 4), (64, 8)):
            launch = Launch("leaf", samples, 8, warps, 3, pdl=chosen.pdl)
            found[f"leaf {samples}/{warps}"] = launch
    return found


def runner_of(problem: Problem, launch: Launch, scratch: torch.Tensor) -> Runner:
    tree, leaves, activation = problem.tree, problem.leaves, problem.case.activation
    return GraphRunner(
        lambda x: triton_tile.hard(x, tree, leaves, activation, launch)[0], problem.inputs, "auto", scratch
    )


def measure(case: Case, target: float, seconds: float) -> None:
    """One size: a line for each variant, the fastest first, and the verdict."""
    problem = Problem(case)
    x = problem.inputs[0]
    print(f"\n{case}", triton_tile.why_not(x, problem.tree, problem.leaves) or "", flush=True)
    scratch = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    answer, _ = tree_answer(x, problem.tree, problem.leaves, case.activation)
    runners: dict[str, Runner] = {}
    for i, model in enumerate(dense(problem)):
        runners[f"dense {i}"] = GraphRunner(model, problem.inputs, "auto", scratch)
    runners["auto"] = GraphRunner(problem.layer, problem.inputs, "auto", scratch)
    for name, launch in variants(problem).items():
        try:
            runner = runner_of(problem, launch, scratch)
        except Exception as error:  # a compiler may raise anything; the other variants go on
            print(f"  {name:16} failed: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        verdict = judge(runner.output(0), answer)
        if verdict.right:
            runners[name] = runner
        else:
            print(f"  {name:16} WRONG: relative error {verdict.error:.2g}, allowed {verdict.allowed:.2g}")
    times, _ = interleave(runners, budget=seconds, samples=50)
    base = min(times[name].median for name in times if name.startswith("dense"))
    ranked = sorted((name for name in times if not name.startswith("dense")), key=lambda name: times[name].median)
    for name in ranked:
        us = times[name].median
        met = "" if math.isnan(target) else "  reached" if base / us >= target else "  short"
        print(f"  {name:16} {us:7.2f} us  {base / us:5.2f}x of {target:.2f}x{met}")
    print(f"  dense {base:.2f} us; fastest: {ranked[0]}; default: {times.get('default')}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tables", default="3,1", help="of the paper")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--widths", default="128", help="training widths of Table 1")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each size")
    options = parser.parse_args()
    base = Case(768, 768, 32, 5, 2048, dtype=options.dtype, device="cuda")
    cases: list[tuple[Case, float]] = []
    if "3" in options.tables:
        cases += [(case, TABLE3[case.leaf_width]) for case in table3(base)]
    if "1" in options.tables:
        widths = {int(width) for width in options.widths.split(",")}
        for case in table1(base):
            names = {256: ["USPS"], 784: ["MNIST", "FashionMNIST"]}[case.in_features]
            column = (16, 32, 64, 128).index(case.training_width)
            if case.training_width in widths:
                cases.append((case, max(TABLE1[name][case.leaf_width][column] for name in names)))
    with torch.cuda.stream(torch.cuda.Stream()), torch.inference_mode():
        for case, target in cases:
            measure(case, target, options.seconds)


if __name__ == "__main__":
    main()
