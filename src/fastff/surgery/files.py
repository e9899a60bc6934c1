"""The file of a save: fastff.safetensors has the tensors, and in its header a note in JSON that says how to load them.

One file, so that one rename decides: it is written in a directory of its own inside the target, made durable, and then
renamed over the old save. A process that is killed before leaves the old save, and a directory that the next save
deletes. A running save holds a lock on its directory, so that no other one takes it for such a leftover.
"""

import errno
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..extras import install
from ..interrupts import uninterrupted
from ..layer import FFF
from ..validate import check_allocated

try:
    import fcntl
except ImportError:  # Windows: saves are as atomic, and leftovers of killed ones stay
    fcntl = None  # type: ignore[assignment]

WEIGHTS = "fastff.safetensors"
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_OTHERS = {"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32}
DTYPES = FLOATS | _OTHERS | {"I64": torch.int64}
Header = Mapping[str, tuple[str, tuple[int, ...]]]  # dtype and shape of each tensor
_LONGEST_HEADER = 2**25  # bytes: 100,000 tensors have half of it
_REMEDIES = {
    errno.ENOSPC: "Free some space there, or choose another directory",
    errno.EDQUOT: "Free some space there, or choose another directory",
    errno.EACCES: "Choose a directory that you may write to",
    errno.EPERM: "Choose a directory that you may write to",
    errno.EROFS: "Choose a directory that you may write to",
    errno.EEXIST: "It is a file: pass the path of a directory",
    errno.ENOTDIR: "A part of the path is a file: pass the path of a directory",
    errno.EISDIR: f"There is a directory where {WEIGHTS} goes: delete it, or choose another directory",
    errno.ELOOP: "A link leads back to itself: delete it, or choose another directory",
}


def kind_of(tensor: Tensor) -> str:
    """What safetensors calls the dtype of a tensor; "" if it is not saved."""
    return next((kind for kind, dtype in DTYPES.items() if dtype == tensor.dtype), "")


def check_directory(directory: str | os.PathLike[str]) -> None:
    """Raise for what is no path, and for the one that Python takes for the current directory, and nobody else does."""
    path = os.fspath(directory) if isinstance(directory, str | os.PathLike) else directory
    if not isinstance(path, str):
        raise TypeError(f"the path of a directory must be a string or a path; got {directory!r:.80}.")
    if not path:
        raise ValueError('the path of the directory is empty. Pass "." for the current directory.')
    if "\0" in path:
        raise ValueError(f"the path of a directory has no null character; got {path!r:.80}. Pass one without.")


def write(
    directory: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    note: Mapping[str, Any],
    beside: Mapping[str, Any] | None = None,
) -> None:
    """Save tensors and their note, all or nothing. `beside` has JSON files for other programs, None to delete one."""
    safetensors = _safetensors()
    from safetensors.torch import save_file

    folder, beside = Path(directory), beside or {}
    if empty := [name for name, tensor in tensors.items() if tensor.is_meta]:
        raise ValueError(
            f"cannot save {', '.join(empty[:8])}: on the meta device, where a model has no values. Load its weights "
            "first."
        )
    metadata = {"format": "pt", "fastff": json.dumps(note, sort_keys=True)}
    texts = {
        name: json.dumps(value, indent=2, sort_keys=True) + "\n" for name, value in beside.items() if value is not None
    }
    whole = _whole(tensors)
    try:
        with _staging(folder) as stage:
            save_file(whole, stage / WEIGHTS, metadata=metadata)
            for name, text in texts.items():
                (stage / name).write_text(text, "utf-8")
            for path in stage.iterdir():
                path.chmod(_mode(folder / path.name, stage))  # save_file makes files private
                _sync(path)
            for name in (*texts, WEIGHTS):
                os.replace(stage / name, folder / name)
    except (OSError, safetensors.SafetensorError) as error:
        told = re.search(r"\(os error (\d+)\)", str(error))  # safetensors writes in Rust, and has errors of its own
        number = getattr(error, "errno", None) or (int(told[1]) if told else errno.EIO)
        looped = number == errno.EEXIST and folder.is_symlink()
        remedy = f" {_REMEDIES[number]}." if number in _REMEDIES else ""
        remedy = " It is a link that leads nowhere: delete it, or choose another directory." if looped else remedy
        reason = os.strerror(number) if told or getattr(error, "errno", None) else error
        raise OSError(
            number, f"cannot save into {folder}: {reason}.{remedy} A save that is there is unchanged"
        ) from error
    for name in beside.keys() - texts.keys():
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):  # not every file system can; the save is done all the same, short of a power cut
        _sync(folder)


def _mode(path: Path, stage: Path) -> int:
    """The permissions of a file to write: of the one that it replaces, or else as the umask wants."""
    with suppress(OSError):
        old = path.stat().st_mode
        if stat.S_ISREG(old):
            return stat.S_IMODE(old) & 0o777
    return stage.stat().st_mode & 0o666


def _whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors, each in a storage of its own: the file has no views, and two tensors that lie in one storage,
    and are not tied, are written as two."""
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


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """A new directory in `folder`, which is made if need be; an error leaves neither."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        _clean(folder)
        stage, lock = _claim(folder)
        try:
            yield stage
        finally:
            shutil.rmtree(stage, ignore_errors=True)
            if lock is not None:
                os.close(lock)
    except BaseException:
        for path in made:
            with suppress(OSError):
                path.rmdir()
        raise


