"""Train cases: load the data, train their teachers first, resume from checkpoints, and report divergence.

The loop itself is in loop.py.
"""

import functools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from . import data, teacher
from .divergence import Diverged, remedy
from .loop import Training
from .resume import resume, save
from .runs import Case, Result, name_of
from .settings import Settings
from .teacher import Teachers
from .threads import one_thread

CHECKPOINT_SECONDS = 30.0

Report = Callable[[int, int, str], None]
_load = functools.lru_cache(maxsize=1)(data.load)  # groups of one data set follow each other


def train(
    cases: Sequence[Case],
    *,
    device: str,
    root: Path | None,
    checkpoint: Path | None = None,
    report: Report | None = None,
    seconds: float = math.inf,
) -> list[Result]:
    """Train cases that differ in the seed alone, all at once, and return their results.

    If the file `checkpoint` exists, the training resumes from it. It is written now and then; the caller removes it.
    report(epoch, most, text) is called after every evaluation. The first evaluation after `seconds` ends the training;
    the results are those up to there. If some cases diverge, `Diverged` is raised at the end; it has the results of the
    others.
    """
    start = time.monotonic()
    if len({case.group for case in cases}) != 1:
        raise ValueError("cases that train together must differ in the seed alone. Call train() for each group.")
    with ExitStack() as stack:
        stack.enter_context(
            torch.random.fork_rng(range(torch.cuda.device_count()) if device.startswith("cuda") else [])
        )
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision(Settings(**dict(cases[0].settings)).precision)
        if device.startswith("cuda"):
            stack.enter_context(one_thread())
        dataset = _load(cases[0].dataset, root)
        teachers = _teachers(cases, device, root, checkpoint, report) if teacher.has_teacher(cases[0]) else None
        training = Training(cases, torch.device(device), dataset, teachers)
        if checkpoint is not None and checkpoint.exists():
            resume(training, checkpoint)
        saved = time.monotonic()
        while not training.finished and (not training.epoch or time.monotonic() - start < seconds):
            training.advance()
            if report is not None:
                report(training.epoch, training.most_epochs, training.describe())
            if checkpoint is not None and time.monotonic() - saved > CHECKPOINT_SECONDS:
                save(training.state_dict(), checkpoint)
                saved = time.monotonic()
        if checkpoint is not None and training.generalised is not None and cases[0].model == "ViT-FF":
            for i, case in enumerate(cases):
                path = teacher.path_of(checkpoint.parent, case)
                if i not in training.watch.reasons and not path.exists():  # an earlier run may have saved it
                    save(training.ensemble.member(i, training.generalised.state).state_dict(), path)
        results = training.results()
        if training.watch.reasons:
            reasons = {cases[i]: f"{reason}. {remedy(cases[i])}" for i, reason in training.watch.reasons.items()}
            raise Diverged(reasons, results)
        return results


def _teachers(
    cases: Sequence[Case], device: str, root: Path | None, checkpoint: Path | None, report: Report | None
) -> Teachers:
    """The teachers of these cases: loaded from the checkpoint's folder, or trained now."""
    needed = [teacher.teacher_of(case) for case in cases]
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) if checkpoint is None else checkpoint.parent
        if missing := [case for case in needed if not teacher.path_of(folder, case).exists()]:
            own = folder / f"{name_of(missing)}.pt"
            try:
                train(missing, device=device, root=root, checkpoint=own, report=report)
            except Diverged as error:
                own.unlink(missing_ok=True)
                raise Diverged(teacher.blamed(cases, error.reasons)) from None
            own.unlink(missing_ok=True)
        dataset = _load(cases[0].dataset, root)
        image = tuple(dataset.train.x.shape[1:])
        return Teachers([teacher.load(folder, case, image, dataset.classes, device) for case in needed])
