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
    return sum(constants[name] * value for name, value in quantities(size, way, launch).items())


def quantities(size: Size, way: str, launch: Launch) -> dict[str, float]:
    """What the time of a way depends on, by name."""
    row = size.features * size.bytes
    found = {"call": 1.0} | (_walk(size, launch, row) if size.walks and size.depth else {})
    found["memory_mb"] = 1e-6 * (size.used_leaves * size.leaf_bytes + size.batch * (row + size.out * size.bytes))
    work = size.batch * size.leaf_numbers
    if way == "dense":
        hidden = size.batch * size.leaves * size.leaf_width
        return found | {
            "gflop": 2e-9 * work * size.leaves,
            "weights_mb": 1e-6 * size.leaves * size.leaf_bytes,
            "hidden_mb": 1e-6 * (1 + size.gated) * hidden * size.bytes,
        }
    if not launch.grouped:
        # A program reads its part of a leaf piece after piece; all programs share the cache.
        share = launch.block / size.leaf_width if launch.spread else 1
        return found | {"program_kb": 1e-3 * min(1, share) * size.leaf_bytes, "cache_mb": 1e-6 * size.batch * size.leaf_bytes}
    tiles = size.used_leaves + size.batch / launch.leaf_tile
    share = min(1, launch.block / size.leaf_width) if launch.spread else 1
    return found | {
        "program_kb": 1e-3 * share * size.leaf_bytes,
        "cache_mb": 1e-6 * tiles * size.leaf_bytes,
        "gflop": 2e-9 * tiles * launch.leaf_tile * size.leaf_numbers,
        "tiles": 1e-3 * tiles,
    }


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


# Placeholder constants until the fit.
CONSTANTS: dict[tuple[str, int], dict[str, float]] = {}
