"""Trains what a store does not have, part by part, and stores each part when it is done.

A part is a few seeds of one group: they train at once. Of two processes with the same store, one takes a part and the
other goes on with the next; a claim ends with its process, so that nothing stays taken after a kill. What a part has
reached lies in a checkpoint beside the store until its results are stored. An error ends its part and no other.
"""

import hashlib
import itertools
import logging
import sys
import time
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fastff.extras import install

from .divergence import Diverged
from .resume import Damaged
from .runs import Case, Result, name_of
from .store import Store
from .teacher import blamed, dense, is_taught, path_of

ENGINES = ("local", "ray")
Part = tuple[Case, ...]  # of one group
Report = Callable[[int, int, str], None]
Trained = tuple[list[Result], dict[Case, str]]  # the results, and why the other cases diverged
Outcome = tuple[Trained, str] | Exception  # with the machine; or why there is none
EXPECTED = (Diverged, Damaged, OSError)  # a sentence says it all: no traceback


class Failure(NamedTuple):
    part: Part
    error: Exception


class SomeFailed(RuntimeError):
    """Parts that could not be trained, after all others were; `results` has what there is."""

    def __init__(self, failures: Sequence[Failure], results: Sequence[Result]) -> None:
        self.failures, self.results = list(failures), list(results)
        self.count = sum(len(part) for part, _ in failures)
        names = "; ".join(f"{title(part)}: {said(error)}" for part, error in failures)
        super().__init__(f"{self.count} {'training' if self.count == 1 else 'trainings'} failed. {names}")


def run(
    cases: Iterable[Case],
    store: Store,
    *,
    device: str,
    root: Path | None,
    about: dict[str, str],
    engine: str = "local",
    ensemble: int = 10,
    progress: bool = True,
) -> list[Result]:
    """The results of the cases, in their order. What the store does not have is trained first.

    A case that is taught has its teacher trained before it, as a case like any other. One that diverges fails alone:
    it is not stored, and leaves no checkpoint.

    `root` is the directory of the data, `about` what `store.about(device)` says, and `ensemble` the number of seeds
    that train at once. `SomeFailed` is raised at the end if there were errors.
    """
    cases = list({case.key: case for case in cases}.values())
    stored, failures = store.keys(), list[Failure]()
    todo = parts(with_teachers(cases, stored), ensemble)
    folder = checkpoints(store)
    waiting = []
    for part in todo:
        if any(case.key not in stored for case in part):
            waiting.append(part)
        else:  # one is left by a process that was killed after it had stored
            checkpoint(folder, part).unlink(missing_ok=True)
    if not waiting:
        return _found(cases, store)
    folder.mkdir(parents=True, exist_ok=True)
    with _bars(len(todo), len(todo) - len(waiting), progress) as bars, _Claims(folder / "claims") as claims:
        crew = _crew(engine, device, root, bars.epoch)
        running = 0
        while waiting or running:
            for part in list(waiting):
                if running == crew.most:
                    break
                if not _can_start(part, store, failures):
                    continue
                if not claims.take(part):
                    continue
                waiting.remove(part)
                # It may have been stored by the one who had it before.
                stored = store.keys()
                missing = tuple(case for case in part if case.key not in stored)
                claims.drop(tuple(case for case in part if case.key in stored))
                if untaught := _untaught(missing, failures):
                    failures += _diverged(untaught, bars)
                    claims.drop(tuple(untaught))
                    missing = tuple(case for case in missing if case not in untaught)
                if missing:
                    for twin in _teachers(missing):
                        if twin.key in stored and not path_of(folder, twin).exists():
                            bars.note(f"{title((twin,))} is stored without its file: it is trained again, to teach")
                    crew.start(missing, checkpoint(folder, missing))
                    bars.start(missing)
                    running += 1
                elif untaught:
                    bars.count()
                else:
                    bars.done(part, "another process has stored it")
            if running:
                part, outcome = crew.finish()
                running -= 1
                if isinstance(outcome, Exception):
                    failures.append(Failure(part, outcome))
                    bars.failed(part, outcome)
                    bars.count()
                else:
                    (results, reasons), machine = outcome
                    store.put_all(results, about | {"machine": machine or about["machine"]})
                    checkpoint(folder, part).unlink(missing_ok=True)
                    failures += _diverged(reasons, bars)
                    if trained := tuple(result.case for result in results):
                        bars.done(trained, f"{sum(result.seconds for result in results):.1f} s")
                    else:
                        bars.count()
                claims.drop(part)
            elif waiting:
                bars.wait(waiting[0])
                time.sleep(0.5)
    results = _found(cases, store)
    if failures:
        raise SomeFailed(failures, results)
    return results


