"""One leaf per sample with gradients, as segments.py, on a GPU: how its Triton kernels are launched.

Samples are sorted by leaf once. Inputs and outputs stay where they are: kernels gather and scatter their rows. Each
linear layer then has three products: its own, and in backward the rows' gradient and the leaves'.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._torch import in_eager
from ..activations import Activation, apply
from ..tensors import Leaves, sparse_rows
from ..validate import check_allocated
from . import segments
from .choice import attempt
from .reference import input_pairs
from .triton_arguments import precision, stored
from .triton_launch import launch_kernel
from .triton_size import power_of_two

_PROGRAMS = 8 * 132  # of a gradient: enough for every multiprocessor of an H200


class Groups(NamedTuple):
    """The samples by leaf."""

    leaf: Tensor  # (batch,) int32: sorted
    order: Tensor  # (batch,) int64: the sample at each place
    end: Tensor  # (batch,) int32: where the samples of the place's leaf end


def group(leaf: Tensor, leaves: int) -> Groups:
    """Sorted by leaf; samples of a leaf keep their order, so that sums are the same at every run."""
    # A radix sort passes over the bits of its keys.
    key, order = leaf.to(torch.int16 if leaves <= 2**15 else torch.int32).sort(stable=True)
    return Groups(key.int(), order, ends(key))


def ends(leaf: Tensor) -> Tensor:
    """For each place in a sorted list of leaves: where its leaf ends."""
    return torch.searchsorted(leaf, leaf, right=True, out_int32=True)


def visit(x: Tensor, leaf: Tensor, leaves: Leaves, activation: Activation, dropout: float, sparse: bool) -> Tensor:
    """As `segments.visit`."""
    for name, part in leaves._asdict().items() if in_eager() else ():
        if part is not None:  # the kernels would read memory that was freed
            check_allocated(f"leaves.{name}", part)
    groups = group(leaf, len(leaves.in_weight))
    x = stored(x)
    first = (_linear(x, weight, bias, groups, True, sparse) for weight, bias in input_pairs(leaves))
    hidden = apply(activation, *first)  # (batch, l), in the order of the leaves
    hidden = F.dropout(hidden, dropout) if dropout else hidden
    return _linear(hidden, leaves.out_weight, leaves.out_bias, groups, False, sparse)


def _linear(
    rows: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups, transposed: bool, sparse: bool
) -> Tensor:
    return _Linear.apply(rows, weight, bias, *groups, transposed, sparse)  # type: ignore[no-untyped-call]


class _Linear(torch.autograd.Function):
    """Rows times the matrix of their leaf, plus its bias. `transposed`: as `leaf_product` has it."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        leaf: Tensor,
        order: Tensor,
        end: Tensor,
        transposed: bool,
        sparse: bool,
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, bias, leaf, order, end)
        ctx.transposed, ctx.sparse = transposed, sparse
        run = product if in_eager() else torch.ops.fastff.leaf_product
        return run(rows, weight, bias, leaf, order, transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        segments.refuse_second_derivative()
        rows, weight, bias, leaf, order, end = ctx.saved_tensors
        grad = stored(grad)
        d_rows = d_weight = d_bias = None
        if ctx.needs_input_grad[0]:
            run = product if in_eager() else torch.ops.fastff.leaf_product
            d_rows = run(grad, weight, None, leaf, order, not ctx.transposed)
        if ctx.needs_input_grad[1] or (bias is not None and ctx.needs_input_grad[2]):
            first, second = (grad, rows) if ctx.transposed else (rows, grad)
            sums = "none" if bias is None else "first" if ctx.transposed else "second"
            if ctx.sparse and in_eager():
                used, place = leaf.unique_consecutive(return_inverse=True)
                found = outer(first, second, place.int(), order, end, len(used), sums)
                d_weight, d_bias = (sparse_rows(used.long(), values, len(weight)) for values in found)
            else:
                run_outer = outer if in_eager() else torch.ops.fastff.leaf_outer
                d_weight, d_bias = run_outer(first, second, leaf, order, end, len(weight), sums)
        return d_rows, d_weight, None if bias is None else d_bias, *[None] * 5


def product(
    rows: Tensor, weight: Tensor, bias: Tensor | None, leaf: Tensor, order: Tensor | None, transposed: bool
) -> Tensor:
    """Each row times its leaf's matrix, plus its bias: see `leaf_product`. No order: all follows the leaves."""

    def by_torch() -> Tensor:
        given = rows if order is None or not transposed else rows.index_select(0, order)
        y = segments.product(given, weight, leaf.long(), transposed)
        y = y if bias is None else y.add_(bias.index_select(0, leaf.long()))
        return y if order is None or transposed else torch.empty_like(y).index_copy_(0, order, y)

    return attempt("product", lambda: _product(rows, weight, bias, leaf, order, transposed), by_torch, rows, weight)


def _product(
    rows: Tensor, weight: Tensor, bias: Tensor | None, leaf: Tensor, order: Tensor | None, transposed: bool
) -> Tensor:
    from .triton_segment_kernels import leaf_product

    rows, weight, bias, leaf = stored(rows), stored(weight), None if bias is None else stored(bias), leaf.int()
    batch, leaves = len(leaf), len(weight)
    n, k = weight.shape[1:] if transposed else weight.shape[:0:-1]
    out = rows.new_empty(batch, n)
    if not batch:
        return out
    wide = rows.element_size() == 4
    bm = 64 if batch >= 32 * leaves else 32 if batch >= 8 * leaves else 16
    bn = min(64 if wide or k <= 128 else 128, max(16, power_of_two(n)))
    bk = min(32 if wide else 64, max(16, power_of_two(k)))
    blocks = -(-n // bn)
    with torch.cuda.device_of(rows):
        launch_kernel(
            leaf_product, (-(-batch // bm) * blocks,),
            rows, weight, weight if bias is None else bias, leaf, leaf if order is None else order, out, batch, blocks,
            leaves,
            K=k, N=n, TRANSPOSED=transposed, ORDERED=order is not None, BIAS=bias is not None,
            PRECISION=precision(rows, n), BM=bm, BN=bn, BK=bk, EVEN=k % bk == 0, STAGES=min(4, -(-k // bk)),
            num_warps=4,
        )  # fmt: skip
    return out


def outer(
    first: Tensor, second: Tensor, leaf: Tensor, order: Tensor | None, end: Tensor, leaves: int, sums: str
) -> tuple[Tensor, Tensor]:
    """The outer products of the rows of each leaf, added up: (leaves, a, b); and the sums of the rows `sums` names.

    first (batch, a) is in the order of the leaves, second (batch, b) in the order of the batch if `order` is given.
    """

    def by_torch() -> tuple[Tensor, Tensor]:
        rows = second if order is None else second.index_select(0, order)
        found = segments.outer(first, rows, leaf.long(), leaves)
        added = {"none": first[:, :0], "first": first, "second": rows}[sums].float()
        total = added.new_zeros(leaves, added.shape[1]).index_add_(0, leaf.long(), added)
        return found, total.to(first.dtype)

    kernels = lambda: _outer(first, second, leaf, order, end, leaves, sums)  # noqa: E731 (one call)
    return attempt("outer", kernels, by_torch, first, second)


def _outer(
    first: Tensor, second: Tensor, leaf: Tensor, order: Tensor | None, end: Tensor, leaves: int, sums: str
) -> tuple[Tensor, Tensor]:
    from .triton_segment_kernels import leaf_outer

    first, second, leaf = stored(first), stored(second), leaf.int()
    batch, (a, b) = len(leaf), (first.shape[1], second.shape[1])
    out = first.new_zeros(leaves, a, b)
    bias = first.new_zeros(leaves, {"none": 0, "first": a, "second": b}[sums])
    if not batch:
        return out, bias
    wide, few = first.element_size() == 4, batch < 8 * leaves
    ba = min(64 if a > 32 and not few else 32, max(16, power_of_two(a)))
    bb = min(64 if wide else 256 if few else 128, max(16, power_of_two(b)))
    blocks = -(-a // ba), -(-b // bb)
    span, chunks, part = spans(batch, blocks[0] * blocks[1], a * b + bias.shape[1], first)
    with torch.cuda.device_of(first):
        launch_kernel(
            leaf_outer, (chunks * blocks[0] * blocks[1],),
            first, second, leaf, end, leaf if order is None else order, out, bias, part, batch, span, *blocks,
            A=a, B=b, ORDERED=order is not None, FIRST_BIAS=sums == "first", SECOND_BIAS=sums == "second",
            PRECISION=sum_precision(first), BA=ba, BB=bb, BR=16 if few else 32, STAGES=2, num_warps=4,
        )  # fmt: skip
        add_up(part, leaf, out, bias, batch, span, chunks)
    return out, bias


def sum_precision(x: Tensor) -> str:
    """How a sum over samples multiplies float32 numbers: it may be short, so in three parts (see `precision`)."""
    return "bf16x6" if x.dtype == torch.float32 and not x.is_cpu else "ieee"


def spans(batch: int, columns: int, numbers: int, like: Tensor) -> tuple[int, int, Tensor]:
    """How many places a program of a sum takes, how many such spans there are, and room for their parts.

    The wider the result, the longer the spans: the room is about 2 * _PROGRAMS blocks of the result in any case. One
    span has no parts.
    """
    span = max(64, power_of_two(-(-batch * columns // _PROGRAMS)))
    chunks = -(-batch // span)
    return span, chunks, torch.empty(2 * chunks * numbers if chunks > 1 else 0, dtype=torch.float32, device=like.device)


def add_up(
    part: Tensor, leaf: Tensor, out: Tensor, bias: Tensor, batch: int, span: int, chunks: int, depth: int = 0
) -> None:
    """Add up the parts of leaves or, given a depth, of nodes, whose samples lie in several spans."""
    from .triton_segment_kernels import add_parts

    if chunks == 1:
        return
    size = out[0].numel()
    sums = bias.numel() // len(bias)
    block = min(1024, power_of_two(size + sums))
    blocks = -(-(size + sums) // block)
    levels = max(16, power_of_two(depth)) if depth else 0
    launch_kernel(
        add_parts, (chunks * max(levels, 1) * blocks,),
        part, leaf, out, bias, batch, span, chunks, blocks,
        DEPTH=depth, LEVELS=levels, SIZE=size, SUMS=sums, BLOCK=block, MANY=8, num_warps=4,
    )  # fmt: skip
