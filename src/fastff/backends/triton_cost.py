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
        "call": 2.52, "memory_mb": 0.259, "nodes_mb": 0.2, "odd_kb": 0.0343, "odd_mb": 0.105, "program_kb": 0.0242,
        "reread_mb": 0.0873, "round_kb": 0.0454, "rounds": 0.763,
    },
    ("alone", 4): {
        "call": 1.62, "memory_mb": 0.282, "nodes_mb": 0.0655, "odd_kb": 0.0107, "odd_mb": 0.0546, "program_kb": 0.0101,
        "reread_mb": 0.0866, "round_kb": 0.321, "rounds": 0.628,
    },
    ("dense", 2): {
        "call": 20.1, "gflop": 0.745, "hidden_mb": 2.25, "memory_mb": 0.0996, "nodes_mb": 0.248, "odd_mb": 2.22,
        "round_kb": 0.29, "splits": 3.63, "top_gflop": 18.7, "weights_mb": 0.166,
    },
    ("spread", 2): {
        "call": 4.72, "memory_mb": 0.314, "nodes_mb": 0.213, "odd_mb": 0.237, "reread_mb": 0.109, "round_kb": 0.137,
        "rounds": 0.68,
    },
    ("spread", 4): {
        "call": 4.9, "memory_mb": 0.273, "nodes_mb": 0.12, "odd_mb": 0.0544, "reread_mb": 0.0928, "round_kb": 0.363,
        "rounds": 0.213,
    },
    ("spread tiles", 2): {
        "call": 11.8, "gflop": 2.4, "memory_mb": 0.167, "nodes_mb": 0.2, "odd_kb": 0.0228, "odd_mb": 0.701,
        "program_kb": 0.0107, "round_kb": 1.05, "rounds": 2.61, "splits": 1.49, "tiles": 5.42, "top_gflop": 3.12,
        "top_mb": 5.9,
    },
    ("spread tiles", 4): {
        "call": 15.4, "gflop": 20.5, "nodes_mb": 0.0731, "odd_mb": 0.583, "reread_mb": 0.757, "round_kb": 1.33,
    },
    ("tiles", 2): {
        "call": 9.2, "gflop": 4.55, "memory_mb": 0.161, "nodes_mb": 0.446, "odd_kb": 0.0497, "odd_mb": 0.564,
        "program_kb": 0.00963, "round_kb": 0.907, "rounds": 0.789, "splits": 4.79, "top_gflop": 0.214, "top_mb": 7.88,
    },
    ("tiles", 4): {
        "call": 11.6, "memory_mb": 0.0269, "nodes_mb": 0.403, "odd_kb": 0.096, "odd_mb": 0.127, "program_kb": 0.0335,
        "reread_mb": 0.213, "round_kb": 0.704, "tiles": 32.8,
    },
    ("tiny", 2): {
        "call": 2.09, "memory_mb": 1.04, "nodes_mb": 0.0385, "odd_kb": 0.817, "odd_mb": 0.295, "program_kb": 0.00955,
        "round_kb": 0.476, "rounds": 0.42,
    },
    ("tiny", 4): {
        "call": 1.48, "memory_mb": 0.206, "nodes_mb": 0.00479, "odd_kb": 0.109, "odd_mb": 0.203, "program_kb": 0.105,
        "round_kb": 0.214, "rounds": 0.351,
    },
    ("whole", 2): {
        "call": 2.9, "memory_mb": 0.283, "odd_kb": 0.0501, "out_kb": 0.122, "program_kb": 0.0174,
    },
}
# fmt: on
