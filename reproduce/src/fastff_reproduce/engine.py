"""Train the cases that a store does not have, part by part, and store each part when it is done.

A part is a few seeds of one case; they train at once. Several processes can share a store: each part is trained by one
of them (claims.py). A part has a checkpoint beside the store until its results are stored. An error ends its part and
no other.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from .claims import Claims
from .display import Display, display
from .divergence import Diverged
from .parts import Failure, Part, SomeFailed, checkpoint, parts, teachers, title, with_teachers
from .runs import Case, Result
from .store import Store
from .teacher import blamed, has_teacher, path_of, teacher_of
from .workers import make_workers


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
    """The results of the cases, in their order. Cases missing from the store are trained first.

    If a case has a teacher, it is trained before and stored like any other case. A case that diverges fails alone: it
    is not stored, and leaves no checkpoint.

    `root` is the directory of the data, `about` comes from `store.about(device)`, and `ensemble` is the number of seeds
    that train at once. If some parts failed, `SomeFailed` is raised at the end.
    """
    cases = list({case.key: case for case in cases}.values())
    stored, failures = store.keys(), list[Failure]()
    todo = parts(with_teachers(cases, stored), ensemble)
    folder = checkpoints(store)
    waiting = []
    for part in todo:
        if any(case.key not in stored for case in part):
            waiting.append(part)
        else:  # left by a process that was killed after storing
            checkpoint(folder, part).unlink(missing_ok=True)
    if not waiting:
        return _found(cases, store)
    folder.mkdir(parents=True, exist_ok=True)
    with display(len(todo), len(todo) - len(waiting), progress) as bars, Claims(folder / "claims") as claims:
        workers = make_workers(engine, device, root, bars.epoch)
        running = 0
        while waiting or running:
            for part in list(waiting):
                if running == workers.most:
                    break
                if not _can_start(part, store, failures):
                    continue
                if not claims.take(part):
                    continue
                waiting.remove(part)
                # The process that had it before may have stored it.
                stored = store.keys()
                missing = tuple(case for case in part if case.key not in stored)
                claims.drop(tuple(case for case in part if case.key in stored))
                if lost := _without_teacher(missing, failures):
                    failures += _report_diverged(lost, bars)
                    claims.drop(tuple(lost))
                    missing = tuple(case for case in missing if case not in lost)
                if missing:
                    for case in teachers(missing):
                        if case.key in stored and not path_of(folder, case).exists():
                            bars.note(f"{title((case,))} is stored but its file is missing: it is trained again")
                    workers.start(missing, checkpoint(folder, missing))
                    bars.start(missing)
                    running += 1
                elif lost:
                    bars.count()
                else:
                    bars.done(part, "stored by another process")
            if running:
                part, outcome = workers.finish()
                running -= 1
                if isinstance(outcome, Exception):
                    failures.append(Failure(part, outcome))
                    bars.failed(part, outcome)
                    bars.count()
                else:
                    (results, reasons), machine = outcome
                    store.put_all(results, about | {"machine": machine or about["machine"]})
                    checkpoint(folder, part).unlink(missing_ok=True)
                    failures += _report_diverged(reasons, bars)
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


def _can_start(part: Part, store: Store, failures: Sequence[Failure]) -> bool:
    """Whether the teachers of a part are done: trained, here or by another process, or failed."""
    needed = teachers(part)
    failed = {case for failure in failures for case in failure.part}
    return not needed or {case.key for case in needed if case not in failed} <= store.keys()


def _without_teacher(part: Part, failures: Sequence[Failure]) -> dict[Case, str]:
    """The cases of a part whose teachers diverged, and why."""
    lost: dict[Case, str] = {}
    for failure in failures:
        lost |= failure.error.reasons if isinstance(failure.error, Diverged) else {}
    students = [case for case in part if has_teacher(case) and teacher_of(case) in lost]
    return blamed(students, lost)


def _report_diverged(reasons: Mapping[Case, str], bars: Display) -> list[Failure]:
    """A failure, reported, for each case that diverged."""
    made = [Failure((case,), Diverged({case: reason})) for case, reason in reasons.items()]
    for part, error in made:
        bars.failed(part, error)
    return made


def checkpoints(store: Store) -> Path:
    return store.path.with_name(f"{store.path.name}.checkpoints")


def _found(cases: Iterable[Case], store: Store) -> list[Result]:
    return [result for case in cases if (result := store.get(case))]