def with_teachers(cases: Iterable[Case], stored: Container[str] = ()) -> list[Case]:
    """The cases, each after the one that teaches it, if there is one and the case is not stored."""
    made = ((*(_teachers([case]) if case.key not in stored else ()), case) for case in cases)
    return list(dict.fromkeys(itertools.chain.from_iterable(made)))


def _teachers(part: Sequence[Case]) -> list[Case]:
    return [dense(case) for case in part if is_taught(case)]


def _can_start(part: Part, store: Store, failures: Sequence[Failure]) -> bool:
    """Whether those who teach a part have been trained, here or by another process, or cannot be."""
    teachers = _teachers(part)
    failed = {case for failure in failures for case in failure.part}
    return not teachers or {case.key for case in teachers if case not in failed} <= store.keys()


def _untaught(part: Part, failures: Sequence[Failure]) -> dict[Case, str]:
    """The cases of a part whose teachers have diverged, and why."""
    lost: dict[Case, str] = {}
    for failure in failures:
        lost |= failure.error.reasons if isinstance(failure.error, Diverged) else {}
    students = [case for case in part if is_taught(case) and dense(case) in lost]
    return blamed(students, lost)


def _diverged(reasons: Mapping[Case, str], bars: "_Bars") -> list[Failure]:
    """Each case that diverged as a failure of its own, told."""
    made = [Failure((case,), Diverged({case: reason})) for case, reason in reasons.items()]
    for part, error in made:
        bars.failed(part, error)
    return made


def parts(cases: Iterable[Case], ensemble: int) -> list[Part]:
    """The cases, those of one group together, at most `ensemble` of them at once."""
    if ensemble < 1:
        raise ValueError(f"ensemble is the number of seeds that train at once, 1 or more; got {ensemble}.")
    groups: dict[Case, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.group, []).append(case)
    return [tuple(group[i : i + ensemble]) for group in groups.values() for i in range(0, len(group), ensemble)]


def title(part: Part) -> str:
    seeds = [case.seed for case in part]
    several = f"seeds {min(seeds)} to {max(seeds)}" if len(seeds) > 1 else f"seed {seeds[0]}"
    return f"{part[0].title} {several}"


def said(error: Exception) -> str:
    """An error in a line: with its kind, unless the sentence is ours."""
    if isinstance(error, Diverged):
        return "; ".join(error.reasons.values())
    return str(error) if isinstance(error, EXPECTED) else f"{type(error).__name__}: {error}"


def checkpoints(store: Store) -> Path:
    return store.path.with_name(f"{store.path.name}.checkpoints")


def checkpoint(folder: Path, part: Part) -> Path:
    return folder / f"{name_of(part)}.pt"


def _found(cases: Iterable[Case], store: Store) -> list[Result]:
    return [result for case in cases if (result := store.get(case))]


