"""The activations a leaf can have: a name, or any elementwise callable.

A gated activation has two input matrices and multiplies: swiglu is silu(x G) * (x W), geglu is gelu(x G) * (x W), and
geglu_tanh is geglu with the tanh form of gelu (Gemma, T5 1.1).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = str | Callable[[Tensor], Tensor]


def identity(x: Tensor) -> Tensor:
    return x


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "silu": F.silu,
    "tanh": torch.tanh,
    "identity": identity,
}
GATED: dict[str, Callable[[Tensor], Tensor]] = {"swiglu": F.silu, "geglu": F.gelu, "geglu_tanh": gelu_tanh}


def check(activation: Activation) -> None:
    """Raise unless `activation` is a known name or a callable."""
    if isinstance(activation, str):
        if activation not in PLAIN and activation not in GATED:
            raise ValueError(
                f"activation must be one of {', '.join([*PLAIN, *GATED])}, or a callable; got {activation!r}."
            )
    elif not callable(activation) or isinstance(activation, type):
        got = f"the class {activation.__name__}; pass an instance" if isinstance(activation, type) else repr(activation)
        raise TypeError(f"activation must be a name or a callable; got {got}.")


def is_gated(activation: Activation) -> bool:
    return isinstance(activation, str) and activation in GATED


def function(activation: Activation) -> Callable[[Tensor], Tensor]:
    """The elementwise function; for a gated activation, the one that acts on the gate."""
    if isinstance(activation, str):
        return PLAIN[activation] if activation in PLAIN else GATED[activation]
    return activation


def apply(activation: Activation, up: Tensor, gate: Tensor | None = None) -> Tensor:
    """The hidden layer of a feedforward network: act(up), or act(gate) * up if it is gated."""
    act = function(activation)
    return act(up) if gate is None else act(gate) * up
