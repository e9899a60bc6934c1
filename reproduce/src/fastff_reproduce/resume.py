"""Checkpoints of a training: written as a whole, and refused if damaged, of another training, or not finite."""

from pathlib import Path
from typing import Any, Protocol

import torch

from fastff.atomic import replacing


class Damaged(ValueError):
    """A file that no training can resume from; the message has the remedy."""


class Resumable(Protocol):
    device: torch.device

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def find_diverged(self, whole: bool = False) -> list[int]: ...


def save(state: dict[str, Any], path: Path) -> None:
    """Write the state to the file, as a whole."""
    try:
        with replacing(path, binary=True) as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError if the disk is full
        reason = next((e.strerror for e in (error, error.__context__) if isinstance(e, OSError) and e.strerror), error)
        raise OSError(f"{path} cannot be written: {reason}. Free some space, and run the command again.") from None


def load(path: Path, device: torch.device | str) -> Any:
    """The state that `save` wrote."""
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except PermissionError as error:
        raise OSError(f"{path} cannot be read: {error.strerror}. Allow reading it, or remove it.") from None
    except Exception as error:  # damaged files raise many types
        raise Damaged(f"{path} is damaged. Remove it: its training starts again.") from error


def resume(training: Resumable, path: Path) -> None:
    """Continue a training from a file; `Damaged` if that is impossible."""
    state = load(path, training.device)
    try:
        training.load_state_dict(state)
    except (KeyError, TypeError, IndexError, RuntimeError, AttributeError) as error:
        raise Damaged(f"{path} is not a checkpoint of this training. Remove it: the training starts again.") from error
    if training.find_diverged(whole=True):
        raise Damaged(f"{path} has numbers that are not finite. Remove it: the training starts again.")
