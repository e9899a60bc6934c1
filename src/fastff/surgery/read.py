"""Read a save. It may come from somebody else, so the file is checked before safetensors opens it: its kind, the length
of its header, duplicate names."""

import errno
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..interrupts import uninterrupted
from ..layer import FFF
from ..regions.edit_state import PREFIX
from .files import REMEDIES, WEIGHTS, Header, check_directory, import_safetensors

_LONGEST_HEADER = 2**25  # bytes: 100,000 tensors need half of it


class Saved:
    """An open save: its note, the dtypes and shapes of its tensors, and the tensors, which are read on demand."""

    def __init__(self, path: Path, file: Any) -> None:
        self.path, self.file, self.note = path, file, _note(path, file.metadata() or {})
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, it is no dict
        every = {name: (s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
        self.header: Header = {name: about for name, about in every.items() if not name.startswith(PREFIX)}
        self._edits = [name for name in every if name.startswith(PREFIX)]

    def edits(self) -> dict[str, Tensor]:
        """The tensors of the records of edits, by name."""
        with uninterrupted():
            return {name: self.file.get_tensor(name).clone() for name in self._edits}

    def tensors(self, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """Each tensor of a model that was compared with the header, and its new data, on its device. Tied tensors stay
        tied."""
        own = model.state_dict(keep_vars=True)
        temperatures = {id(layer.temperature_tensor) for layer in model.modules() if isinstance(layer, FFF)}
        for name in self.header:
            with uninterrupted():  # safetensors turns Ctrl-C into another error
                tensor = self.file.get_tensor(name).clone()  # a copy: the tensor is a view of the file
            if id(own[name]) in temperatures:
                check_temperature(name, tensor)
            yield own[name], tensor.to(own[name].device)


def check_temperature(name: str, tensor: Tensor) -> None:
    """Raise unless this is a valid temperature of a layer."""
    limits = torch.finfo(tensor.dtype)
    if not limits.tiny <= float(tensor) <= limits.max:
        raise ValueError(
            f"{name}, the temperature of an FFF, must be positive and finite in {tensor.dtype}; got {float(tensor)}. "
            "The weights are corrupt, or were changed by hand."
        )


@contextmanager
def open_weights(directory: str | os.PathLike[str]) -> Iterator[Saved]:
    """The save in a directory, if it is complete. A newer save that replaces it does not affect the reader."""
    safetensors = import_safetensors()
    check_directory(directory)
    folder = Path(directory)
    path = folder / WEIGHTS
    try:
        _check_regular(path)
        opened = safetensors.safe_open(path, "pt")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist: {_found_instead(folder)}") from None
    except NotADirectoryError as error:
        raise NotADirectoryError(
            errno.ENOTDIR, f"{folder} is a file. Pass the directory that fastff saved into, such as {folder.parent}"
        ) from error
    except OSError as error:
        remedy = REMEDIES.get(errno.ELOOP) if error.errno == errno.ELOOP else "Pass a directory that you may read"
        raise OSError(error.errno, f"cannot read {path}: {error.strerror}. {remedy}") from error
    except (safetensors.SafetensorError, EOFError) as error:
        raise ValueError(
            f"{path} is not a complete safetensors file: it is truncated, or another kind of file ({error})."
        ) from None
    with opened as file:
        yield Saved(path, file)


def _check_regular(path: Path) -> None:
    """Raise unless this is a regular file with a header of normal length. Reading a pipe would block forever."""
    file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError(f"{path} is a directory, a pipe or a device; fastff reads only regular files.")
        length = int.from_bytes(os.read(file, 8), "little")
        if 8 + length > about.st_size:
            raise EOFError("its header is cut off")
        if length > _LONGEST_HEADER:
            raise ValueError(f"{path} has a header of {length} bytes; fastff reads {_LONGEST_HEADER} at most.")
        _check_names(path, os.read(file, length))
    finally:
        os.close(file)


def _check_names(path: Path, header: bytes) -> None:
    """Raise for a header with a duplicate name: safetensors might pick either tensor."""
    with suppress(UnicodeDecodeError, json.JSONDecodeError, RecursionError):  # safetensors reports these
        try:
            json.loads(header, object_pairs_hook=_unique)
        except _Duplicate as error:
            raise ValueError(f"{path} was not written by fastff: in its header {error}.") from None


class _Duplicate(ValueError):
    """A name that occurs twice in a JSON object."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = set()
    for name, _ in pairs:
        if name in names:
            raise _Duplicate(f"the name {name!r:.80} occurs twice")
        names.add(name)
    return dict(pairs)


def _found_instead(folder: Path) -> str:
    kinds = (".bin", ".pt", ".pth", ".safetensors")
    others = sorted(p.name for p in folder.iterdir() if p.suffix in kinds) if folder.is_dir() else []
    if others:
        return f"the directory has {', '.join(others[:4])}. fastff reads no other file, and never a pickle."
    return f"{folder} has no save by fastff."


def _note(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """The note in a header: a JSON object without duplicate names."""
    text = metadata.get("fastff")
    if text is None:
        raise ValueError(f"{path} has no note of a surgery. It was not written by fastff.")
    if re.fullmatch("[0-9a-f]{32}", text):
        raise ValueError(
            f"{path} is a save of format version 1, in two files. Save the model again with this version of fastff."
        )
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError(f"{path} has a note that fastff did not write: it is nested too deeply.") from None
    except ValueError as error:
        raise ValueError(f"{path} has a note that fastff did not write: {error}.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must have a JSON object as its note; got a {type(value).__name__}.")
    return value
