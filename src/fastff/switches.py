"""Switches of the whole process, which several threads may turn at once and which end up where they were.

Each thread that notes a switch, turns it and puts it back may note what another thread has turned, and leave it there.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Held while random generators and torch's fused encoder layer are not what the user has set.
PROBING = threading.RLock()
_COUNTING = threading.Lock()
_stances: list[Any] = []  # one for each block within `eager`; the first knows what was before


@contextmanager
def eager() -> Iterator[None]:
    """Compiled code, which runs no hook, is off until the last thread has left. For use within what is `guarded`."""
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
