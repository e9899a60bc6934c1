"""The tensors of a layer and of a pass, as every backend gets them: nodes in heap order, leaves from left to right."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor


class Tree(NamedTuple):
    """The node networks: in -> 1 for node width n = 1, in -> n -> 1 with the activation in between for n > 1."""

    weight: Tensor  # (nodes, in), or (nodes, n, in)
    bias: Tensor  # (nodes,), or (nodes, n)
    out_weight: Tensor | None = None  # (nodes, n)
    out_bias: Tensor | None = None  # (nodes,)


class Leaves(NamedTuple):
    """The leaf networks in -> l -> out, side by side. A gate makes the hidden layer act(x G) * (x W).

    int8 leaves: the weights are int8, and each neuron multiplies its row of a weight by a scale in the other tensors'
    dtype.
    """

    in_weight: Tensor  # (leaves, l, in)
    in_bias: Tensor | None  # (leaves, l)
    out_weight: Tensor  # (leaves, l, out)
    out_bias: Tensor | None  # (leaves, out)
    gate_weight: Tensor | None = None  # (leaves, l, in)
    gate_bias: Tensor | None = None  # (leaves, l)
    in_scale: Tensor | None = None  # (leaves, l), as the others: int8 leaves
    out_scale: Tensor | None = None
    gate_scale: Tensor | None = None

    @property
    def is_int8(self) -> bool:
        return self.in_scale is not None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of inputs and outputs."""
        return (self.in_weight if self.in_scale is None else self.in_scale).dtype


FLOAT_LEAVES = Leaves._fields[:6]  # the parts of leaves that are not int8
# The names of a layer's parameters, in this order.
TREE_PARAMETERS = tuple(f"node_{name}" for name in Tree._fields)
LEAF_PARAMETERS = tuple(f"leaf_{name}" for name in Leaves._fields)


class SoftOptions(NamedTuple):
    """What a soft pass may do besides mixing the leaves."""

    temperature: Tensor | float = 1.0  # multiplies the logits of the nodes
    transposition: float = 0.0  # the probability that a node swaps its children for a sample
    straight_through: bool = False  # use the leaf of the hard pass, with the gradient of the mixture
    dropout: float = 0.0  # on the hidden layer of the leaves


class Soft(NamedTuple):
    """What a soft pass computes: the output, and what the losses on the tree need."""

    output: Tensor  # (..., out)
    logits: Tensor  # (batch, nodes): scaled by the temperature, before transposition
    mixture: Tensor  # (batch, leaves): the weights that were used


class Shed(NamedTuple):
    """What a soft pass that sheds leaves computes: the output, and the visits to nodes for the losses on the tree.

    A row with a reach of 0 is no visit and does not count: the specification has a row for every sample and node.
    """

    output: Tensor  # (..., out)
    logits: Tensor  # (rows,): of the node, scaled by the temperature, before transposition
    reach: Tensor  # (rows,): the probability with which the sample reaches the node
    sample: Tensor  # (rows,): int64
    node: Tensor  # (rows,): int64
    leaf: Tensor  # (batch,): the leaf with the likelier side at every node, which is never shed


class SampledOptions(NamedTuple):
    """How a sampled pass decides. The first three are as in SoftOptions."""

    temperature: Tensor | float = 1.0
    transposition: float = 0.0
    dropout: float = 0.0
    alternatives: int = 1  # other leaves that each sample tries
    estimator: str = "mixture"  # how they are drawn: fastff.sampling
    sparse: bool = False  # gradients of the parameters are sparse: of the visited nodes and leaves alone
    at_owner: Any = None  # runs leaves where they are (parallel/exchange.py); None: they are all here


class Sampled(NamedTuple):
    """What a sampled pass computes: the output, and paths of each sample for the losses on the tree.

    The first path is the visited leaf's. With the estimator "mixture" the alternatives' follow. Weighted, they then
    stand for all paths: the expectation is the soft mixture.
    """

    output: Tensor  # (..., out)
    logits: Tensor  # (batch, paths, depth): of the nodes on a path, scaled by the temperature, before transposition
    leaf: Tensor  # (batch, paths): where a path ends
    weight: Tensor  # (batch, paths): sums to 1
    nodes: Tensor | None = None  # (batch, nodes): of all nodes, as `logits`, if these are few (backends/paths.py)


Parts = TypeVar("Parts", Tree, Leaves)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Autocast off, on a device that has it."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def sparse_rows(used: Tensor, values: Tensor, rows: int) -> Tensor:
    """A tensor that is zero but for these entries of its first dimension; they are sorted, and each is there once."""
    size = (rows, *values.shape[1:])
    return torch.sparse_coo_tensor(used.unsqueeze(0), values, size, is_coalesced=True, check_invariants=False)


def alias(tensors: Parts) -> Parts:
    """The same memory: another thread that sets `parameter.data` from here on does not change these."""
    return type(tensors)._make(None if t is None else t.data for t in tensors)


def dequantize(leaves: Leaves) -> Leaves:
    """int8 leaves with float weights, all in float32 at least; float leaves unchanged."""
    if leaves.in_scale is None or leaves.out_scale is None:
        return leaves
    wide = at_least_float32(leaves.dtype)

    def scaled(weight: Tensor, scale: Tensor) -> Tensor:
        return weight.to(wide) * scale.to(wide).unsqueeze(-1)

    gated = leaves.gate_weight is not None and leaves.gate_scale is not None
    gate = scaled(leaves.gate_weight, leaves.gate_scale) if gated else None  # type: ignore[arg-type]
    first, second = scaled(leaves.in_weight, leaves.in_scale), scaled(leaves.out_weight, leaves.out_scale)
    return cast(Leaves(first, leaves.in_bias, second, leaves.out_bias, gate, leaves.gate_bias), wide)


def cast(tensors: Parts, dtype: torch.dtype) -> Parts:
    return type(tensors)._make(None if t is None else t.to(dtype) for t in tensors)