def _claim(folder: Path) -> tuple[Path, int | None]:
    """A new directory for a save, and the lock on it."""
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        stage = folder / f".fastff-{secrets.token_hex(8)}.tmp"
        stage.mkdir(parents=True)
        if fcntl is None:
            return stage, None
        with suppress(FileNotFoundError):  # another save saw it before it was locked, and deleted it
            lock = os.open(stage, os.O_RDONLY | os.O_DIRECTORY)
            with suppress(OSError):  # a file system without locks: then nobody can take it for a leftover either
                fcntl.flock(lock, fcntl.LOCK_EX)
            if stage.exists():
                return stage, lock
            os.close(lock)


def _clean(folder: Path) -> None:
    """Delete what killed saves have left."""
    for stage in folder.glob(".fastff-*.tmp") if fcntl is not None and folder.is_dir() else ():
        with suppress(OSError):
            lock = os.open(stage, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an OSError while its save runs
                shutil.rmtree(stage)
            finally:
                os.close(lock)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


class Saved:
    """An open save: its note, what tensors it has, and the tensors themselves, read when asked for."""

    def __init__(self, path: Path, file: Any) -> None:
        self.path, self.file, self.note = path, file, _note(path, file.metadata() or {})
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, it is no dict
        self.header: Header = {name: (s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}

    def tensors(self, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """Each tensor of a model that was compared with the header, and what its data is to be, on its device. What is
        tied stays tied."""
        own = model.state_dict(keep_vars=True)
        temperatures = {id(layer.temperature_tensor) for layer in model.modules() if isinstance(layer, FFF)}
        for name in self.header:
            with uninterrupted():  # safetensors turns a Ctrl-C into an error of its own
                tensor = self.file.get_tensor(name).clone()  # a copy: the tensor itself lies in the file
            if id(own[name]) in temperatures:
                check_temperature(name, tensor)
            yield own[name], tensor.to(own[name].device)


def check_temperature(name: str, tensor: Tensor) -> None:
    """Raise where the temperature of a layer is one that cannot be set."""
    limits = torch.finfo(tensor.dtype)
    if not limits.tiny <= float(tensor) <= limits.max:
        raise ValueError(
            f"{name}, the temperature of an FFF, must be positive and finite in {tensor.dtype}; got {float(tensor)}. "
            "The weights are corrupted, or were changed by hand."
        )


@contextmanager
def open_weights(directory: str | os.PathLike[str]) -> Iterator[Saved]:
    """The save in a directory, if it is whole. A save that takes its place meanwhile changes nothing for the reader."""
    safetensors = _safetensors()
    check_directory(directory)
    folder = Path(directory)
    path = folder / WEIGHTS
    try:
        _check_regular(path)
        opened = safetensors.safe_open(path, "pt")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is not there: {_found_instead(folder)}") from None
    except NotADirectoryError as error:
        raise NotADirectoryError(
            errno.ENOTDIR, f"{folder} is a file. Pass the directory that fastff saved into, such as {folder.parent}"
        ) from error
    except OSError as error:
        remedy = _REMEDIES.get(errno.ELOOP) if error.errno == errno.ELOOP else "Pass a directory that you may read"
        raise OSError(error.errno, f"cannot read {path}: {error.strerror}. {remedy}") from error
    except (safetensors.SafetensorError, EOFError) as error:
        raise ValueError(
            f"{path} is not a whole safetensors file: it is truncated, or of another kind ({error})."
        ) from None
    with opened as file:
        yield Saved(path, file)


def _check_regular(path: Path) -> None:
    """Raise for what is no file on a disk, such as a pipe, on which a reader waits for ever, and for a huge header."""
    file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError(f"{path} is a directory, a pipe or a device; fastff reads regular files alone.")
        length = int.from_bytes(os.read(file, 8), "little")
        if 8 + length > about.st_size:
            raise EOFError("its header is cut off")
        if length > _LONGEST_HEADER:
            raise ValueError(f"{path} has a header of {length} bytes; fastff reads {_LONGEST_HEADER} at most.")
        _check_names(path, os.read(file, length))
    finally:
        os.close(file)


def _check_names(path: Path, header: bytes) -> None:
    """Raise for a header with one name twice, of which safetensors takes either."""
    with suppress(UnicodeDecodeError, json.JSONDecodeError, RecursionError):  # safetensors says what is wrong with it
        try:
            json.loads(header, object_pairs_hook=_once)
        except _Twice as error:
            raise ValueError(f"{path} is not as fastff writes it: in its header {error}.") from None


class _Twice(ValueError):
    """A name that stands in a JSON object twice."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = set()
    for name, _ in pairs:
        if name in names:
            raise _Twice(f"the name {name!r:.80} stands twice")
        names.add(name)
    return dict(pairs)


def _found_instead(folder: Path) -> str:
    kinds = (".bin", ".pt", ".pth", ".safetensors")
    others = sorted(p.name for p in folder.iterdir() if p.suffix in kinds) if folder.is_dir() else []
    if others:
        return f"there is {', '.join(others[:4])}. fastff reads no other file, and never a pickle."
    return f"{folder} is no directory into which fastff saved."


def _note(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """The note in a header: a JSON object with no name twice in any part of it."""
    text = metadata.get("fastff")
    if text is None:
        raise ValueError(f"{path} has no note of a surgery. It was not written by fastff.")
    if re.fullmatch("[0-9a-f]{32}", text):
        raise ValueError(
            f"{path} is a save of format version 1, in two files. Save the model again with this version of fastff, "
            "which reads one file."
        )
    try:
        value = json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError(f"{path} has a note that is not JSON as fastff writes it: it is nested too deeply.") from None
    except ValueError as error:
        raise ValueError(f"{path} has a note that is not JSON as fastff writes it: {error}.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must have a JSON object as its note; got a {type(value).__name__}.")
    return value


def _safetensors() -> Any:
    try:
        import safetensors
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"saving and loading need safetensors: {install('safetensors')}", name="safetensors"
        ) from None
    return safetensors
