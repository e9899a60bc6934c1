"""The specification: both passes of the paper's Algorithm 1 in plain torch.

Written to be obviously right. Every other backend is compared with this one; derivatives are autograd's own. Inputs are
flattened, (batch, in). Logits and mixture weights are float32 at least, whatever the dtype of the layer: a decision is
cheap to compute well and expensive to get wrong.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import tree as heap
from ..activations import Activation, apply, function
from ..tensors import Leaves, Shed, Soft, SoftOptions, Tree, at_least_float32, dequantize
from ..tree import one_hot
from .request import Request

HAS_GRADIENT = True


def why_not(request: Request) -> str:
    return ""


def describe(request: Request) -> str:
    return "step by step, as the specification says"


def soft(x: Tensor, tree: Tree, leaves: Leaves, activation: Activation, options: SoftOptions) -> Soft:
    """The soft pass: every leaf, weighted by the decisions on its path."""
    logits = node_logits(x, tree, activation) * options.temperature  # (batch, nodes)
    weights = mixture(transpose(logits, options.transposition), options.straight_through)  # (batch, leaves)
    hidden = leaf_hidden(x, leaves, activation)  # (batch, leaves, l)
    y = mix(F.dropout(hidden, options.dropout) if options.dropout else hidden, weights, leaves)
    return Soft(y, logits, weights)


def shed(x: Tensor, tree: Tree, leaves: Leaves, activation: Activation, options: SoftOptions, epsilon: float) -> Shed:
    """The soft pass without the leaves whose weight is below `epsilon` times the even share, 2**-depth.

    The other weights are scaled to sum to 1. Branch weights are at most 1, so no leaf below a node under this limit is
    kept. The likeliest leaf always is.
    """
    logits = node_logits(x, tree, activation) * options.temperature  # (batch, nodes)
    swapped = transpose(logits, options.transposition)
    branch, count = branches(swapped), logits.shape[-1] + 1
    reach = [logits.new_ones(logits.shape[0], 1)]  # of level m: (batch, 2**m), 0 where it is shed
    for m in range(heap.depth_of(count)):
        child = (reach[m].unsqueeze(-1) * branch[:, heap.level(m)]).flatten(-2)
        reach.append(torch.where(child < epsilon / count, 0, child))  # a NaN is kept
    weights = reach[-1] / reach[-1].sum(-1, keepdim=True)
    leaf = walk(swapped)
    if options.straight_through:
        weights = one_hot(leaf, count, weights.dtype) + (weights - weights.detach())
    hidden = leaf_hidden(x, leaves, activation)
    y = mix(F.dropout(hidden, options.dropout) if options.dropout else hidden, weights, leaves)
    sample, node = (torch.arange(n, device=x.device) for n in logits.shape)
    place = sample.repeat_interleave(logits.shape[1]), node.repeat(logits.shape[0])
    return Shed(y, logits.flatten(), torch.cat([logits[:, :0], *reach[:-1]], 1).flatten(), *place, leaf)


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
    """The weight of every leaf, the product of the branch weights on its path: (batch, leaves).

    Straight-through: the value is 1 for the leaf of the hard pass and 0 elsewhere; the gradient is the soft weights'.
    """
    depth = heap.depth_of(logits.shape[-1] + 1)
    branch = branches(logits)
    weights = logits.new_ones(logits.shape[0], 1)
    for m in range(depth):
        weights = (weights.unsqueeze(-1) * branch[:, heap.level(m)]).flatten(-2)  # (batch, 2**(m+1))
    if straight_through:
        weights = one_hot(walk(logits), weights.shape[-1], weights.dtype) + (weights - weights.detach())
    return weights


def transpose(logits: Tensor, probability: float) -> Tensor:
    """The logits with the children of some nodes swapped: p -> 1 - p is z -> -z."""
    return torch.where(torch.rand_like(logits) < probability, -logits, logits) if probability else logits


def leaf_hidden(x: Tensor, leaves: Leaves, activation: Activation) -> Tensor:
    """The hidden layer of every leaf: (batch, leaves, l)."""
    hidden = apply(activation, *(_first_layer(x, *pair) for pair in input_pairs(leaves)))
    return hidden.unflatten(-1, leaves.in_weight.shape[:2])


def input_pairs(leaves: Leaves) -> list[tuple[Tensor, Tensor | None]]:
    """Weight and bias of the hidden layer, and of the gate if there is one."""
    pairs = [(leaves.in_weight, leaves.in_bias)]
    return pairs if leaves.gate_weight is None else [*pairs, (leaves.gate_weight, leaves.gate_bias)]


def _first_layer(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One input matrix of all leaves: (batch, leaves * l)."""
    return F.linear(x, weight.flatten(0, 1), None if bias is None else bias.flatten())


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
    """The logit of one node per sample: (batch,)."""
    wide = at_least_float32(x.dtype)
    x, weight, bias = x.to(wide), tree.weight[node].to(wide), tree.bias[node].to(wide)
    if tree.out_weight is None or tree.out_bias is None:
        return (x * weight).sum(-1) + bias
    hidden = function(activation)((x.unsqueeze(1) * weight).sum(-1) + bias)  # (batch, n)
    return (hidden * tree.out_weight[node].to(wide)).sum(-1) + tree.out_bias[node].to(wide)


def route(x: Tensor, tree: Tree, activation: Activation) -> Tensor:
    """The leaf that the hard pass reaches, visiting one node per level: (batch,) int64."""
    depth = heap.depth_of(tree.weight.shape[0] + 1)
    node = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
    for _ in range(depth):
        node = 2 * node + 1 + (node_logit(x, node, tree, activation) >= 0)  # a NaN goes left
    return node - heap.num_nodes(depth)


def hard(x: Tensor, tree: Tree, leaves: Leaves, activation: Activation) -> tuple[Tensor, Tensor]:
    """The hard pass: route, then visit. Returns the output and the leaf of each sample."""
    leaf = route(x, tree, activation)
    return visit(x, leaf, leaves, activation), leaf


def visit(x: Tensor, leaf: Tensor, leaves: Leaves, activation: Activation) -> Tensor:
    """The output of one leaf per sample: (batch, out)."""
    own = dequantize(Leaves._make(None if t is None else t[leaf] for t in leaves))  # (batch, ...): each sample's leaf
    wide = x.to(own.dtype)  # of int8 leaves: float32 at least
    hidden = apply(activation, *(_visit_first_layer(wide, *pair) for pair in input_pairs(own)))  # (batch, l)
    y = (hidden.unsqueeze(1) @ own.out_weight).squeeze(1)  # (batch, out)
    return (y if own.out_bias is None else y + own.out_bias).to(x.dtype)


def _visit_first_layer(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One input matrix of the leaf of each sample: (batch, l)."""
    hidden = (weight @ x.unsqueeze(-1)).squeeze(-1)
    return hidden if bias is None else hidden + bias
