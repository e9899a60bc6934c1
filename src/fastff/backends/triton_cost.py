"""What a hard pass costs on a GPU, by each way to launch it: microseconds, predicted from its size.

A time is a sum: each quantity, such as bytes read, times its constant. benchmarks/launch_cost.py measures all ways at
random sizes, fits the constants to the times, and prints them as they stand here.
"""

import functools
from typing import NamedTuple

from .triton_choice import Launch, launches
from .triton_size import Size


class Choice(NamedTuple):
    """The way with the lowest predicted time, and the predicted time of running all leaves as dense products."""

    way: str
    launch: Launch
    us: float
    dense_us: float | None  # None: it does not fit

    def __str__(self) -> str:
        dense = "" if self.dense_us is None or self.way == "dense" else f", {self.dense_us:.3g} us for all leaves"
        return f"{self.us:.3g} us predicted (H200){dense}"


@functools.lru_cache(maxsize=4096)
def fastest(size: Size) -> Choice:
    """The way to run this size. Empty batches count as one sample."""
    size = size._replace(batch=max(1, size.batch))
    ways = launches(size)
    us = {way: predict(size, way, launch) for way, launch in ways.items()}
    # Predictions err, and running all leaves for nothing is expensive: so dense must be clearly faster.
    way = min(us, key=lambda way: us[way] * (1.25 if way == "dense" else 1))
    return Choice(way, ways[way], us[way], us.get("dense"))


def predict(size: Size, way: str, launch: Launch) -> float:
    """Microseconds of a pass, by the constants of an H200."""
    constants = CONSTANTS[way, size.bytes]
    return sum(constants.get(name, 0.0) * value for name, value in quantities(size, way, launch).items())


def quantities(size: Size, way: str, launch: Launch) -> dict[str, float]:
    """What the time of a way depends on, by name: counts, kilobytes, megabytes and billions of operations."""
    row, out_row = size.features * size.bytes, size.out * size.bytes
    found = {"call": 1.0} | (_walk(size, launch, row) if size.walks and size.depth else {})
    found["memory_mb"] = 1e-6 * (size.used_leaves * size.leaf_bytes + size.batch * (row + out_row))
    if way == "whole":
        return {"call": 1.0, "memory_mb": found["memory_mb"]} | _whole(size, launch, row, out_row)
    if way == "dense":
        numbers = size.leaves * size.leaf_numbers
        hidden = (1 + size.gated) * size.batch * size.leaves * size.leaf_width * size.bytes
        return found | {
            "gflop": 2e-9 * size.batch * numbers,
            "weights_mb": 1e-6 * numbers * size.bytes,
            "hidden_mb": 1e-6 * hidden,
            "odd_mb": 1e-6
            * (_odd(row) * (row * size.batch + numbers * size.bytes) + _odd(out_row) * out_row * size.batch),
        }
    tiles = size.used_leaves + size.batch / launch.leaf_tile if launch.grouped else size.batch
    # A program reads its part of a leaf piece after piece; a leaf that several programs read is in the cache.
    share = min(1, launch.block / size.leaf_width) if launch.spread else 1
    # Rows that do not begin at multiples of 16 bytes are read number by number.
    odd = size.leaf_width * ((1 + size.gated) * _odd(row) * size.features + _odd(out_row) * size.out)
    found |= {
        "program_kb": 1e-3 * share * size.leaf_bytes,
        "reread_mb": 1e-6 * (tiles - size.used_leaves) * size.leaf_bytes,
        "odd_mb": 1e-6 * (tiles * odd * size.weight_bytes + size.batch * (_odd(row) * row + _odd(out_row) * out_row)),
        "odd_kb": 1e-3 * share * odd * size.weight_bytes,
    }
    if launch.grouped:
        # Rounded up to what tensor cores take.
        width = max(16, size.leaf_width)
        found["gflop"] = 2e-9 * tiles * launch.leaf_tile * size.leaf_numbers / size.leaf_width * width
        found["tiles"] = 1e-3 * tiles
    return found


