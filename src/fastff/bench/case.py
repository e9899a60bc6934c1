"""A case: the size of a layer, the batch, the dtype and the device; and its byte floor.

The byte floor of a hard pass counts the bytes that must cross the memory bus at least once: every leaf and every node
that some sample of the batch visits, the inputs and the outputs. Divided by the bandwidth of the machine it is a time
that no implementation can beat, unless weights stay in a cache from one call to the next.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import activations
from .. import tree as heap
from ..checks import check_int
from .hardware import lack_of_memory

DTYPES = ("float32", "bfloat16", "float16", "float64")
DEVICES = ("cpu", "cuda")
LEAST_INPUTS = 4  # that take turns
DEEPEST = 62  # leaves are numbered by int64
LARGEST = 2**62  # for every other number


@dataclass(frozen=True)
class Case:
    """One size to measure."""

    in_features: int
    out_features: int
    leaf_width: int
    depth: int
    batch: int
    dtype: str = "float32"
    device: str = "cpu"
    node_width: int = 1
    activation: str = "relu"

    def __post_init__(self) -> None:
        for name in ("in_features", "out_features", "leaf_width", "batch", "node_width"):
            check_int(name, getattr(self, name), 1)
        check_int("depth", self.depth, 0)
        for name in ("in_features", "out_features", "leaf_width", "depth", "batch", "node_width"):
            if getattr(self, name) > (most := DEEPEST if name == "depth" else LARGEST):
                raise ValueError(f"{name} must be at most {most}; got {getattr(self, name)}.")
        activations.check(self.activation)
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {self.dtype!r}.")
        if self.device not in DEVICES:
            raise ValueError(f"device must be one of {', '.join(DEVICES)}; got {self.device!r}.")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device 'cuda' needs a GPU that torch can use; none was found. Use device 'cpu'.")

    def __str__(self) -> str:
        size = f"{self.in_features} -> {self.out_features}, l={self.leaf_width}, d={self.depth}"
        extra = f", n={self.node_width}" if self.node_width > 1 else ""
        extra += f", {self.activation}" if self.activation != "relu" else ""
        return f"{size}{extra}, batch {self.batch}, {self.dtype}, {self.device}"

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def itemsize(self) -> int:
        return self.torch_dtype.itemsize

    @property
    def num_leaves(self) -> int:
        return heap.num_leaves(self.depth)

    @property
    def training_width(self) -> int:
        return self.leaf_width * self.num_leaves

    @property
    def leaf_numel(self) -> int:
        """The parameters of one leaf."""
        first = self.leaf_width * (self.in_features + 1) * (2 if activations.is_gated(self.activation) else 1)
        return first + (self.leaf_width + 1) * self.out_features

    @property
    def node_numel(self) -> int:
        """The parameters of one node."""
        n = self.node_width
        return self.in_features + 1 if n == 1 else n * (self.in_features + 1) + n + 1

    @property
    def parameter_bytes(self) -> int:
        return (self.num_leaves * self.leaf_numel + heap.num_nodes(self.depth) * self.node_numel) * self.itemsize

    @property
    def columns(self) -> dict[str, Any]:
        """The case as columns of the results."""
        return {
            "in": self.in_features,
            "out": self.out_features,
            "leaf_width": self.leaf_width,
            "depth": self.depth,
            "node_width": self.node_width,
            "activation": self.activation,
            "batch": self.batch,
            "dtype": self.dtype,
            "device": self.device,
        }


def count_visited(leaf: Tensor, depth: int) -> tuple[int, int]:
    """The number of distinct leaves and of distinct nodes that a batch visits, given the leaf of each sample."""
    leaf = leaf.unique()
    nodes = sum(len((leaf >> (depth - m)).unique()) for m in range(depth))
    return len(leaf), nodes


def floor_bytes(case: Case, leaves: float, nodes: float) -> float:
    """The fewest bytes that a hard pass moves if its batch visits this many leaves and nodes."""
    values = case.batch * (case.in_features + case.out_features)
    return (leaves * case.leaf_numel + nodes * case.node_numel + values) * case.itemsize


def lacking(case: Case) -> str:
    """Why a case cannot be measured: its weights or its inputs need more memory than is free. Empty if it can."""
    if lack := lack_of_memory(case.parameter_bytes, case.device):
        return f"the layer {lack}"
    inputs = case.batch * (LEAST_INPUTS * case.in_features + case.out_features) * case.itemsize
    lack = lack_of_memory(inputs, case.device)
    return lack and f"a batch of {case.batch} {lack}"
