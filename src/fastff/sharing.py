"""Leaves that learn from each other: part of each leaf's gradient is shared across leaves."""

import math
from typing import Any

import torch
from torch import Tensor

from .tensors import Leaves


def share(leaves: Leaves, sharing: float) -> Leaves:
    """The same leaves, with gradients that are partly shared.

    With g one leaf's gradient, G the sum over the leaves and L their number: (1 - sharing) g + sharing G / sqrt(L). The
    root makes both parts equally noisy, as a leaf sees one sample in L.
    """
    shared: list[Any] = [None if p is None else _Shared.apply(p, sharing) for p in leaves]  # type: ignore[no-untyped-call]
    return Leaves(*shared)


class _Shared(torch.autograd.Function):
    """A parameter of all leaves, which are along its first dimension."""

    generate_vmap_rule = True

    @staticmethod
    def forward(parameter: Tensor, sharing: float) -> Tensor:
        return parameter.view_as(parameter)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.sharing = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.sum(0, keepdim=True) / math.sqrt(len(grad))
        return torch.lerp(grad, total, ctx.sharing), None
