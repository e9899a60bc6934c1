"""A staging directory: several files are written in it, made durable, and renamed into place.

It lies inside the target directory. A killed process leaves the old files and the staging directory, which the next
save deletes. A running save holds a lock on its staging directory, so that no other save deletes it.
(`fastff.atomic` replaces a single file, without the lock and the clean-up.)
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: saves are atomic, but leftovers of killed saves stay
    fcntl = None  # type: ignore[assignment]


@contextmanager
def staging(folder: Path) -> Iterator[Path]:
    """A new directory in `folder`, which is created if necessary; an error leaves neither behind."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        clean(folder)
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
    """A new staging directory, and the lock on it."""
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        stage = folder / f".fastff-{secrets.token_hex(8)}.tmp"
        stage.mkdir(parents=True)
        if fcntl is None:
            return stage, None
        with suppress(FileNotFoundError):  # another save saw it before it was locked, and deleted it
            lock = os.open(stage, os.O_RDONLY | os.O_DIRECTORY)
            with suppress(OSError):  # a file system without locks: then no other save can delete it either
                fcntl.flock(lock, fcntl.LOCK_EX)
            if stage.exists():
                return stage, lock
            os.close(lock)


def clean(folder: Path) -> None:
    """Delete the staging directories of killed saves."""
    for stage in folder.glob(".fastff-*.tmp") if fcntl is not None and folder.is_dir() else ():
        with suppress(OSError):
            lock = os.open(stage, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an OSError while its save runs
                shutil.rmtree(stage)
            finally:
                os.close(lock)


def sync(path: Path) -> None:
    """Make a file or directory durable."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
