"""The hard pass on a GPU: how its Triton kernels are launched.

The way depends on the samples per leaf. Few: one program a sample walks the tree and runs the leaf (one launch), or a
large leaf is spread over many programs. Many: samples are listed by leaf, and tiles of them go through the leaf on
tensor cores. Nothing is sent to the host, so every way can be captured in a CUDA graph; all give the same numbers at
every run, since no number depends on the order in which samples arrive.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..tensors import Leaves, Tree
from . import triton_tile, triton_whole
from .reference import input_pairs
from .request import Request
from .triton_arguments import (
    depth_of,
    fence_options,
    fits,
    function_name,
    launch_options,
    leaf_options,
    leaf_tensors,
    node_tensors,
    node_width,
    precision,
)
from .triton_choice import Launch, walk_launch
from .triton_cost import fastest
from .triton_launch import launch_kernel
from .triton_size import Size, has_dependent_launch, power_of_two, size_of

# `group` gives every leaf a list with room for the whole batch. Beyond this number of entries, samples are sorted.
_MOST_LISTED = 2**25


def describe(request: Request) -> str:
    x, leaves = request.x, request.leaves
    assert leaves is not None  # explain describes whole passes
    size = size_of(x, request.tree, leaves)
    choice = fastest(size)
    return f"{_words(size, choice.launch)}; {choice}"


def _words(size: Size, launch: Launch) -> str:
    if launch.tiny:
        return triton_tile.describe(size)
    if launch.dense:
        return "dense: runs all leaves and masks the unvisited ones"
    if launch.whole:
        how = ", after their first products were spread over the GPU" if launch.splits else " in one kernel"
        return f"tiles of samples go through the nodes and all leaves{how}; unvisited leaves are masked"
    if not launch.grouped:
        if launch.spread:
            return "the leaf of each sample is spread over many programs"
        return "one program a sample walks the tree and runs the leaf"
    how = "sorted" if size.leaves * size.batch > _MOST_LISTED else "listed"
    spread = ", spread over neurons and outputs" if launch.spread else ""
    return f"samples are {how} by leaf, and tiles of them go through both products of the leaf{spread}"


def choose_launch(x: Tensor, tree: Tree | None, leaves: Leaves) -> Launch:
    """The fastest way, by the cost model."""
    return _on(x, fastest(size_of(x, tree, leaves)).launch)


def is_recordable(x: Tensor, leaves: Leaves, launch: Launch) -> bool:
    """Whether a pass consists of launches of these kernels alone, which can be repeated."""
    return not launch.dense and not (launch.grouped and len(leaves.in_weight) * len(x) > _MOST_LISTED)


def _on(x: Tensor, launch: Launch) -> Launch:
    return launch._replace(pdl=x.is_cuda and has_dependent_launch(x.device.index))


def hard(x: Tensor, tree: Tree, leaves: Leaves, activation: str, launch: Launch | None = None) -> tuple[Tensor, Tensor]:
    """The output, and the leaf of each sample."""
    launch = launch or choose_launch(x, tree, leaves)
    if launch.tiny:
        return triton_tile.hard(x, tree, leaves, activation)
    leaf = torch.empty(len(x), dtype=torch.int64, device=x.device)
    return _run(x, leaf, tree, leaves, activation, launch), leaf


def route(x: Tensor, tree: Tree, activation: str, launch: Launch | None = None) -> Tensor:
    """The leaf of each sample."""
    x = x.resolve_neg().contiguous()
    leaf = torch.empty(len(x), dtype=torch.int64, device=x.device)
    if len(x):
        if launch is None:  # whatever the leaves are
            rows = torch.empty(len(tree.weight) + 1, 1, 1, device="meta", dtype=x.dtype)
            launch = _on(x, walk_launch(size_of(x, tree, Leaves(rows, None, rows, None))))
        with torch.cuda.device_of(x):
            _walk(x, leaf, tree, activation, launch)
    return leaf


def visit(x: Tensor, leaf: Tensor, leaves: Leaves, activation: str) -> Tensor:
    return _run(x, leaf.contiguous(), None, leaves, activation, None)


def _run(x: Tensor, leaf: Tensor, tree: Tree | None, leaves: Leaves, activation: str, launch: Launch | None) -> Tensor:
    x = x.resolve_neg().contiguous()
    if not len(x):
        return x.new_empty(0, leaves.out_weight.shape[-1])
    launch = launch or choose_launch(x, tree, leaves)
    with torch.cuda.device_of(x):
        if launch.dense:
            return _masked(x, leaf, tree, leaves, activation, launch)
        if launch.whole and tree is not None:
            return triton_whole.run(x, leaf, tree, leaves, activation, launch)
        if launch.grouped:
            work = _list_samples(x, leaf, tree, len(leaves.in_weight), activation, launch)
            return (_spread_tiles if launch.spread else _leaf_tiles)(x, work, leaves, activation, launch)
        if launch.spread:
            return _spread_samples(x, leaf, tree, leaves, activation, launch)
        return _descend(x, leaf, tree, leaves, activation, launch)


def _walk(x: Tensor, leaf: Tensor, tree: Tree, activation: str, launch: Launch) -> None:
    """Fills in the leaf of each sample."""
    if launch.grouped:
        z = _node_products(x, tree, None, launch) if launch.splits else None
        _group(x, z, leaf, tree, None, activation, launch)
    else:
        _descend(x, leaf, tree, None, activation, launch)


def _masked(x: Tensor, leaf: Tensor, tree: Tree | None, leaves: Leaves, activation: str, launch: Launch) -> Tensor:
    """All leaves as one dense layer, in which a kernel keeps the neurons of each sample's own leaf.

    An infinity or NaN in the second matrix of an unvisited leaf reaches the output: it is multiplied by zero.
    """
    from .triton_dense_kernels import own_neurons

    if tree is not None:
        _walk(x, leaf, tree, activation, launch)
    parts = [
        F.linear(x, weight.flatten(0, 1), None if bias is None else bias.flatten())
        for weight, bias in input_pairs(leaves)
    ]
    neurons = parts[0].shape[1]
    block = min(1024, power_of_two(neurons))
    launch_kernel(
        own_neurons, (len(x), -(-neurons // block)),
        parts[0], parts[-1], leaf, leaves.in_weight.shape[1], neurons,
        ACT=function_name(activation), GATED=len(parts) > 1, BLOCK=block,
    )  # fmt: skip
    second = leaves.out_weight.flatten(0, 1)
    return parts[0] @ second if leaves.out_bias is None else torch.addmm(leaves.out_bias[leaf], parts[0], second)


def _descend(
    x: Tensor, leaf: Tensor, tree: Tree | None, leaves: Leaves | None, activation: str, launch: Launch
) -> Tensor:
    from .triton_sample_kernels import descend

    y = x if leaves is None else x.new_empty(len(x), leaves.out_weight.shape[-1])
    depth = depth_of(tree)
    block, features = 512 // x.element_size(), power_of_two(x.shape[1])
    width = launch.warps if leaves is None else max(launch.warps, power_of_two(leaves.in_weight.shape[1]))
    rounds = max(1, min(launch.round, depth))
    hidden = torch.empty(len(x) * width if leaves is not None else 0, dtype=torch.float32, device=x.device)
    launch_kernel(
        descend, (len(x),),
        x, *node_tensors(x, tree), *leaf_tensors(x, leaves), leaf, hidden, y,
        IN=x.shape[1], OUT=y.shape[1], L=1 if leaves is None else leaves.out_weight.shape[1], DEPTH=depth,
        N=node_width(tree), **leaf_options(leaves, activation), ROUTE=tree is not None, VISIT=leaves is not None,
        ROUND=rounds, BL=width, BLOCK=block, BN=min(1024, power_of_two(y.shape[1])),
        KEPT_NODE=fits(x, (1 << rounds) * features, launch.warps), KEPT=fits(x, width * features, launch.warps),
        **fence_options(x, launch), WARPS=launch.warps,
        # On a full GPU, programs that wait take the place of others.
        EARLY=len(x) <= 128, **launch_options(launch, launch.warps),
    )  # fmt: skip
    return y


def _spread_samples(
    x: Tensor, leaf: Tensor, tree: Tree | None, leaves: Leaves, activation: str, launch: Launch
) -> Tensor:
    """The leaf of each sample by many programs, first its hidden neurons, then its output columns."""
    from .triton_sample_kernels import sample_hidden, sample_output

    batch, features = x.shape
    width, out = leaves.out_weight.shape[1:]
    if tree is not None:
        _descend(x, leaf, tree, None, activation, launch)
    hidden = torch.empty(batch, width, dtype=torch.float32, device=x.device)
    y = x.new_empty(batch, out)
    weights = leaf_tensors(x, leaves)
    options = leaf_options(leaves, activation)
    has_out_bias = options.pop("OUT_BIAS")
    warps = min(launch.leaf_warps, launch.block)
    launch_kernel(
        sample_hidden, (batch, -(-width // launch.block)),
        x, *weights[:6], weights[8], leaf, hidden, width,
        IN=features, **options, BL=launch.block, BLOCK=512 // x.element_size(),
        KEPT=fits(leaves.in_weight, launch.block * power_of_two(features), warps), **fence_options(x, launch),
        WARPS=warps,
        **launch_options(launch, warps),
    )  # fmt: skip
    launch_kernel(
        sample_output, (batch, -(-out // launch.n)),
        weights[6], weights[7], leaf, hidden, y,
        L=width, OUT=out, OUT_BIAS=has_out_bias, BJ=launch.out_k, BN=launch.n,
        WIDE=launch.n * weights[6].element_size() >= 512 * launch.leaf_warps,
        **launch_options(launch, launch.leaf_warps),
    )  # fmt: skip
    return y


class _Work(NamedTuple):
    """The samples by leaf, and the tiles beyond those that every leaf has."""

    listed: Tensor  # the samples of each leaf, in room for a batch each; is_sorted: all samples in order
    counts: Tensor  # the samples of each leaf; is_sorted: where each leaf begins
    extra: Tensor  # (2, most extra tiles): leaf, and place in its list
    number: Tensor  # of extra tiles
    leaves: int
    is_sorted: bool

    def arguments(self) -> tuple[Tensor, ...]:
        return self.listed, self.counts, self.extra, self.number

    def most_tiles(self, launch: Launch) -> int:
        return self.leaves * launch.per + self.extra.shape[1]


def _list_samples(x: Tensor, leaf: Tensor, tree: Tree | None, leaves: int, activation: str, launch: Launch) -> _Work:
    """Fills in the leaf of each sample, given a tree; and what the kernels of the leaves have to do."""
    from .triton_walk_kernels import clear, sorted_tiles

    batch = len(x)
    extra = torch.empty(2, batch // launch.leaf_tile, dtype=torch.int32, device=x.device)
    is_sorted = leaves * batch > _MOST_LISTED
    count = None if is_sorted else torch.empty(leaves + 1, dtype=torch.int32, device=x.device)
    z = _node_products(x, tree, count, launch) if tree is not None and launch.splits else None
    if count is not None:
        if z is None:
            launch_kernel(clear, (-(-len(count) // 1024),), count, len(count), **launch_options(launch, 4))
        listed = torch.empty(leaves * batch, dtype=torch.int32, device=x.device)
        _group(x, z, leaf, tree, (listed, count, extra), activation, launch)
        return _Work(listed, count, extra, count[leaves:], leaves, False)
    if tree is not None:
        _group(x, z, leaf, tree, None, activation, launch)
    ordered, order = leaf.sort()
    first = torch.searchsorted(ordered, torch.arange(leaves + 1, device=x.device))
    number = torch.zeros(1, dtype=torch.int32, device=x.device)
    launch_kernel(
        sorted_tiles, (-(-batch // 256),),
        ordered, first, number, extra, batch, extra.shape[1], BM=256, LISTED=launch.per * launch.leaf_tile,
        LEAF_TILE=launch.leaf_tile,
    )  # fmt: skip
    return _Work(order, first, extra, number, leaves, True)


def _node_products(x: Tensor, tree: Tree, count: Tensor | None, launch: Launch) -> Tensor:
    """Parts of the logits of the top of the tree; also clears the counters, if given."""
    from .triton_walk_kernels import node_products

    batch, features = x.shape
    columns = max(16, 1 << launch.top)
    k = min(launch.product_k, max(16, power_of_two(features)))
    span = -(-features // (launch.splits * k)) * k
    z = torch.empty(launch.splits, batch, columns, dtype=torch.float32, device=x.device)
    grid = -(-batch // launch.product_tile), -(-columns // launch.product_nodes), launch.splits
    launch_kernel(
        node_products, grid,
        x, tree.weight, z, z if count is None else count, batch, (1 << launch.top) - 1, span,
        0 if count is None else len(count),
        IN=features, COLUMNS=columns, BM=launch.product_tile, BN=launch.product_nodes, BK=k, EVEN=features % k == 0,
        STAGES=min(4, span // k), **launch_options(launch, 4),
    )  # fmt: skip
    return z


def _group(
    x: Tensor, z: Tensor | None, leaf: Tensor, tree: Tree | None, lists: tuple[Tensor, Tensor, Tensor] | None,
    activation: str, launch: Launch,
) -> None:  # fmt: skip
    """Fills in the leaf of each sample, given a tree; the lists of all leaves with their lengths, and extra tiles."""
    from .triton_walk_kernels import group

    listed, count, extra = lists or (leaf, leaf, leaf)
    leaves, most = (len(count) - 1, extra.shape[1]) if lists else (0, 0)
    splits = 0 if z is None else len(z)
    launch_kernel(
        group, (-(-len(x) // launch.tile),),
        x, x if z is None else z, *node_tensors(x, tree), leaf, listed, count, extra, len(x), leaves, most,
        IN=x.shape[1], DEPTH=depth_of(tree), N=node_width(tree), ACT=function_name(activation), ROUTE=tree is not None,
        LIST=lists is not None, CLEARED=lists is not None and z is None and _walks_early(x, tree, launch),
        TOP=launch.top if tree is not None else 0,
        SPLITS=splits, BM=launch.tile,
        BK=min(launch.group_k, max(16, power_of_two(x.shape[1]))), BLOCK=512 // x.element_size(),
        KEPT=fits(x, launch.tile * x.shape[1], launch.group_warps),
        LISTED=launch.per * launch.leaf_tile if lists else 0, LEAF_TILE=launch.leaf_tile if lists else 1,
        **launch_options(launch, launch.group_warps),
    )  # fmt: skip


def _walks_early(x: Tensor, tree: Tree | None, launch: Launch) -> bool:
    """Whether `group` may read before it waits. Copies of less than 16 bytes go through the first-level cache."""
    tensors = [x] if tree is None else [x, tree.weight]
    aligned = all(t.data_ptr() % 16 == 0 for t in tensors) and x.shape[1] * x.element_size() % 16 == 0
    return launch.pdl and aligned


def _leaf_tiles(x: Tensor, work: _Work, leaves: Leaves, activation: str, launch: Launch) -> Tensor:
    from .triton_group_kernels import leaf_tiles

    features, width, out = x.shape[1], *leaves.out_weight.shape[1:]
    y = x.new_empty(len(x), out)
    k = min(launch.k, max(16, power_of_two(features)))
    most = work.extra.shape[1]
    launch_kernel(
        leaf_tiles, (work.most_tiles(launch),),
        x, *leaf_tensors(x, leaves), *work.arguments(), y, len(x), work.leaves, most,
        IN=features, L=width, OUT=out, **leaf_options(leaves, activation), PRECISION=precision(x, width),
        PER=launch.per, SORTED=work.is_sorted, BM=launch.leaf_tile, BL=max(16, power_of_two(width)), BK=k,
        BN=min(launch.n, max(16, power_of_two(out))), EVEN=features % k == 0, STAGES=launch.stages,
        **launch_options(launch, launch.leaf_warps),
    )  # fmt: skip
    return y


def _spread_tiles(x: Tensor, work: _Work, leaves: Leaves, activation: str, launch: Launch) -> Tensor:
    from .triton_group_kernels import group_hidden, group_output

    features, width, out = x.shape[1], *leaves.out_weight.shape[1:]
    hidden = x.new_empty(len(x), -(-width // 16) * 16)  # rows that begin at multiples of 16 bytes
    y = x.new_empty(len(x), out)
    most = work.extra.shape[1]
    k = min(launch.k, max(16, power_of_two(features)))
    j = min(launch.out_k, max(16, power_of_two(width)))
    n = min(launch.n, max(16, power_of_two(out)))
    weights = leaf_tensors(x, leaves)
    options = leaf_options(leaves, activation)
    has_out_bias = options.pop("OUT_BIAS")
    common = {
        "L": width, "ROW": hidden.shape[1], "PRECISION": precision(x, width), "PER": launch.per,
        "SORTED": work.is_sorted, "BM": launch.leaf_tile, **launch_options(launch, launch.leaf_warps),
    }  # fmt: skip
    tiles, blocks = work.most_tiles(launch), -(-width // launch.block)
    launch_kernel(
        group_hidden, (tiles * blocks,),
        x, *weights[:6], weights[8], *work.arguments(), hidden, len(x), work.leaves, most, blocks,
        IN=features, **options, **common, BL=launch.block, BK=k, EVEN=features % k == 0, STAGES=launch.stages,
    )  # fmt: skip
    one = width <= j
    span = max(n, launch.span) if one else n
    blocks = -(-out // span)
    launch_kernel(
        group_output, (tiles * blocks,),
        weights[6], weights[7], *work.arguments(), hidden, y, len(x), work.leaves, most, blocks, span,
        OUT=out, OUT_BIAS=has_out_bias, INT8=leaves.is_int8, **common, BJ=j, BN=n,
        EVEN=width % j == 0 and out % n == 0, ONE=one, STAGES=launch.out_stages,
    )  # fmt: skip
    return y
