"""Read a linear layer: its sizes and weights, or why they cannot be read.

A layer is linear by what it computes. nn.Linear and Conv1D are known; a subclass of nn.Linear with its own forward,
like Falcon's, runs on a probe and must compute what nn.Linear does.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .trace import probe, run


class Linear(NamedTuple):
    """The sizes and weights of a linear layer. `trouble` says why the weights cannot be read, if they cannot."""

    in_features: int
    out_features: int
    weight: Tensor = torch.empty(0)  # (out, in)
    bias: Tensor | None = None
    trouble: str = ""


def read_linear(module: nn.Module) -> Linear | None:
    """Read an nn.Linear, or a linear layer with transposed weights such as GPT-2's Conv1D. None for other modules."""
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
    if not isinstance(module, nn.Linear) and next(module.buffers(recurse=False), None) is not None and own:
        return None
    if isinstance(module, nn.Linear) and (set(own) - {"weight", "bias"} or [*module.buffers()]):
        return Linear(*sizes, trouble=f"its {kind} is more than a linear layer: it has extra tensors")
    if "weight" not in own or not all(map(_is_plain, own.values())) or next(module.children(), None) is not None:
        why = f"its {kind} is quantised, wrapped or parametrised; its weights cannot be read: call replace_ before that"
        return Linear(*sizes, trouble=why)
    if own["weight"].is_meta:
        return Linear(*sizes, trouble="it is on the meta device, which holds no weights")
    weight, bias = own["weight"].detach(), own.get("bias")
    weight = weight if isinstance(module, nn.Linear) else weight.T
    linear = Linear(*sizes, weight, None if bias is None else bias.detach())
    own_forward = isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward
    if own_forward and not _computes(module, linear):
        return Linear(*sizes, trouble=f"its {kind} has its own forward, which computes something else than nn.Linear")
    return linear


def _computes(module: nn.Module, linear: Linear) -> bool:
    """Whether a module computes x W^T + b on a probe: near zero, far from it, in evaluation and in training."""
    near = probe(linear.in_features, linear.weight)
    far = near * (20 if near.dtype == torch.float16 else 500)  # here a clipped output shows
    wide = wide_dtype(near)
    weight, bias = linear.weight.to(wide), None if linear.bias is None else linear.bias.to(wide)
    for x, training in ((near, False), (far, False), (near, True)):
        try:
            y = run(module, x, training=training)[0]
        except Exception:  # foreign code, which may raise anything
            return False
        exact = F.linear(x.to(wide), weight, bias)
        if not isinstance(y, Tensor) or not agrees(y, F.linear(x, linear.weight, linear.bias), exact):
            return False
    return True


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype for exact results on x's device."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def agrees(y: Tensor, rounded: Tensor, exact: Tensor) -> bool:
    """Whether y is `exact` up to rounding, where `rounded` has the same steps in y's dtype.

    The error of y may be four times the error of `rounded`: another order of summation, or another way to compute
    activations, stays below that.
    """
    if y.shape != exact.shape or y.dtype != rounded.dtype:
        return False
    rounding = (rounded.to(exact.dtype) - exact).norm()
    return bool((y.to(exact.dtype) - exact).norm() <= 4 * rounding + 8 * torch.finfo(y.dtype).eps * exact.norm())


def _is_plain(parameter: Tensor) -> bool:
    """Whether a parameter is a plain floating-point tensor: no subclass, no sparse layout, no integers, no float8."""
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    return type(parameter) in (nn.Parameter, Tensor) and parameter.layout is torch.strided and parameter.dtype in kinds
