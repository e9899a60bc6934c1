"""Hardening and balance: what makes the soft tree of training agree with the hard tree of inference.

The losses read what the last training forward of every FFF in a model left behind, and sum over the layers:

    y = model(x)
    loss = task(y, target) + h * fastff.hardening_loss(model) + 0.1 * fastff.balance_loss(model)
    loss.backward()

With z the node logits (scaled by the temperature) and p = sigmoid(z), a node's entropy in nats is
H = -p log p - (1 - p) log(1 - p). Below 0.10 on average, rounding the decisions is nearly free.
"""

import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import tree as heap
from .backends import select
from .backends.reference import one_hot
from .checks import check_int, check_number
from .interrupts import uninterrupted
from .layer import FFF
from .memory import recall


def layers(model: nn.Module) -> dict[str, FFF]:
    """The FFF layers of a model by name; an error if there are none."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a model, an nn.Module; got {type(model).__name__}. Pass the model itself.")
    found = {_plain(name): module for name, module in model.named_modules() if isinstance(module, FFF)}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no FFF layer. Put one in, as fastff.FFF(in_features, out_features, "
            "depth=..., leaf_width=...), or pass the model that has one."
        )
    return found


def mark_fitted(model: nn.Module) -> None:
    """The FFF layers of a model have got their trees and leaves: a Recipe then keeps them."""
    for layer in layers(model).values():
        layer.fitted_tree = layer.fitted_leaves = True


def _plain(name: str) -> str:
    """A module's name without what torch.compile puts into it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def hardening_loss(model: nn.Module, reduction: Literal["mean", "sum", "path"] = "mean") -> Tensor:
    """The entropy of the decisions in the last training forward, summed over the FFF layers of `model`.

    "mean": over samples and nodes. The paper's h of 3 to 10 fits this one, which the authors' code computes.

    "sum": over samples and nodes, the paper's formula to the letter; it grows with the batch and with 2**depth.

    "path": a node counts for a sample by the probability that the sample reaches it, averaged over samples; this is
    the entropy of the mixture.
    """
    check_reduction(reduction)
    losses = []
    for _, _, logits in last_forward(model):
        entropy = bernoulli_entropy(logits)  # (batch, nodes)
        if reduction == "sum":
            losses.append(entropy.sum())
        elif reduction == "mean":
            losses.append(entropy.sum() / max(entropy.numel(), 1))  # 0, not NaN, for depth 0 or an empty batch
        else:
            losses.append((log_reach(logits).exp() * entropy).sum() / max(len(entropy), 1))
    return torch.stack(losses).sum()


