"""Torch operations alone, arranged to be fast: the backend that runs anywhere.

Soft pass: the derivatives of the mixture and of the mixed sum are written by hand. With g_j = c_j dL/dc_j and S the sum
of g over a subtree, dL/dz_v = sigmoid(-z_v) S_right - sigmoid(z_v) S_left: one sweep up the tree, no division,
O(batch leaves) in time and memory. The mixed sum keeps the leaves' hidden layer and the mixture, not their product,
which is as large as the hidden layer and cheap to compute again: a step needs about the memory of the dense layer's.

On a GPU a small product costs a launch and little else, so the nodes ride along in the leaves' products: one matrix
[leaf_in; nodes] for the first layer, biases as one more column, and one [leaf_out; leaf_out_bias] for the second. A
step then has the six products of a dense layer. On a CPU the copies into these matrices cost more than they save.

Hard pass: all logits in one product while the tree is small, then the samples of each leaf together, so that a leaf's
weights are read once and never copied.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import tree as heap
from .._torch import in_eager
from ..activations import Activation, function
from . import reference
from .reference import Leaves, Tree, leaf_hidden, node_logits, one_hot, walk

__all__ = ["first_layer", "leaf_hidden", "mix", "mixture", "node_logits", "route", "visit", "walk"]


def first_layer(x: Tensor, tree: Tree, leaves: Leaves, activation: Activation) -> tuple[Tensor, Tensor]:
    if not _pack(x) or not len(tree.weight):
        return reference.first_layer(x, tree, leaves, activation)
    parts = [(tree.weight.flatten(0, -2), tree.bias.flatten()), _matrix(leaves.in_weight, leaves.in_bias)]
    if leaves.gate_weight is not None:
        parts.append(_matrix(leaves.gate_weight, leaves.gate_bias))
    node, hidden, *gate = _linears(x, parts)
    act = function(activation)
    hidden = act(gate[0]) * hidden if gate else act(hidden)
    return reference.node_output(node, tree, activation), hidden.unflatten(-1, leaves.in_weight.shape[:2])


def _pack(x: Tensor) -> bool:
    """Whether small products ride along in large ones."""
    return x.is_cuda


def _matrix(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The leaves' weights as one matrix, with a bias of zeros where there is none."""
    flat = weight.flatten(0, 1)
    return flat, flat.new_zeros(len(flat)) if bias is None else bias.flatten()


