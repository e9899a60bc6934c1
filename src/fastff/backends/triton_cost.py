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
    if launch.whole:
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
    tiles, parts = -(-size.batch // launch.leaf_tile), -(-size.out // launch.span)
    waves = max(1, tiles * parts / 132)
    columns = size.leaves * (size.leaf_width * (1 + size.gated) + 1)
    first_waves, first, added = waves, 1.0 * (columns + launch.leaf_tile) * row, 0.0
    if launch.splits:
        first_waves = max(1, -(-size.batch // launch.product_tile) * launch.splits / 132)
        first = (columns + launch.product_tile) * row / launch.splits
        added = launch.splits * launch.leaf_tile * columns * 4.0
    second = size.leaves * size.leaf_width * out_row / parts
    return {
        "program_kb": 1e-3 * first_waves * first,
        "added_kb": 1e-3 * waves * added,
        "out_kb": 1e-3 * waves * second,
        "odd_kb": 1e-3 * (_odd(row) * first_waves * first + _odd(out_row) * waves * second),
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
        "call": 1.63, "memory_mb": 0.231, "nodes_mb": 0.2, "odd_kb": 0.0327, "odd_mb": 0.199, "program_kb": 0.0497,
        "reread_mb": 0.146, "round_kb": 0.0028, "rounds": 0.929,
    },
    ("alone", 4): {
        "call": 0.621, "memory_mb": 0.225, "nodes_mb": 0.0722, "odd_kb": 0.000375, "odd_mb": 0.126, "program_kb":
        0.0166, "reread_mb": 0.088, "round_kb": 0.108, "rounds": 1.5,
    },
    ("dense", 2): {
        "call": 21.3, "gflop": 0.718, "hidden_mb": 1.92, "memory_mb": 0.448, "nodes_mb": 0.00382, "odd_mb": 2.59,
        "round_kb": 0.0042, "rounds": 1.82e-05, "splits": 0.158, "top_gflop": 6.22, "top_mb": 0.00782, "weights_mb":
        0.197,
    },
    ("split whole", 2): {
        "added_kb": 0.134, "call": 6.25, "memory_mb": 0.955, "odd_kb": 0.00377, "out_kb": 0.057, "program_kb":
        0.000254,
    },
    ("spread", 2): {
        "call": 3.73, "memory_mb": 0.237, "nodes_mb": 0.137, "odd_kb": 0.00787, "odd_mb": 0.111, "program_kb":
        1.65e-06, "reread_mb": 0.257, "round_kb": 0.209, "rounds": 0.685,
    },
    ("spread", 4): {
        "call": 4.71, "memory_mb": 0.183, "nodes_mb": 0.337, "odd_kb": 0.000644, "odd_mb": 0.0861, "reread_mb":
        0.0922, "round_kb": 0.456, "rounds": 0.0514,
    },
    ("spread tiles", 2): {
        "call": 9.94, "gflop": 1.59, "memory_mb": 0.208, "nodes_mb": 0.0687, "odd_kb": 0.0139, "odd_mb": 0.65,
        "program_kb": 0.000242, "reread_mb": 0.000724, "round_kb": 0.932, "rounds": 2.44, "splits": 0.000103,
        "tile_kb": 0.0725, "tiles": 27.1, "top_gflop": 6, "top_mb": 2.23,
    },
    ("spread tiles", 4): {
        "call": 3.78, "gflop": 0.248, "memory_mb": 0.105, "nodes_mb": 0.000401, "odd_kb": 0.0172, "odd_mb": 0.243,
        "reread_mb": 0.792, "round_kb": 0.588, "rounds": 1.98, "tile_kb": 0.377, "tiles": 18.7,
    },
    ("tiles", 2): {
        "call": 4.74, "gflop": 3.18, "memory_mb": 0.105, "nodes_mb": 0.0552, "odd_kb": 0.0661, "odd_mb": 0.337,
        "program_kb": 0.0155, "reread_mb": 1.04e-06, "round_kb": 0.875, "rounds": 1.34, "splits": 0.000495,
        "tile_kb": 0.0791, "tiles": 0.154, "top_gflop": 8.55e-06, "top_mb": 1.98,
    },
    ("tiles", 4): {
        "call": 8.05, "gflop": 2.13, "memory_mb": 0.0425, "nodes_mb": 0.319, "odd_kb": 0.00384, "odd_mb": 0.29,
        "program_kb": 0.00123, "reread_mb": 0.242, "round_kb": 0.0554, "rounds": 3.12e-05, "tile_kb": 0.216,
        "tiles": 25,
    },
    ("tiny", 2): {
        "call": 0.0542, "memory_mb": 0.00969, "nodes_mb": 0.0553, "odd_kb": 0.553, "odd_mb": 0.162, "program_kb":
        0.265, "reread_mb": 0.0648, "round_kb": 0.303, "rounds": 1.5,
    },
    ("tiny", 4): {
        "call": 1.89, "memory_mb": 0.0796, "nodes_mb": 2e-05, "odd_kb": 0.901, "odd_mb": 0.0959, "program_kb":
        0.0775, "reread_mb": 1.91e-06, "round_kb": 0.52, "rounds": 0.0312,
    },
    ("whole", 2): {
        "call": 3.01, "memory_mb": 0.0239, "odd_kb": 0.03, "out_kb": 0.264, "program_kb": 0.0366,
    },
}
# fmt: on
