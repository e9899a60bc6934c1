"""One leaf per sample, with gradients: a leaf's rows lie together, and each visited leaf is read once.

    product(rows, weight, leaf)[b] = rows[b] @ weight[leaf[b]]                    (batch, b)
    outer(first, second, leaf)[j]  = sum over b with leaf[b] = j of first[b]^T second[b]     (leaves, a, b)

`leaf` is sorted. The two are each other's derivatives, and all that a leaf needs: nothing has the size (batch, leaves),
and unvisited leaves are not touched. A gradient is dense, or sparse over the leaves (COO, as in
nn.Embedding(sparse=True)): then it has the size of the visited leaves only.

Each leaf is one call of torch.mm, which reads rows and weights in place. A compiler sees each loop as one registered
operation (ops.py), since it cannot know the number of rows of a leaf.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._torch import in_eager
from ..activations import Activation, apply
from ..tensors import Leaves, at_least_float32, sparse_rows
from . import triton_training
from .reference import input_pairs


def visit(
    x: Tensor, leaf: Tensor, leaves: Leaves, activation: Activation, dropout: float = 0.0, sparse: bool = False
) -> Tensor:
    """The output of one leaf per sample, as `reference.visit`; with dropout on the hidden layer: (batch, out)."""
    if triton_training.takes(activation, x, *leaves):
        from . import triton_segments  # which imports this file

        return triton_segments.visit(x, leaf, leaves, activation, dropout, sparse)
    leaf, order = leaf.sort(stable=True)
    rows = x.index_select(0, order)
    first = (linear(rows, weight, bias, leaf, True, sparse) for weight, bias in input_pairs(leaves))
    hidden = apply(activation, *first)  # (batch, l)
    hidden = F.dropout(hidden, dropout) if dropout else hidden
    y = linear(hidden, leaves.out_weight, leaves.out_bias, leaf, False, sparse)
    return y.index_select(0, order.argsort())


def product(rows: Tensor, weight: Tensor, leaf: Tensor, transposed: bool) -> Tensor:
    """Each row times the matrix of its leaf, or times the transposed matrix; leaf is sorted."""
    columns = weight.shape[1] if transposed else weight.shape[2]
    out = rows.new_empty(rows.shape[0], columns)
    used, counts = _counts(leaf)
    for j, part, to in zip(used.tolist(), rows.split(counts), out.split(counts), strict=True):
        torch.mm(part, weight[j].mT if transposed else weight[j], out=to)
    return out


def outer(first: Tensor, second: Tensor, leaf: Tensor, leaves: int) -> Tensor:
    """The sum of the outer products of the rows of each leaf: (leaves, a, b); leaf is sorted."""
    used, counts = _counts(leaf)
    out = (torch.empty if len(used) == leaves else torch.zeros)(
        leaves, first.shape[1], second.shape[1], dtype=first.dtype, device=first.device
    )
    _outer_into(first, second, used.tolist(), counts, out)
    return out


def outer_of_visited(first: Tensor, second: Tensor, leaf: Tensor, leaves: int) -> Tensor:
    """`outer` as a sparse tensor of the leaves that have rows."""
    used, counts = _counts(leaf)
    values = first.new_empty(len(used), first.shape[1], second.shape[1])
    _outer_into(first, second, range(len(used)), counts, values)
    return sparse_rows(used, values, leaves)


def scatter_rows(
    like: Tensor, index: Tensor, rows: Callable[[int], Tensor], dtype: torch.dtype, sparse: bool = False
) -> Tensor:
    """Rows summed in a tensor like `like`, at index (batch, k): rows(m) belongs to index[:, m]. Sums are `dtype`."""
    used, at = index.unique(return_inverse=True) if sparse else (None, index)
    total = torch.zeros(len(like if used is None else used), *like.shape[1:], dtype=dtype, device=like.device)
    for m, column in enumerate(at.unbind(1)):
        total.index_add_(0, column, rows(m))
    total = total.to(like.dtype)
    return total if used is None else sparse_rows(used, total, len(like))


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None, leaf: Tensor, transposed: bool, sparse: bool) -> Tensor:
    """product + bias[leaf], with a gradient."""
    return _Linear.apply(rows, weight, bias, leaf, transposed, sparse)  # type: ignore[no-untyped-call]


def refuse_second_derivative(of: str = 'decision="sampled"', instead: str = 'decision="straight_through"') -> None:
    """Raise in a backward pass with create_graph=True, if nothing records that pass's operations."""
    if in_eager() and torch.is_grad_enabled():
        raise RuntimeError(f"{of} has no second derivative. Use {instead}, or no create_graph=True.")


class _Linear(torch.autograd.Function):
    """product + bias[leaf]."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, leaf: Tensor, transposed: bool, sparse: bool
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, bias, leaf)
        ctx.transposed, ctx.sparse = transposed, sparse
        y = _product(rows, weight, leaf, transposed)
        return y if bias is None else y.add_(bias.index_select(0, leaf))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        rows, weight, bias, leaf = ctx.saved_tensors
        d_rows = d_weight = d_bias = None
        if ctx.needs_input_grad[0]:
            d_rows = _product(grad, weight, leaf, not ctx.transposed)
        if ctx.needs_input_grad[1]:
            first, second = (grad, rows) if ctx.transposed else (rows, grad)
            sparse = ctx.sparse and in_eager()
            d_weight = (outer_of_visited if sparse else _outer)(first, second, leaf, weight.shape[0])
        if bias is not None and ctx.needs_input_grad[2]:
            wide = at_least_float32(grad.dtype)
            d_bias = scatter_rows(bias, leaf.unsqueeze(1), lambda _: grad.to(wide), wide, ctx.sparse and in_eager())
        return d_rows, d_weight, d_bias, None, None, None


def _product(rows: Tensor, weight: Tensor, leaf: Tensor, transposed: bool) -> Tensor:
    call = product if in_eager() else torch.ops.fastff.segment_product
    return call(rows, weight, leaf, transposed)


def _outer(first: Tensor, second: Tensor, leaf: Tensor, leaves: int) -> Tensor:
    call = outer if in_eager() else torch.ops.fastff.segment_outer
    return call(first, second, leaf, leaves)


def _counts(leaf: Tensor) -> tuple[Tensor, list[int]]:
    """The leaves with rows, and how many rows."""
    used, counts = leaf.unique_consecutive(return_counts=True)
    return used, counts.tolist()


def _outer_into(first: Tensor, second: Tensor, places: Any, counts: list[int], out: Tensor) -> None:
    for j, a, b in zip(places, first.split(counts), second.split(counts), strict=True):
        torch.mm(a.mT, b, out=out[j])
