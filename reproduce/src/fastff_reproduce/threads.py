"""Train on one CPU thread: small operations gain nothing from more."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Within the block, operations run on the calling thread alone.

    The operations of a small model, and the CPU's part of GPU training, are too short to divide. If other trainings
    use the same cores, several threads would take many times as long, waiting for each other.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
