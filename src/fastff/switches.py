"""Settings of the whole process that several threads may change at once.

A thread that saves a setting, changes it and restores it may save another thread's change, and restore that. The locks
here prevent it.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Held while random generators or torch's fused encoder layer differ from the user's settings.
PROBING = threading.RLock()
_COUNTING = threading.Lock()
_stances: list[Any] = []  # one for each open block of `eager`; the first one restores the stance before it


@contextmanager
def eager() -> Iterator[None]:
    """Turn off compiled code, which runs no hooks, until the last thread has left. Use it within a `guarded` block."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with _COUNTING:
        _stances.append(torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _COUNTING:
            last = _stances.pop()
            if not _stances:
                last.__exit__(None, None, None)