class _Claims:
    """Which cases this process trains: for each a byte of a file, locked. The system frees it when the process ends."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+b")

    def __enter__(self) -> "_Claims":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()  # and with it all locks

    def take(self, part: Part) -> bool:
        """All cases of a part, or none."""
        for i, case in enumerate(part):
            if not self._lock(case, on=True):
                self.drop(part[:i])
                return False
        return True

    def drop(self, part: Part) -> None:
        for case in part:
            self._lock(case, on=False)

    def _lock(self, case: Case, on: bool) -> bool:
        if sys.platform == "win32":  # no claims: what is trained twice is still stored once
            return True
        import fcntl

        byte = int.from_bytes(hashlib.sha256(case.key.encode()).digest()[:7], "big")
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB if on else fcntl.LOCK_UN, 1, byte)
        except (BlockingIOError, PermissionError):
            return False
        return True


class _Crew(Protocol):
    """Who trains: `start` as many as `most` parts, then `finish` gives one that is done."""

    most: int

    def start(self, part: Part, checkpoint: Path) -> None: ...

    def finish(self) -> tuple[Part, Outcome]: ...


def _crew(engine: str, device: str, root: Path | None, report: Report) -> _Crew:
    if engine not in ENGINES:
        raise ValueError(f"engine is one of {', '.join(ENGINES)}; got {engine!r}.")
    return _Ray(device, root) if engine == "ray" else _Local(device, root, report)


class _Local:
    """This process, one part after the other."""

    most = 1

    def __init__(self, device: str, root: Path | None, report: Report) -> None:
        self._device, self._root, self._report = device, root, report

    def start(self, part: Part, checkpoint: Path) -> None:
        self._part, self._checkpoint = part, checkpoint

    def finish(self) -> tuple[Part, Outcome]:
        try:
            trained = _train(self._part, self._device, self._root, self._checkpoint, self._report)
        except Exception as error:  # whatever it is, the other parts are to be trained
            return self._part, error
        return self._part, (trained, "")


class _Ray:
    """The workers of a Ray cluster. They return results to this process, which alone writes to the store."""

    most = sys.maxsize  # Ray has a queue of its own

    def __init__(self, device: str, root: Path | None) -> None:
        try:
            import ray
        except ModuleNotFoundError as error:
            if error.name != "ray":
                raise
            raise ModuleNotFoundError(f"engine ray needs ray: {install('ray')}", name="ray") from None
        self._ray: Any = ray
        if not ray.is_initialized():
            ray.init(log_to_driver=False, logging_level=logging.WARNING)  # the cluster of RAY_ADDRESS, or one made here
        # A worker that dies is replaced. An error of the training would be the same again and is not.
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
    """What a worker does. A checkpoint needs a file system that it shares with the driver."""
    from fastff.provenance import machine

    there = checkpoint if checkpoint.parent.is_dir() else None
    return _train(part, device, root, there, None), machine(device)


def _train(part: Part, device: str, root: Path | None, checkpoint: Path | None, report: Report | None) -> Trained:
    from .trainer import train

    try:
        return train(part, device=device, root=root, checkpoint=checkpoint, report=report), {}
    except Diverged as error:
        return error.results, error.reasons


class _Bars:
    """How far it is, on stderr: bars in a terminal, a line for each part elsewhere."""

    def __init__(self, progress: Progress, total: int, done: int, show: bool) -> None:
        self._progress, self._console = progress, progress.console
        self._lines = show and not progress.console.is_terminal
        self._done, self._total = done, total
        self._all = progress.add_task("all", total=total, completed=done, text="")
        self._one = progress.add_task("", total=None, visible=False, text="")

    def start(self, part: Part) -> None:
        self._progress.reset(self._one, description=escape(title(part)), total=None, visible=True, text="")

    def epoch(self, epoch: int, most: int, text: str) -> None:
        self._progress.update(self._one, completed=epoch, total=most, text=escape(text))

    def wait(self, part: Part) -> None:
        self._progress.update(self._one, description=escape(f"another process trains {title(part)}"), visible=True)

    def note(self, text: str) -> None:
        self._console.print(escape(text), soft_wrap=True)

    def count(self) -> None:
        """A part is over."""
        self._done += 1
        self._progress.advance(self._all)

    def done(self, part: Part, text: str) -> None:
        self.count()
        if self._lines:
            self._console.print(escape(f"{self._done} of {self._total}: {title(part)}: {text}"), soft_wrap=True)

    def failed(self, part: Part, error: Exception) -> None:
        if not isinstance(error, EXPECTED):
            trace = "".join(traceback.format_exception(error))
            self._console.print(escape(trace), style="dim", soft_wrap=True)
        self._console.print(escape(f"failed: {title(part)}: {said(error)}"), style="red", soft_wrap=True)


@contextmanager
def _bars(total: int, done: int, show: bool) -> Iterator[_Bars]:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[text]}", style="dim"),
    )
    with Progress(*columns, console=console, transient=True, disable=not (show and console.is_terminal)) as progress:
        yield _Bars(progress, total, done, show)
