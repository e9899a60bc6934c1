"""The dropout of a block: where it acts, and its rate. FFF has dropout on the hidden layer of its leaves.

nn.Dropout stores its rate. The rate of torch.nn.functional.dropout is read off a training pass: dropped entries are 0,
the others are multiplied by 1 / (1 - rate).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..activations import Activation
from .blocks import Skip, Weights
from .linears import agrees, wide_dtype
from .match import Match
from .trace import Call


def hidden_dropout(drops: list[nn.Dropout]) -> float:
    """The rate of the dropout on a hidden layer."""
    rates = [m.p for m in drops if m.p > 0]
    if 1 in rates:
        raise Skip("its dropout rate is 1, which zeroes the whole hidden layer")
    if len(rates) > 1:
        raise Skip("it has more than one dropout on its hidden layer")
    return float(rates[0]) if rates else 0.0


def check_dropout_place(calls: list[Call], found: Match, x: Tensor) -> None:
    """Skip a block if a dropout among these calls does not act on the hidden layer that leads to the output."""
    if found.activation in ("relu", "identity"):
        return  # dropout before or after them is the same
    hidden = found.weights.hidden(x, found.function).double()
    for call in calls:
        if not isinstance(call.module, nn.Dropout) or not call.module.p:
            continue
        seen = call.input.double()
        if seen.shape != hidden.shape or (seen - hidden).norm() > 0.01 * hidden.norm():
            raise Skip("its dropout comes before the activation, where FFF has none")


def functional_rates(
    weights: Weights, act: Activation, x: Tensor, inner: list[Tensor], hidden: Tensor, y: Tensor
) -> tuple[float, float] | None:
    """The rates of functional dropout on the hidden layer and on the output, in a training pass; None if more than
    that happens.

    x: the block's input (samples, tokens, in). inner: the input of each of its first linear layers. hidden: the last
    one's input. y: the block's output.
    """
    if not all(seen.shape == x.shape and torch.equal(seen, x) for seen in inner):
        return None
    wide = wide_dtype(x)
    exact = weights.to(wide)
    on_hidden = _rate(hidden, weights.hidden(x, act), exact.hidden(x.to(wide), act))
    clean = F.linear(hidden, weights.down, weights.down_bias)
    on_output = _rate(y, clean, F.linear(hidden.to(wide), exact.down, exact.down_bias))
    return None if on_hidden is None or on_output is None else (on_hidden, on_output)


def _rate(seen: Tensor, clean: Tensor, exact: Tensor) -> float | None:
    """The rate of the dropout that turned `clean` (samples, tokens, features) into `seen`; None if none did."""
    if seen.shape != clean.shape or seen.dtype != clean.dtype:
        return None
    if agrees(seen, clean, exact):
        return 0.0
    kept = seen != 0
    scale = float((seen * exact)[kept].sum() / (clean * exact)[kept].sum())
    rate = round(1 - 1 / scale, 4) if scale > 1 else 0.0
    dropped = ~kept & (clean != 0)
    if not 0 < rate < 1 or not agrees(seen, kept * clean / (1 - rate), kept * exact / (1 - rate)):
        return None
    # Entries are dropped singly: not whole samples, tokens or features, as in stochastic depth and Dropout1d.
    alone = all(bool((dropped.any(dim) & (kept & (clean != 0)).any(dim)).any()) for dim in range(dropped.dim()))
    return rate if alone else None
