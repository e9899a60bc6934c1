"""A GPU's backend, by Triton kernels: float32, bfloat16 and float16, any activation that has a name.

The hard pass is in triton_hard.py, the soft pass in triton_soft.py. This file says what they can run, and remembers the
sizes at which a kernel did not compile or launch.
"""

import importlib.util
from typing import Any

import torch

from . import triton_hard, triton_soft
from .request import Request
from .triton_hard import hard, route, visit
from .triton_soft import soft

__all__ = ["hard", "route", "soft", "visit"]
INSTALLED = importlib.util.find_spec("triton") is not None
HAS_GRADIENT = False  # the soft pass has one of its own
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def why_not(request: Request) -> str:
    if not INSTALLED:
        return "triton is not installed"
    reason = request.why_no_kernel("cuda", DTYPES)
    if not reason and request.kind == "soft":
        reason = triton_soft.why_not(request)
    return reason or (failure(size_of(request)) if _failures else "")


def describe(request: Request) -> str:
    return (triton_soft if request.kind == "soft" else triton_hard).describe(request)


# Why a kernel did not compile or launch, by pass and size: the next one of that size goes to torch at once.
_failures: dict[tuple[Any, ...], str] = {}


def size_of(request: Request) -> tuple[Any, ...]:
    """What a failure is remembered by; the batch comes first."""
    x, leaves = request.x, request.leaves
    layer = None if leaves is None else (leaves.in_weight.shape, leaves.out_weight.shape, leaves.in_weight.dtype)
    return len(x), request.kind == "soft", x.shape[1:], x.dtype, x.device, layer, request.activation


def failure(size: tuple[Any, ...]) -> str:
    """Why kernels of this size are refused; empty if they are not."""
    return _failures.get(size, "")


def remember_failure(size: tuple[Any, ...], error: Exception) -> bool:
    """Refuse this size from here on. Returns whether this is the first failure for a layer of this shape."""
    first = not any(known[1:] == size[1:] for known in _failures)
    _failures[size] = f"could not run its kernel at this size ({type(error).__name__}: {error})"
    return first


def is_failure(error: Exception) -> bool:
    """Whether this is a kernel that Triton could not compile or launch, and no other fault."""
    from triton.errors import TritonError

    if isinstance(error, TritonError):
        return True
    return isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
