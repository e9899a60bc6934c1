"""Who trains the parts: this process, one after the other, or the workers of a Ray cluster."""

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from fastff.provenance import machine

from .divergence import Diverged
from .parts import EXPECTED, Part
from .runs import Case, Result

ENGINES = ("local", "ray")
Report = Callable[[int, int, str], None]
Trained = tuple[list[Result], dict[Case, str]]  # the results, and why the other cases diverged
Outcome = tuple[Trained, str] | Exception  # with the worker's machine


class Workers(Protocol):
    """`start` up to `most` parts; `finish` waits for one of them."""

    most: int

    def start(self, part: Part, checkpoint: Path) -> None: ...

    def finish(self) -> tuple[Part, Outcome]: ...


def make_workers(engine: str, device: str, root: Path | None, report: Report) -> Workers:
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}; got {engine!r}.")
    return Ray(device, root) if engine == "ray" else Local(device, root, report)


class Local:
    """Trains in this process, one part after the other."""

    most = 1

    def __init__(self, device: str, root: Path | None, report: Report) -> None:
        self._device, self._root, self._report = device, root, report

    def start(self, part: Part, checkpoint: Path) -> None:
        self._part, self._checkpoint = part, checkpoint

    def finish(self) -> tuple[Part, Outcome]:
        try:
            trained = _train(self._part, self._device, self._root, self._checkpoint, self._report)
        except Exception as error:  # the other parts are trained all the same
            return self._part, error
        return self._part, (trained, "")


class Ray:
    """Trains on a Ray cluster. Workers return results to this process, which alone writes to the store."""

    most = sys.maxsize  # Ray queues them

    def __init__(self, device: str, root: Path | None) -> None:
        try:
            import ray
        except ModuleNotFoundError as error:
            if error.name != "ray":
                raise
            raise ModuleNotFoundError(
                'engine ray needs ray: pip install "./reproduce[ray]" in a checkout of fastff', name="ray"
            ) from None
        self._ray: Any = ray
        if not ray.is_initialized():
            ray.init(log_to_driver=False, logging_level=logging.WARNING)  # the cluster at RAY_ADDRESS, or a local one
        # Retry when a worker dies. A training that fails would fail again: it is not retried.
        self._work = ray.remote(max_retries=3, num_gpus=1 if device == "cuda" else 0)(_work)
        self._device, self._root = device, None if root is None else root.absolute()
        self._parts: dict[Any, Part] = {}

    def start(self, part: Part, checkpoint: Path) -> None:
        task = self._work.remote(part, self._device, self._root, checkpoint.absolute())
        self._parts[task] = part

    def finish(self) -> tuple[Part, Outcome]:
        (task, *_), _ = self._ray.wait(list(self._parts), num_returns=1)
        part = self._parts.pop(task)
        try:
            return part, self._ray.get(task)
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            return part, cause if isinstance(cause, EXPECTED) else error


def _work(part: Part, device: str, root: Path | None, checkpoint: Path) -> tuple[Trained, str]:
    """Runs on a worker. A checkpoint needs a file system that it shares with this process."""
    there = checkpoint if checkpoint.parent.is_dir() else None
    return _train(part, device, root, there, None), machine(device)


def _train(part: Part, device: str, root: Path | None, checkpoint: Path | None, report: Report | None) -> Trained:
    from .trainer import train

    try:
        return train(part, device=device, root=root, checkpoint=checkpoint, report=report), {}
    except Diverged as error:
        return error.results, error.reasons
