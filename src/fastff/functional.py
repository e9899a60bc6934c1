"""The two passes as functions of tensors: check the input once, choose a backend, keep the leading dimensions.

soft:  y = sum_j c_j(x) L_j(x)      c_j: the product of the branch weights on the way to leaf j   (training)
hard:  y = L_j(x)                   j: go right wherever a node's logit is >= 0                   (inference)
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .activations import Activation, is_gated
from .activations import check as check_activation
from .backends import select, select_soft, triton
from .backends.reference import Leaves, Tree
from .checks import check_probability

__all__ = ["Leaves", "Soft", "Tree", "hard", "mixture", "node_logits", "route", "soft"]

Parts = TypeVar("Parts", Tree, Leaves)


class Soft(NamedTuple):
    """What a soft pass computes: the output, and what the losses on the tree need."""

    output: Tensor  # (..., out)
    logits: Tensor  # (batch, nodes): scaled by the temperature, before transposition
    mixture: Tensor  # (batch, leaves): the weights that were used


def soft(
    x: Tensor,
    tree: Tree,
    leaves: Leaves,
    *,
    activation: Activation = "relu",
    temperature: Tensor | float = 1.0,
    transposition: float = 0.0,
    straight_through: bool = False,
    dropout: float = 0.0,
) -> Soft:
    """The soft pass of x (..., in). `transposition` and `dropout` are probabilities and act whenever they are not 0."""
    flat = flatten(x, tree.weight)
    check_fit(tree, leaves, activation)
    check_probability("transposition", transposition)
    check_probability("dropout", dropout)
    if not isinstance(temperature, Tensor) and not temperature > 0:
        raise ValueError(f"temperature must be positive; got {temperature}.")
    dtype = autocast_dtype(flat)
    if dtype is not None:
        flat, tree, leaves = flat.to(dtype), cast(tree, dtype), cast(leaves, dtype)
    if isinstance(activation, str) and select_soft(flat, tree, leaves, activation, dropout)[0] is triton:
        y, logits, weights = triton.soft(flat, tree, leaves, activation, temperature, transposition, straight_through)
        return Soft(restore(y, x), logits, weights)
    ops, _ = select()
    logits = ops.node_logits(flat, tree, activation) * temperature  # (batch, nodes)
    # p -> 1 - p is z -> -z.
    turned = torch.where(torch.rand_like(logits) < transposition, -logits, logits) if transposition else logits
    weights = ops.mixture(turned, straight_through)  # (batch, leaves)
    hidden = ops.leaf_hidden(flat, leaves, activation)
    y = ops.mix(F.dropout(hidden, dropout) if dropout else hidden, weights, leaves)
    return Soft(restore(y, x), logits, weights)


def hard(x: Tensor, tree: Tree, leaves: Leaves, *, activation: Activation = "relu") -> Tensor:
    """The hard pass of x (..., in): one node a level, then one leaf."""
    flat = flatten(x, tree.weight)
    check_fit(tree, leaves, activation)
    dtype = autocast_dtype(flat)
    ops, _ = select()
    if dtype is None:
        return restore(ops.visit(flat, ops.route(flat, tree, activation), leaves, activation), x)
    # The weights stay as they are: casting them would touch every leaf, and the point is to visit one.
    with no_autocast(flat):
        flat = flat.to(tree.weight.dtype)
        y = ops.visit(flat, ops.route(flat, tree, activation), leaves, activation)
        return restore(y.to(dtype), x)


def node_logits(x: Tensor, tree: Tree, *, activation: Activation = "relu") -> Tensor:
    """The logit of every node at x (..., in): (..., nodes), float32 at least."""
    flat = flatten(x, tree.weight)
    with no_autocast(flat):
        return restore(select()[0].node_logits(flat.to(tree.weight.dtype), tree, activation), x)


def mixture(logits: Tensor) -> Tensor:
    """The weight of every leaf, given the logits (..., nodes): (..., leaves), summing to one."""
    return restore(select()[0].mixture(logits.reshape(logits.shape[:-1].numel(), logits.shape[-1])), logits)


def route(x: Tensor, tree: Tree, *, activation: Activation = "relu") -> Tensor:
    """The leaf that the hard pass uses at x (..., in): (...,) int64."""
    flat = flatten(x, tree.weight)
    with torch.no_grad(), no_autocast(flat):
        leaf: Tensor = select()[0].route(flat.to(tree.weight.dtype), tree, activation)
    return leaf.reshape(x.shape[:-1])


def flatten(x: Tensor, weight: Tensor, layer: str = "FFF") -> Tensor:
    """x as (batch, in), or an error that says what is wrong with it."""
    features = weight.shape[-1]
    if not isinstance(x, Tensor):
        raise TypeError(f"{layer} expects a tensor; got {type(x).__name__}. Convert it with torch.as_tensor.")
    if x.dim() == 0 or x.shape[-1] != features:
        raise ValueError(
            f"{layer} expects inputs of shape (..., {features}); got {tuple(x.shape)}. "
            + (f"Pass in_features={x.shape[-1]}, or project the input first." if x.dim() else "Add a last dimension.")
        )
    if x.device != weight.device:
        raise ValueError(
            f"{layer} has its parameters on {weight.device}; got an input on {x.device}. Move one of them."
        )
    if not x.is_floating_point() or (x.dtype != weight.dtype and autocast_dtype(x) is None):
        raise TypeError(
            f"{layer} has {weight.dtype} parameters; got a {x.dtype} input. "
            f"Convert it with x.to({weight.dtype}), convert the layer, or use torch.autocast."
        )
    return x if x.dim() == 2 else x.reshape(-1, features)


def restore(y: Tensor, x: Tensor) -> Tensor:
    """y (batch, features) with the leading dimensions of x."""
    return y if x.dim() == 2 else y.reshape(x.shape[:-1] + y.shape[-1:])


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast asks for, if it is on; float64 is exempt from autocast in torch, so here too."""
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return None
    return torch.get_autocast_dtype(x.device.type)


def no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Autocast off, on a device that has it."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def check_fit(tree: Tree, leaves: Leaves, activation: Activation) -> None:
    """Raise unless these nodes and leaves make a tree, and the leaves suit the activation."""
    check_activation(activation)
    if len(tree.weight) + 1 != len(leaves.in_weight):
        raise ValueError(f"a tree of {len(tree.weight)} nodes has one leaf more; got {len(leaves.in_weight)} leaves.")
    if is_gated(activation) != (leaves.gate_weight is not None):
        needs = "a gate_weight" if is_gated(activation) else "no gate_weight"
        raise ValueError(f"activation {activation!r} needs leaves with {needs}.")


def cast(tensors: Parts, dtype: torch.dtype) -> Parts:
    return type(tensors)._make(None if t is None else t.to(dtype) for t in tensors)
