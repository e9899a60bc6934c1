"""What a training has reached, in a file: written as a whole, and refused unless all of it can be trusted."""

import os
from pathlib import Path
from typing import Any, Protocol

import torch


class Damaged(ValueError):
    """A file that nothing can go on from; the message says what to do."""


class Resumable(Protocol):
    device: torch.device

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def find_diverged(self, whole: bool = False) -> list[int]: ...


def save(state: dict[str, Any], path: Path) -> None:
    """Replace the file as a whole: whoever kills us leaves the old one or the new one."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            torch.save(state, file)
        os.replace(part, path)
    except (OSError, RuntimeError) as error:  # torch tells of a full disk by a RuntimeError
        part.unlink(missing_ok=True)
        reason = next((e.strerror for e in (error, error.__context__) if isinstance(e, OSError) and e.strerror), error)
        raise OSError(f"{path} cannot be written: {reason}. Make room for it, and run the command again.") from None


def load(path: Path, device: torch.device | str) -> Any:
    """What `save` has written."""
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except PermissionError as error:
        raise OSError(f"{path} cannot be read: {error.strerror}. Allow it, or remove the file.") from None
    except Exception as error:  # of many kinds, for a file that is damaged
        raise Damaged(f"{path} is damaged. Remove it: what it has is trained again.") from error


def resume(training: Resumable, path: Path) -> None:
    """Go on from a file, unless it is damaged, of another training, or not finite."""
    state = load(path, training.device)
    try:
        training.load_state_dict(state)
    except (KeyError, TypeError, IndexError, RuntimeError, AttributeError) as error:
        raise Damaged(f"{path} is no checkpoint of this training. Remove it: the training starts anew.") from error
    if training.find_diverged(whole=True):
        raise Damaged(f"{path} has numbers that are not finite. Remove it: the training starts anew.")
