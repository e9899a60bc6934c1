"""Shared by a save's writer and reader: the file's name, the dtypes it can hold, checks of the path.

fastff.safetensors has the tensors and, in its header, a note in JSON that says how to load them. staging.py and
write.py write it, read.py reads it.
"""

import errno
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..extras import install

WEIGHTS = "fastff.safetensors"
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_OTHERS = {"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32}
DTYPES = FLOATS | _OTHERS | {"I64": torch.int64}
Header = Mapping[str, tuple[str, tuple[int, ...]]]  # dtype and shape of each tensor
REMEDIES = {
    errno.ENOSPC: "Free some space there, or choose another directory",
    errno.EDQUOT: "Free some space there, or choose another directory",
    errno.EACCES: "Choose a directory that you may write to",
    errno.EPERM: "Choose a directory that you may write to",
    errno.EROFS: "Choose a directory that you may write to",
    errno.EEXIST: "It is a file: pass the path of a directory",
    errno.ENOTDIR: "A part of the path is a file: pass the path of a directory",
    errno.EISDIR: f"There is a directory where {WEIGHTS} goes: delete it, or choose another directory",
    errno.ELOOP: "It is a link to itself: delete it, or choose another directory",
}


def kind_of(tensor: Tensor) -> str:
    """The name of a tensor's dtype in safetensors; "" if it cannot be saved."""
    return next((kind for kind, dtype in DTYPES.items() if dtype == tensor.dtype), "")


def check_directory(directory: str | os.PathLike[str]) -> None:
    """Raise unless this is a path. An empty one, which Python reads as the current directory, is refused too."""
    path = os.fspath(directory) if isinstance(directory, str | os.PathLike) else directory
    if not isinstance(path, str):
        raise TypeError(f"the path of the directory must be a string or a path; got {directory!r:.80}.")
    if not path:
        raise ValueError('the path of the directory is empty. Pass "." for the current directory.')
    if "\0" in path:
        raise ValueError(f"the path of the directory must not contain a null character; got {path!r:.80}.")


def import_safetensors() -> Any:
    """safetensors, or an error that says how to install it."""
    try:
        import safetensors
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"saving and loading need safetensors: {install('safetensors')}", name="safetensors"
        ) from None
    return safetensors
