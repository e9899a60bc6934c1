"""Walks through the tree and logits along paths, as paths.py, on a GPU: how their Triton kernels are launched."""

from typing import Any

import torch
from torch import Tensor

from .. import tree as heap
from .._torch import in_eager
from ..tensors import Tree, sparse_rows
from . import paths
from .choice import attempt
from .segments import refuse_second_derivative
from .triton_arguments import function_name, node_tensors, node_width, stored
from .triton_launch import launch_kernel
from .triton_segments import add_up, group, part_stride, spans, sum_precision
from .triton_size import power_of_two

_TILE = 16  # samples that walk together
_KEPT = 2048  # bytes: inputs that stay in registers. With 3072, walks spill others.


def descend(
    x: Tensor, tree: Tree, activation: str, node: Tensor, threshold: Tensor | None, swap: Tensor | None
) -> Tensor:
    """As `paths.descend`."""
    if not in_eager():
        return torch.ops.fastff.walk_from(x, *tree, node, threshold, swap, activation)
    return walk_from(x, *tree, node, threshold, swap, activation)


def walk_from(
    x: Tensor,
    node_weight: Tensor,
    node_bias: Tensor,
    node_out_weight: Tensor | None,
    node_out_bias: Tensor | None,
    node: Tensor,
    threshold: Tensor | None,
    swap: Tensor | None,
    activation: str,
) -> Tensor:
    """`descend`, with the tensors of the tree."""
    tree = Tree(node_weight, node_bias, node_out_weight, node_out_bias)

    def by_torch() -> Tensor:
        return paths.descend_by_torch(x, tree, activation, node, threshold, swap)

    return attempt("walk", lambda: _walk_from(x, tree, activation, node, threshold, swap), by_torch, x, node_weight)


