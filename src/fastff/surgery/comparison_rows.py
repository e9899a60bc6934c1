"""Make one row of a comparison: build the model, measure it, distil it, measure it again, time it."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..batches import evaluation_mode
from .blocks import Block
from .closeness import check_same_shape, drift, first_tensor
from .comparison import Compared
from .comparison_times import take_times
from .controls import ORIGINAL, Candidate, Task, build, parameters_of
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


@dataclass(frozen=True)
class Rows:
    """Shared by all rows of a comparison."""

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

    def row(self, task: Task, advance: Advance) -> Compared:
        """The row of a task."""

        def tell(steps: int = 1, text: str = "", total: int | None = None) -> None:
            advance(steps, f"{task.method} {task.size}: {text}", total)

        tell(0, "fitting" if task.depth is not None else "measuring")
        begin = time.perf_counter()
        whole = parameters_of(self.original)
        if task.method == "int8":
            try:
                made = self._build(task)
                with evaluation_mode(made.model):
                    run_on(made.model, self.held_out[0], "the int8 model")
            except (NoInt8, ValueError) as why:
                tell(self.steps + 1)
                return Compared(*task, whole, note=str(why))
        else:
            made = self._build(task)
        notes = [f"by {made.how}"] if made.how else []
        fitted = None
        if made.trained and self.steps:
            fitted, _ = self._quality(made.model)
            notes += self._distil(made, tell)
        else:
            tell(self.steps)
        quality, why_none = self._quality(made.model)
        seconds = time.perf_counter() - begin
        tell(0, "timing")
        taken = take_times(self._build_original(), made, self.timed, self.budget)
        tell(1)
        notes += [note for note in (why_none, taken.note) if note]
        parameters = parameters_of(made.model) if made.trained else whole
        times = taken._asdict() | {"note": "; ".join(notes)}
        return Compared(*task, parameters, quality=quality, fitted_quality=fitted, seconds=seconds, **times)

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
