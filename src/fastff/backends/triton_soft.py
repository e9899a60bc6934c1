"""The soft pass on a GPU: two matrix products with one Triton kernel between them, and the same backwards.

The first product computes the hidden layers of all leaves and the logits of all nodes at once, x [leaf_in; node]^T; the
second applies [leaf_out; leaf_out_bias] to the weighted hidden layer and the mixture. What lies between, activation,
tree and weighting, is one kernel (`weigh`) that reads the one product and writes the operand of the other. A training
step has the six products of a dense layer, two kernels where that has two activations, and four copies of weights.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import tree as heap
from .._torch import in_eager
from ..activations import GATED
from ..tensors import Leaves, Soft, SoftOptions, Tree
from .request import Request
from .triton_arguments import function_name
from .triton_size import power_of_two

# A sample's leaves lie in the registers of one program.
_MOST_NEURONS = 8192


def why_not(request: Request) -> str:
    """Why these kernels cannot run a soft pass that suits a GPU's dtype and activation; empty if they can."""
    leaves = request.leaves
    if request.tree is None or request.tree.out_weight is not None or leaves is None:
        return "has kernels for node_width 1 only"
    if request.options.dropout:
        return "has no dropout"
    num_leaves, leaf_width = leaves.in_weight.shape[:2]
    if num_leaves == 1:
        return "has nothing to gain at depth 0"
    if num_leaves * power_of_two(leaf_width) > _MOST_NEURONS:
        return f"holds at most {_MOST_NEURONS} leaf neurons a sample"
    return ""


def describe(request: Request) -> str:
    return "two matrix products with one kernel between them"


def soft(x: Tensor, tree: Tree, leaves: Leaves, activation: str, options: SoftOptions) -> Soft:
    temperature, transposition, straight_through, _ = options
    num_leaves, leaf_width = leaves.in_weight.shape[:2]
    parts = [(leaves.in_weight.flatten(0, 1), leaves.in_bias), (tree.weight, tree.bias)]
    if leaves.gate_weight is not None:
        parts.insert(1, (leaves.gate_weight.flatten(0, 1), leaves.gate_bias))
    rows = [len(weight) for weight, _ in parts]
    # Matrix units want rows of 16 bytes: 8 numbers of 2 bytes.
    short = -sum(rows) % 8
    weights = [*(weight for weight, _ in parts), x.new_zeros(short, x.shape[-1])]
    biases = [x.new_zeros(n) if bias is None else bias.flatten() for n, (_, bias) in zip(rows, parts, strict=True)]
    bias = torch.cat([*biases, x.new_zeros(short)])
    first = _Product.apply(x, True, bias, *weights)  # type: ignore[no-untyped-call]  # (batch, sum(rows) + short)

    flip = None
    if transposition:
        flip = torch.rand(len(x), num_leaves - 1, device=x.device) < transposition
    if not isinstance(temperature, Tensor):
        temperature = torch.full((), temperature, device=x.device)
    has_bias = leaves.out_bias is not None
    packed, logits, mixture = _Weigh.apply(  # type: ignore[no-untyped-call]
        first, temperature, flip, heap.depth_of(num_leaves), leaf_width, activation, has_bias, straight_through
    )
    blocks = [leaves.out_weight.flatten(0, 1)]
    if leaves.out_bias is not None:
        blocks += [leaves.out_bias, x.new_zeros(-num_leaves * (leaf_width + 1) % 8, leaves.out_bias.shape[-1])]
    y = _Product.apply(packed, False, None, *blocks)  # type: ignore[no-untyped-call]
    return Soft(y, logits, mixture)