def _whole(size: Size, launch: Launch, row: int, out_row: int) -> dict[str, float]:
    """A program reads its tile and the first matrices piece after piece, then its part of the second one."""
    programs, parts = -(-size.batch // launch.leaf_tile), -(-size.out // launch.span)
    waves = max(1, programs * parts / 132)
    first = (size.leaves * (size.leaf_width * (1 + size.gated) + 1) + launch.leaf_tile) * row
    second = size.leaves * size.leaf_width * out_row / parts
    return {
        "program_kb": 1e-3 * waves * first,
        "out_kb": 1e-3 * waves * second,
        "odd_kb": 1e-3 * waves * (_odd(row) * first + _odd(out_row) * second),
    }


def _odd(row: int) -> bool:
    return row % 16 != 0


def _walk(size: Size, launch: Launch, row: int) -> dict[str, float]:
    if launch.tiny or not launch.grouped:
        levels = launch.round
        rounds = -(-size.depth // levels)
        rows = rounds * ((1 << min(levels, size.depth)) - 1)
        return {"rounds": rounds, "round_kb": 1e-3 * rounds * row, "nodes_mb": 1e-6 * size.batch * rows * row}
    below = size.depth - launch.top
    products = (1 << launch.top) - 1
    return {
        "rounds": below,
        "round_kb": 1e-3 * below * row * size.node_width,
        "nodes_mb": 1e-6 * size.batch * below * row * size.node_width,
        "top_gflop": 2e-9 * size.batch * products * size.features,
        "top_mb": 1e-6 * products * row,
        "splits": launch.splits > 0,
    }


# Microseconds for each unit of a quantity, by way and bytes of a number, on an H200 with CUDA graphs.
# fmt: off
CONSTANTS: dict[tuple[str, int], dict[str, float]] = {
    ("alone", 2): {
        "call": 1.54, "memory_mb": 0.223, "nodes_mb": 0.256, "odd_kb": 0.0436, "odd_mb": 0.24, "program_kb": 0.0515,
        "reread_mb": 0.0583, "round_kb": 0.00082, "rounds": 0.926,
    },
    ("alone", 4): {
        "call": 1.19, "memory_mb": 0.187, "nodes_mb": 0.0938, "odd_kb": 0.022, "odd_mb": 0.105, "program_kb": 0.0165,
        "reread_mb": 0.0896, "round_kb": 0.251, "rounds": 0.565,
    },
    ("dense", 2): {
        "call": 19.8, "gflop": 0.636, "hidden_mb": 2.27, "memory_mb": 0.574, "nodes_mb": 0.294, "odd_mb": 2.47,
        "round_kb": 0.00906, "rounds": 2.62e-05, "splits": 0.0228, "top_gflop": 4.72, "top_mb": 1.78e-05, "weights_mb":
        0.205,
    },
    ("spread", 2): {
        "call": 4.02, "memory_mb": 0.251, "nodes_mb": 0.171, "odd_kb": 2.99e-06, "odd_mb": 0.168, "reread_mb": 0.158,
        "round_kb": 0.235, "rounds": 0.612,
    },
    ("spread", 4): {
        "call": 5, "memory_mb": 0.211, "nodes_mb": 0.222, "odd_mb": 0.115, "program_kb": 0.0278, "reread_mb": 0.0886,
        "round_kb": 0.239, "rounds": 0.0471,
    },
    ("spread tiles", 2): {
        "call": 14.7, "gflop": 2.77, "memory_mb": 0.17, "nodes_mb": 0.00467, "odd_kb": 0.0365, "odd_mb": 0.867,
        "program_kb": 0.000479, "round_kb": 1.2, "rounds": 2.16, "splits": 2.36, "tiles": 14.1, "top_gflop": 6.59,
        "top_mb": 7.75,
    },
    ("spread tiles", 4): {
        "call": 6.86, "gflop": 7.16, "memory_mb": 0.0598, "nodes_mb": 0.000866, "odd_kb": 0.0255, "odd_mb": 0.529,
        "reread_mb": 1.28, "round_kb": 1.67, "rounds": 1.44, "tiles": 0.0238,
    },
    ("tiles", 2): {
        "call": 10.5, "gflop": 1.98, "memory_mb": 0.2, "nodes_mb": 0.00645, "odd_kb": 0.0313, "odd_mb": 0.419,
        "program_kb": 0.0199, "round_kb": 0.725, "rounds": 0.307, "splits": 0.236, "tiles": 3.25e-05, "top_gflop":
        0.144, "top_mb": 13.2,
    },
    ("tiles", 4): {
        "call": 11.7, "gflop": 0.000113, "memory_mb": 0.0019, "nodes_mb": 0.491, "odd_kb": 0.0509, "odd_mb": 0.00625,
        "program_kb": 0.056, "reread_mb": 0.0869, "round_kb": 0.406, "rounds": 0.000104, "tiles": 40.6,
    },
    ("tiny", 2): {
        "call": 1.27, "memory_mb": 0.029, "nodes_mb": 0.126, "odd_kb": 0.593, "odd_mb": 0.0684, "program_kb": 0.124,
        "reread_mb": 2.27e-06, "round_kb": 0.762, "rounds": 0.908,
    },
    ("tiny", 4): {
        "call": 1.09, "memory_mb": 0.055, "nodes_mb": 0.0015, "odd_kb": 0.217, "odd_mb": 0.159, "program_kb": 0.122,
        "reread_mb": 1.48e-06, "round_kb": 0.367, "rounds": 0.631,
    },
    ("whole", 2): {
        "call": 3.89, "memory_mb": 0.0221, "odd_kb": 0.0403, "out_kb": 0.232, "program_kb": 0.0102,
    },
}
# fmt: on
