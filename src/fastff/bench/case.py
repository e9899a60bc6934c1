"""A case: the size of a layer, the batch, the dtype and the device; and the bytes that it cannot do without.

The byte floor of a hard pass is what has to cross the memory bus at least once: every leaf and every node that some
sample of the batch visits, the inputs and the outputs. Divided by the bandwidth of the machine it is a time that no
implementation can beat, unless the weights stay in a cache from one call to the next.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import activations
from .. import tree as heap
from ..checks import check_int

DTYPES = ("float32", "bfloat16", "float16", "float64")
DEVICES = ("cpu", "cuda")
LEAST_INPUTS = 4  # in turn
DEEPEST = 62  # leaves are numbered by int64
LARGEST = 2**62  # of any other number


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
            raise ValueError("device 'cuda' needs a GPU that torch can use; there is none here. Use device 'cpu'.")

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
    """How many different leaves, and different nodes, the samples of a batch visit, given their leaves."""
    leaf = leaf.unique()
    nodes = sum(len((leaf >> (depth - m)).unique()) for m in range(depth))
    return len(leaf), nodes


def floor_bytes(case: Case, leaves: float, nodes: float) -> float:
    """The bytes that a hard pass has to move at least, if its batch visits so many leaves and nodes."""
    values = case.batch * (case.in_features + case.out_features)
    return (leaves * case.leaf_numel + nodes * case.node_numel + values) * case.itemsize


def free_memory(device: str) -> int:
    """The bytes that can still be used without swapping or failing."""
    if device == "cuda":
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return int(torch.cuda.mem_get_info()[0]) + cached
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        return int(lines["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 2**62


def lacking(case: Case) -> str:
    """Why a case cannot be measured at all: its weights and the fewest inputs take more memory than is free."""
    if lack := lack_of_memory(case.parameter_bytes, case.device):
        return f"the layer {lack}"
    inputs = case.batch * (LEAST_INPUTS * case.in_features + case.out_features) * case.itemsize
    lack = lack_of_memory(inputs, case.device)
    return lack and f"a batch of {case.batch} {lack}"


def lack_of_memory(need: float, device: str) -> str:
    """Why so many bytes are too many, or nothing if they are not. A tenth is left to others."""
    free = 0.9 * free_memory(device)
    return "" if need <= free else f"needs {need / 2**30:.3g} GiB, {free / 2**30:.3g} GiB are free"
