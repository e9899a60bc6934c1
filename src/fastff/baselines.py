"""Baselines to compare an FFF with: FF, a dense feedforward layer, and MoE, a mixture of experts.

MoE is the layer of Shazeer et al. 2017 ("Outrageously large neural networks"). With H = x W_gate + e softplus(x
W_noise) and e normal noise, the k experts with the largest H run, weighted by the softmax of their H. Two losses keep
the experts in use: the squared coefficients of variation of their importance (the sum of their weights) and of their
load (a smooth estimate of the number of samples they get). Evaluation has no noise.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import activations
from .activations import Activation
from .backends import torch_backend
from .checks import allocate, check_int, check_probability
from .functional import autocast_dtype, flatten, restore, visit
from .last_forward import recall, remember
from .tensors import FLOAT_LEAVES, Leaves, at_least_float32, cast, no_autocast


class FF(nn.Module):
    """A dense feedforward layer in -> width -> out: Linear, activation, dropout, Linear."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        width: int,
        activation: Activation = "relu",
        bias: bool = True,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = check_int("in_features", in_features, 1)
        self.out_features = check_int("out_features", out_features, 1)
        self.width = check_int("width", width, 1)
        check_probability("dropout", dropout)
        activations.check(activation)
        self.activation, self.dropout = activation, float(dropout)
        self.up = nn.Linear(in_features, width, bias, device=device, dtype=dtype)
        gated = activations.is_gated(activation)
        self.gate = nn.Linear(in_features, width, bias, device=device, dtype=dtype) if gated else None
        self.down = nn.Linear(width, out_features, bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        gate = None if self.gate is None else self.gate(x)
        hidden = activations.apply(self.activation, self.up(x), gate)
        y: Tensor = self.down(F.dropout(hidden, self.dropout, self.training))
        return y

    @property
    def training_width(self) -> int:
        return self.width

    training_size = inference_width = inference_size = training_width

    def extra_repr(self) -> str:
        return f"width={self.width}, activation={self.activation!r}, dropout={self.dropout}"


class MoE(nn.Module):
    """A mixture of `num_experts` feedforward networks in -> expert_width -> out, `k` of which run for each sample.

    The experts' parameters have the layout of an FFF's leaves. The gate starts at zero, as in Shazeer et al., so that
    at first noise alone decides and the load is even.
    """

    gate_weight: nn.Parameter
    noise_weight: nn.Parameter
    expert_in_weight: nn.Parameter
    expert_in_bias: nn.Parameter | None
    expert_out_weight: nn.Parameter
    expert_out_bias: nn.Parameter | None
    expert_gate_weight: nn.Parameter | None
    expert_gate_bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        num_experts: int,
        expert_width: int,
        k: int = 2,
        activation: Activation = "relu",
        bias: bool = True,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features = check_int("in_features", in_features, 1)
        self.out_features = out_features = check_int("out_features", out_features, 1)
        self.num_experts = num_experts = check_int("num_experts", num_experts, 1)
        self.expert_width = expert_width = check_int("expert_width", expert_width, 1)
        self.k = k = check_int("k", k, 1)
        if k > num_experts:
            raise ValueError(f"k must be at most num_experts={num_experts}; got {k}.")
        check_probability("dropout", dropout)
        activations.check(activation)
        self.activation, self.dropout = activation, float(dropout)
        gated = activations.is_gated(activation)
        hidden = (num_experts, expert_width)
        shapes: dict[str, tuple[int, ...] | None] = {
            "gate_weight": (num_experts, in_features),
            "noise_weight": (num_experts, in_features),
            "expert_in_weight": (*hidden, in_features),
            "expert_in_bias": hidden if bias else None,
            "expert_out_weight": (*hidden, out_features),
            "expert_out_bias": (num_experts, out_features) if bias else None,
            "expert_gate_weight": (*hidden, in_features) if gated else None,
            "expert_gate_bias": hidden if gated and bias else None,
        }
        what = f"MoE(num_experts={num_experts}, expert_width={expert_width})"
        for name, tensor in allocate(shapes, device, dtype, what).items():
            self.register_parameter(name, None if tensor is None else nn.Parameter(tensor))
        self.last_importance: Tensor | None = None
        self.last_load: Tensor | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for name, parameter in self.named_parameters(recurse=False):
            fan = self.expert_width if name.startswith("expert_out") else self.in_features
            nn.init.uniform_(parameter, -1 / math.sqrt(fan), 1 / math.sqrt(fan))
        nn.init.zeros_(self.gate_weight)
        nn.init.zeros_(self.noise_weight)

    def forward(self, x: Tensor) -> Tensor:
        """In training all experts run, weighted by noisy gates (0 for all but k). In evaluation only k run."""
        flat = flatten(x, self.gate_weight, "MoE")
        dtype = autocast_dtype(flat)
        if not self.training:
            if dtype is None:
                return restore(self._evaluate(flat), x)
            with no_autocast(flat):  # as in functional.hard: do not cast weights that are not used
                return restore(self._evaluate(flat.to(self.gate_weight.dtype)).to(dtype), x)
        experts = self._experts
        if dtype is not None:
            flat, experts = flat.to(dtype), cast(experts, dtype)
        clean = self._logits(flat, self.gate_weight)  # (batch, experts)
        # The floor is from the authors' code: without any noise, the load has no gradient.
        std = F.softplus(self._logits(flat, self.noise_weight)) + 1e-2
        noisy = clean + torch.randn_like(clean) * std
        gates = top_k_gates(noisy, self.k)
        remember(self, gates, last_importance=gates.sum(0), last_load=smooth_load(clean, std, noisy, self.k))
        backend = torch_backend()
        hidden = backend.leaf_hidden(flat, experts, self.activation)
        return restore(backend.mix(F.dropout(hidden, self.dropout) if self.dropout else hidden, gates, experts), x)

    def _evaluate(self, x: Tensor) -> Tensor:
        top, chosen = self._logits(x, self.gate_weight).topk(self.k, -1)  # (batch, k)
        share = top.softmax(-1).to(x.dtype)
        parts = [visit(x, chosen[:, i], self._experts, self.activation) * share[:, i, None] for i in range(self.k)]
        return torch.stack(parts).sum(0)

    def _logits(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight.to(x.dtype)).to(at_least_float32(x.dtype))

    @property
    def _experts(self) -> Leaves:
        return Leaves(*(getattr(self, f"expert_{name}") for name in FLOAT_LEAVES))

    @property
    def training_width(self) -> int:
        return self.num_experts * self.expert_width

    @property
    def training_size(self) -> int:
        """All neurons, with the gate and its noise."""
        return self.training_width + 2 * self.num_experts

    @property
    def inference_width(self) -> int:
        return self.k * self.expert_width

    @property
    def inference_size(self) -> int:
        """The neurons that one input uses, with the whole gate, which finds the k best."""
        return self.inference_width + self.num_experts

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"last_importance": None, "last_load": None}

    def extra_repr(self) -> str:
        sizes = (
            f"training width {self.training_width}, size {self.training_size}; "
            f"inference width {self.inference_width}, size {self.inference_size}"
        )
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, num_experts={self.num_experts}, "
            f"expert_width={self.expert_width}, k={self.k}; {sizes}"
        )


