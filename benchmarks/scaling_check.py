"""The cost model of src/fastff/bench/scaling.py against what the leaf-parallel code does, on one machine with gloo.

    torchrun --standalone --nproc-per-node 4 benchmarks/scaling_check.py --output results/scaling.csv

One row per size: the bytes that all ranks handed to all-to-alls in one training step, counted and predicted; and the
rows of the busiest rank over the mean, counted in one batch and simulated, for even and for Zipf-distributed leaves.
Counts only: nothing is timed.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from csv_rows import about, append

import fastff
from fastff.bench.scaling import Step, imbalance, zipf
from fastff.parallel.exchange import at_owner
from fastff.ranks import Ranks

SIZES = ((4, 8, 32, 48, 64, 1), (6, 4, 64, 64, 128, 2), (10, 8, 48, 32, 256, 3))  # depth, l, in, out, batch, a
EXPONENTS = (0.0, 1.0, 1.3)


class Counted:
    """Counts the bytes that this rank hands to all-to-alls, within the block."""

    def __enter__(self) -> "Counted":
        self.sent, self.call = 0, dist.all_to_all_single
        dist.all_to_all_single = self
        return self

    def __call__(self, output, rows, *splits, **options):  # type: ignore[no-untyped-def]
        self.sent += rows.nbytes
        return self.call(output, rows, *splits, **options)

    def __exit__(self, *error: object) -> None:
        dist.all_to_all_single = self.call


def total(value: float) -> float:
    found = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(found)
    return float(found)


def bytes_row(size: tuple[int, ...], ranks: int) -> dict[str, object]:
    depth, width, first, last, batch, alternatives = size
    torch.manual_seed(dist.get_rank())
    layer = fastff.FFF(first, last, depth=depth, leaf_width=width, decision="sampled", alternatives=alternatives)
    fastff.parallel.shard_leaves_(layer)
    x = torch.randn(batch, first, requires_grad=True)
    with Counted() as counted:
        layer(x).square().mean().backward()
    step = Step(depth, width, first, last, batch, ranks, alternatives)
    names = dict(zip(("depth", "leaf_width", "in", "out", "batch", "alternatives"), size, strict=True))
    result = {"counted": int(total(counted.sent)), "predicted": ranks * step.exchanged}
    return {"what": "bytes of all-to-alls", **names, "ranks": ranks, "exponent": "", **result}


def rows_row(exponent: float, ranks: int) -> dict[str, object]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    depth, batch = 10, 4096
    torch.manual_seed(0)
    shares = zipf(2**depth, exponent)
    simulated = imbalance(shares, batch * ranks, ranks, draws=200)
    torch.manual_seed(1 + dist.get_rank())
    leaf = torch.multinomial(shares, batch, replacement=True)
    part = torch.zeros(2**depth // ranks, 1, 1)
    weight = DTensor.from_local(part, init_device_mesh("cpu", (ranks,)), [Shard(0)])
    arrived: list[int] = []

    def run(rows: torch.Tensor, leaf: torch.Tensor, leaves: object) -> torch.Tensor:
        arrived.append(len(rows))
        return rows

    leaves = fastff.functional.Leaves(weight, None, weight, None)
    at_owner(Ranks(), torch.zeros(batch, 1), leaf, leaves, run)
    most = torch.tensor(arrived[0])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    result = {"counted": round(int(most) / batch, 4), "predicted": round(simulated, 4)}
    names = {"depth": depth, "leaf_width": 1, "in": 1, "out": 1, "batch": batch, "alternatives": 0}
    return {"what": "rows of the busiest rank over the mean", **names, "ranks": ranks, "exponent": exponent, **result}


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="CSV file of the rows")
    parser.add_argument("--commit", default="", help="of the checkout, if git cannot say")
    o = parser.parse_args(given)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    rows = [bytes_row(size, ranks) for size in SIZES] + [rows_row(exponent, ranks) for exponent in EXPONENTS]
    if dist.get_rank() == 0:
        command = f"torchrun --standalone --nproc-per-node {ranks} benchmarks/scaling_check.py"
        origin = about("cpu", command, o.commit)
        for row in rows:
            print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        if o.output:
            append(o.output, [row | origin for row in rows])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
