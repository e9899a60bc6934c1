"""Write a save: one file, so that one rename decides between the old save and the new one."""

import errno
import json
import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from ..validate import check_allocated
from .files import REMEDIES, WEIGHTS, import_safetensors
from .staging import staging, sync


def write(
    directory: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    note: Mapping[str, Any],
    beside: Mapping[str, Any] | None = None,
) -> None:
    """Save tensors and their note, all or nothing. beside: JSON files for other programs; None deletes one."""
    safetensors = import_safetensors()
    from safetensors.torch import save_file

    folder, beside = Path(directory), beside or {}
    if empty := [name for name, tensor in tensors.items() if tensor.is_meta]:
        raise ValueError(
            f"cannot save {', '.join(empty[:8])}: on the meta device, which holds no values. Load the weights first."
        )
    metadata = {"format": "pt", "fastff": json.dumps(note, sort_keys=True)}
    texts = {
        name: json.dumps(value, indent=2, sort_keys=True) + "\n" for name, value in beside.items() if value is not None
    }
    whole = _whole(tensors)
    try:
        with staging(folder) as stage:
            save_file(whole, stage / WEIGHTS, metadata=metadata)
            for name, text in texts.items():
                (stage / name).write_text(text, "utf-8")
            for path in stage.iterdir():
                path.chmod(_mode(folder / path.name, stage))  # save_file makes files private
                sync(path)
            for name in (*texts, WEIGHTS):
                os.replace(stage / name, folder / name)
    except (OSError, safetensors.SafetensorError) as error:
        told = re.search(r"\(os error (\d+)\)", str(error))  # safetensors writes in Rust, with its own errors
        number = getattr(error, "errno", None) or (int(told[1]) if told else errno.EIO)
        looped = number == errno.EEXIST and folder.is_symlink()
        remedy = f" {REMEDIES[number]}." if number in REMEDIES else ""
        remedy = " It is a link to nothing: delete it, or choose another directory." if looped else remedy
        reason = os.strerror(number) if told or getattr(error, "errno", None) else error
        raise OSError(number, f"cannot save into {folder}: {reason}.{remedy} An existing save is unchanged") from error
    for name in beside.keys() - texts.keys():
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):  # not every file system can; the save is complete anyway, unless the power fails
        sync(folder)


def _mode(path: Path, stage: Path) -> int:
    """The permissions of a new file: the replaced file's, or else by the umask."""
    with suppress(OSError):
        old = path.stat().st_mode
        if stat.S_ISREG(old):
            return stat.S_IMODE(old) & 0o777
    return stage.stat().st_mode & 0o666


def _whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors, each in its own storage: the file has no views, and two tensors that share a storage but are
    not tied are written as two."""
    whole, storages = {}, set()
    for name, tensor in tensors.items():
        check_allocated(name, tensor)
        tensor = tensor.detach().contiguous()
        storage = tensor.untyped_storage()
        if tensor.numel() and (storage.data_ptr() in storages or storage.nbytes() != tensor.nbytes):
            tensor = tensor.clone()
        storages.add(tensor.untyped_storage().data_ptr())
        whole[name] = tensor
    return whole
