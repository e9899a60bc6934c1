"""One leaf per sample with gradients, as segments.py, on a GPU: how its Triton kernels are launched.

Samples are sorted by leaf once. Inputs and outputs stay where they are: kernels gather and scatter their rows. Each
linear layer then has three products: its own, and in backward the rows' gradient and the leaves'.
"""

from collections.abc import Sequence
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

_PROGRAMS = 4 * 132  # of a gradient: enough for every multiprocessor of an H200
_SHORT = 128  # neurons of a leaf that stay in registers


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
    first = (linear(x, weight, bias, groups, True, sparse) for weight, bias in input_pairs(leaves))
    hidden = apply(activation, *first)  # (batch, l), in the order of the leaves
    hidden = F.dropout(hidden, dropout) if dropout else hidden
    return linear(hidden, leaves.out_weight, leaves.out_bias, groups, False, sparse)


def linear(
    rows: Tensor, weight: Tensor, bias: Tensor | None, groups: Sequence[Tensor], transposed: bool, sparse: bool
) -> Tensor:
    """Rows times the matrix of their leaf, plus its bias, with a gradient. `transposed`: as `leaf_product` has it.

    With more groups than rows (transposed), rows go round several times, and the first time alone has a gradient.
    """
    return _Linear.apply(rows, weight, bias, *groups, transposed, sparse)  # type: ignore[no-untyped-call]


class _Linear(torch.autograd.Function):
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
        count = len(rows) if ctx.transposed else len(leaf)
        grad, leaf, order, end = stored(grad)[:count], leaf[:count], order[:count], end[:count]
        d_rows = d_weight = d_bias = None
        if ctx.needs_input_grad[0]:
            run = product if in_eager() else torch.ops.fastff.leaf_product
            d_rows = run(grad, weight, None, leaf, order, not ctx.transposed)
        if ctx.needs_input_grad[1] or (bias is not None and ctx.needs_input_grad[2]):
            first, second = (grad, rows) if ctx.transposed else (rows, grad)
            sums = "none" if bias is None else "first" if ctx.transposed else "second"
            d_weight, d_bias = weight_gradients(first, second, leaf, order, end, len(weight), sums, ctx.sparse)
        return d_rows, d_weight, None if bias is None else d_bias, *[None] * 5


def weight_gradients(
    first: Tensor, second: Tensor, leaf: Tensor, order: Tensor, end: Tensor, leaves: int, sums: str, sparse: bool
) -> tuple[Tensor, Tensor]:
    """As `outer`; sparse tensors if wanted, unless a compiler runs."""
    if not (sparse and in_eager()):
        run = outer if in_eager() else torch.ops.fastff.leaf_outer
        found: tuple[Tensor, Tensor] = run(first, second, leaf, order, end, leaves, sums)
        return found
    used, place = leaf.unique_consecutive(return_inverse=True)
    values = outer(first, second, place.int(), order, end, len(used), sums)
    return sparse_rows(used.long(), values[0], leaves), sparse_rows(used.long(), values[1], leaves)


def product(
    rows: Tensor, weight: Tensor, bias: Tensor | None, leaf: Tensor, order: Tensor | None, transposed: bool
) -> Tensor:
    """Each row times its leaf's matrix, plus its bias: see `leaf_product`. No order: all follows the leaves."""

    def by_torch() -> Tensor:
        given = rows if order is None or not transposed else rows.index_select(0, order % len(rows))
        y = segments.product(given, weight, leaf.long(), transposed)
        y = y if bias is None else y.add_(bias.index_select(0, leaf.long()))
        return y if order is None or transposed else torch.empty_like(y).index_copy_(0, order, y)

    return attempt("product", lambda: _product(rows, weight, bias, leaf, order, transposed), by_torch, rows, weight)


