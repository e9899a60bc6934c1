"""Measure how close a converted layer or model is to the dense one:

- missed: the fraction of a dense block's output variance that the layer's hard pass misses, on the same inputs;
- drift: the difference between a model and its teacher, as a fraction of the teacher's variance, at any one place.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..layer import FFF
from .report import too_few

MIN_INPUTS = 20  # fewer are too few to measure on
_ROUNDING = 8  # units in the last place: outputs that vary by no more do not vary


def hold_out(x: Tensor) -> tuple[Tensor, Tensor]:
    """A tenth of the inputs x (samples, in) to measure on, and the others; all for both if there are few."""
    tenth = torch.arange(len(x), device=x.device) % 10 == 0
    return (x[tenth], x[~tenth]) if len(x) >= MIN_INPUTS else (x, x)


@torch.no_grad()
def missed(layer: FFF, dense: Callable[[Tensor], Tensor], x: Tensor) -> float | None:
    """The fraction of the dense block's output variance at x that the hard pass misses; None if the output varies by no
    more than rounding.

    1.0 is the error of a constant prediction, the mean output.
    """
    mode = layer.training
    error = variance = square = 0.0
    outputs = [dense(part) for part in x.split(8192)]
    mean = torch.cat(outputs).double().mean(0)
    for part, y in zip(x.split(8192), outputs, strict=True):
        error += (layer.eval()(part) - y).double().square().sum().item()
        variance += (y.double() - mean).square().sum().item()
        square += y.double().square().sum().item()
    layer.train(mode)
    return None if variance <= (_ROUNDING * torch.finfo(x.dtype).eps) ** 2 * square else error / variance


def drift(ours: Tensor, theirs: Tensor) -> Tensor:
    """The mean square difference from a teacher, over the variance of its values about the mean of each feature."""
    variance, rounding = _variance(theirs)
    least = rounding.clamp_min(torch.finfo(torch.float32).tiny)
    return (ours.float() - theirs.float()).square().mean() / variance.maximum(least)


def _variance(x: Tensor) -> tuple[Tensor, Tensor]:
    """The variance of x (..., features) about the mean of each feature, and how much of it may be rounding."""
    wide = x.detach().float().reshape(-1, x.shape[-1])
    eps = max(torch.finfo(kind).eps for kind in (x.dtype, torch.float32))
    return (wide - wide.mean(0)).square().mean(), (_ROUNDING * eps) ** 2 * wide.square().mean()


def check_same_shape(what: str, ours: Tensor, theirs: Tensor) -> None:
    if ours.shape != theirs.shape:
        raise ValueError(
            f"{what} has the shape {tuple(ours.shape)} in the model and {tuple(theirs.shape)} in the teacher; they "
            "must be equal. Pass a copy of the model from before replace_."
        )


def check_varies(theirs: Tensor) -> None:
    """Raise if the teacher's output does not vary: drift would divide by zero."""
    variance, rounding = _variance(theirs)
    if variance <= rounding:
        rows = theirs.numel() // theirs.shape[-1]
        why = too_few(1) if rows == 1 else "the teacher's outputs do not vary on these data"
        raise ValueError(
            f"{why}: the drift of a batch is a fraction of its variance. Pass larger batches that vary (a DataLoader "
            "with drop_last=True), or loss=..."
        )


def first_tensor(output: Any) -> Tensor:
    """The tensor in a model's output: the output itself, or the first floating-point one in a tuple or mapping."""
    values = (
        output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else [output]
    )
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
            return value
    raise TypeError(f"the model returned a {type(output).__name__} without a floating-point tensor; pass loss=...")
