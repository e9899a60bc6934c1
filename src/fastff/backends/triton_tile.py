"""The hard pass of tiny layers on a GPU, in one launch: how the kernels of triton_tile_kernels.py are launched.

Two ways. `rows`: a program takes a tile of samples, and each sample reads the rows of its own leaf. `leaf`: a program
takes one leaf and a tile of samples, runs the leaf on all of them, and writes those that reach it: for 16-bit numbers,
on tensor cores. The choice counts the numbers that move from the caches to the multiprocessors: the own leaf of each
sample, or each input and the weights of a leaf once for each leaf of the tree.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..activations import GATED, PLAIN
from ..tensors import Leaves, Tree
from .triton_launch import launch_kernel
from .triton_size import Size, has_dependent_launch, power_of_two, size_of

_DEEPEST = 8
_MOST_SAMPLES = 2**20  # a grid has 65,535 tiles at most beside the leaves
_MOST_BLOCKS = 128  # of four numbers a thread: a leaf is unrolled, and more of it would leave the registers
_ROOM = 53  # blocks of 16 bytes, which the registers of a thread hold beside everything else
_TILE = 16  # samples: 2048 of them keep 128 multiprocessors busy


class TileLaunch(NamedTuple):
    """How the pass of a tiny layer runs."""

    way: str  # "rows" or "leaf"
    samples: int = _TILE  # that walk together
    lanes: int = 16  # threads that share a sample, 16 bytes at a time
    warps: int = 8
    top: int = 3  # levels walked first, by the rows of all their nodes
    round: int = 2  # levels at a time after that
    loads: int = 32  # rows: of a thread, that a group of neurons has in flight
    pdl: bool = False  # programmatic dependent launch: begin while the last kernel ends, and wait for it then
    prefetch: bool = True  # with pdl: move inputs to the L2 cache before that wait


class _Shape(NamedTuple):
    """The rows of a layer in 16-byte blocks of a thread."""

    in_blocks: int
    neuron_blocks: int  # of all rows of a neuron
    out_registers: int  # of an output row in float32, in units of four


def why_not(size: Size) -> str:
    """Why these kernels cannot run a pass of this size, or would be slow; empty if they can."""
    shape = _shape(size, 16)
    if not size.walks:
        return "has tiles for whole passes only"
    if size.weight_bytes != size.bytes:
        return "has no tiles for int8 leaves"
    if size.node_width > 1:
        return "has tiles for nodes of width 1 only"
    if size.batch > _MOST_SAMPLES:
        return f"has tiles for {_MOST_SAMPLES} samples at most; got {size.batch}"
    if size.depth > _DEEPEST:
        return f"has tiles for trees of depth {_DEEPEST} at most; got {size.depth}"
    if shape.in_blocks + shape.out_registers + max(shape.neuron_blocks, shape.in_blocks) > _ROOM:
        return f"has tiles for rows that fit into registers; got {size.features} -> {size.out}, {size.bytes} bytes each"
    blocks = size.leaf_width * shape.neuron_blocks * (4 // size.bytes)
    if blocks > _MOST_BLOCKS:
        return f"has tiles for leaves of {_MOST_BLOCKS} blocks at most; got {blocks}"
    return ""


def choose(size: Size, pdl: bool) -> TileLaunch:
    """The launch for a layer of this size."""
    shape = _shape(size, 16)
    samples = 32 if size.leaves <= 4 else 64
    # Tensor cores take 16 samples and 16 neurons at least; moving numbers to them costs as much as fetching them again.
    moved = 5 * size.leaves * (size.features + size.leaf_numbers // samples)
    if size.bytes == 2 and size.leaf_numbers > moved and _leaf_fits(size):
        return TileLaunch("leaf", samples, lanes=8, warps=4, top=min(size.depth, 3), pdl=pdl)
    if size.leaf_width * shape.neuron_blocks <= 4:
        return TileLaunch("rows", samples=8, warps=4, top=2, round=2, loads=16, pdl=pdl)
    top = max(t for t in range(1, 4) if shape.in_blocks << t <= _ROOM or t == 1)
    # Long rows take as long to arrive as the next ones to be asked for.
    levels = 2 if shape.in_blocks <= 4 else 1
    loads = min(32, _ROOM - shape.in_blocks - shape.out_registers)
    return TileLaunch("rows", top=top, round=levels, loads=loads, pdl=pdl)


def describe(size: Size) -> str:
    """How `hard` runs, in words."""
    launch = choose(size, False)
    if launch.way == "rows":
        return f"tiles of {launch.samples} samples walk the tree, and each sample reads its own leaf, in one launch"
    return f"each leaf runs tiles of {launch.samples} samples, and writes those that reach it, in one launch"


def hard(
    x: Tensor, tree: Tree, leaves: Leaves, activation: str, launch: TileLaunch | None = None
) -> tuple[Tensor, Tensor]:
    """The output, and the leaf of each sample."""
    x = x.resolve_neg().contiguous()
    size = size_of(x, tree, leaves)
    launch = launch or choose(size, x.is_cuda and has_dependent_launch(x.device.index))
    shape, batch = _shape(size, launch.lanes), len(x)
    leaf, y = torch.empty(batch, dtype=torch.int64, device=x.device), x.new_empty(batch, size.out)
    if not batch:
        return y, leaf
    from .triton_tile_kernels import tile_leaf, tile_rows

    columns = launch.lanes * 16 // x.element_size()
    first = (leaves.in_weight, leaves.in_bias, leaves.gate_weight, leaves.gate_bias)
    weights = [tree.weight, tree.bias, *first, leaves.out_weight, leaves.out_bias]
    tensors = [x, *(x if t is None else t for t in weights), leaf, y]  # an absent tensor is never read
    options = {
        "IN": size.features, "OUT": size.out, "DEPTH": size.depth, "L": size.leaf_width,
        "ACT": (GATED if activation in GATED else PLAIN)[activation].__name__, "GATED": leaves.gate_weight is not None,
        "IN_BIAS": leaves.in_bias is not None, "GATE_BIAS": leaves.gate_bias is not None,
        "OUT_BIAS": leaves.out_bias is not None, "TOP": min(launch.top, size.depth), "ROUND": launch.round,
        "BM": launch.samples, "COLS": columns, "FENCE": not x.is_cpu, "PDL": launch.pdl, "PREFETCH": launch.prefetch,
        "num_warps": launch.warps, **({"launch_pdl": True} if launch.pdl else {}),
    }  # fmt: skip
    tiles = -(-batch // launch.samples)
    with torch.cuda.device_of(x):
        if launch.way == "rows":
            group = max(1, min(size.leaf_width, launch.loads // shape.neuron_blocks))
            sizes = {"OUT_COLS": min(columns, _block(size.out)), "GROUP": group}
            launch_kernel(tile_rows, (tiles,), *tensors, batch, **sizes, **options)
        else:
            sizes = {"BL": _block(size.leaf_width), "BK": _block(size.features), "BN": _block(size.out)}
            launch_kernel(tile_leaf, (size.leaves, tiles), *tensors, batch, **sizes, **options)
    return y, leaf


def _shape(size: Size, lanes: int) -> _Shape:
    columns = lanes * 16 // size.bytes
    in_blocks, out_blocks = -(-size.features // columns), -(-size.out // columns)
    return _Shape(in_blocks, (1 + size.gated) * in_blocks + out_blocks, out_blocks * (4 // size.bytes))


def _leaf_fits(size: Size) -> bool:
    """Whether the registers of 4 warps hold the weights of a leaf and 32 samples, in 16 bits."""
    k, n = _block(size.features), _block(size.out)
    return _block(size.leaf_width) * ((1 + size.gated) * k + n) + 32 * (k + n) <= 64 * 128 * 3


def _block(n: int) -> int:
    """The edge of a product that has room for n."""
    return max(16, power_of_two(n))
