"""Choose a backend, by name or the fastest that can run the pass, and handle kernels that fail."""

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import aten, native, reference, triton
from .request import Request

BACKENDS: dict[str, ModuleType] = {"reference": reference, "aten": aten, "native": native, "triton": triton}
_choice = "auto"
AUTO = (globals(), "_choice", "auto")  # for direct.py: this entry means that no backend was chosen by name
_Found = TypeVar("_Found")


def available() -> list[str]:
    """The backends that can run here."""
    missing = {
        "native": isinstance(native.library(), str),
        "triton": not (triton.INSTALLED and torch.cuda.is_available()),
    }
    return [name for name in BACKENDS if not missing.get(name)]


def check_name(name: str) -> None:
    """Raise unless this is "auto", or a backend that can run here."""
    if name != "auto" and name not in available():
        reasons = {"native": native.status(), "triton": "it needs triton and a GPU that torch can use"}
        why = f" ({reasons[name]})" if name in reasons else ""
        raise ValueError(f"backend={name!r} is not available here{why}. Available: auto, {', '.join(available())}.")


def chosen() -> str:
    """The name given to `backend`, or "auto"."""
    return _choice


def torch_backend() -> ModuleType:
    """The backend of torch operations, which has every function: `aten`, or `reference` if it was chosen."""
    return reference if _choice == "reference" else aten


def choose(request: Request) -> tuple[ModuleType, str]:
    """The backend that runs a pass, and the reason."""
    choice = _choice  # read once: threads may change it
    if choice in ("reference", "aten"):
        return BACKENDS[choice], f"chosen by fastff.backend({choice!r})"
    if request.kind != "soft" and request.is_compiling:
        return aten, "a compiler sees torch operations"
    # auto: triton on a GPU and for every soft pass, native otherwise.
    name = choice if choice != "auto" else "triton" if request.x.is_cuda or request.kind == "soft" else "native"
    reason: str = BACKENDS[name].why_not(request)
    if not reason:
        why = f"auto: the fastest on {request.x.device.type}"
        return BACKENDS[name], why if choice == "auto" else f"chosen by fastff.backend({name!r})"
    if choice == "auto":
        return aten, f"auto: {name} {reason}"
    kind = "soft" if request.kind == "soft" else "hard"
    raise ValueError(f"backend={name!r} cannot run this {kind} pass: it {reason}. fastff.backend('auto') would.")


def run(backend: ModuleType, request: Request) -> Any:
    """Run the pass by this backend. Torch operations replace a Triton kernel that does not compile or launch.

    A failure warns once for each size of layer; it raises if triton was chosen by name.
    """
    try:
        return getattr(backend, request.kind)(*request.arguments)
    except Exception as error:  # a compiler may raise anything
        if backend is not triton or not triton.is_failure(error):
            raise
        _warn_or_raise(_words(request), triton.size_of(request), error)
    return getattr(aten, request.kind)(*request.arguments)


def attempt(part: str, kernels: Callable[[], _Found], by_torch: Callable[[], _Found], x: Tensor, y: Tensor) -> _Found:
    """Run a part of sampled training by Triton's kernels; a failure is treated as in `run`.

    The part reads x and y: their shapes tell one size from another.
    """
    size = len(x), part, x.shape[1:], x.dtype, x.device, y.shape
    if triton.failure(size):
        return by_torch()
    try:
        return kernels()
    except Exception as error:
        if not triton.is_failure(error):
            raise
        what = f"sampled training ({part}) failed for {x.dtype} tensors of shapes {tuple(x.shape)} and {tuple(y.shape)}"
        _warn_or_raise(what, size, error)
    return by_torch()


def _words(request: Request) -> str:
    x, leaves = request.x, request.leaves
    kind = "soft" if request.kind == "soft" else "hard"
    layer = "" if leaves is None else f" with leaves of shape {tuple(leaves.in_weight.shape)}"
    size = f"{x.dtype} inputs of shape {tuple(x.shape)}{layer}, {request.activation}"
    return f"the {kind} pass failed for {size}"


def _warn_or_raise(what: str, size: tuple[Any, ...], error: Exception) -> None:
    why = f"the triton kernel of {what} ({type(error).__name__}: {error})"
    if _choice == "triton":
        raise ValueError(f"{why}. fastff.backend('auto') would use torch operations.") from error
    if triton.remember_failure(size, error):
        warnings.warn(f"{why}. Torch operations run this size instead.", RuntimeWarning, stacklevel=4)


class backend:
    """Choose the backend by name: for a `with` block, or without `with` until the next `fastff.backend(...)`.

    "auto" is the default. The choice holds for the process. Blocks may overlap, as in several threads: the newest open
    block counts. An unavailable backend raises, and so does a pass that the backend cannot run.
    """

    def __init__(self, name: str) -> None:
        check_name(name)
        self.name = name
        self._entered: list[_Choice] = []
        with _lock:
            # Of successive calls, the newest counts. The one before it comes back if this one is a block.
            while len(_choices) > 1 and not (_choices[-1].is_block or _choices[-2].is_block):
                del _choices[-2]
            self._call = _Choice(name)
            _set([*_choices, self._call])

    def __enter__(self) -> "backend":
        with _lock:
            block = _Choice(self.name, is_block=True)
            self._entered.append(block)
            _set([*(choice for choice in _choices if choice is not self._call), block])
        return self

    def __exit__(self, *_: Any) -> None:
        with _lock:
            first = _choices.index(self._entered.pop())
            last = first + 1
            while last < len(_choices) and not _choices[last].is_block:  # calls in this block end with it
                last += 1
            _set(_choices[:first] + _choices[last:])


@dataclass(eq=False)
class _Choice:
    name: str
    is_block: bool = False


def _set(choices: list[_Choice]) -> None:
    global _choice
    _choices[:] = choices
    _choice = choices[-1].name if choices else "auto"


_choices: list[_Choice] = []  # in force, the newest last
_lock = threading.Lock()
