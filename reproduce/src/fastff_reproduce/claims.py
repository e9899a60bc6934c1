"""Which process trains what: locks on bytes of a file beside the store, one byte per case.

The operating system frees the locks when the process ends, so a killed process claims nothing.
"""

import hashlib
import sys
from pathlib import Path

from .parts import Part
from .runs import Case


class Claims:
    """The cases that this process trains."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+b")

    def __enter__(self) -> "Claims":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()  # this frees all locks

    def take(self, part: Part) -> bool:
        """Claim all cases of a part, or none. Returns whether it did."""
        for i, case in enumerate(part):
            if not self._lock(case, on=True):
                self.drop(part[:i])
                return False
        return True

    def drop(self, part: Part) -> None:
        for case in part:
            self._lock(case, on=False)

    def _lock(self, case: Case, on: bool) -> bool:
        if sys.platform == "win32":  # no claims: a case trained twice is still stored once
            return True
        import fcntl

        byte = int.from_bytes(hashlib.sha256(case.key.encode()).digest()[:7], "big")
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB if on else fcntl.LOCK_UN, 1, byte)
        except (BlockingIOError, PermissionError):
            return False
        return True
