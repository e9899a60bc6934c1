"""Write a file as a whole: after a kill, a full disk or Ctrl-C it holds either the old content or the new."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

SQLITE = b"SQLite format 3\0"  # how a database begins


@contextmanager
def replacing(path: Path, *, binary: bool = False) -> Iterator[IO[Any]]:
    """A file to write; it replaces the file at `path` when the block ends without an error."""
    check_no_database(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    options: dict[str, Any] = {"mode": "wb"} if binary else {"mode": "w", "newline": "", "encoding": "utf-8"}
    try:
        if path.exists() and not path.is_file():  # such as /dev/stdout
            with path.open(**options) as file:
                yield file
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open(**options) as file:
            yield file
        draft.replace(path)
    except OSError as error:
        error.filename = str(path)  # the path that the user gave; a full disk names no file
        raise
    finally:
        with suppress(OSError):
            draft.unlink()


def check_no_database(path: Path) -> None:
    """Refuse to overwrite an SQLite database: it may be a store of results."""
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(SQLITE)) == SQLITE:
                raise ValueError(f"{path} is an SQLite database and must not be overwritten. Choose another file.")