def top_k_gates(logits: Tensor, k: int) -> Tensor:
    """The softmax over the k largest logits of each row, 0 elsewhere: (batch, experts)."""
    top, chosen = logits.topk(k, -1)
    return torch.zeros_like(logits).scatter(-1, chosen, top.softmax(-1))


def smooth_load(clean: Tensor, std: Tensor, noisy: Tensor, k: int) -> Tensor:
    """Each expert's expected number of samples, if its noise were drawn again and the others' kept: (experts,)."""
    if k == clean.shape[-1]:
        return torch.full_like(clean[0], clean.shape[0]) if clean.shape[0] else clean.sum(0)
    top = noisy.topk(k + 1, -1).values
    inside = noisy >= top[:, k - 1 : k]
    # An expert is chosen when it beats the k-th best of the others.
    threshold = torch.where(inside, top[:, k : k + 1], top[:, k - 1 : k])
    return torch.special.ndtr((clean - threshold) / std).sum(0)


def importance_loss(model: nn.Module) -> Tensor:
    """The squared coefficient of variation of the experts' summed weights, summed over the MoE layers of a model."""
    return _variation(model, "last_importance")


def load_loss(model: nn.Module) -> Tensor:
    """The squared coefficient of variation of the experts' smooth load, summed over the MoE layers of a model."""
    return _variation(model, "last_load")


def _variation(model: nn.Module, name: str) -> Tensor:
    layers = {label: module for label, module in model.named_modules() if isinstance(module, MoE)}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no MoE layer. Pass a model that has one.")
    losses = []
    for label, layer in layers.items():
        trained = layer.gate_weight.requires_grad and layer.k < layer.num_experts
        total = recall(layer, name, f"the MoE layer {label!r}", differentiable=trained)
        losses.append(total.var(correction=0) / (total.mean() ** 2).clamp(min=torch.finfo(total.dtype).tiny))
    return torch.stack(losses).sum()
