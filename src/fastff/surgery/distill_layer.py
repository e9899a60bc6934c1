"""Distillation of one layer: train its leaves, and its tree if wanted, on the outputs of its dense block."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import functional
from ..checks import check_int
from ..layer import FFF
from ..tensors import FLOAT_LEAVES
from .blocks import Block, Weights
from .closeness import hold_out, missed
from .fit import dense_layer
from .leaves import check_dense, check_same_function
from .report import Distilled, diverged, no_better, too_few

Advance = Callable[..., None]  # as fastff.progress yields it


def distill_layer_(
    name: str,
    layer: FFF,
    block: Block,
    x: Tensor,
    advance: Advance,
    *,
    steps: int,
    batch: int,
    rate: float,
    train_tree: bool = False,
) -> Distilled:
    """Train a layer's leaves, and its tree if wanted, on the outputs of its dense block at x (samples, in). Weights
    that end up worse on held-out inputs are restored."""
    dense = dense_layer(block).to(layer.leaf_in_weight)
    held_out, train = hold_out(x)
    learned = learners(layer, train_tree)
    start = [p.detach().clone() for p in learned]
    before, note = missed(layer, dense, held_out), ""
    if before is None or len(x) == 1:
        note = too_few(1) if len(x) == 1 else "the outputs of the dense block do not vary on these data"
        return Distilled(name, math.nan, math.nan, kept=False, note=note)
    losses = distill_leaves_(layer, dense, train, steps=steps, batch=batch, rate=rate, train_tree=train_tree)
    for step, error in enumerate(losses, 1):
        advance(text=f"{name}: {error:.3g}")
        if not math.isfinite(error):
            note = diverged(step, error)
            break
    after = missed(layer, dense, held_out)
    after = math.inf if after is None else after
    if not note and after < before and all(p.isfinite().all() for p in learned):
        return Distilled(name, before, after)
    for p, old in zip(learned, start, strict=True):
        p.copy_(old)
    return Distilled(name, before, before, kept=False, note=note or no_better(before, after))


def distill_leaves_(
    layer: FFF,
    dense: FFF,
    x: Tensor,
    *,
    steps: int = 1000,
    batch: int = 1024,
    rate: float = 1e-3,
    train_tree: bool = False,
) -> Iterable[float]:
    """Train the leaves of a layer on the outputs of a dense one at x (samples, in); yields the loss of every step.

    A sample trains the leaf that it visits, in the hard pass, and with `train_tree` the nodes on its path.
    """
    check_dense(layer, dense)
    check_learner(layer, dense)
    check_int("steps", steps, 1)
    learned, forward = learners(layer, train_tree), training_pass(layer, train_tree)
    state = [(p, p.requires_grad, p.grad) for p in learned]
    optimizer = torch.optim.Adam(learned, lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    try:
        for parameter in learned:
            parameter.requires_grad_(True)
        for _ in range(steps):
            some = x[torch.randint(len(x), (min(batch, len(x)),), device=x.device)]
            with torch.no_grad():
                y = dense(some)
            with torch.enable_grad():
                loss = F.mse_loss(forward(some), y)
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            schedule.step()
            yield loss.item()
    finally:
        for parameter, wanted, grad in state:
            parameter.requires_grad_(wanted)
            parameter.grad = grad


def learners(layer: FFF, train_tree: bool) -> list[torch.nn.Parameter]:
    """The parameters that distillation trains."""
    return [*layer.leaf_parameters(), *(layer.tree_parameters() if train_tree else [])]


def training_pass(layer: FFF, train_tree: bool) -> Callable[[Tensor], Tensor]:
    """The hard pass for training; with `train_tree` its gradient reaches the nodes, too."""
    return partial(sampled if train_tree and layer.depth else visited, layer)


def sampled(layer: FFF, x: Tensor) -> Tensor:
    """The hard pass at x (..., in). Each sample tries one other leaf, to estimate its nodes' gradient."""
    found = functional.sampled(
        x, layer.tree, layer.leaves, activation=layer.activation, temperature=layer.temperature_tensor
    )
    return found.output


def visited(layer: FFF, x: Tensor) -> Tensor:
    """The hard pass at x (..., in), for training: one call for the samples of each leaf.

    Each leaf's gradient stays separate. An index into the parameter of all leaves would make a gradient of that
    parameter's size for every visited leaf.
    """
    flat = x.reshape(-1, layer.in_features)
    if not len(flat):
        return layer(x)
    leaf, order = layer.route(flat).sort()
    used, counts = leaf.unique_consecutive(return_counts=True)
    leaves = layer.leaves[: len(FLOAT_LEAVES)]
    parts = [[None] * layer.num_leaves if t is None else t.unbind() for t in leaves]
    y = []
    for j, some in zip(used.tolist(), flat[order].split(counts.tolist()), strict=True):
        in_weight, in_bias, out_weight, out_bias, gate_weight, gate_bias = (part[j] for part in parts)
        weights = Weights(in_weight, in_bias, out_weight.mT, out_bias, gate_weight, gate_bias)
        y.append(weights.compute(some, layer.activation))
    return torch.cat(y)[order.argsort()].reshape(*x.shape[:-1], layer.out_features)


def check_learner(layer: FFF, dense: Any, at: str = "") -> None:
    """Raise unless a layer can learn from a dense layer or block."""
    if layer.leaf_in_weight.dtype == torch.float16:
        raise ValueError("Adam overflows in float16. Distil in float32 or bfloat16, and convert the model afterwards.")
    check_same_function(layer, dense, at)