def _linears(x: Tensor, parts: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Several linear layers of one input, in one product."""
    rows = [len(weight) for weight, _ in parts]
    # Matrix units want rows of 16 bytes: 8 numbers of 2 bytes.
    short, narrow = -sum(rows) % 8, -(x.shape[-1] + 1) % 8
    weight = torch.cat([*(weight for weight, _ in parts), x.new_zeros(short, x.shape[-1])])
    bias = torch.cat([*(bias for _, bias in parts), x.new_zeros(short)]).unsqueeze(-1)
    matrix = torch.cat([weight, bias, x.new_zeros(len(weight), narrow)], -1)
    x = torch.cat([x, x.new_ones(len(x), 1), x.new_zeros(len(x), narrow)], -1)
    return list((x @ matrix.mT).split([*rows, short], -1))[: len(parts)]


def mixture(logits: Tensor, straight_through: bool = False) -> Tensor:
    return _Mixture.apply(logits, straight_through)  # type: ignore[no-untyped-call]


def mix(hidden: Tensor, weights: Tensor, leaves: Leaves) -> Tensor:
    weights = weights.to(hidden.dtype)
    return _Mix.apply(hidden, weights, leaves.out_weight, leaves.out_bias)  # type: ignore[no-untyped-call]


class _Mixture(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, straight_through: bool) -> Tensor:
        weights = reference.mixture(logits)
        return one_hot(walk(logits), weights.shape[-1], weights.dtype) if straight_through else weights

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        logits, ctx.straight_through = inputs
        ctx.save_for_backward(logits, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, weights = ctx.saved_tensors
        if ctx.straight_through:
            weights = reference.mixture(logits)
        depth = heap.depth_of(weights.shape[-1])
        if depth == 0:
            return torch.zeros_like(logits), None
        subtree = weights * grad  # (batch, leaves), then level by level up
        children = []
        for _ in range(depth):
            pairs = subtree.unflatten(-1, (-1, 2))  # (batch, 2**m, 2): sums below the left and the right child
            children.append(pairs)
            subtree = pairs.sum(-1)
        below = torch.cat(children[::-1], -2)  # (batch, nodes, 2), in heap order
        branch = reference.branches(logits)
        return branch[..., 0] * below[..., 1] - branch[..., 1] * below[..., 0], None


class _Mix(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(hidden: Tensor, weights: Tensor, out_weight: Tensor, out_bias: Tensor | None) -> Tensor:
        if out_bias is None:
            return _weighted(hidden, weights) @ out_weight.flatten(0, 1)
        if _pack(hidden):
            return _packed(hidden, weights) @ _stacked(out_weight, out_bias)
        return torch.addmm(weights @ out_bias, _weighted(hidden, weights), out_weight.flatten(0, 1))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weights, out_weight, out_bias = ctx.saved_tensors
        need_hidden, need_weights, need_out_weight, need_out_bias = ctx.needs_input_grad
        d_hidden = d_weights = d_out_weight = d_out_bias = None
        packed = _pack(hidden) and out_bias is not None
        width = out_weight.shape[:2].numel()
        if packed and (need_out_weight or need_out_bias):
            d_stacked = _packed(hidden, weights).mT @ grad
            d_out_weight = d_stacked[:width].unflatten(0, out_weight.shape[:2])
            d_out_bias = d_stacked[width : width + len(out_bias)]
        else:
            if need_out_weight:
                d_out_weight = (_weighted(hidden, weights).mT @ grad).unflatten(0, out_weight.shape[:2])
            if need_out_bias:
                d_out_bias = weights.mT @ grad
        if need_hidden or need_weights:
            if packed:
                d_packed = grad @ _stacked(out_weight, out_bias).mT
                d_product, d_weights = d_packed[:, :width], d_packed[:, width : width + len(out_bias)]
            else:
                d_product = grad @ out_weight.flatten(0, 1).mT
                d_weights = None if out_bias is None else grad @ out_bias.mT
            d_product = d_product.unflatten(-1, out_weight.shape[:2])  # (batch, leaves, l)
            if need_weights:
                by_hidden = (d_product * hidden).sum(-1)
                d_weights = by_hidden if d_weights is None else d_weights + by_hidden
            if need_hidden:
                d_hidden = d_product * weights.unsqueeze(-1)
        return d_hidden, d_weights, d_out_weight, d_out_bias


def _weighted(hidden: Tensor, weights: Tensor) -> Tensor:
    return (hidden * weights.unsqueeze(-1)).flatten(1)  # (batch, leaves * l)


def _packed(hidden: Tensor, weights: Tensor) -> Tensor:
    """The weighted hidden layer and the weights themselves, which multiply the biases: (batch, leaves * (l + 1))."""
    product = _weighted(hidden, weights)
    short = -(product.shape[-1] + weights.shape[-1]) % 8
    return torch.cat([product, weights, weights.new_zeros(len(weights), short)], -1)


def _stacked(out_weight: Tensor, out_bias: Tensor) -> Tensor:
    matrix = out_weight.flatten(0, 1)
    short = -(len(matrix) + len(out_bias)) % 8
    return torch.cat([matrix, out_bias, matrix.new_zeros(short, matrix.shape[-1])])


# Up to so many nodes per level, the logits of all nodes in one product beat a gather of the visited rows
# (2 cores of a Xeon, 768 inputs; see results/).
_NODES_PER_LEVEL = 64


def route(x: Tensor, tree: Tree, activation: Activation) -> Tensor:
    nodes = tree.weight.shape[0]
    if nodes <= _NODES_PER_LEVEL * heap.depth_of(nodes + 1):
        return walk(node_logits(x, tree, activation))
    return reference.route(x, tree, activation)


def visit(x: Tensor, leaf: Tensor, leaves: Leaves, activation: Activation) -> Tensor:
    # Grouping reads the leaf numbers, which a tracer does not have and a GPU would have to stop for.
    if not in_eager() or x.device.type != "cpu" or x.shape[0] == 0:
        return reference.visit(x, leaf, leaves, activation)
    counts = torch.bincount(leaf, minlength=leaves.in_weight.shape[0]).tolist()
    used = [(j, count) for j, count in enumerate(counts) if count]
    if len(used) == 1:
        return _one_leaf(x, used[0][0], leaves, activation)
    order = leaf.argsort(stable=True)
    groups = x[order].split([count for _, count in used])
    y = torch.cat([_one_leaf(group, j, leaves, activation) for (j, _), group in zip(used, groups, strict=True)])
    return y[order.argsort()]


def _one_leaf(x: Tensor, j: int, leaves: Leaves, activation: Activation) -> Tensor:
    act = function(activation)
    hidden = F.linear(x, leaves.in_weight[j], None if leaves.in_bias is None else leaves.in_bias[j])
    if leaves.gate_weight is None:
        hidden = act(hidden)
    else:
        hidden = (
            act(F.linear(x, leaves.gate_weight[j], None if leaves.gate_bias is None else leaves.gate_bias[j])) * hidden
        )
    if leaves.out_bias is None:
        return hidden @ leaves.out_weight[j]
    return torch.addmm(leaves.out_bias[j], hidden, leaves.out_weight[j])
