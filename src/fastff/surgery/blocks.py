"""A dense feedforward block as surgery sees it: its weights, the function it computes, the modules it consists of."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..activations import GATED, PLAIN, Activation, apply

# The forms that surgery looks for. The first three are modules that do nothing else and are replaced whole. In the last
# two, the FFF replaces the first linear layer, and everything up to and including the second becomes the identity.
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
    """It does not run on a probe; it counts as skipped only if it visibly has an activation."""


class Linear(NamedTuple):
    """The sizes and weights of a linear layer. `trouble` says why the weights cannot be read, if they cannot."""

    in_features: int
    out_features: int
    weight: Tensor = torch.empty(0)  # (out, in)
    bias: Tensor | None = None
    trouble: str = ""


def read_linear(module: nn.Module) -> Linear | None:
    """Read a linear layer: an nn.Linear, or one with transposed weights, as GPT-2's Conv1D. None for other modules."""
    own = dict(module.named_parameters(recurse=False))
    if isinstance(module, nn.Linear):
        sizes = module.in_features, module.out_features
    elif set(own) == {"weight", "bias"} and own["weight"].dim() == 2 and own["bias"].shape == own["weight"].shape[1:]:
        sizes = own["weight"].shape[0], own["weight"].shape[1]
    elif next(module.parameters(), None) is None or hasattr(module, "base_layer"):
        # Quantised layers keep packed weights and adapters wrap a base_layer: they have sizes but no weight parameter.
        sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)  # type: ignore[assignment]
        if not all(isinstance(size, int) for size in sizes):
            return None
    else:
        return None
    kind = type(module).__name__
    if isinstance(module, nn.Linear) and (
        type(module).forward is not nn.Linear.forward or set(own) - {"weight", "bias"} or [*module.buffers()]
    ):
        return Linear(
            *sizes, trouble=f"its {kind} is more than a linear layer: it has extra tensors or its own forward"
        )
    if "weight" not in own or not all(map(_is_plain, own.values())) or next(module.children(), None) is not None:
        why = f"its {kind} is quantised, wrapped or parametrised; its weights cannot be read: call replace_ before that"
        return Linear(*sizes, trouble=why)
    if own["weight"].is_meta:
        return Linear(*sizes, trouble="it is on the meta device, which holds no weights")
    weight, bias = own["weight"].detach(), own.get("bias")
    weight = weight if isinstance(module, nn.Linear) else weight.T
    return Linear(*sizes, weight, None if bias is None else bias.detach())


def _is_plain(parameter: Tensor) -> bool:
    """Whether a parameter is a plain floating-point tensor: no subclass, no sparse layout, no integers, no float8."""
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    return type(parameter) in (nn.Parameter, Tensor) and parameter.layout is torch.strided and parameter.dtype in kinds


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
        """Its hidden layer: (..., width)."""
        gate = None if self.gate is None else F.linear(x, self.gate, self.gate_bias)
        return apply(act, F.linear(x, self.up, self.up_bias), gate)

    def explain(self, x: Tensor, y: Tensor, act: Activation) -> bool:
        """Whether y is the block's output at x.

        The error of y against float64 may be four times the error of the same steps in x's dtype: another order of
        summation, or another way to compute the activation, stays below that.
        """
        if x.dtype != self.up.dtype or y.shape != x.shape[:-1] + self.down.shape[:1]:
            return False
        wide = torch.float32 if x.device.type == "mps" else torch.float64
        exact = self.to(wide).compute(x.to(wide), act)
        rounding = (self.compute(x, act).to(wide) - exact).norm()
        eps = torch.finfo(x.dtype).eps
        return bool((y.to(wide) - exact).norm() <= 4 * rounding + 8 * eps * exact.norm())


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

    name: the path where the FFF goes. activation: as FFF takes it; `activation_at` is the path of a callable one.
    linears: the paths of the linear layers. identity: the paths that become the identity. dropout: the rate on the
    hidden layer. dropout_after: the path of an nn.Dropout on the output, which is kept.
    """

    name: str
    form: str
    weights: Weights
    activation: Activation
    linears: tuple[str, ...]
    activation_at: str = ""
    identity: tuple[str, ...] = ()
    dropout: float = 0.0
    dropout_after: str = ""
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
