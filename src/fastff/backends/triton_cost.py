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
        found["tile_kb"] = 1e-3 * launch.leaf_tile * (row + (0 if launch.spread else out_row))
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
        "call": 2.07, "memory_mb": 0.245, "nodes_mb": 0.182, "odd_kb": 0.0106, "odd_mb": 0.27, "program_kb": 0.0489,
        "reread_mb": 0.0801, "round_kb": 0.0946, "rounds": 0.659,
    },
    ("alone", 4): {
        "call": 0.718, "memory_mb": 0.264, "nodes_mb": 0.0754, "odd_kb": 0.00605, "odd_mb": 0.0936, "program_kb":
        0.0273, "reread_mb": 0.0794, "round_kb": 0.2, "rounds": 1.16,
    },
    ("dense", 2): {
        "call": 20.3, "gflop": 0.641, "hidden_mb": 2.13, "memory_mb": 0.612, "nodes_mb": 0.135, "odd_mb": 2.59,
        "round_kb": 0.00574, "rounds": 2.21e-05, "splits": 0.278, "top_gflop": 1.82, "top_mb": 1.91e-05, "weights_mb":
        0.202,
    },
    ("spread", 2): {
        "call": 3, "memory_mb": 0.271, "nodes_mb": 0.249, "odd_kb": 0.0358, "odd_mb": 0.151, "program_kb": 1.74e-06,
        "reread_mb": 0.154, "round_kb": 0.104, "rounds": 1.39,
    },
    ("spread", 4): {
        "call": 4.69, "memory_mb": 0.199, "nodes_mb": 0.375, "odd_mb": 0.0741, "reread_mb": 0.097, "round_kb": 0.346,
        "rounds": 0.2,
    },
    ("spread tiles", 2): {
        "call": 9.67, "gflop": 1.53, "memory_mb": 0.203, "nodes_mb": 0.0134, "odd_kb": 0.108, "odd_mb": 0.723,
        "program_kb": 0.00187, "reread_mb": 0.0037, "round_kb": 1.06, "rounds": 3.72, "splits": 0.001, "tile_kb":
        0.0929, "tiles": 14, "top_gflop": 4.25, "top_mb": 2.52,
    },
    ("spread tiles", 4): {
        "call": 3.41, "gflop": 0.602, "memory_mb": 0.183, "nodes_mb": 0.00245, "odd_kb": 0.0125, "odd_mb": 0.209,
        "reread_mb": 0.811, "round_kb": 0.52, "rounds": 1.91, "tile_kb": 0.424, "tiles": 14.1,
    },
    ("tiles", 2): {
        "call": 7.49, "gflop": 6.31, "memory_mb": 0.0172, "nodes_mb": 0.482, "odd_kb": 0.0652, "odd_mb": 0.474,
        "program_kb": 0.0113, "round_kb": 1.02, "rounds": 1.14, "splits": 0.000101, "tile_kb": 0.0347, "tiles": 0.0631,
        "top_gflop": 0.00535, "top_mb": 2.27,
    },
    ("tiles", 4): {
        "call": 7.86, "gflop": 23.9, "memory_mb": 0.000544, "nodes_mb": 0.0619, "odd_kb": 0.0198, "odd_mb": 0.298,
        "program_kb": 0.00609, "reread_mb": 0.0659, "round_kb": 0.174, "rounds": 0.000111, "tile_kb": 0.223, "tiles":
        8.85,
    },
    ("tiny", 2): {
        "call": 1.1, "memory_mb": 0.122, "nodes_mb": 0.112, "odd_kb": 0.844, "odd_mb": 0.196, "program_kb": 0.00215,
        "reread_mb": 4.83e-06, "round_kb": 0.856, "rounds": 0.975,
    },
    ("tiny", 4): {
        "call": 1.75, "memory_mb": 0.116, "nodes_mb": 5.94e-05, "odd_kb": 0.855, "odd_mb": 0.0976, "program_kb": 0.074,
        "reread_mb": 2.08e-06, "round_kb": 0.538, "rounds": 0.0194,
    },
    ("whole", 2): {
        "call": 3.01, "memory_mb": 0.0056, "odd_kb": 0.0659, "out_kb": 0.342, "program_kb": 0.00683,
    },
}
# fmt: on
