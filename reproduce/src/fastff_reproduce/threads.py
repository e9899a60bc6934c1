"""How many threads work for a training."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Operations run on the calling thread alone.

    Those of a small model, and what a GPU leaves for the CPU, are too short to be divided. Where others want the cores
    too, as other trainings do, they would take many times as long, waiting for each other.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
