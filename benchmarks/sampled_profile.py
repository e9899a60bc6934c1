"""The kernels of one sampled training step in a CUDA graph, by time; and, at depth 15, of an eager step.

    python benchmarks/sampled_profile.py --output results/sampled_profile.csv      # needs a GPU; 20 s a depth

The step is that of `sampled-mixture-1` in sampled_gpu.py. For each kernel: launches and microseconds a step. Two rows
sum up: `busy` has the time in all kernels, `span` the time from the first one's begin to the last one's end, which is
longer than without the profiler.
"""

import argparse
import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import sampled_gpu
import torch
from csv_rows import about, append
from torch.profiler import ProfilerActivity, profile

EAGER = 15  # from this depth on: the optimizer's memory leaves no room for a graph's


def kernels_of(run: Callable[[], object], repetitions: int) -> list[tuple[str, float, float]]:
    """Name, launches and microseconds of each kernel of a run, the longest first; then `busy` and `span`."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(repetitions):
            run()
        torch.cuda.synchronize()
    times: dict[str, list[int]] = defaultdict(list)
    begin, end = [], []
    for event in found.profiler.kineto_results.events():
        if "cuda" in str(event.device_type()).lower() and event.duration_ns() > 0:
            times[event.name()].append(event.duration_ns())
            begin.append(event.start_ns())
            end.append(event.end_ns())
    rows = [(name, len(each) / repetitions, sum(each) / repetitions / 1e3) for name, each in times.items()]
    rows.sort(key=lambda row: -row[2])
    launches = sum(row[1] for row in rows)
    span = (max(end) - min(begin)) / repetitions / 1e3
    return [*rows, ("busy", launches, sum(row[2] for row in rows)), ("span", launches, span)]


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", default="5,8,10,15")
    parser.add_argument("--stage", default="now", help="a name for these kernels, in the rows")
    parser.add_argument("--output", type=Path, help="CSV file of the rows")
    parser.add_argument("--commit", default="", help="of the checkout, if git cannot say")
    o = parser.parse_args(given)
    origin = about("cuda", "python benchmarks/sampled_profile.py", o.commit)
    sizes = argparse.Namespace(leaf_width=32, features=768, batch=16384, dtype="bfloat16", device="cuda", most_dense=0)
    for depth in map(int, o.depths.split(",")):
        x, grad = sampled_gpu.batch(sizes)
        way = sampled_gpu.Way("sampled-mixture-1", sizes, depth, x)
        step = functools.partial(way.step, x, grad)
        for _ in range(2):
            step()
        run = step if depth >= EAGER else sampled_gpu.in_graph(step)
        mode = "eager" if depth >= EAGER else "graph"
        rows: list[dict[str, object]] = [
            {"stage": o.stage, "depth": depth, "mode": mode, "kernel": name[:110], "launches": n, "us": round(us, 1)}
            for name, n, us in kernels_of(run, 5)
        ]
        for row in rows:
            print(f"{row['depth']:>5} {row['us']:>9} us {row['launches']:>6.1f} x  {row['kernel']}", flush=True)
        if o.output:
            append(o.output, [row | origin for row in rows])


if __name__ == "__main__":
    main()
