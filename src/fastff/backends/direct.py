"""A layer's next calls on a CPU, checked and run in C++ (csrc/direct.cpp).

plan_cache.py asks a score of questions before it runs a plan: about 4 us of Python, where the kernels take 2 us (EPYC,
one sample, 768 -> 768). `make` gives a function that asks the same questions in half that time. It returns None if
anything has changed since the function was made: plan_cache.py then finds out what.

The compiled module is optional: without Python's headers it is not built, and only a CPython with its stable interface
loads it. Otherwise calls go through ctypes.
"""

import ctypes
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from ..activations import Activation

# x, parameters by name, activation -> y, or None if this is no case for it.
Direct = Callable[[Tensor, Mapping[str, Tensor | None], Activation], Tensor | None]
_TOGETHER = 2  # tensors of a check: torch's grows a table, and one of seven takes longer than four of two


@functools.cache
def module() -> ModuleType | None:
    """The compiled module, if there is one."""
    try:
        return importlib.import_module("._direct", __package__)
    except ImportError:
        return None


def make(
    x: Tensor,
    weights: Sequence[Tensor],
    places: Sequence[tuple[str, Any, int, int]],
    absent: Sequence[str],
    activation: Activation,
    *,
    hard: int,
    layer: ctypes.Structure,
) -> Direct | None:
    """A function for inputs and weights of this form, while autocast and inference mode are as now; or None.

    Args:
        places: of each weight: the name of the parameter, a weak reference to its storage, its address, and the bytes
            of the storage.
        absent: the names of the parameters that are None.
        hard: the address of the kernels' entry.
        layer: what the kernels are told.
    """
    from .choice import AUTO  # which imports this

    compiled, exchange = module(), getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if compiled is None or exchange is None:
        return None
    tensors = [x, *weights]
    groups = [tensors[i : i + _TOGETHER] for i in range(0, len(tensors), _TOGETHER)]
    tests = [_torch.alike_test(x, groups[0][1:]), *(_torch.alike_test(None, group) for group in groups[1:])]
    made: Direct | None = compiled.make(
        exchange,
        hard,
        ctypes.addressof(layer),
        layer,
        tuple(places),
        tuple(absent),
        tuple(zip(tests, map(len, groups), strict=True)),
        _torch.QUIET,
        (*_torch.QUIET_ENTRIES, AUTO),
        activation,
        Tensor,
        _torch.empty_strided_cpu,
        x.dtype,
        torch.get_num_threads,
    )
    return made if _torch.never not in tests else None
