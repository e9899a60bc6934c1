"""Parts: a few seeds of one case that train at once. How cases are grouped into them, and how a failed one is named."""

from collections.abc import Container, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from .divergence import Diverged
from .resume import Damaged
from .runs import Case, Result, name_of
from .teacher import has_teacher, teacher_of

Part = tuple[Case, ...]  # cases that differ in the seed alone
EXPECTED = (Diverged, Damaged, OSError)  # their messages say it all: no traceback


class Failure(NamedTuple):
    part: Part
    error: Exception


class SomeFailed(RuntimeError):
    """Some parts failed, after all others were trained; `results` has the results of those."""

    def __init__(self, failures: Sequence[Failure], results: Sequence[Result]) -> None:
        self.failures, self.results = list(failures), list(results)
        self.count = sum(len(part) for part, _ in failures)
        names = "; ".join(f"{title(part)}: {message(error)}" for part, error in failures)
        super().__init__(f"{self.count} {'training' if self.count == 1 else 'trainings'} failed. {names}")


def parts(cases: Iterable[Case], ensemble: int) -> list[Part]:
    """Group cases that differ in the seed alone, at most `ensemble` to a part."""
    if ensemble < 1:
        raise ValueError(f"ensemble, the number of seeds that train at once, must be 1 or more; got {ensemble}.")
    groups: dict[Case, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.group, []).append(case)
    return [tuple(group[i : i + ensemble]) for group in groups.values() for i in range(0, len(group), ensemble)]


def with_teachers(cases: Iterable[Case], stored: Container[str] = ()) -> list[Case]:
    """The cases, each one that is not stored after its teacher, if it has one."""
    made = ((*(teachers([case]) if case.key not in stored else ()), case) for case in cases)
    return list(dict.fromkeys(chain.from_iterable(made)))


def teachers(part: Sequence[Case]) -> list[Case]:
    """The teachers of those cases that have one."""
    return [teacher_of(case) for case in part if has_teacher(case)]


def title(part: Part) -> str:
    seeds = [case.seed for case in part]
    several = f"seeds {min(seeds)} to {max(seeds)}" if len(seeds) > 1 else f"seed {seeds[0]}"
    return f"{part[0].title} {several}"


def message(error: Exception) -> str:
    """An error in one line, with its type unless the message is ours."""
    if isinstance(error, Diverged):
        return "; ".join(error.reasons.values())
    return str(error) if isinstance(error, EXPECTED) else f"{type(error).__name__}: {error}"


def checkpoint(folder: Path, part: Part) -> Path:
    return folder / f"{name_of(part)}.pt"
