"""Torch operations alone, arranged to be fast: the backend that runs anywhere.

Soft pass: the derivatives of the mixture and of the mixed sum are written by hand. With g_j = c_j dL/dc_j and S the sum
of g over a subtree, dL/dz_v = sigmoid(-z_v) S_right - sigmoid(z_v) S_left: one sweep up the tree, no division,
O(batch leaves) in time and memory. The mixed sum keeps the leaves' hidden layer and the mixture, not their product,
which is as large as the hidden layer and cheap to recompute: a step needs about as much memory as the dense layer's.

Hard pass: all logits in one product while the tree is small, then the samples of each leaf together, so that a leaf's
weights are read once and not copied. Where copies are small, on a GPU and under a tracer, it gathers them instead. A
layer that is small as a whole runs all leaves and masks the unvisited ones: two products, no copies. (An infinity or
NaN in an unvisited leaf then reaches the output.)
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import tree as heap
from .._torch import in_eager, is_batched, is_watched
from ..activations import Activation, apply
from ..tensors import Leaves, Soft, SoftOptions, Tree, dequantize
from ..tree import one_hot
from . import reference
from .reference import input_pairs, node_logits, transpose, walk
from .request import Request

__all__ = ["hard", "leaf_hidden", "mix", "mixture", "node_logits", "route", "soft", "visit", "walk"]
HAS_GRADIENT = True


def why_not(request: Request) -> str:
    return ""


def soft(x: Tensor, tree: Tree, leaves: Leaves, activation: Activation, options: SoftOptions) -> Soft:
    """As the reference, with the faster parts of this file."""
    logits = node_logits(x, tree, activation) * options.temperature
    weights = mixture(transpose(logits, options.transposition), options.straight_through)
    hidden = leaf_hidden(x, leaves, activation)
    y = mix(F.dropout(hidden, options.dropout) if options.dropout else hidden, weights, leaves)
    return Soft(y, logits, weights)


def leaf_hidden(x: Tensor, leaves: Leaves, activation: Activation) -> Tensor:
    # relu's derivative needs only its output, so relu may overwrite its input.
    return reference.leaf_hidden(x, leaves, torch.relu_ if activation == "relu" else activation)


def mixture(logits: Tensor, straight_through: bool = False) -> Tensor:
    return _Mixture.apply(logits, straight_through)  # type: ignore[no-untyped-call]


def mix(hidden: Tensor, weights: Tensor, leaves: Leaves) -> Tensor:
    weights = weights.to(hidden.dtype)
    return _Mix.apply(hidden, weights, leaves.out_weight, leaves.out_bias)  # type: ignore[no-untyped-call]


class _Mixture(torch.autograd.Function):
    """Works on (nodes, batch): the innermost loop then runs over the batch and not over pairs of children."""

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, straight_through: bool) -> Tensor:
        if straight_through:
            return one_hot(walk(logits), logits.shape[-1] + 1, logits.dtype)
        return _soft_weights(_branches(logits)).mT.contiguous()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        logits, ctx.straight_through = inputs
        ctx.save_for_backward(logits, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, weights = ctx.saved_tensors
        branch = _branches(logits)
        depth = heap.depth_of(weights.shape[-1])
        if depth == 0:
            return torch.zeros_like(logits), None
        weights = _soft_weights(branch) if ctx.straight_through else weights.mT
        subtree = weights * grad.mT  # (leaves, batch), then level by level up
        children = []
        for _ in range(depth):
            # The sums below the left and the right child: (2**m, 2, batch).
            pairs = subtree.reshape(len(subtree) // 2, 2, subtree.shape[-1])
            children.append(pairs)
            subtree = pairs[:, 0] + pairs[:, 1]
        below = torch.cat(children[::-1])  # (nodes, 2, batch), in heap order
        return (branch[:, 0] * below[:, 1] - branch[:, 1] * below[:, 0]).mT, None


def _branches(logits: Tensor) -> Tensor:
    """The weights of the left and the right child of every node: (nodes, 2, batch)."""
    return torch.sigmoid(torch.stack([-logits.mT, logits.mT], 1))


def _soft_weights(branch: Tensor) -> Tensor:
    """The weight of every leaf: (leaves, batch)."""
    weights = branch.new_ones(1, branch.shape[-1])
    for m in range(heap.depth_of(len(branch) + 1)):
        weights = (weights.unsqueeze(1) * branch[heap.level(m)]).flatten(0, 1)  # (2**(m+1), batch)
    return weights


class _Mix(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(hidden: Tensor, weights: Tensor, out_weight: Tensor, out_bias: Tensor | None) -> Tensor:
        product, matrix = (hidden * weights.unsqueeze(-1)).flatten(1), out_weight.flatten(0, 1)
        return product @ matrix if out_bias is None else torch.addmm(weights @ out_bias, product, matrix)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weights, out_weight, out_bias = ctx.saved_tensors
        need_hidden, need_weights, need_out_weight, need_out_bias = ctx.needs_input_grad
        d_hidden = d_weights = d_out_weight = d_out_bias = None
        product = None
        if need_out_weight:
            product = hidden * weights.unsqueeze(-1)
            d_out_weight = (product.flatten(1).mT @ grad).view(out_weight.shape)
        if need_out_bias:
            d_out_bias = weights.mT @ grad
        if need_hidden or need_weights:
            d_product = (grad @ out_weight.flatten(0, 1).mT).view(hidden.shape)  # (batch, leaves, l)
            # New memory of this size costs a CPU more than the arithmetic: reuse the old if nothing else reads it.
            in_place = in_eager() and not torch.is_grad_enabled() and not is_batched(grad)
            if need_weights:
                d_weights = torch.mul(d_product, hidden, out=product if in_place else None).sum(-1)
                if out_bias is not None:
                    d_weights = d_weights + grad @ out_bias.mT
            if need_hidden:
                d_hidden = torch.mul(d_product, weights.unsqueeze(-1), out=d_product if in_place else None)
        return d_hidden, d_weights, d_out_weight, d_out_bias


# Where one method becomes faster than another, on 2 Xeon cores.
_NODES_PER_LEVEL = 64  # up to here, the logits of all nodes in one product beat a gather of the visited rows
_COPIED_PER_LEAF = 2**14  # weights: up to here, a gather of the leaves' weights beats a product for each leaf
_MASKED_LEAVES, _MASKED = 32, 2**17  # leaves and leaf weights: up to here, run all leaves
_COPIED = 2**27  # weights copied at a time, to bound the memory


def route(x: Tensor, tree: Tree, activation: Activation) -> Tensor:
    nodes = tree.weight.shape[0]
    if nodes <= _NODES_PER_LEVEL * heap.depth_of(nodes + 1):
        return walk(node_logits(x, tree, activation))
    return reference.route(x, tree, activation)


def hard(x: Tensor, tree: Tree, leaves: Leaves, activation: Activation) -> tuple[Tensor, Tensor]:
    leaf = route(x, tree, activation)
    return visit(x, leaf, leaves, activation), leaf


def _arrangement(x: Tensor, leaves: Leaves) -> str:
    """How the leaves run: all of them, "masked"; one copied for each sample, "gathered"; or "grouped"."""
    weight = leaves.in_weight[0].numel() + leaves.out_weight[0].numel()
    if len(leaves.in_weight) <= _MASKED_LEAVES and leaves.in_weight.numel() + leaves.out_weight.numel() <= _MASKED:
        return "masked"
    # Grouping reads the leaf numbers: a tracer cannot, and a GPU would have to synchronise.
    if not in_eager() or is_watched() or x.device.type != "cpu":
        return "gathered"
    batch = x.shape[0]
    return "gathered" if batch * weight <= _COPIED_PER_LEAF * min(batch, len(leaves.in_weight)) else "grouped"


def describe(request: Request) -> str:
    if request.kind == "soft":
        return "two matrix products, the derivative of the tree by hand"
    assert request.leaves is not None  # explain describes whole passes
    return {
        "masked": "dense: runs all leaves and masks the unvisited ones",
        "gathered": "the weights of each sample's leaf are copied together",
        "grouped": "leaf by leaf, with the samples that reached it",
    }[_arrangement(request.x, request.leaves)]


def visit(x: Tensor, leaf: Tensor, leaves: Leaves, activation: Activation) -> Tensor:
    arrangement = _arrangement(x, leaves)
    if arrangement == "masked":
        return masked(x, leaf, leaves, activation)
    if not in_eager() or is_watched():
        return reference.visit(x, leaf, leaves, activation)
    batch, weight = x.shape[0], leaves.in_weight[0].numel() + leaves.out_weight[0].numel()
    if arrangement == "gathered":
        parts = zip(x.split(_COPIED // weight + 1), leaf.split(_COPIED // weight + 1), strict=True)
        return torch.cat([reference.visit(part, at, leaves, activation) for part, at in parts])
    if batch == 1:
        return _one_leaf(x, int(leaf), leaves, activation)
    leaf, order = leaf.sort()
    used, counts = leaf.unique_consecutive(return_counts=True)
    groups = zip(used.tolist(), x[order].split(counts.tolist()), strict=True)
    y = torch.cat([_one_leaf(group, j, leaves, activation) for j, group in groups])
    return y[order.argsort()]


def masked(x: Tensor, leaf: Tensor, leaves: Leaves, activation: Activation) -> Tensor:
    """As `visit`, for all leaves at once: two dense products, and a mask between."""
    wide = dequantize(leaves)
    hidden = leaf_hidden(x.to(wide.dtype), wide, activation)
    # Not `mix` of this file, which has no forward-mode derivative.
    return reference.mix(hidden, one_hot(leaf, hidden.shape[1], hidden.dtype), wide).to(x.dtype)


def _one_leaf(x: Tensor, j: int, leaves: Leaves, activation: Activation) -> Tensor:
    if leaves.is_int8:
        one = dequantize(Leaves._make(None if t is None else t[j : j + 1] for t in leaves))
        return _one_leaf(x.to(one.dtype), 0, one, activation).to(x.dtype)
    # leaf_hidden on a slice of one leaf does the same in two lines, and adds 9 us to 26 (Xeon, 768 -> 32 -> 768).
    pairs = input_pairs(leaves)
    hidden = apply(activation, *(F.linear(x, weight[j], None if bias is None else bias[j]) for weight, bias in pairs))
    if leaves.out_bias is None:
        return hidden @ leaves.out_weight[j]
    return torch.addmm(leaves.out_bias[j], hidden, leaves.out_weight[j])
