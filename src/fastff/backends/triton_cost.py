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
        "call": 2.51, "memory_mb": 0.223, "nodes_mb": 0.183, "odd_kb": 0.0198, "odd_mb": 0.154, "program_kb": 0.0238,
        "reread_mb": 0.087, "round_kb": 0.0109, "rounds": 0.96,
    },
    ("alone", 4): {
        "call": 1.95, "memory_mb": 0.336, "nodes_mb": 0.0672, "odd_kb": 0.016, "odd_mb": 0.0411, "program_kb": 0.0093,
        "reread_mb": 0.0816, "round_kb": 0.212, "rounds": 0.493,
    },
    ("dense", 2): {
        "call": 18, "gflop": 0.709, "hidden_mb": 2.21, "memory_mb": 0.0441, "odd_mb": 1.55, "round_kb": 0.531,
        "splits": 9.12, "top_gflop": 26.7, "weights_mb": 0.169,
    },
    ("spread", 2): {
        "call": 6.25, "memory_mb": 0.3, "nodes_mb": 0.154, "odd_mb": 0.4, "reread_mb": 0.114, "round_kb": 0.0862,
        "rounds": 0.424,
    },
    ("spread", 4): {
        "call": 5.46, "memory_mb": 0.302, "nodes_mb": 0.119, "odd_mb": 0.00193, "program_kb": 0.0328,
        "reread_mb": 0.0935, "round_kb": 0.187, "rounds": 0.0809,
    },
    ("spread tiles", 2): {
        "call": 11.6, "gflop": 1.18, "memory_mb": 0.187, "nodes_mb": 0.0537, "odd_kb": 0.269, "odd_mb": 0.735,
        "program_kb": 0.00763, "reread_mb": 0.0866, "round_kb": 1.1, "rounds": 1.82, "splits": 1.22, "tiles": 9.39,
        "top_gflop": 2.54, "top_mb": 5.09,
    },
    ("spread tiles", 4): {
        "call": 8.14, "gflop": 10.7, "nodes_mb": 0.1, "odd_mb": 0.897, "reread_mb": 0.562, "round_kb": 1.57,
        "rounds": 1,
    },
    ("tiles", 2): {
        "call": 9.18, "gflop": 3.94, "memory_mb": 0.156, "nodes_mb": 0.0372, "odd_kb": 0.0661, "odd_mb": 0.683,
        "program_kb": 0.0096, "round_kb": 0.841, "rounds": 1.6, "splits": 7.32, "top_gflop": 0.586, "top_mb": 6.26,
    },
    ("tiles", 4): {
        "call": 12.3, "memory_mb": 0.0311, "nodes_mb": 0.333, "odd_kb": 0.113, "odd_mb": 0.326, "reread_mb": 0.161,
        "round_kb": 0.924, "tiles": 33.2,
    },
    ("whole", 2): {
        "call": 5, "memory_mb": 0.3, "program_kb": 0.02, "out_kb": 0.02, "odd_kb": 0.1,
    },
    ("tiny", 2): {
        "call": 2.92, "memory_mb": 1.22, "odd_kb": 0.64, "round_kb": 1.25,
    },
    ("tiny", 4): {
        "call": 1.33, "memory_mb": 0.239, "nodes_mb": 0.00468, "odd_kb": 0.127, "odd_mb": 0.197, "program_kb": 0.105,
        "round_kb": 0.187, "rounds": 0.408,
    },
}
# fmt: on