def _walk_from(
    x: Tensor, tree: Tree, activation: str, node: Tensor, threshold: Tensor | None, swap: Tensor | None
) -> Tensor:
    from .triton_path_kernels import walk_from

    x, node = stored(x), node.contiguous()
    depth, leaf = heap.depth_of(len(tree.weight) + 1), torch.empty(len(x), dtype=torch.int64, device=x.device)
    if not len(x):
        return leaf
    with torch.cuda.device_of(x):
        launch_kernel(
            walk_from, (-(-len(x) // _TILE),),
            x, *map(stored, node_tensors(x, tree)), node, x if threshold is None else stored(threshold.float()),
            x if swap is None else swap.contiguous(), leaf, len(x),
            IN=x.shape[1], DEPTH=depth, N=node_width(tree), ACT=function_name(activation),
            THRESHOLD=threshold is not None, SWAP=swap is not None, **walk_options(x),
        )  # fmt: skip
    return leaf


def walk_options(x: Tensor) -> dict[str, Any]:
    kept = x.shape[1] * x.element_size() <= _KEPT
    return {"BM": _TILE, "BLOCK": 512 // x.element_size(), "KEPT": kept, "num_warps": 4}


def logits_to(x: Tensor, leaf: Tensor, tree: Tree, sparse: bool) -> Tensor:
    """As `paths.logits_to`, for nodes of width 1 and trees that have some."""
    x, groups = stored(x), group(leaf, len(tree.weight) + 1)
    return _Logits.apply(x, *groups, tree.weight, tree.bias, sparse)  # type: ignore[no-untyped-call]


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, leaf: Tensor, order: Tensor, end: Tensor, weight: Tensor, bias: Tensor, sparse: bool
    ) -> Tensor:
        ctx.save_for_backward(x, leaf, order, end, weight)
        ctx.sparse = sparse
        run = path_logits if in_eager() else torch.ops.fastff.path_logits
        return run(x, leaf, order, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        x, leaf, order, end, weight = ctx.saved_tensors
        grad = stored(grad)
        d_x = d_weight = d_bias = None
        if ctx.needs_input_grad[0]:
            run = path_inputs if in_eager() else torch.ops.fastff.path_inputs
            d_x = run(grad, leaf, order, weight)
        if ctx.needs_input_grad[4] or ctx.needs_input_grad[5]:
            run_outer = path_outer if in_eager() else torch.ops.fastff.path_outer
            d_weight, d_bias = run_outer(x, grad, leaf, order, end, weight)
            if ctx.sparse and in_eager():
                d_weight, d_bias = of_visited(leaf, d_weight, d_bias)
        return d_x, None, None, None, d_weight, d_bias, None


def node_sums(values: Tensor, leaf: Tensor) -> Tensor:
    """As `paths.node_sums`, always in the same order. (index_add sums on a GPU in any order, one sample at a time.)"""
    groups = group(leaf, heap.num_leaves(values.shape[1]))
    return torch.cat([_NodeSum.apply(part, leaf, *groups) for part in values.unbind(2)], 1)  # type: ignore[no-untyped-call]


class _NodeSum(torch.autograd.Function):
    """One number for each level of a path: (batch, depth) to (nodes, 1)."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, leaf: Tensor, group: Tensor, order: Tensor, end: Tensor) -> Tensor:
        ctx.save_for_backward(leaf)
        ctx.depth = values.shape[1]
        run = path_outer if in_eager() else torch.ops.fastff.path_outer
        like = values.new_empty(heap.num_nodes(ctx.depth), 1)
        found: Tensor = run(values.new_ones(len(values), 1), values, group, order, end, like)[0]
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (leaf,) = ctx.saved_tensors
        return grad[:, 0][paths.nodes(leaf, ctx.depth)], None, None, None, None


def path_logits(x: Tensor, leaf: Tensor, order: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The logits on the path to each leaf: (batch, depth) float32, in the order of the batch."""

    def by_torch() -> Tensor:
        node = paths.nodes(_by_sample(leaf, order), heap.depth_of(len(weight) + 1))
        return paths.logits(x, node, Tree(weight, bias), "identity")

    return attempt("logits", lambda: _path_logits(x, leaf, order, weight, bias), by_torch, x, weight)


def _path_logits(x: Tensor, leaf: Tensor, order: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    from .triton_path_kernels import path_logits

    x, weight, bias = stored(x), stored(weight), stored(bias)
    batch, depth = len(x), heap.depth_of(len(weight) + 1)
    z = torch.empty(batch, depth, dtype=torch.float32, device=x.device)
    if batch:
        with torch.cuda.device_of(x):
            launch_kernel(
                path_logits, (-(-batch // _TILE),), x, weight, bias, leaf, order, z, batch,
                IN=x.shape[1], DEPTH=depth, **walk_options(x),
            )  # fmt: skip
    return z


def path_inputs(grad: Tensor, leaf: Tensor, order: Tensor, weight: Tensor) -> Tensor:
    """The gradient of x, given the logits' gradient."""

    def by_torch() -> Tensor:
        x = weight.new_empty(len(grad), weight.shape[1])
        node = paths.nodes(_by_sample(leaf, order), grad.shape[1])
        return paths.gradients(x, node, weight, weight[:, 0], grad, (True, False, False))[0]  # type: ignore[return-value]

    return attempt("input gradient", lambda: _path_inputs(grad, leaf, order, weight), by_torch, grad, weight)


def _path_inputs(grad: Tensor, leaf: Tensor, order: Tensor, weight: Tensor) -> Tensor:
    from .triton_path_kernels import path_inputs

    grad, weight = stored(grad), stored(weight)
    (batch, depth), features = grad.shape, weight.shape[1]
    out = weight.new_empty(batch, features)
    if batch:
        columns = min(256, max(16, power_of_two(features)))
        blocks = -(-features // columns)
        with torch.cuda.device_of(weight):
            launch_kernel(
                path_inputs, (-(-batch // _TILE) * blocks,), weight, grad, leaf, order, out, batch, blocks,
                IN=features, DEPTH=depth, BM=_TILE, BN=columns, num_warps=4,
            )  # fmt: skip
    return out


def path_outer(
    x: Tensor, grad: Tensor, leaf: Tensor, order: Tensor, end: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of the nodes' weights and biases, given the logits' gradient.

    Place p has row order[p] of the gradient, and row order[p] % batch of x (batch, in).
    """

    def by_torch() -> tuple[Tensor, Tensor]:
        node = paths.nodes(leaf, grad.shape[1])
        rows = x.index_select(0, order % len(x)), node, weight, weight[:, 0], grad.index_select(0, order)
        return paths.gradients(*rows, (False, True, True))[1:]  # type: ignore[return-value]

    return attempt("node gradient", lambda: _path_outer(x, grad, leaf, order, end, weight), by_torch, x, weight)


def _path_outer(
    x: Tensor, grad: Tensor, leaf: Tensor, order: Tensor, end: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    from .triton_path_kernels import path_outer

    x, grad = stored(x), stored(grad)
    batch, depth, features = len(leaf), grad.shape[1], weight.shape[1]
    out, bias = weight.new_zeros(weight.shape), weight.new_zeros(len(weight))
    if not batch:
        return out, bias
    levels, columns = max(16, power_of_two(depth)), min(256 // x.element_size(), max(16, power_of_two(features)))
    blocks = -(-features // columns)
    stride = part_stride(features + 1)
    span, chunks, part = spans(batch, blocks, levels * stride, x)
    with torch.cuda.device_of(x):
        launch_kernel(
            path_outer, (chunks * blocks,),
            x, grad, leaf, end, order, out, bias, part, batch, len(x), span, blocks,
            IN=features, DEPTH=depth, LEVELS=levels, STRIDE=stride, PRECISION=gradient_precision(x), BR=16,
            BN=columns, STAGES=2, num_warps=4,
        )  # fmt: skip
        add_up(part, leaf, out, bias, batch, span, chunks, depth)
    return out, bias


def of_visited(leaf: Tensor, *gradients: Tensor) -> list[Tensor]:
    """These gradients (nodes, ...) as sparse tensors of the nodes above these leaves."""
    count = len(gradients[0])
    seen = torch.zeros(count, dtype=torch.bool, device=leaf.device)
    used = seen.index_fill_(0, paths.nodes(leaf, heap.depth_of(count + 1)).flatten(), True).nonzero().squeeze(1)
    return [sparse_rows(used, t.index_select(0, used), count) for t in gradients]


def gradient_precision(x: Tensor) -> str:
    """How a float32 gradient of logits meets numbers of x's dtype: 16 bits as TF32, which has all of them."""
    return "tf32" if x.element_size() == 2 and not x.is_cpu else sum_precision(x)


def _by_sample(leaf: Tensor, order: Tensor) -> Tensor:
    """Sorted leaves in the order of the batch."""
    return torch.empty_like(leaf).index_copy_(0, order, leaf)
