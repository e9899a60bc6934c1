"""Explain a candidate's output as one reading of its weights with one activation."""

from typing import Any, NamedTuple

from torch import Tensor

from ..activations import PLAIN, Activation
from .blocks import Skip, Weights, gated_name, readings, recognise
from .linears import Linear


class Match(NamedTuple):
    """A form of block, weights and an activation that reproduce an output; `function` acts on the gate of a gated one.

    activation: as for FFF: "swiglu" for a gate with silu.
    """

    form: str
    weights: Weights
    activation: Activation
    function: Activation


def match(linears: list[Linear], candidates: list[Any], x: Tensor, y: Tensor) -> Match:
    """The one reading of the linear layers that gives y at x, with a candidate activation or else any named one."""
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
        raise Skip(f"it is gated by {act}; FFF has gates with silu (swiglu) and gelu (geglu, geglu_tanh)")
    return found._replace(activation=name)


def activation_name(activation: Activation) -> str:
    return activation if isinstance(activation, str) else getattr(activation, "__name__", type(activation).__name__)
