"""The hard pass on a GPU: how its Triton kernels are launched.

Two ways, by the number t = batch / leaves of samples a leaf. Few: one program a sample walks the tree and runs the leaf
(one launch). Many: samples are listed by leaf, and tiles of them go through both products of the leaf on tensor cores
(two launches, and one that clears the counters of the lists). Nothing is sent to the host, so both can be captured in a
CUDA graph; both give the same numbers at every run, since no number depends on the order in which samples arrive.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree as heap
from ..activations import GATED, PLAIN
from ..tensors import Leaves, Tree
from .request import Request

# `group` gives every leaf a list with room for the whole batch. Beyond this number of entries, samples are sorted.
_MOST_LISTED = 2**25
# Bytes, by the size of a number: where both ways take about the same time.
_WORTH_GROUPING = {2: 2**25, 4: 2**27}


class Launch(NamedTuple):
    """How a hard pass runs: one program a sample, or samples grouped by leaf. The numbers are launch parameters."""

    grouped: bool
    # one program a sample
    round: int = 3  # levels walked in one round
    warps: int = 8
    pdl: bool = False  # programmatic dependent launch: begin while the last kernel ends, and wait for it then
    # grouped, the walk
    tile: int = 16  # samples that walk together
    top: int = 0  # levels whose nodes all go in one product
    group_k: int = 128  # columns of that product at a time
    group_warps: int = 4
    # grouped, the leaves
    leaf_tile: int = 16  # samples that go through a leaf together
    splits: int = 1  # programs a leaf
    k: int = 128  # columns of the first product at a time
    n: int = 128  # columns of the second
    stages: int = 3  # blocks of weights loaded ahead at a time
    leaf_warps: int = 4


def choose_launch(x: Tensor, leaves: int, leaf_weights: int, node_width: int) -> Launch:
    """The launch for a batch of this size, from measurements on an H200."""
    batch, depth, size = len(x), heap.depth_of(leaves), x.element_size()
    # Grouped, a leaf's weights are read once, and not by every sample: worth two more launches if it saves enough.
    saved = (batch - leaves * -math.expm1(-batch / leaves)) * leaf_weights * size
    wide = x.shape[1] >= 2048
    if saved < _WORTH_GROUPING[size]:
        few_warps = depth <= 8 and not wide if size == 2 else batch >= 1024
        pdl = x.is_cuda and _has_dependent_launch(x.device.index)
        return Launch(False, warps=4 if few_warps else 8, pdl=pdl)
    per_leaf = batch / leaves
    if size == 4:
        # Short products: tensor cores cut off what they add up, and `_precision` counts on 32 columns at a time.
        launch = Launch(True, group_warps=4 if depth <= 5 else 8, k=32, n=64, stages=4)
        if per_leaf <= 16:
            return launch
        if batch < 8192:
            return launch._replace(splits=_splits(per_leaf, 16))
        return launch._replace(splits=_splits(0.6 * per_leaf, 16))
    launch = Launch(True, top=min(depth, 5) if node_width == 1 else 0, group_k=256)
    if batch >= 8192 and node_width == 1 and depth <= 5:
        launch = launch._replace(tile=32, group_k=128)
    elif batch >= 8192 and node_width == 1 and depth <= 8:
        launch = launch._replace(tile=128, top=depth, group_warps=8, group_k=64)
    if per_leaf < 12:
        return launch._replace(k=256, n=256, stages=4) if wide else launch._replace(leaf_warps=2)
    if batch < 8192 or per_leaf < 32:
        return launch._replace(leaf_tile=32, splits=_splits(per_leaf, 32), n=256, stages=3 if wide else 4)
    return launch._replace(
        leaf_tile=64, splits=_splits(0.75 * per_leaf, 64), k=64, n=64, stages=5 if per_leaf <= 128 else 4
    )


@functools.cache
def _has_dependent_launch(device: int) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9


def describe(request: Request) -> str:
    x, leaves = request.x, request.leaves
    assert leaves is not None  # explain describes whole passes
    launch = choose_launch(x, len(leaves.in_weight), _leaf_weights(leaves), _node_width(request.tree))
    if not launch.grouped:
        return "one program a sample walks the tree and runs the leaf"
    how = "sorted" if len(leaves.in_weight) * len(x) > _MOST_LISTED else "listed"
    return f"samples are {how} by leaf, and tiles of them go through both products of the leaf"


def _splits(per_leaf: float, tile: int) -> int:
    """Programs per leaf: twice the tiles of an even spread, since the spread is uneven."""
    return max(1, round(2 * per_leaf / tile))


def hard(x: Tensor, tree: Tree, leaves: Leaves, activation: str, launch: Launch | None = None) -> tuple[Tensor, Tensor]:
    """The output, and the leaf of each sample."""
    leaf = torch.empty(len(x), dtype=torch.int64, device=x.device)
    return _run(x, leaf, tree, leaves, activation, launch), leaf


def route(x: Tensor, tree: Tree, activation: str) -> Tensor:
    x = x.resolve_neg().contiguous()
    leaf = torch.empty(len(x), dtype=torch.int64, device=x.device)
    # For the walk alone, as if a leaf had twice 32 neurons for each feature.
    launch = choose_launch(x, len(tree.weight) + 1, 64 * x.shape[1], _node_width(tree))
    if len(x):
        with torch.cuda.device_of(x):
            if launch.grouped:
                _group(x, leaf, tree, None, activation, launch)
            else:
                _descend(x, leaf, tree, None, activation, launch)
    return leaf


def visit(x: Tensor, leaf: Tensor, leaves: Leaves, activation: str) -> Tensor:
    return _run(x, leaf.contiguous(), None, leaves, activation, None)


def _run(x: Tensor, leaf: Tensor, tree: Tree | None, leaves: Leaves, activation: str, launch: Launch | None) -> Tensor:
    x = x.resolve_neg().contiguous()
    num_leaves = len(leaves.in_weight)
    launch = launch or choose_launch(x, num_leaves, _leaf_weights(leaves), _node_width(tree))
    if not len(x):
        return x.new_empty(0, leaves.out_weight.shape[-1])
    with torch.cuda.device_of(x):
        if not launch.grouped:
            return _descend(x, leaf, tree, leaves, activation, launch)
        if num_leaves * len(x) <= _MOST_LISTED:
            listed, count = _group(x, leaf, tree, num_leaves, activation, launch)
            return _leaf_tiles(x, listed, count, leaves, activation, launch, False)
        if tree is not None:
            _group(x, leaf, tree, None, activation, launch)
        ordered, order = leaf.sort()
        begin = torch.searchsorted(ordered, torch.arange(num_leaves + 1, device=x.device))
        return _leaf_tiles(x, order, begin, leaves, activation, launch, True)


def _descend(
    x: Tensor, leaf: Tensor, tree: Tree | None, leaves: Leaves | None, activation: str, launch: Launch
) -> Tensor:
    from .triton_kernels import descend

    y = x if leaves is None else x.new_empty(len(x), leaves.out_weight.shape[-1])
    depth = _depth(tree)
    block, features = 512 // x.element_size(), power_of_two(x.shape[1])
    width = launch.warps if leaves is None else max(launch.warps, power_of_two(leaves.in_weight.shape[1]))
    rounds = max(1, min(launch.round, depth))
    hidden = torch.empty(len(x) * width if leaves is not None else 0, dtype=torch.float32, device=x.device)
    descend[(len(x),)](
        x, *_node_tensors(x, tree), *_leaf_tensors(x, leaves), leaf, hidden, y,
        IN=x.shape[1], DEPTH=depth, N=_node_width(tree), **_leaf_options(leaves, activation),
        ROUTE=tree is not None, VISIT=leaves is not None, ROUND=rounds, BL=width, BLOCK=block,
        BN=min(1024, power_of_two(y.shape[1])), KEPT_NODE=_fits(x, (1 << rounds) * features, launch.warps),
        KEPT=_fits(x, width * features, launch.warps), WARPS=launch.warps, PDL=launch.pdl, num_warps=launch.warps,
        **({"launch_pdl": True} if launch.pdl else {}),
    )  # fmt: skip
    return y


def _group(
    x: Tensor, leaf: Tensor, tree: Tree | None, leaves: int | None, activation: str, launch: Launch
) -> tuple[Tensor, Tensor]:
    """Fills in the leaf of each sample, given a tree; returns the lists of all leaves, and their lengths."""
    from .triton_kernels import group

    count = torch.zeros(leaves or 0, dtype=torch.int32, device=x.device)
    listed = torch.empty((leaves or 0) * len(x), dtype=torch.int32, device=x.device)
    group[(-(-len(x) // launch.tile),)](
        x, *_node_tensors(x, tree), leaf, listed, count, len(x),
        IN=x.shape[1], DEPTH=_depth(tree), N=_node_width(tree), ACT=function_name(activation), ROUTE=tree is not None,
        LIST=leaves is not None, TOP=launch.top, BM=launch.tile,
        BK=min(launch.group_k, max(16, power_of_two(x.shape[1]))),
        BLOCK=512 // x.element_size(), KEPT=_fits(x, launch.tile * x.shape[1], launch.group_warps),
        num_warps=launch.group_warps,
    )  # fmt: skip
    return listed, count


def _leaf_tiles(
    x: Tensor, listed: Tensor, count: Tensor, leaves: Leaves, activation: str, launch: Launch, is_sorted: bool
) -> Tensor:
    from .triton_kernels import leaf_tiles

    num_leaves, width, out = leaves.out_weight.shape
    block = min(128, max(16, power_of_two(width)))
    y = x.new_empty(len(x), out, dtype=torch.float32 if width > block else x.dtype)
    leaf_tiles[(num_leaves, launch.splits)](
        x, *_leaf_tensors(x, leaves), listed, count, y, len(x),
        IN=x.shape[1], **_leaf_options(leaves, activation), PRECISION=_precision(x, width), SORTED=is_sorted,
        BM=launch.leaf_tile, BK=min(launch.k, max(16, power_of_two(x.shape[1]))), BL=block,
        BN=min(launch.n, max(16, power_of_two(out))), STAGES=launch.stages, num_warps=launch.leaf_warps,
    )  # fmt: skip
    return y.to(x.dtype)


def _precision(x: Tensor, leaf_width: int) -> str:
    """How tensor cores multiply float32 numbers: split in two of 11 bits, or in three of 8.

    Tensor cores cut off what they add up. Against float64, 32 columns at a time, two parts have up to 1.4 times the
    error of torch's own products where sums are long anyway; at 64 features 2.2 times, in a leaf of 130 neurons 3.1
    times. Three parts have up to 1.2 times, and take 1.1 to 1.4 times as long. (256 samples a leaf, H200.)
    """
    if x.dtype != torch.float32 or x.is_cpu:  # the interpreter has no tensor cores, and knows not all their names
        return "ieee"
    return "tf32x3" if x.shape[1] >= 512 and leaf_width <= 64 else "bf16x6"


def _fits(x: Tensor, numbers: int, warps: int) -> bool:
    """Whether the registers of these warps have room for the numbers, and for some others."""
    return numbers * x.element_size() <= 512 * 32 * warps


def _depth(tree: Tree | None) -> int:
    return 0 if tree is None else heap.depth_of(len(tree.weight) + 1)


def _node_width(tree: Tree | None) -> int:
    return 1 if tree is None or tree.out_weight is None else tree.out_weight.shape[1]


def _leaf_weights(leaves: Leaves) -> int:
    return sum(
        part[0].numel() for part in (leaves.in_weight, leaves.gate_weight, leaves.out_weight) if part is not None
    )


def _node_tensors(x: Tensor, tree: Tree | None) -> tuple[Tensor, ...]:
    """A kernel's arguments. Absent tensors are passed as x and never read."""
    return (x,) * 4 if tree is None else tuple(x if part is None else part for part in tree)


def _leaf_tensors(x: Tensor, leaves: Leaves | None) -> tuple[Tensor, ...]:
    if leaves is None:
        return (x,) * 6
    first = (leaves.in_weight, leaves.in_bias, leaves.gate_weight, leaves.gate_bias)
    return tuple(x if part is None else part for part in (*first, leaves.out_weight, leaves.out_bias))


def _leaf_options(leaves: Leaves | None, activation: str) -> dict[str, Any]:
    return {
        "OUT": 1 if leaves is None else leaves.out_weight.shape[2],
        "L": 1 if leaves is None else leaves.out_weight.shape[1],
        "ACT": function_name(activation),
        "GATED": leaves is not None and leaves.gate_weight is not None,
        "IN_BIAS": leaves is not None and leaves.in_bias is not None,
        "GATE_BIAS": leaves is not None and leaves.gate_bias is not None,
        "OUT_BIAS": leaves is not None and leaves.out_bias is not None,
    }


def function_name(activation: str) -> str:
    """The ACT of the kernels."""
    return (GATED if activation in GATED else PLAIN)[activation].__name__


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
