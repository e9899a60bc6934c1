"""A layer's next calls on a CPU, checked and run in C++ (csrc/direct.cpp).

plan_cache.py asks a score of questions before it runs a plan: about 4 us of Python, where the kernels take 2 us (EPYC,
one sample, 768 -> 768). `make` gives a function that asks the same questions in half that time. It returns None if
anything has changed since the function was made: plan_cache.py then finds out what.

The compiled module is optional: without Python's headers it is not built, and only a CPython with its stable interface
loads it. Otherwise calls go through ctypes.
"""

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from ..activations import Activation

Entry = tuple[dict[str, Any], str, Any]
# x, parameters by name, activation -> y, or None if this is no case for it.
Direct = Callable[[Tensor, Mapping[str, Tensor | None], Activation], Tensor | None]


@functools.cache
def module() -> ModuleType | None:
    """The compiled module, if there is one."""
    try:
        return importlib.import_module("._direct", __package__)
    except ImportError:
        return None


def make(
    x: Tensor,
    weights: Mapping[str, tuple[Tensor, Any, int, int]],
    absent: Sequence[str],
    activation: Activation,
    *,
    hard: int,
    layer: int,
    owner: Any,
    entries: Sequence[Entry] = (),
) -> Direct | None:
    """A function for inputs and weights of this form, while autocast and inference mode are as now; or None.

    Args:
        weights: by the name of the parameter: the tensor, a weak reference to its storage, its address, and the bytes
            of the storage.
        absent: the names of the parameters that are None.
        hard, layer: addresses of the kernels' entry and of the layer that they are told.
        owner: keeps the layer's memory alive.
        entries: of dictionaries, such as a module's: (dictionary, key, what it must be for the function to run).
    """
    compiled, exchange = module(), getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if compiled is None or exchange is None:
        return None
    tensors = [x, *(tensor for tensor, *_ in weights.values())]
    together = compiled.together()
    checks = [_torch.alike_test(tensors[0], tensors[1:together])]
    checks += [_torch.alike_test(None, tensors[i : i + together]) for i in range(together, len(tensors), together)]
    made: Direct | None = compiled.make(
        exchange,
        hard,
        layer,
        owner,
        tuple((name, *place) for name, (_, *place) in weights.items()),
        tuple(absent),
        tuple(checks),
        _torch.QUIET,
        (*_torch.QUIET_ENTRIES, *entries),
        activation,
        _torch.empty_strided_cpu,
        x.dtype,
        torch.get_num_threads,
    )
    return made
