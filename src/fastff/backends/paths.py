"""Paths through the tree, one node per level: where a walk goes, and the logits on the way with their gradient.

Nothing here has the size (batch, nodes), unless that is less than the input's size. For linear nodes, the derivative of
the logits on paths is written by hand: autograd would fill a tensor of all nodes for each level.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import tree as heap
from ..activations import Activation
from ..tensors import SampledOptions, Tree, at_least_float32
from . import reference, triton_training
from .segments import scatter_rows

# Nodes per node that a sample passes. With all logits, a step takes 0.4 to 1.1 times as long at up to 8, 0.6 to 1.2
# times at 16, and 0.9 to 1.4 times at 28 (one thread of an EPYC, 64 to 2048 features, batches of 256 and 2048).
_FEW = 16


def nodes(leaf: Tensor, depth: int) -> Tensor:
    """The nodes on the path to each leaf, in heap order: (batch, depth)."""
    level = torch.arange(depth, device=leaf.device)
    return (1 << level) - 1 + (leaf.unsqueeze(-1) >> (depth - level))


def turns(leaf: Tensor, depth: int) -> Tensor:
    """Whether the path to each leaf goes right, level by level: (batch, depth)."""
    level = torch.arange(depth, device=leaf.device)
    return (leaf.unsqueeze(-1) >> (depth - 1 - level) & 1).bool()


class Nodes:
    """The logits of nodes for a batch, times the temperature: of all nodes if these are few, else of those on a path.

    They are few if two numbers for each take no more memory than x, and a product with all nodes no more time than
    the rows of weights on the paths; see are_few.
    """

    def __init__(self, x: Tensor, tree: Tree, activation: Activation, options: SampledOptions) -> None:
        self.x, self.tree, self.activation, self.options = x, tree, activation, options
        self.depth = heap.depth_of(len(tree.weight) + 1)
        few = are_few(x, tree, options.alternatives)
        self.all = reference.node_logits(x, tree, activation) * options.temperature if few else None

    def descend(self, node: Tensor, threshold: Tensor | None = None, swap: Tensor | None = None) -> Tensor:
        """The leaf that a walk from `node` (batch,) reaches, as the function `descend`: (batch,) int64."""
        if self.all is None:
            threshold = None if threshold is None else threshold / self.options.temperature
            return descend(self.x, self.tree, self.activation, node, threshold, swap)
        logits = self.all.detach()
        return _walk(lambda node: logits.gather(1, node.unsqueeze(1)).squeeze(1), self.depth, node, threshold, swap)

    def logits_to(self, leaf: Tensor) -> Tensor:
        """The logits of the nodes on the path to each leaf: (batch, depth), float32 at least."""
        if self.all is None:
            logits = logits_to(self.x, leaf, self.tree, self.activation, self.options.sparse)
            return logits * self.options.temperature
        return self.all.gather(1, nodes(leaf, self.depth))


def are_few(x: Tensor, tree: Tree, alternatives: int) -> bool:
    """Whether sampled training computes the logits of all nodes. Their gradient is then dense, too."""
    depth, count = heap.depth_of(len(tree.weight) + 1), tree.weight.flatten(0, -2).shape[0]
    if count > min(x.shape[1] // 2, _FEW * (1 + alternatives) * depth):
        return False
    # In fewer bits than float32, a product of all nodes would round the logits.
    return x.dtype == at_least_float32(x.dtype)


def descend(
    x: Tensor,
    tree: Tree,
    activation: Activation,
    node: Tensor,
    threshold: Tensor | None = None,
    swap: Tensor | None = None,
) -> Tensor:
    """The leaf that a walk from `node` (batch,) reaches: (batch,) int64. Leaves are numbered after nodes here.

    A walk goes right where the logit is at least `threshold` (batch, depth), by default 0. Where `swap` (batch, depth)
    is True, the node's children are swapped.
    """
    if triton_training.takes(activation, x, *tree):
        from . import triton_paths  # which imports this file

        return triton_paths.descend(x, tree, activation, node, threshold, swap)  # type: ignore[arg-type]  # it is a name
    return descend_by_torch(x, tree, activation, node, threshold, swap)


def descend_by_torch(
    x: Tensor, tree: Tree, activation: Activation, node: Tensor, threshold: Tensor | None, swap: Tensor | None
) -> Tensor:
    """`descend` in torch operations."""
    depth = heap.depth_of(len(tree.weight) + 1)
    return _walk(lambda node: node_logit(x, node, tree, activation), depth, node, threshold, swap)


def _walk(
    logit_of: Callable[[Tensor], Tensor], depth: int, node: Tensor, threshold: Tensor | None, swap: Tensor | None
) -> Tensor:
    """As descend; logit_of gives the logit of one node per sample."""
    count = heap.num_nodes(depth)
    for m in range(depth):
        logit = logit_of(node.clamp(max=max(count - 1, 0)))
        if swap is not None:
            logit = torch.where(swap[:, m], -logit, logit)
        right = logit >= (0 if threshold is None else threshold[:, m])  # a NaN goes left
        # A walk that starts lower waits for its level.
        node = torch.where(node < heap.level(m).stop, 2 * node + 1 + right, node)
    return node - count


def logits_to(x: Tensor, leaf: Tensor, tree: Tree, activation: Activation, sparse: bool = False) -> Tensor:
    """The logits of the nodes on the path to each leaf: (batch, depth), float32 at least."""
    depth = heap.depth_of(len(tree.weight) + 1)
    if depth and tree.out_weight is None and triton_training.takes(activation, x, *tree):
        from . import triton_paths

        return triton_paths.logits_to(x, leaf, tree, sparse)
    return logits(x, nodes(leaf, depth), tree, activation, sparse)


def logits(x: Tensor, node: Tensor, tree: Tree, activation: Activation, sparse: bool = False) -> Tensor:
    """The logits of the given nodes (batch, k) of each sample: (batch, k), float32 at least."""
    if not node.shape[1]:
        return x.new_zeros(node.shape, dtype=at_least_float32(x.dtype))
    if tree.out_weight is not None:
        return torch.stack([node_logit(x, column, tree, activation) for column in node.unbind(1)], 1)
    return _Logits.apply(x, node, tree.weight, tree.bias, sparse)  # type: ignore[no-untyped-call]


def node_logit(x: Tensor, node: Tensor, tree: Tree, activation: Activation) -> Tensor:
    """As reference.node_logit; index_select copies rows in half the time of an index (EPYC)."""
    if tree.out_weight is not None:
        return reference.node_logit(x, node, tree, activation)
    wide = at_least_float32(x.dtype)
    weight, bias = tree.weight.index_select(0, node), tree.bias.index_select(0, node)
    return torch.linalg.vecdot(x.to(wide), weight.to(wide)) + bias.to(wide)


def node_sums(values: Tensor, leaf: Tensor) -> Tensor:
    """Values (batch, depth, c) along the path to each leaf, summed at each node: (nodes, c)."""
    depth = values.shape[1]
    if depth and triton_training.takes("identity", values):
        from . import triton_paths

        return triton_paths.node_sums(values, leaf)
    flat = values.flatten(0, 1)
    return flat.new_zeros(heap.num_nodes(depth), values.shape[2]).index_add(0, nodes(leaf, depth).flatten(), flat)


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, node: Tensor, weight: Tensor, bias: Tensor, sparse: bool) -> Tensor:
        ctx.save_for_backward(x, node, weight, bias)
        ctx.sparse = sparse
        tree = Tree(weight, bias)
        return torch.stack([node_logit(x, column, tree, "identity") for column in node.unbind(1)], 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        need_x, _, *need, _ = ctx.needs_input_grad
        x, node, weight, bias = ctx.saved_tensors
        d_x, d_weight, d_bias = gradients(x, node, weight, bias, grad, (need_x, *need), ctx.sparse)
        return d_x, None, d_weight, d_bias, None


def gradients(
    x: Tensor, node: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, needs: tuple[bool, ...], sparse: bool = False
) -> list[Tensor | None]:
    """The gradients of x, of the weights and of the biases, where needed, given the logits' gradient."""
    wide, d_x, d_weight, d_bias = x.to(grad.dtype), None, None, None
    if needs[0]:
        d_x = torch.zeros_like(wide)
        for m, column in enumerate(node.unbind(1)):
            d_x = d_x.addcmul_(grad[:, m, None], weight.index_select(0, column).to(grad.dtype))
        d_x = d_x.to(x.dtype)
    if needs[1]:
        d_weight = scatter_rows(weight, node, lambda m: grad[:, m, None] * wide, grad.dtype, sparse)
    if needs[2]:
        d_bias = scatter_rows(bias, node, lambda m: grad[:, m], grad.dtype, sparse)
    return [d_x, d_weight, d_bias]
