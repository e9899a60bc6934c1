"""The backends, and how one is chosen.

`reference` is the specification: both passes and their parts (node_logits, leaf_hidden, mixture, mix, walk) as
functions of tensors. `aten` has the same functions, arranged for speed, and runs anywhere. `native` (C++ on a CPU) and
`triton` (a GPU) have the hard pass alone: route, visit and hard, for the cases that their `unsupported` has nothing
against. The soft pass of a GPU is `triton_soft`.
"""

import threading
import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .._torch import is_plain
from ..activations import Activation
from ..tensors import Leaves, Tree
from ..validate import check_allocated
from . import aten, native, reference, triton, triton_soft

TABLE: dict[str, ModuleType] = {"reference": reference, "aten": aten, "native": native, "triton": triton}
_choice = "auto"


def available() -> list[str]:
    """The backends that can run here."""
    missing = {
        "native": isinstance(native.library(), str),
        "triton": not (triton.INSTALLED and torch.cuda.is_available()),
    }
    return [name for name in TABLE if not missing.get(name)]


def check_name(name: str) -> None:
    """Raise unless this is "auto", or a backend that can run here."""
    if name != "auto" and name not in available():
        why = f" ({native.status()})" if name == "native" else ""
        raise ValueError(f"backend={name!r} is not available here{why}. Available: auto, {', '.join(available())}.")


def chosen() -> str:
    """The name given to `backend`, or "auto"."""
    return _choice


def select() -> tuple[ModuleType, str]:
    """The backend of the parts that `native` and `triton` lack, and why it is that one."""
    if _choice == "reference":
        return reference, "chosen by fastff.backend('reference')"
    return aten, "auto: torch operations run everywhere" if _choice == "auto" else f"{_choice} has no such function"


def select_hard(x: Tensor, tree: Tree | None, leaves: Leaves | None, activation: Activation) -> tuple[ModuleType, str]:
    """The backend of a hard pass, or of its walk (no leaves) or leaf (no tree) alone, and why it is that one."""
    plain = is_plain(*(t for t in (x, *(tree or ()), *(leaves or ())) if t is not None))
    if plain:
        check_allocated("x", x)
        for part, tensors in (("tree", tree), ("leaves", leaves)):
            for key, tensor in zip(tensors._fields, tensors, strict=True) if tensors is not None else ():
                check_allocated(f"{part}.{key}", tensor)
    if _choice in ("reference", "aten"):
        return TABLE[_choice], f"chosen by fastff.backend({_choice!r})"
    name = _choice if _choice != "auto" else "triton" if x.is_cuda else "native"
    reason = "runs on plain tensors, under no tracer, no torch.func transform and no forward-mode derivative"
    if plain:
        reason = TABLE[name].unsupported(x, tree, leaves, activation)
    if _choice == "auto":
        return (aten, f"auto: {name} {reason}") if reason else (TABLE[name], f"auto: the fastest on {x.device.type}")
    if reason:
        raise ValueError(f"backend={name!r} cannot run this hard pass: it {reason}. fastff.backend('auto') would.")
    return TABLE[name], f"chosen by fastff.backend({name!r})"


def select_soft(
    x: Tensor, tree: Tree, leaves: Leaves, activation: Activation, dropout: float
) -> tuple[ModuleType, str]:
    """The backend of a soft pass, and why it is that one."""
    if _choice in ("reference", "aten"):
        return TABLE[_choice], f"chosen by fastff.backend({_choice!r})"
    if _choice == "native":
        raise ValueError("backend='native' has the hard pass alone. Train under fastff.backend('auto').")
    reason = triton_soft.unsupported(x, tree, leaves, activation, dropout)
    if not reason:
        return triton_soft, f"{_choice}: a GPU, and a case that its kernels cover"
    if _choice == "triton":
        raise ValueError(f"backend='triton' cannot run this soft pass: it {reason}. fastff.backend('auto') would.")
    return aten, f"auto: triton {reason}"


def run_hard(
    module: ModuleType,
    name: str,
    x: Tensor,
    tree: Tree | None,
    leaves: Leaves | None,
    activation: Activation,
    *leaf: Tensor,
) -> Any:
    """A function of the backend that `select_hard` chose: "hard", "hard_with_leaf", "route", or "visit" with a leaf.

    A kernel that does not compile or launch gives way to torch operations: see `give_way`.
    """
    arguments = [x, *leaf, *(part for part in (tree, leaves) if part is not None), activation]
    try:
        return getattr(module, name)(*arguments)
    except Exception as error:  # a compiler may raise anything; give_way looks at it
        if module is not triton:
            raise
        give_way("hard", x, leaves, activation, error)
    return getattr(aten, name)(*arguments)


def give_way(kind: str, x: Tensor, leaves: Leaves | None, activation: Activation, error: Exception) -> None:
    """Warn that torch operations take the place of a Triton kernel that failed, once for a layer of this size.

    Raises where triton was chosen by name, and where the error is no failure to compile or launch.
    """
    if not triton.is_failure(error):
        raise error
    layer = "" if leaves is None else f" with leaves of shape {tuple(leaves.in_weight.shape)}"
    size = f"{x.dtype} inputs of shape {tuple(x.shape)}{layer}, {activation}"
    why = f"the triton kernel of the {kind} pass failed for {size} ({type(error).__name__}: {error})"
    if _choice == "triton":
        raise ValueError(f"{why}. fastff.backend('auto') would use torch operations.") from error
    if triton.remember_failure(kind, x, leaves, activation, error):
        warnings.warn(f"{why}. Torch operations run this size instead.", RuntimeWarning, stacklevel=3)


class backend:
    """Choose the backend by name: until the next call as a call, or for a block as a context manager.

    `fastff.backend("reference")`; `with fastff.backend("reference"): ...`. "auto" is the default. The choice holds for
    the process. Blocks may overlap, as in several threads: of those that are open, the newest counts. A name that is
    not available here raises, and so does a pass that the backend cannot run.
    """

    def __init__(self, name: str) -> None:
        check_name(name)
        self.name = name
        self._entered: list[_Choice] = []
        with _lock:
            # Of calls that follow each other the newest counts. The one before it comes back if this one is a block.
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
            while last < len(_choices) and not _choices[last].is_block:  # calls within this block end with it
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
