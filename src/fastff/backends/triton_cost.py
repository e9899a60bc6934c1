"""What a hard pass costs on a GPU, by each way to launch it: microseconds, predicted from its size.

A time is a sum: quantities that a way has to do with, such as bytes read, times constants. benchmarks/launch_cost.py
measures all ways at random sizes, fits the constants to the times, and prints them as they stand here.
"""

import functools
from typing import NamedTuple

from .triton_choice import Launch, launches
from .triton_size import Size


class Choice(NamedTuple):
    """The way that is predicted to be the fastest, and its time beside that of all leaves as dense products."""

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
    # Predictions err, and all leaves cost far more than one where they do: so they must be clearly faster.
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
    # A program reads its part of a leaf piece after piece; all programs share the cache.
    share = min(1, launch.block / size.leaf_width) if launch.spread else 1
    # Rows that do not begin at multiples of 16 bytes are read number by number.
    odd = size.leaf_width * ((1 + size.gated) * _odd(row) * size.features + _odd(out_row) * size.out)
    found |= {
        "program_kb": 1e-3 * share * size.leaf_bytes,
        "cache_mb": 1e-6 * tiles * size.leaf_bytes,
        "odd_mb": 1e-6 * (tiles * odd * size.weight_bytes + size.batch * (_odd(row) * row + _odd(out_row) * out_row)),
        "odd_kb": 1e-3 * share * odd * size.weight_bytes,
    }
    if launch.grouped:
        # Rounded up to what tensor cores take.
        width = max(16, size.leaf_width)
        found["gflop"] = 2e-9 * tiles * launch.leaf_tile * size.leaf_numbers / size.leaf_width * width
        found["tiles"] = 1e-3 * tiles
    return found


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
        "splits": launch.splits > 0,
    }


# Microseconds for each unit of a quantity, by way and bytes of a number, on an H200 with CUDA graphs.
# fmt: off
CONSTANTS: dict[tuple[str, int], dict[str, float]] = {
    ("alone", 2): {
        "cache_mb": 0.0943, "call": 1.93, "memory_mb": 0.167, "nodes_mb": 0.184, "odd_kb": 0.0281, "odd_mb": 0.0942,
        "program_kb": 0.0194, "rounds": 1.22,
    },
    ("alone", 4): {
        "cache_mb": 0.0825, "call": 2.05, "memory_mb": 0.27, "nodes_mb": 0.0651, "odd_kb": 0.015, "odd_mb": 0.0311,
        "program_kb": 0.00784, "round_kb": 0.256, "rounds": 0.435,
    },
    ("dense", 2): {
        "call": 18, "gflop": 0.181, "hidden_mb": 2.31, "memory_mb": 0.151, "nodes_mb": 0.849, "odd_mb": 0.457,
        "round_kb": 0.167, "splits": 7.95, "top_gflop": 15.9, "weights_mb": 0.21,
    },
    ("spread", 2): {
        "cache_mb": 0.121, "call": 4.7, "memory_mb": 0.182, "nodes_mb": 0.167, "odd_mb": 0.302, "round_kb": 0.112,
        "rounds": 0.755,
    },
    ("spread", 4): {
        "cache_mb": 0.0981, "call": 5.19, "memory_mb": 0.206, "nodes_mb": 0.134, "odd_kb": 0.0176, "odd_mb": 0.00855,
        "round_kb": 0.16, "rounds": 0.275,
    },
    ("spread tiles", 2): {
        "call": 9.82, "gflop": 6.59, "memory_mb": 0.103, "odd_kb": 0.239, "odd_mb": 0.957, "program_kb": 0.0223,
        "round_kb": 1.1, "rounds": 2.2, "splits": 1.92, "top_gflop": 2.58,
    },
    ("spread tiles", 4): {
        "call": 14.9, "gflop": 40.5, "odd_kb": 0.012, "odd_mb": 0.328, "round_kb": 1.47, "tiles": 6.39,
    },
    ("tiles", 2): {
        "call": 8.51, "gflop": 7.23, "memory_mb": 0.052, "nodes_mb": 0.356, "odd_kb": 0.0992, "odd_mb": 0.558,
        "program_kb": 0.0142, "round_kb": 0.778, "rounds": 1.99, "splits": 8.1, "top_gflop": 0.53,
    },
    ("tiles", 4): {
        "cache_mb": 0.0255, "call": 10.5, "gflop": 0.801, "nodes_mb": 0.37, "odd_kb": 0.131, "odd_mb": 0.223,
        "program_kb": 0.00874, "round_kb": 1.01, "tiles": 31.6,
    },
    ("tiny", 2): {
        "call": 3.31, "nodes_mb": 0.104, "odd_kb": 0.0903, "odd_mb": 0.34, "round_kb": 0.95, "rounds": 0.627,
    },
    ("tiny", 4): {
        "call": 1.3, "memory_mb": 0.222, "nodes_mb": 7.26e-05, "odd_kb": 0.141, "odd_mb": 0.209, "program_kb": 0.104,
        "round_kb": 0.277, "rounds": 0.405,
    },
}
# fmt: on
