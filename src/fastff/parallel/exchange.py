"""Rows go to the rank that holds their leaf, and the outputs come back.

Each rank holds the same number of leaves, in order: leaf j is on rank j // own. One call of `at_owner` makes four
all-to-alls: the number of rows, the leaves' numbers, the rows, and the outputs. Backward makes one for the outputs'
gradient and, if needed, one for the rows'. All ranks must call `at_owner`, with any number of rows, even none.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ranks import Ranks
from ..tensors import Leaves

Run = Callable[[Tensor, Tensor, Leaves], Tensor]  # rows (rows, in), their leaves (rows,), the leaves here


def at_owner(ranks: Ranks, x: Tensor, leaf: Tensor, leaves: Leaves, run: Run) -> Tensor:
    """run(rows, leaf, leaves) on the leaves' (DTensors) ranks; `leaf` (batch,) counts over all: (batch, out).

    Leaves get the mean of their gradients over the ranks, as other parameters do from DistributedDataParallel.
    """
    size = ranks.size
    here = _here(leaves, size)
    own = len(here.in_weight)
    order = leaf.argsort(stable=True)
    sent = (leaf // own).bincount(minlength=size)
    arriving = torch.empty_like(sent)
    dist.all_to_all_single(arriving, sent, group=ranks.group)
    send, receive = sent.tolist(), arriving.tolist()
    number = exchange(leaf.index_select(0, order), send, receive, ranks.group) % own
    rows = exchange(x.index_select(0, order), send, receive, ranks.group)
    y = exchange(run(rows, number, here), receive, send, ranks.group)
    return y.index_select(0, order.argsort())


def exchange(rows: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:
    """Send the first send[0] rows to the first rank, and so on. Returns the rows received, by rank. Differentiable."""
    return _Exchange.apply(rows, send, receive, group)  # type: ignore[no-untyped-call]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _all_to_all(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(grad, ctx.receive, ctx.send, ctx.group), None, None, None


def _all_to_all(rows: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:
    out = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
    return out


def _here(leaves: Leaves, size: int) -> Leaves:
    """This rank's leaves."""
    return Leaves._make(None if t is None else _Mean.apply(t.to_local(), size) for t in leaves)  # type: ignore[attr-defined, no-untyped-call]


class _Mean(torch.autograd.Function):
    """The same tensor; its gradient, a sum over the rows of all ranks, becomes a mean over the ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, size: int) -> Tensor:
        ctx.size = size
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.size, None
