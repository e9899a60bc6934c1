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
    way = min(us, key=us.__getitem__)
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
CONSTANTS: dict[tuple[str, int], dict[str, float]] = {
    ("alone", 2): {
        "cache_mb": 0.0985,
        "call": 1.45,
        "memory_mb": 0.155,
        "nodes_mb": 0.162,
        "odd_kb": 0.0516,
        "odd_mb": 0.0849,
        "program_kb": 0.0151,
        "rounds": 1.29,
    },  # fmt: skip
    ("alone", 4): {
        "cache_mb": 0.0828,
        "call": 1.51,
        "memory_mb": 0.453,
        "nodes_mb": 0.033,
        "odd_kb": 0.0249,
        "odd_mb": 0.0427,
        "round_kb": 0.572,
        "rounds": 0.57,
    },  # fmt: skip
    ("dense", 2): {
        "call": 17.7,
        "gflop": 0.645,
        "hidden_mb": 1.57,
        "memory_mb": 0.00209,
        "nodes_mb": 1.77,
        "odd_mb": 0.348,
        "round_kb": 0.178,
        "splits": 7.13,
        "top_gflop": 31.9,
        "weights_mb": 0.221,
    },  # fmt: skip
    ("spread", 2): {
        "cache_mb": 0.124,
        "call": 4.55,
        "memory_mb": 0.143,
        "nodes_mb": 0.178,
        "odd_mb": 0.303,
        "program_kb": 0.00213,
        "round_kb": 0.127,
        "rounds": 0.657,
    },  # fmt: skip
    ("spread", 4): {
        "call": 4.72,
        "memory_mb": 0.547,
        "nodes_mb": 0.00209,
        "odd_mb": 0.762,
        "round_kb": 0.196,
    },  # fmt: skip
    ("spread tiles", 2): {
        "call": 10.8,
        "gflop": 1.14,
        "memory_mb": 0.218,
        "odd_kb": 0.0916,
        "odd_mb": 1.44,
        "program_kb": 0.024,
        "round_kb": 0.859,
        "rounds": 2.03,
        "splits": 0.00808,
        "top_gflop": 2.54,
    },  # fmt: skip
    ("spread tiles", 4): {
        "cache_mb": 0.245,
        "call": 12.5,
        "gflop": 28.4,
        "program_kb": 0.0436,
        "round_kb": 1.31,
        "tiles": 83.3,
    },  # fmt: skip
    ("tiles", 2): {
        "call": 8.07,
        "gflop": 6.03,
        "memory_mb": 0.0343,
        "nodes_mb": 0.366,
        "odd_kb": 0.073,
        "odd_mb": 0.643,
        "program_kb": 0.0162,
        "round_kb": 0.22,
        "rounds": 3.04,
        "splits": 6.45,
        "top_gflop": 1.52,
    },  # fmt: skip
    ("tiles", 4): {
        "call": 10.2,
        "gflop": 5.75,
        "nodes_mb": 0.0795,
        "odd_kb": 0.104,
        "odd_mb": 1.42,
        "round_kb": 1.28,
    },  # fmt: skip
    ("tiny", 2): {
        "call": 2,
        "nodes_mb": 0.197,
        "odd_kb": 0.119,
        "odd_mb": 0.262,
        "rounds": 1.83,
    },  # fmt: skip
    ("tiny", 4): {
        "call": 1.27,
        "memory_mb": 0.33,
        "nodes_mb": 0.0117,
        "odd_kb": 0.165,
        "program_kb": 0.0992,
        "rounds": 0.429,
    },  # fmt: skip
}