class _Product(torch.autograd.Function):
    """x M + bias, or x M^T + bias, for a matrix given in blocks of rows, which is put together anew in backward."""

    @staticmethod
    def forward(x: Tensor, transposed: bool, bias: Tensor | None, *blocks: Tensor) -> Tensor:
        matrix = torch.cat(blocks)
        return F.linear(x, matrix if transposed else matrix.mT, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.transposed, bias, *blocks = inputs
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, *blocks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *blocks = ctx.saved_tensors
        d_x = None
        if ctx.needs_input_grad[0]:
            matrix = torch.cat(blocks)
            d_x = grad @ (matrix if ctx.transposed else matrix.mT)
            del matrix
        d_matrix = grad.mT @ x if ctx.transposed else x.mT @ grad
        d_bias = grad.sum(0) if ctx.has_bias else None
        return d_x, None, d_bias, *d_matrix.split([len(block) for block in blocks])


class _Weigh(torch.autograd.Function):
    @staticmethod
    def forward(
        first: Tensor,
        temperature: Tensor,
        flip: Tensor | None,
        depth: int,
        leaf_width: int,
        activation: str,
        bias: bool,
        hard: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        run = _weigh if in_eager() else weigh
        return run(first, temperature, flip, depth, leaf_width, activation, bias, hard)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        first, temperature, flip, *ctx.options = inputs
        ctx.save_for_backward(first, temperature, flip)
        ctx.mark_non_differentiable(output[2])

    @staticmethod
    def backward(ctx: Any, d_packed: Tensor, d_logits: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if in_eager() and torch.is_grad_enabled():
            raise RuntimeError(
                "the triton kernels of the soft pass have no second derivative. Run the model under "
                "fastff.backend('aten') where you need one (create_graph=True)."
            )
        run: Callable[..., Tensor] = _weigh_backward if in_eager() else weigh_backward
        return run(*ctx.saved_tensors, d_packed, d_logits, *ctx.options), *[None] * 7


def _weigh(
    first: Tensor,
    temperature: Tensor,
    flip: Tensor | None,
    depth: int,
    leaf_width: int,
    activation: str,
    bias: bool,
    hard: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    first = _rows(first)
    packed, logits, mixture = _outputs(first, depth, leaf_width, bias)
    if len(first):
        from .triton_soft_kernels import weigh_forward

        options = _options(depth, leaf_width, activation, bias, flip is not None, hard)
        flip = first if flip is None else flip
        with torch.cuda.device_of(first):
            weigh_forward[(len(first),)](
                first, flip, temperature, packed, logits, mixture, first.stride(0), packed.stride(0), **options
            )
    return packed, logits, mixture


def _weigh_backward(
    first: Tensor,
    temperature: Tensor,
    flip: Tensor | None,
    d_packed: Tensor,
    d_logits: Tensor,
    depth: int,
    leaf_width: int,
    activation: str,
    bias: bool,
    hard: bool,
) -> Tensor:
    first, d_packed, d_logits = _rows(first), _rows(d_packed), d_logits.contiguous()
    d_first = first.new_empty(first.shape)
    if len(first):
        from .triton_soft_kernels import weigh_backward

        options = _options(depth, leaf_width, activation, bias, flip is not None, hard)
        flip = first if flip is None else flip
        with torch.cuda.device_of(first):
            tensors = (first, flip, temperature, d_packed, d_logits, d_first)
            weigh_backward[(len(first),)](*tensors, first.stride(0), d_packed.stride(0), d_first.stride(0), **options)
    return d_first


def _outputs(first: Tensor, depth: int, leaf_width: int, bias: bool) -> tuple[Tensor, Tensor, Tensor]:
    leaves = heap.num_leaves(depth)
    columns = leaves * (leaf_width + 1) if bias else leaves * leaf_width
    packed = first.new_empty(len(first), columns + (-columns % 8 if bias else 0))
    logits = first.new_empty(len(first), leaves - 1, dtype=torch.float32)
    return packed, logits, first.new_empty(len(first), leaves, dtype=torch.float32)


def _options(depth: int, leaf_width: int, activation: str, bias: bool, flip: bool, hard: bool) -> dict[str, Any]:
    gated = activation in GATED
    block = power_of_two(leaf_width)
    return {
        "DEPTH": depth,
        "L": leaf_width,
        "L_BLOCK": block,
        "ACT": function_name(activation),
        "GATED": gated,
        "BIAS": bias,
        "FLIP": flip,
        "HARD": hard,
        "num_warps": 4 if block << depth <= 2048 else 8,
    }


def _rows(x: Tensor) -> Tensor:
    """x with contiguous rows, which may lie apart."""
    return x if x.stride(-1) == 1 else x.contiguous()


# For torch.compile, which cannot look into the launches. The layout is flexible: without the tag, inductor copies the
# products into the layout that eager would have given them.
_FLEXIBLE = (torch.Tag.flexible_layout,)
weigh = torch.library.custom_op("fastff::weigh", _weigh, mutates_args=(), tags=_FLEXIBLE)
weigh_backward = torch.library.custom_op("fastff::weigh_backward", _weigh_backward, mutates_args=(), tags=_FLEXIBLE)


weigh.register_fake(
    lambda first, temperature, flip, depth, leaf_width, activation, bias, hard: _outputs(first, depth, leaf_width, bias)
)
weigh_backward.register_fake(lambda first, *_: first.new_empty(first.shape))
