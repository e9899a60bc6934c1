"""Is this checkout as fast as another one? Latencies of both, in turn, in one run.

    git worktree add /tmp/before COMMIT                 # and build: libfastff_native.so in src/fastff/backends of each
    python benchmarks/checkouts.py /tmp/before . --output results/checkouts.csv

One child process for each checkout waits for the name of a case, times it for a third of a second on one thread, and
answers. The order changes from round to round. Processes differ by some percent in their memory layout, so there are
several pairs of them. Medians over all rounds are compared.
"""

import argparse
import csv
import functools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

CASES = {  # in = out, depth, leaf width, batch, what runs
    "one sample": (768, 5, 32, 1, "eval"),
    "one sample, tiny layer": (8, 1, 1, 1, "eval"),
    "one sample, depth 10": (768, 10, 32, 1, "eval"),
    "64 samples": (768, 5, 32, 64, "eval"),
    "2048 samples": (768, 5, 32, 2048, "eval"),
    "one sample, float64": (64, 5, 8, 1, "float64"),
    "one sample, gradients on": (768, 5, 32, 1, "gradients"),
    "training step of 64": (128, 4, 8, 64, "step"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", nargs=2, type=Path, help="the one before, the one after")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of processes")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of each pair")
    parser.add_argument("--output", type=Path, help="write a CSV file")
    options = parser.parse_args()
    found: dict[str, list[list[float]]] = {name: [[], []] for name in CASES}
    for turn in range(options.pairs * options.rounds):
        if turn % options.rounds == 0:
            children = [_start(folder / "src") for folder in options.checkouts]
        for name in CASES:
            for i in (0, 1) if turn % 2 else (1, 0):
                found[name][i].append(_ask(children[i], name))
    rows = []
    for name, (before, after) in found.items():
        old, new = statistics.median(before), statistics.median(after)
        rows.append({"case": name, "before_us": f"{old:.2f}", "after_us": f"{new:.2f}", "ratio": f"{new / old:.3f}"})
        print("{case:26s} {before_us:>9s} us -> {after_us:>9s} us   {ratio}".format(**rows[-1]))
    if options.output:
        sys.path.insert(0, str(options.checkouts[1] / "src"))
        from fastff.provenance import machine

        commits = [_commit(folder) for folder in options.checkouts]
        about = {
            "pairs": options.pairs,
            "rounds": options.rounds,
            "before": commits[0],
            "after": commits[1],
            "machine": machine("cpu"),
        }
        with options.output.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0], *about])
            writer.writeheader()
            writer.writerows(row | about for row in rows)


def _start(source: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, __file__, "--child", str(source.resolve())]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _ask(child: "subprocess.Popen[str]", name: str) -> float:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(f"{name}\n")
    child.stdin.flush()
    return float(json.loads(child.stdout.readline()))


def _commit(folder: Path) -> str:
    run = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True, check=True
    )
    return run.stdout.strip()


def child(source: str) -> None:
    # An editable install finds its own checkout first.
    sys.meta_path = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
    sys.path.insert(0, source)
    import torch

    import fastff

    assert fastff.__file__.startswith(source), fastff.__file__
    torch.set_num_threads(1)
    calls = {}
    for name, (features, depth, leaf_width, batch, what) in CASES.items():
        torch.manual_seed(0)
        dtype = torch.float64 if what == "float64" else torch.float32
        layer = fastff.FFF(features, features, depth=depth, leaf_width=leaf_width, dtype=dtype)
        x = torch.randn(batch, features, dtype=dtype)

        def step(layer=layer, x=x) -> None:
            (layer(x).square().mean() + fastff.balance_loss(layer)).backward()

        calls[name] = step if what == "step" else functools.partial(layer.eval(), x)
    for line in sys.stdin:
        name = line.strip()
        with torch.set_grad_enabled(CASES[name][-1] in ("gradients", "step")):
            print(json.dumps(_time(calls[name])), flush=True)


def _time(call: object) -> float:
    """Microseconds of a call, the median of groups that take 20 ms each."""
    assert callable(call)
    for _ in range(3):
        call()
    end, group = time.perf_counter() + 0.02, 0
    while time.perf_counter() < end:
        call()
        group += 1
    times, end = [], time.perf_counter() + 0.3
    while time.perf_counter() < end:
        begin = time.perf_counter()
        for _ in range(group):
            call()
        times.append(1e6 * (time.perf_counter() - begin) / group)
    return statistics.median(times)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2])
    else:
        main()
