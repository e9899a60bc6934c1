"""Make one row of a comparison: build the model, measure it, distil it, measure it again, time it."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..batches import evaluation_mode
from ..provenance import checkout
from .blocks import Block
from .closeness import check_same_shape, drift, first_tensor
from .comparison import Compared
from .comparison_times import take_times
from .controls import INT8, METHODS, ORIGINAL, Candidate, Task, build, int8_of, parameters_of
from .distill_layer import Advance
from .distill_model import OUTPUT, Loss, distill_model_
from .inputs import run_on
from .int8_control import NoInt8

Quality = Callable[[nn.Module, Sequence[Any]], float]


def match(original: nn.Module) -> Quality:
    """The default quality: 1 - drift, the fraction of the variance of the original's output that a model reproduces."""

    def match(model: nn.Module, held_out: Sequence[Any]) -> float:
        found = []
        for batch in held_out:
            ours, theirs = first_tensor(run_on(model, batch)), first_tensor(run_on(original, batch, "the original"))
            check_same_shape("the output", ours, theirs)
            found.append(1 - drift(ours, theirs).item())
        return sum(found) / len(found)

    return match


class Made(NamedTuple):
    """A candidate to measure: distilled, if it has new layers. seconds: what that took. notes: for its row."""

    candidate: Candidate
    parameters: int
    seconds: float
    fitted_quality: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rows:
    """Shared by all rows of a comparison. kept: the last trained model by its method and size, for its row in int8."""

    original: nn.Module
    blocks: Sequence[Block]
    train: Any  # batches, which can be read again
    held_out: Sequence[Any]
    timed: Sequence[Any]
    quality: Quality
    steps: int
    rate: float
    loss: Loss | None
    samples: int
    budget: float
    options: Mapping[str, Any]  # filter and example of replace_
    kept: dict[tuple[str, str], Made] = field(default_factory=dict)

    def row(self, task: Task, advance: Advance) -> Compared:
        """The row of a task."""
        told = 0

        def tell(steps: int = 1, text: str = "", total: int | None = None) -> None:
            nonlocal told
            told += steps
            advance(steps, f"{task.method} {task.size}: {text}", total)

        tell(0, "measuring" if task.depth is None or "int8" in task.method else "fitting")
        try:
            made = self._made(task, tell)
        except NoInt8 as why:
            tell(self.steps + 1 - told)
            return Compared(*task, why.parameters or parameters_of(self.original), note=str(why))
        begin = time.perf_counter()
        quality, why_none = self._quality(made.candidate.model)
        seconds = made.seconds + time.perf_counter() - begin
        tell(0, "timing")
        taken = take_times(self._build_original(), made.candidate, self.timed, self.budget)
        tell(1)
        notes = [note for note in (*made.notes, why_none, taken.note) if note]
        measured: dict[str, Any] = taken._asdict() | {"note": "; ".join(notes), "quality": quality, "seconds": seconds}
        measured |= {"fitted_quality": made.fitted_quality, "commit": checkout()}
        measured["date"] = datetime.now(UTC).isoformat(timespec="seconds")
        return Compared(*task, made.parameters, **measured)

    def _made(self, task: Task, tell: Advance) -> Made:
        """The model of a task. Trained models in int8 are made from the row before, or trained again if it is old."""
        base = task._replace(method=task.method.removesuffix(" int8"))
        trained = self.kept.pop(base[:2], None)
        self.kept.clear()
        if base == task:
            made = self._prepared(task, tell)
            if f"{task.method} int8" in METHODS:
                self.kept[task[:2]] = made
            return made
        if trained is None:
            trained = self._prepared(base, tell)
        else:
            tell(self.steps)
        begin = time.perf_counter()
        try:
            candidate = int8_of(trained.candidate, self._check_runs)
        except NoInt8 as why:
            why.parameters = trained.parameters
            raise
        seconds = trained.seconds + time.perf_counter() - begin
        notes = (f"by {candidate.how}", *trained.notes)
        return trained._replace(candidate=candidate, seconds=seconds, fitted_quality=None, notes=notes)

    def _prepared(self, task: Task, tell: Advance) -> Made:
        """The model of a task, distilled if it has new layers."""
        begin = time.perf_counter()
        candidate = self._build(task)
        if task.method in INT8:
            try:
                self._check_runs(candidate.model)
            except ValueError as why:
                raise NoInt8(str(why)) from None
        fitted, notes = None, [f"by {candidate.how}"] if candidate.how else []
        if candidate.trained and self.steps:
            fitted, _ = self._quality(candidate.model)
            notes += self._distil(candidate, tell)
        else:
            tell(self.steps)
        parameters = parameters_of(candidate.model if candidate.trained else self.original)
        return Made(candidate, parameters, time.perf_counter() - begin, fitted, tuple(notes))

    def _check_runs(self, model: nn.Module) -> None:
        with evaluation_mode(model):
            run_on(model, self.held_out[0], "the int8 model")

    def _build(self, task: Task) -> Candidate:
        return build(task, self.original, self.blocks, self.train, self.samples, self.options)

    def _build_original(self) -> Candidate:
        return self._build(Task(ORIGINAL, "", None, None, 0, 0))

    def _distil(self, made: Candidate, tell: Advance) -> list[str]:
        """Distil a candidate; returns notes for the row."""
        blocks = {block.name: block for block in self.blocks}
        found = distill_model_(
            made.model,
            self.original,
            made.trained,
            blocks,
            self.train,
            steps=self.steps,
            rate=self.rate,
            loss=self.loss,
            advance=tell,
        )
        last = next(one for one in found if one.name == OUTPUT)
        return [] if last.kept else [f"distillation was undone: {last.note}"]

    def _quality(self, model: nn.Module) -> tuple[float | None, str]:
        """A model's quality; None and why if it is not finite."""
        with evaluation_mode(model), torch.no_grad():
            value = self.quality(model, self.held_out)
        value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"quality must return a number; got {value!r} of type {type(value).__name__}.")
        return (float(value), "") if math.isfinite(value) else (None, f"the quality is {value}")