def credit(
    grad: Tensor, weight: Tensor, bias: Tensor | None, hidden: Tensor, leaf: Tensor, order: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of the hidden neurons (entries, l), and the product of grad (batch, out) with each entry's output.

    The leaf's matrix is (l, out). The output is hidden @ matrix + bias; it is not computed. Entries lie in the order
    of their leaves; the products are in the order of the batch, which goes round several times: (entries,) float32.
    """

    def by_torch() -> tuple[Tensor, Tensor]:
        rows = grad.index_select(0, order % len(grad))
        found = segments.product(rows, weight, leaf.long(), True)
        dots = (found.float() * hidden.float()).sum(1)
        if bias is not None:
            dots += (rows.float() * bias.index_select(0, leaf.long()).float()).sum(1)
        return found, torch.empty_like(dots).index_copy_(0, order, dots)

    return attempt("credit", lambda: _credit(grad, weight, bias, hidden, leaf, order), by_torch, grad, weight)


def _credit(
    grad: Tensor, weight: Tensor, bias: Tensor | None, hidden: Tensor, leaf: Tensor, order: Tensor
) -> tuple[Tensor, Tensor]:
    found, parts = _launch_product(grad, weight, bias, leaf, order, True, stored(hidden))
    return found, parts[0] if len(parts) == 1 else parts.sum(0)


def _product(
    rows: Tensor, weight: Tensor, bias: Tensor | None, leaf: Tensor, order: Tensor | None, transposed: bool
) -> Tensor:
    if transposed or weight.shape[1] > _SHORT:
        return _launch_product(rows, weight, bias, leaf, order, transposed, None)[0]
    from .triton_segment_kernels import leaf_output

    rows, weight, bias, leaf = stored(rows), stored(weight), None if bias is None else stored(bias), leaf.int()
    batch, (leaves, k, n) = len(leaf), weight.shape
    out = rows.new_empty(batch, n)
    if not batch:
        return out
    many = batch >= 8 * leaves
    bm, places = (32, 32) if many else (16, min(16, power_of_two(max(1, 2 * batch // leaves))))
    bk = max(16, power_of_two(k))
    bn = min(64 if rows.element_size() == 4 or bk > 64 else 128, max(16, power_of_two(n)))
    span = bn * -(-n // (2 * bn))  # the columns in two parts
    spans = -(-n // span)
    with torch.cuda.device_of(rows):
        launch_kernel(
            leaf_output, (-(-batch // places) * spans,),
            rows, weight, weight if bias is None else bias, leaf, leaf if order is None else order, out, batch, span,
            spans, leaves, places,
            K=k, N=n, ORDERED=order is not None, BIAS=bias is not None, PRECISION=precision(rows, n), BM=bm, BN=bn,
            BK=bk, EVEN=k == bk and n % bn == 0, STAGES=3, num_warps=2 if bk <= 32 else 4,
        )  # fmt: skip
    return out


def _launch_product(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    leaf: Tensor,
    order: Tensor | None,
    transposed: bool,
    hidden: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The product; with `hidden`, also the parts of `credit`, for each block of columns."""
    from .triton_segment_kernels import leaf_product

    rows, weight, bias, leaf = stored(rows), stored(weight), None if bias is None else stored(bias), leaf.int()
    batch, leaves = len(leaf), len(weight)
    n, k = weight.shape[1:] if transposed else weight.shape[:0:-1]
    wide = rows.element_size() == 4
    many = batch >= 32 * leaves * (1 if hidden is None else 2)
    bm = 64 if many else 16
    bn = min(64 if wide or k <= 128 else 128, max(16, power_of_two(n)))
    bk = min(32 if wide else 64 if many else 128, max(16, power_of_two(k)))
    blocks = -(-n // bn)
    out = rows.new_empty(batch, n)
    parts = rows.new_empty(0 if hidden is None else blocks, batch, dtype=torch.float32)
    if not batch:
        return out, parts
    with torch.cuda.device_of(rows):
        launch_kernel(
            leaf_product, (-(-batch // bm) * blocks,),
            rows, weight, weight if bias is None else bias, leaf, leaf if order is None else order, out,
            out if hidden is None else hidden, parts if parts.numel() else out, batch, len(rows), blocks, leaves,
            K=k, N=n, TRANSPOSED=transposed, ORDERED=order is not None, BIAS=bias is not None,
            CREDIT=hidden is not None, PRECISION=precision(rows, n), BM=bm, BN=bn, BK=bk, EVEN=k % bk == 0,
            STAGES=min(3, -(-k // bk)), num_warps=4 if many or wide or bn > 64 else 2,
        )  # fmt: skip
    return out, parts


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
    from .triton_segment_kernels import clear_unvisited, leaf_outer

    first, second, leaf = stored(first), stored(second), leaf.int()
    batch, (a, b) = len(leaf), (first.shape[1], second.shape[1])
    make = first.new_empty if batch else first.new_zeros
    out, bias = make(leaves, a, b), make(leaves, {"none": 0, "first": a, "second": b}[sums])
    if not batch:
        return out, bias
    wide, few = first.element_size() == 4, batch < 32 * leaves
    ba = min(64 if a > 32 and not few else 32, max(16, power_of_two(a)))
    bb = min(64 if wide else 256 if few else 128, max(16, power_of_two(b)))
    blocks = -(-a // ba), -(-b // bb)
    stride = part_stride(a * b + bias.shape[1])
    span, chunks, part = spans(batch, blocks[0] * blocks[1], stride, first)
    with torch.cuda.device_of(first):
        launch_kernel(
            clear_unvisited, (leaves,), leaf, out, bias, batch,
            SIZE=a * b, SUMS=bias.shape[1], STEPS=power_of_two(batch + 1).bit_length(), BLOCK=1024, num_warps=4,
        )  # fmt: skip
        launch_kernel(
            leaf_outer, (chunks * blocks[0] * blocks[1],),
            first, second, leaf, end, leaf if order is None else order, out, bias, part, batch, span, *blocks,
            A=a, B=b, ORDERED=order is not None, FIRST_BIAS=sums == "first", SECOND_BIAS=sums == "second",
            STRIDE=stride, PRECISION=sum_precision(first), BA=ba, BB=bb, BR=16 if few else 32 if wide else 64,
            STAGES=2, num_warps=4,
        )  # fmt: skip
        add_up(part, leaf, out, bias, batch, span, chunks)
    return out, bias


def sum_precision(x: Tensor) -> str:
    """How a sum over samples multiplies float32 numbers: it may be short, so in three parts (see `precision`)."""
    return "bf16x6" if x.dtype == torch.float32 and not x.is_cpu else "ieee"


def part_stride(numbers: int) -> int:
    """The numbers from one part of a sum to the next.

    With rows of 97 floats, Triton 3.6 stores four floats at addresses that are no multiple of 16 bytes: it takes
    (16 * a + (0, 1, ...)) * 97 for a multiple of 16.
    """
    return -(-numbers // 32) * 32


def span_of(batch: int, columns: int) -> int:
    """How many places a program of a sum takes."""
    return max(64, power_of_two(-(-batch * columns // _PROGRAMS)))


def spans(batch: int, columns: int, numbers: int, like: Tensor) -> tuple[int, int, Tensor]:
    """How many places a program of a sum takes, how many such spans there are, and room for their parts.

    The wider the result, the longer the spans: the room is about 2 * _PROGRAMS blocks of the result in any case. One
    span has no parts.
    """
    span = span_of(batch, columns)
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
    block = min(256 if depth else 1024, power_of_two(size + sums))
    blocks = -(-(size + sums) // block)
    levels = max(16, power_of_two(depth)) if depth else 0
    launch_kernel(
        add_parts, (chunks * max(levels, 1) * blocks,),
        part, leaf, out, bias, batch, span, chunks, blocks,
        DEPTH=depth, LEVELS=levels, SIZE=size, SUMS=sums, STRIDE=part_stride(size + sums), BLOCK=block,
        MANY=8 if depth else 2, num_warps=4,
    )  # fmt: skip
