"""The size of a hard pass, as the choice of its Triton kernels sees it: numbers alone, so that a choice can be kept."""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..tensors import Leaves, Tree

HOPPER_SHARED = 227 * 1024  # bytes of shared memory that a program may have on a Hopper GPU


class Size(NamedTuple):
    """What the choice depends on."""

    batch: int
    features: int
    out: int
    depth: int
    leaf_width: int
    node_width: int
    gated: bool
    bytes: int  # of an input
    weight_bytes: int  # of a leaf's weight
    walks: bool = True  # whether samples walk a tree; otherwise their leaves are given
    shared: int = HOPPER_SHARED  # bytes of shared memory that a program may have

    @property
    def leaves(self) -> int:
        return 1 << self.depth

    @property
    def per_leaf(self) -> float:
        return self.batch / self.leaves

    @property
    def used_leaves(self) -> float:
        """The leaves that samples reach, if each is as likely as another."""
        return -self.leaves * math.expm1(-self.per_leaf)

    @property
    def leaf_numbers(self) -> int:
        """The weights of a leaf."""
        return self.leaf_width * (self.features * (1 + self.gated) + self.out)

    @property
    def leaf_bytes(self) -> int:
        return self.leaf_numbers * self.weight_bytes


def size_of(x: Tensor, tree: Tree | None, leaves: Leaves) -> Size:
    num_leaves, width, out = leaves.out_weight.shape
    node_width = 1 if tree is None or tree.out_weight is None else tree.out_weight.shape[1]
    shared = _shared_memory(x.device.index) if x.is_cuda else HOPPER_SHARED
    depth = (num_leaves - 1).bit_length()  # a mixture of experts may have any number of them
    return Size(
        len(x), x.shape[1], out, depth, width, node_width, leaves.gate_weight is not None,
        x.element_size(), leaves.out_weight.element_size(), tree is not None, shared,
    )  # fmt: skip


@functools.cache
def has_dependent_launch(device: int) -> bool:
    """Whether a kernel may begin while the one before it ends."""
    return torch.cuda.get_device_capability(device)[0] >= 9


@functools.cache
def _shared_memory(device: int) -> int:
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 48 * 1024))  # not in every build of torch


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length()
