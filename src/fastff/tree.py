"""The arithmetic of a perfect binary tree.

Nodes are numbered in heap order: the root is 0, the children of node i are 2i + 1 (left) and 2i + 2 (right), level m
holds the nodes 2**m - 1 ... 2**(m+1) - 2. Leaves are numbered 0 ... 2**depth - 1 from left to right, so the bits of a
leaf's number, highest first, are the turns on the way to it: 0 is left, 1 is right.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def num_leaves(depth: int) -> int:
    return 1 << depth


def num_nodes(depth: int) -> int:
    return (1 << depth) - 1


def level(m: int) -> slice:
    """The nodes of level m, as a slice into heap order."""
    return slice((1 << m) - 1, (1 << (m + 1)) - 1)


def depth_of(leaves: int) -> int:
    """The depth of the tree with this number of leaves."""
    if leaves < 1 or leaves & (leaves - 1):
        raise ValueError(f"a perfect binary tree has a power of two of leaves; got {leaves}.")
    return int(leaves).bit_length() - 1  # sizes are tensors under torch.jit.trace


def path(leaf: int, depth: int) -> list[tuple[int, bool]]:
    """The (node, goes right) pairs met on the way from the root to a leaf."""
    if not 0 <= leaf < num_leaves(depth):
        raise ValueError(f"a tree of depth {depth} has leaves 0 to {num_leaves(depth) - 1}; got {leaf}.")
    steps = []
    node = 0
    for m in reversed(range(depth)):
        right = bool(leaf >> m & 1)
        steps.append((node, right))
        node = 2 * node + 1 + right
    return steps


def level_sizes(depth: int) -> list[int]:
    """The number of nodes in each level."""
    return [2**m for m in range(depth)]


def log_flow(logits: Tensor) -> Tensor:
    """The logarithm of the probability that a sample reaches a node and goes left or right: (batch, nodes, 2)."""
    branch, depth = F.logsigmoid(torch.stack([-logits, logits], -1)), depth_of(logits.shape[-1] + 1)
    if not depth:
        return branch
    # Split, not sliced: the derivative of slices would fill and add a tensor of the full size for each.
    levels = list(branch.split(level_sizes(depth), 1))
    for m in range(1, depth):
        levels[m] = levels[m - 1].flatten(-2).unsqueeze(-1) + levels[m]
    return torch.cat(levels, 1)


def log_reach(logits: Tensor) -> Tensor:
    """The logarithm of the probability that a sample reaches a node: (batch, nodes)."""
    # The flow out of a node, left or right, is what reaches its children, and nodes follow each other in that order.
    return torch.cat([torch.zeros_like(logits[:, :1]), log_flow(logits).flatten(-2)[:, : logits.shape[-1] - 1]], -1)


def sum_below(leaf: Tensor) -> Tensor:
    """The sum over the leaves below each node, in heap order: (nodes,)."""
    levels: list[Tensor] = []
    while len(leaf) > 1:
        leaf = leaf.unflatten(0, (-1, 2)).sum(-1)
        levels.insert(0, leaf)
    return torch.cat(levels) if levels else leaf[:0]


def one_hot(index: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """1 at the index and 0 elsewhere: (..., size)."""
    return (index.unsqueeze(-1) == torch.arange(size, device=index.device)).to(dtype)
