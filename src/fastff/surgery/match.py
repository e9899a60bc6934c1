"""Explain what a candidate computed: as one reading of its weights with one activation, and with dropout FFF has."""

from typing import Any, NamedTuple

from torch import Tensor, nn

from ..activations import PLAIN, Activation
from .blocks import Linear, Skip, Weights, gated_name, readings, recognise
from .trace import Call


class Match(NamedTuple):
    """A form of block, weights and an activation that reproduce an output; `function` acts on the gate of a gated one.

    activation: as FFF takes it, "swiglu" for a gate with silu.
    """

    form: str
    weights: Weights
    activation: Activation
    function: Activation


def match(linears: list[Linear], candidates: list[Any], x: Tensor, y: Tensor) -> Match:
    """The one reading of the linear layers that gives y at x, by a candidate activation or else any that has a name."""
    known = [a for c in candidates if (a := recognise(c)) is not None]
    for tried in (list(dict.fromkeys(known)), list(PLAIN)):
        found = [
            Match(form, weights, activation, activation)
            for form, weights in readings(linears)
            for activation in tried
            if weights.explain(x, y, activation)
        ]
        if len(found) == 1:
            return _name_gate(found[0])
        if found:
            ways = ", ".join(f"{m.form} {activation_name(m.activation)}" for m in found)
            raise Skip(f"its output on a probe can be explained in several ways ({ways})")
    tensors = [t for linear in linears for t in (linear.weight, linear.bias) if t is not None]
    if not all(bool(tensor.isfinite().all()) for tensor in tensors):
        raise Skip("its weights contain NaN or infinity; load finite weights")
    raise Skip("recomputed from its weights on a probe, plain or gated, its output differs")


def _name_gate(found: Match) -> Match:
    if found.weights.gate is None:
        return found
    name = gated_name(found.activation)
    if name is None:
        act = activation_name(found.activation)
        raise Skip(f"it is gated by {act}; FFF has gates with silu (swiglu) and gelu (geglu)")
    return found._replace(activation=name)


def activation_name(activation: Activation) -> str:
    return activation if isinstance(activation, str) else getattr(activation, "__name__", type(activation).__name__)


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
        return  # dropout before or after these is the same
    hidden = found.weights.hidden(x, found.function).double()
    for call in calls:
        if not isinstance(call.module, nn.Dropout) or not call.module.p:
            continue
        seen = call.input.double()
        if seen.shape != hidden.shape or (seen - hidden).norm() > 0.01 * hidden.norm():
            raise Skip("its dropout comes before the activation, where FFF has none")
