"""Warn before a library's own save_pretrained loses the FFF layers of a converted model; refuse its push_to_hub."""

import os
import warnings
import weakref
from pathlib import Path
from typing import Any

from torch import nn

from .files import WEIGHTS

_WARNING = (
    "the library's own save_pretrained does not know the FFF layers that fastff put into this model: from_pretrained "
    "would fill its dense blocks with random weights. To keep the model, call "
    "fastff.integrations.transformers.save_pretrained(model, directory), or fastff.save for a model that is not a "
    "PreTrainedModel."
)


def refuse_push(*args: Any, **options: Any) -> Any:
    """Replaces a converted model's push_to_hub: nobody could load the upload."""
    raise RuntimeError(
        "the library's own push_to_hub does not know the FFF layers that fastff put into this model: whoever downloads "
        "it gets random dense blocks. Call fastff.integrations.transformers.push_to_hub(model, repo_id); for a class "
        "with huggingface_hub's mixin, use fastff.integrations.hub.FFFHubMixin instead of PyTorchModelHubMixin."
    )


class SaveGuard:
    """Replaces a converted model's save_pretrained: warns, then saves, but never into a directory with a save by
    fastff.

    It is copied and pickled with the model. The reference is weak, because a model that refers to itself stays in
    memory until the garbage collector runs.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def __call__(self, *args: Any, **options: Any) -> Any:
        model: Any = self._model()
        if model is None:  # load(...).save_pretrained(...): the model is not bound to a name
            raise RuntimeError(f"{_WARNING} To call the library's own anyway, assign the model to a variable first.")
        if options.get("push_to_hub"):
            refuse_push()
        where = args[0] if args else options.get("save_directory")
        if isinstance(where, str | os.PathLike) and (Path(where) / WEIGHTS).exists():
            raise ValueError(
                f"{os.fspath(where)} has a {WEIGHTS}, which fastff wrote: with config.json and weights of another "
                "library beside it, the model would load with random dense blocks. Choose another directory."
            )
        warnings.warn(f"{_WARNING} A Trainer's checkpoints are fine for resuming the same training.", stacklevel=2)
        return type(model).save_pretrained(model, *args, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> "SaveGuard":
        model: Any = self._model()
        return SaveGuard(memo.get(id(model), model))

    def __reduce__(self) -> tuple[Any, ...]:
        return SaveGuard, (self._model(),)
