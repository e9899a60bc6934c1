"""The backends, and how one is chosen.

Each backend is a module with the same functions: node_logits, leaf_hidden, mixture, mix, walk, route and visit.
`reference` is the specification; the others must agree with it and exist to be faster. `triton` has the whole soft pass
as one function, for the cases that it supports.
"""

from types import ModuleType
from typing import Any

from torch import Tensor

from ..activations import Activation
from . import aten, reference, triton
from .reference import Leaves, Tree

TABLE: dict[str, ModuleType] = {"reference": reference, "aten": aten}
_choice = "auto"


def available() -> list[str]:
    """The backends that can run here."""
    return list(TABLE)


def select() -> tuple[ModuleType, str]:
    """The backend in force, and why it is that one."""
    if _choice == "auto":
        return aten, "auto: torch operations run everywhere"
    return TABLE[_choice], f"chosen by fastff.backend({_choice!r})"


def select_soft(
    x: Tensor, tree: Tree, leaves: Leaves, activation: Activation, dropout: float
) -> tuple[ModuleType, str]:
    """The backend of a soft pass, and why it is that one."""
    if _choice != "auto":
        return select()
    reason = triton.unsupported(x, tree, leaves, activation, dropout)
    return (aten, f"auto: triton {reason}") if reason else (triton, "auto: a GPU, and a case that its kernels cover")


class backend:
    """Choose the backend by name: for good as a call, or for a block as a context manager.

    `fastff.backend("reference")`; `with fastff.backend("reference"): ...`. "auto" is the default. The choice holds for
    the process; a name that is not available here raises.
    """

    def __init__(self, name: str) -> None:
        if name != "auto" and name not in TABLE:
            raise ValueError(f"backend={name!r} is not available here. Available: auto, {', '.join(available())}.")
        global _choice
        self.name, self._previous = name, _choice
        _choice = name

    def __enter__(self) -> "backend":
        return self

    def __exit__(self, *_: Any) -> None:
        global _choice
        _choice = self._previous
