"""The backends, and how one is chosen.

Each backend is a module with the same functions: first_layer, node_logits, leaf_hidden, mixture, mix, walk, route and
visit. `reference` is the specification; the others must agree with it and exist to be faster.
"""

from types import ModuleType
from typing import Any

from . import aten, reference

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
