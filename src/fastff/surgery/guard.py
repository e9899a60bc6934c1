"""A warning where a library's own save_pretrained would lose the FFF layers of an operated model."""

import os
import warnings
import weakref
from pathlib import Path
from typing import Any

from torch import nn

from .files import WEIGHTS

_TOLD = (
    "save_pretrained of the model's own library does not know of the FFF layers that fastff has put into it: "
    "from_pretrained would fill its dense blocks with random weights. To keep the model, call "
    "fastff.integrations.transformers.save_pretrained(model, directory), or fastff.save for a model that is no "
    "PreTrainedModel."
)


class SaveGuard:
    """Stands for the save_pretrained of one operated model: warns, and then does what was asked for, but not
    into a directory where fastff saved.

    It goes with a copy of the model, and into a pickle of it. The reference is weak, because a model that refers to
    itself stays in memory until the garbage collector runs.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def __call__(self, *args: Any, **options: Any) -> Any:
        model: Any = self._model()
        if model is None:  # load(...).save_pretrained(...): nobody but the caller of load had it
            raise RuntimeError(f"{_TOLD} To call the library's own all the same, give the model a name first.")
        where = args[0] if args else options.get("save_directory")
        if isinstance(where, str | os.PathLike) and (Path(where) / WEIGHTS).exists():
            raise ValueError(
                f"{os.fspath(where)} has a {WEIGHTS}, which fastff wrote: a config.json and weights of another library "
                "beside it would be loaded with random dense blocks. Choose another directory."
            )
        warnings.warn(f"{_TOLD} A Trainer's checkpoints are fine for going on with the same training.", stacklevel=2)
        return type(model).save_pretrained(model, *args, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> "SaveGuard":
        model: Any = self._model()
        return SaveGuard(memo.get(id(model), model))

    def __reduce__(self) -> tuple[Any, ...]:
        return SaveGuard, (self._model(),)
