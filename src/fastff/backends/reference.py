"""The specification: both passes of the paper's Algorithm 1 in plain torch.

Written to be obviously right. Every other backend is compared with this one; derivatives are autograd's own. Inputs are
flattened, (batch, in). Logits and mixture weights are float32 at least, whatever the dtype of the layer: a decision is
cheap to compute well and expensive to get wrong.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import tree as heap
from ..activations import Activation, function
from ..tensors import Leaves, Tree, at_least_float32


def node_logits(x: Tensor, tree: Tree, activation: Activation) -> Tensor:
    """The logit of every node: (batch, nodes)."""
    hidden = F.linear(x, tree.weight.flatten(0, -2), tree.bias.flatten())  # (batch, nodes * n)
    wide = at_least_float32(x.dtype)
    if tree.out_weight is None or tree.out_bias is None:
        return hidden.to(wide)
    hidden = function(activation)(hidden).unflatten(-1, tree.out_weight.shape).to(wide)  # (batch, nodes, n)
    return (hidden * tree.out_weight.to(wide)).sum(-1) + tree.out_bias.to(wide)


def branches(logits: Tensor) -> Tensor:
    """The weights of the left and the right child of every node: (batch, nodes, 2)."""
    # sigmoid(z) and sigmoid(-z) are exact complements; 1 - sigmoid(z) loses the small one to rounding.
    return torch.sigmoid(torch.stack([-logits, logits], -1))


def mixture(logits: Tensor, straight_through: bool = False) -> Tensor:
    """The weight of every leaf, the product of the branch weights on the way to it: (batch, leaves).

    Straight-through: the value is 1 for the leaf of the hard pass and 0 elsewhere, the gradient that of the soft
    weights.
    """
    depth = heap.depth_of(logits.shape[-1] + 1)
    branch = branches(logits)
    weights = logits.new_ones(logits.shape[0], 1)
    for m in range(depth):
        weights = (weights.unsqueeze(-1) * branch[:, heap.level(m)]).flatten(-2)  # (batch, 2**(m+1))
    if straight_through:
        weights = one_hot(walk(logits), weights.shape[-1], weights.dtype) + (weights - weights.detach())
    return weights


def one_hot(index: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    return (index.unsqueeze(-1) == torch.arange(size, device=index.device)).to(dtype)


def leaf_hidden(x: Tensor, leaves: Leaves, activation: Activation) -> Tensor:
    """The hidden layer of every leaf: (batch, leaves, l)."""
    act = function(activation)
    hidden = F.linear(x, leaves.in_weight.flatten(0, 1), None if leaves.in_bias is None else leaves.in_bias.flatten())
    if leaves.gate_weight is None:
        hidden = act(hidden)
    else:
        bias = None if leaves.gate_bias is None else leaves.gate_bias.flatten()
        hidden = act(F.linear(x, leaves.gate_weight.flatten(0, 1), bias)) * hidden
    return hidden.unflatten(-1, leaves.in_weight.shape[:2])


def mix(hidden: Tensor, weights: Tensor, leaves: Leaves) -> Tensor:
    """The leaves' outputs, given their hidden layer, mixed by weights (batch, leaves): (batch, out)."""
    weights = weights.to(hidden.dtype)
    y = (hidden * weights.unsqueeze(-1)).flatten(1) @ leaves.out_weight.flatten(0, 1)
    return y if leaves.out_bias is None else y + weights @ leaves.out_bias


def walk(logits: Tensor) -> Tensor:
    """The leaf that the hard pass reaches, given the logits of all nodes: (batch,) int64."""
    depth = heap.depth_of(logits.shape[-1] + 1)
    node = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    for _ in range(depth):
        right = logits.gather(-1, node.unsqueeze(-1)).squeeze(-1) >= 0  # False for NaN: a NaN goes left, a valid place
        node = 2 * node + 1 + right
    return node - heap.num_nodes(depth)


def node_logit(x: Tensor, node: Tensor, tree: Tree, activation: Activation) -> Tensor:
    """The logit of one node a sample: (batch,)."""
    wide = at_least_float32(x.dtype)
    x, weight, bias = x.to(wide), tree.weight[node].to(wide), tree.bias[node].to(wide)
    if tree.out_weight is None or tree.out_bias is None:
        return (x * weight).sum(-1) + bias
    hidden = function(activation)((x.unsqueeze(1) * weight).sum(-1) + bias)  # (batch, n)
    return (hidden * tree.out_weight[node].to(wide)).sum(-1) + tree.out_bias[node].to(wide)


def route(x: Tensor, tree: Tree, activation: Activation) -> Tensor:
    """The leaf that the hard pass reaches, visiting one node a level: (batch,) int64."""
    depth = heap.depth_of(tree.weight.shape[0] + 1)
    node = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
    for _ in range(depth):
        node = 2 * node + 1 + (node_logit(x, node, tree, activation) >= 0)  # a NaN goes left
    return node - heap.num_nodes(depth)


def hard(x: Tensor, tree: Tree, leaves: Leaves, activation: Activation) -> Tensor:
    """The hard pass: route, then visit."""
    return visit(x, route(x, tree, activation), leaves, activation)


def visit(x: Tensor, leaf: Tensor, leaves: Leaves, activation: Activation) -> Tensor:
    """The output of one leaf a sample: (batch, out)."""
    column = x.unsqueeze(-1)  # (batch, in, 1)
    act = function(activation)
    hidden = (leaves.in_weight[leaf] @ column).squeeze(-1)  # (batch, l)
    if leaves.in_bias is not None:
        hidden = hidden + leaves.in_bias[leaf]
    if leaves.gate_weight is None:
        hidden = act(hidden)
    else:
        gate = (leaves.gate_weight[leaf] @ column).squeeze(-1)
        hidden = act(gate if leaves.gate_bias is None else gate + leaves.gate_bias[leaf]) * hidden
    y = (hidden.unsqueeze(1) @ leaves.out_weight[leaf]).squeeze(1)  # (batch, out)
    return y if leaves.out_bias is None else y + leaves.out_bias[leaf]
