"""The file of a comparison: JSON with its settings and the rows that are done, replaced as a whole after every row.

Rows of another model, other data or other settings are not mixed in: the file records these, and a comparison that
differs stops before any work. Sizes may differ: their rows are added.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ..atomic import replacing
from .comparison import COLUMNS, Compared

KIND = "fastff comparison"
_VALUES = 256  # of a model's tensor, spread evenly: enough to tell one training run's weights from another's


def fingerprint(value: Any) -> str:
    """A short name for the content of a model, a tensor, a batch or a function: its values and its code."""
    digest = hashlib.blake2b(digest_size=8)
    _add(digest, value)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, nn.Module):
        digest.update(repr(value).encode())
        tensors = {name: t.detach().reshape(-1) for name, t in value.state_dict().items() if isinstance(t, Tensor)}
        value = {name: t[:: max(1, len(t) // _VALUES)] for name, t in tensors.items()}
    if isinstance(value, Tensor):
        digest.update(f"{tuple(value.shape)}{value.dtype}".encode())
        digest.update(value.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, FunctionType):
        code = value.__code__
        constants = [part for part in code.co_consts if not isinstance(part, CodeType)]  # whose repr has an address
        digest.update(f"{value.__qualname__}{code.co_names}{constants}".encode() + code.co_code)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            digest.update(str(key).encode())
            _add(digest, part)
    elif isinstance(value, tuple | list):
        for part in value:
            _add(digest, part)
    else:
        digest.update((type(value).__qualname__ if callable(value) else repr(value)).encode())


def read_rows(path: Path, settings: Mapping[str, Any]) -> list[Compared]:
    """The rows of a file, empty if there is none; raises unless it is a comparison with these settings."""
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_text("utf-8"))
        if found["kind"] != KIND:
            raise ValueError("it is of another kind")
        rows = [Compared(**{name: row[name] for name in COLUMNS if name in row}) for row in found["rows"]]
        old = dict(found["settings"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no comparison: {error}. Choose another file, or delete it.") from None
    names = [name for name in {**old, **settings} if old.get(name) != settings.get(name)]
    if names:
        differ = ", ".join(f"{name} {old.get(name)!r} there, {settings.get(name)!r} now" for name in names)
        raise ValueError(
            f"{path} holds rows of another comparison: {differ}. Choose another file, or delete it to start again."
        )
    return rows


def write_rows(path: Path, settings: Mapping[str, Any], rows: Sequence[Compared]) -> None:
    """Replace the file."""
    content = {"kind": KIND, "settings": dict(settings), "rows": [dataclasses.asdict(row) for row in rows]}
    with replacing(path) as file:
        json.dump(content, file, indent=2, allow_nan=False)
        file.write("\n")
