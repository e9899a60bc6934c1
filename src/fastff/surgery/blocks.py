"""A dense feedforward block as surgery sees it: its weights, the function it computes, the modules it consists of."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..activations import GATED, PLAIN, Activation, apply
from .linears import Linear, agrees, wide_dtype

# The forms that surgery looks for. The first three are modules that do nothing else and are replaced whole. In the
# last two, the FFF replaces the first linear layer, and everything up to and including the second becomes the identity.
FORMS = {
    "plain": "down(activation(up(x))) in its own module",
    "gated": "down(activation(gate(x)) * up(x)) in its own module",
    "packed": "gated, with gate and up in one linear layer of twice the width",
    "split": "up and activation in one module, down in another (BERT)",
    "in-layer": "up, activation and down in a larger layer (OPT, torch.nn.TransformerEncoderLayer)",
}


class Skip(Exception):
    """Why something that looks like a feedforward block is left unchanged."""


class CannotRun(Skip):
    """A module that does not run on a probe; reported only if it visibly has an activation."""


@dataclass(frozen=True)
class Weights:
    """The weights of a dense block, or of one leaf, laid out as in nn.Linear; a gated one has gate and gate_bias."""

    up: Tensor  # (width, in)
    up_bias: Tensor | None
    down: Tensor  # (out, width)
    down_bias: Tensor | None
    gate: Tensor | None = None  # (width, in)
    gate_bias: Tensor | None = None

    def to(self, dtype: torch.dtype) -> "Weights":
        return Weights(*(None if t is None else t.to(dtype) for t in vars(self).values()))  # type: ignore[arg-type]

    def compute(self, x: Tensor, act: Activation) -> Tensor:
        """The block's output at x (..., in) with this activation: (..., out)."""
        return F.linear(self.hidden(x, act), self.down, self.down_bias)

    def hidden(self, x: Tensor, act: Activation) -> Tensor:
        """The hidden layer: (..., width)."""
        gate = None if self.gate is None else F.linear(x, self.gate, self.gate_bias)
        return apply(act, F.linear(x, self.up, self.up_bias), gate)

    def explain(self, x: Tensor, y: Tensor, act: Activation) -> bool:
        """Whether y is the block's output at x."""
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            return False
        if x.dtype != self.up.dtype or y.shape != x.shape[:-1] + self.down.shape[:1]:
            return False
        wide = wide_dtype(x)
        return agrees(y, self.compute(x, act), self.to(wide).compute(x.to(wide), act))


def form_of(linears: Sequence[Linear]) -> str:
    """The form that linear layers called in this order can have, judged by their sizes; "" for none."""
    first, last = linears[0], linears[-1]
    if len(linears) == 2 and first.out_features == last.in_features:
        return "plain"
    if len(linears) == 2 and first.out_features == 2 * last.in_features:
        return "packed"
    if len(linears) == 3 and first[:2] == linears[1][:2] and first.out_features == last.in_features:
        return "gated"
    return ""


def readings(linears: Sequence[Linear]) -> Iterator[tuple[str, Weights]]:
    """Each way to read linear layers called in this order as a block: gate first, or gate last."""
    form = form_of(linears)
    *inner, down = [(linear.weight, linear.bias) for linear in linears]
    if form == "packed":
        weight, bias = inner[0]
        inner = list(zip(weight.chunk(2), (None, None) if bias is None else bias.chunk(2), strict=True))
    if form == "plain":
        yield form, Weights(*inner[0], *down)
    elif form:
        yield form, Weights(*inner[1], *down, *inner[0])
        yield form, Weights(*inner[0], *down, *inner[1])


@dataclass(frozen=True)
class Block:
    """A feedforward block that was found and verified in a model.

    name: the FFF's path. activation: as for FFF; if it is a callable, `activation_at` is its path.
    linears: the paths of the linear layers. identity: the paths that become the identity. dropout: the rate on the
    hidden layer. dropout_after: the path of an nn.Dropout on the output, which is kept, or a functional one's rate.
    """

    name: str
    form: str
    weights: Weights
    activation: Activation
    linears: tuple[str, ...]
    activation_at: str = ""
    identity: tuple[str, ...] = ()
    dropout: float = 0.0
    dropout_after: str | float = ""
    requires_grad: dict[str, bool] = field(default_factory=dict)

    @property
    def in_features(self) -> int:
        return self.weights.up.shape[1]

    @property
    def width(self) -> int:
        return self.weights.up.shape[0]

    @property
    def out_features(self) -> int:
        return self.weights.down.shape[0]

    @property
    def bias(self) -> bool:
        """Whether any of the linear layers has a bias."""
        biases = self.weights.up_bias, self.weights.down_bias, self.weights.gate_bias
        return any(bias is not None for bias in biases)

    def __call__(self, x: Tensor) -> Tensor:
        """The dense block's output at x (..., in), without dropout: the target for the layer that replaces it."""
        return self.weights.compute(x, self.activation)


def gated_name(activation: Activation) -> str | None:
    """FFF's name for a gate with this activation; None if it has none."""
    names = {gate: name for name, gate in GATED.items()}
    return names.get(PLAIN[activation]) if isinstance(activation, str) else None


def recognise(unknown: Any) -> Activation | None:
    """fastff's name for a function; the function itself if it has no name; None if it is not elementwise."""
    # Very small and very large numbers too: a clipped ReLU is no ReLU.
    far = torch.logspace(-6, 6, 49, dtype=torch.float64)
    grid = torch.cat([torch.linspace(-6, 6, 97, dtype=torch.float64), far, -far])
    try:
        y, part = unknown(grid), unknown(grid[:5])
    except Exception:  # foreign code, which may take other arguments
        return None
    if not isinstance(y, Tensor) or y.shape != grid.shape or not torch.allclose(y[:5], part, rtol=1e-12):
        return None
    for name, known in PLAIN.items():
        if torch.allclose(known(grid), y.to(grid.dtype), rtol=1e-8, atol=1e-8):
            return name
    return unknown