def check_reduction(reduction: str) -> None:
    if reduction not in ("mean", "sum", "path"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'path'; got {reduction!r}.")


def balance_loss(model: nn.Module, kind: Literal["node", "leaf"] = "node") -> Tensor:
    """How unevenly the last training forward used the tree, summed over the FFF layers of `model`.

    "node": the sum over nodes of -(log a + log(1 - a)) / 2**(level + 1), with a the share of a node's samples that go
    right; it is depth * log 2 when every node halves its samples, and more otherwise.

    "leaf": as in the Switch transformer, the number of leaves times the sum over leaves of f * m, with f the share of
    samples that the hard pass sends to a leaf and m its mean soft weight; 1 when both are uniform.
    """
    if kind not in ("node", "leaf"):
        raise ValueError(f"kind must be 'node' or 'leaf'; got {kind!r}.")
    losses = []
    for _, layer, logits in last_forward(model):
        if not logits.shape[0]:
            losses.append(logits.sum())
        elif kind == "leaf":
            ops, _ = select()
            share = one_hot(ops.walk(logits), layer.num_leaves, logits.dtype).mean(0)
            losses.append(layer.num_leaves * (share * ops.mixture(logits).mean(0)).sum())
        else:
            # In logarithms: a node that nothing reaches, or that sends all one way, has a finite loss and gradient.
            sides = torch.logsumexp(log_flow(logits), 0)  # (nodes, 2)
            uneven = torch.logsumexp(sides, -1) - sides.mean(-1)  # -(log a + log(1 - a)) / 2
            losses.append(sum((part.mean() for part in uneven.split(_sizes(layer.depth))), logits.new_zeros(())))
    return torch.stack(losses).sum()


@torch.no_grad()
def entropies(model: nn.Module) -> dict[str, Tensor]:
    """The mean entropy of every node over the last training forward: a (nodes,) tensor for each FFF layer, by name."""
    return {
        name: bernoulli_entropy(logits).sum(0) / max(len(logits), 1)
        for name, _, logits in last_forward(model, differentiable=False)
    }


def bernoulli_entropy(logits: Tensor) -> Tensor:
    """H(sigmoid(z)) in nats."""
    # softplus(z) - z sigmoid(z), written in |z| so that nothing cancels: the two terms are of the same sign.
    a = logits.abs()
    return F.softplus(-a) + a * torch.sigmoid(-a)


def log_flow(logits: Tensor) -> Tensor:
    """The logarithm of the probability that a sample reaches a node and goes left or right: (batch, nodes, 2)."""
    branch, depth = F.logsigmoid(torch.stack([-logits, logits], -1)), heap.depth_of(logits.shape[-1] + 1)
    if not depth:
        return branch
    # Split, not sliced: the derivative of slices would fill and add a tensor of the full size for each.
    levels = list(branch.split(_sizes(depth), 1))
    for m in range(1, depth):
        levels[m] = levels[m - 1].flatten(-2).unsqueeze(-1) + levels[m]
    return torch.cat(levels, 1)


def _sizes(depth: int) -> list[int]:
    """The number of nodes in each level."""
    return [2**m for m in range(depth)]


def log_reach(logits: Tensor) -> Tensor:
    """The logarithm of the probability that a sample reaches a node: (batch, nodes)."""
    # The flow out of a node, left or right, is what reaches its children, and nodes follow each other in that order.
    return torch.cat([torch.zeros_like(logits[:, :1]), log_flow(logits).flatten(-2)[:, : logits.shape[-1] - 1]], -1)


def last_forward(model: nn.Module, differentiable: bool = True) -> Iterator[tuple[str, FFF, Tensor]]:
    """Every FFF layer, by name, with the logits of its last training forward."""
    for name, layer in layers(model).items():
        trained = any(parameter.requires_grad for parameter in layer.tree_parameters())
        needed = differentiable and trained and layer.depth > 0
        yield name, layer, recall(layer, "_logits", f"the FFF layer {name!r}", needed)


def set_temperature_(model: nn.Module, value: float) -> None:
    """Set the temperature of every FFF layer of a model; of none if one of them cannot have it."""
    found = layers(model).values()
    value = check_temperature("temperature", value, found)
    with uninterrupted():
        for layer in found:
            layer.temperature = value


def check_temperature(name: str, value: float, found: Iterable[FFF]) -> float:
    """The value as a float, if it is a temperature that each of these layers can have."""
    value = check_number(name, value, 0, above=True)
    for dtype in {layer._temperature.dtype for layer in found}:
        if not torch.finfo(dtype).tiny <= value <= torch.finfo(dtype).max:
            raise ValueError(f"{name} must be positive and finite in {dtype}; got {value}.")
    return value


class Schedule:
    """A number that changes over training, for the temperature or the hardening weight h.

    kind: "constant" (start), "linear", "cosine" (slow at both ends) or "exponential" (equal ratios) from start to end
    in `steps` calls of step(), then end. `value` is the number now; step() advances by one and returns the new value.
    """

    def __init__(self, kind: str, start: float, end: float | None = None, steps: int = 0) -> None:
        if kind not in ("constant", "linear", "cosine", "exponential"):
            raise ValueError(f"kind must be 'constant', 'linear', 'cosine' or 'exponential'; got {kind!r}.")
        steps = check_int("steps", steps, 0)
        if kind != "constant" and (end is None or steps < 1):
            raise ValueError(f"a {kind} schedule needs an end and at least 1 step; got end={end}, steps={steps}.")
        lowest, positive = (0.0, True) if kind == "exponential" else (-sys.float_info.max, False)
        self.kind, self.start, self.steps = kind, check_number("start", start, lowest, above=positive), steps
        self.end = self.start if end is None else check_number("end", end, lowest, above=positive)
        if kind == "constant":
            self.end = self.start
        change = self.end / self.start if kind == "exponential" else self.end - self.start
        if not math.isfinite(change) or (kind == "exponential" and not change):
            raise ValueError(f"the way from {start} to {end} is too far for a float.")
        self.count = 0

    @property
    def value(self) -> float:
        """The number now."""
        if self.kind == "constant":
            return self.start
        if self.count >= self.steps:
            return self.end
        t = self.count / self.steps
        if self.kind == "exponential":
            return self.start * math.pow(self.end / self.start, t)
        if self.kind == "cosine":
            t = (1 - math.cos(math.pi * t)) / 2
        return self.start + (self.end - self.start) * t

    def step(self) -> float:
        """Advance by one and return the new value."""
        self.count += 1
        return self.value

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.keys() != vars(self).keys():
            raise ValueError(f"a schedule's state has {', '.join(vars(self))}; got {', '.join(state) or 'nothing'}.")
        vars(self).update(state)

    def __repr__(self) -> str:
        return f"Schedule({self.kind!r}, {self.start}, {self.end}, steps={self.steps})  # {self.value} at {self.count}"
