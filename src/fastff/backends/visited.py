"""Gradients for kernels without one: backward recomputes the visited leaves in torch.

Decisions are constants, so nodes get no gradient from a hard pass.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..tensors import Leaves
from .choice import run, torch_backend
from .request import Request

Pass = Callable[[Tensor], tuple[Tensor, Tensor]]


def run_with_gradient(backend: ModuleType, request: Request) -> Tensor:
    """The output of a hard pass or of a visit, with a gradient for x and the leaves."""

    def compute(x: Tensor) -> tuple[Tensor, Tensor]:
        found = run(backend, request._replace(x=x))
        return (found, request.leaf) if request.kind == "visit" else found  # type: ignore[return-value]

    return _Visited.apply(compute, request.x, request.activation, *(request.leaves or ()))  # type: ignore[no-untyped-call]


class _Visited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Pass, x: Tensor, activation: str, *leaves: Tensor | None) -> Tensor:
        y, leaf = compute(x.detach())
        ctx.activation = activation
        ctx.save_for_backward(x, leaf, *leaves)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *leaves = _gradients(ctx, grad)
        return None, x, None, *leaves


def _gradients(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    """The gradients of x and of the leaves' tensors."""
    x, leaf, *leaves = ctx.saved_tensors
    tensors = [x, *leaves]
    again = torch.is_grad_enabled()  # a second derivative is wanted
    with torch.enable_grad():
        # A view of each, so that one's gradient does not reach another from which it was computed.
        own = [
            None if t is None else t.view_as(t) if again else t.detach().requires_grad_(t.requires_grad)
            for t in tensors
        ]
        y = torch_backend().visit(own[0], leaf, Leaves._make(own[1:]), ctx.activation)
        wanted = [t for t in own if t is not None and t.requires_grad]
        found = iter(torch.autograd.grad(y, wanted, grad, create_graph=again))
    return [next(found) if t is not None and t.requires_grad else None for t in own]
