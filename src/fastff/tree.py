"""The arithmetic of a perfect binary tree.

Nodes are numbered in heap order: the root is 0, the children of node i are 2i + 1 (left) and 2i + 2 (right), level m
holds the nodes 2**m - 1 ... 2**(m+1) - 2. Leaves are numbered 0 ... 2**depth - 1 from left to right, so the bits of a
leaf's number, highest first, are the turns on the way to it: 0 is left, 1 is right.
"""


def num_leaves(depth: int) -> int:
    return 1 << depth


def num_nodes(depth: int) -> int:
    return (1 << depth) - 1


def level(m: int) -> slice:
    """The nodes of level m, as a slice into heap order."""
    return slice((1 << m) - 1, (1 << (m + 1)) - 1)


def depth_of(leaves: int) -> int:
    """The depth of the tree with so many leaves."""
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
