"""A training whose numbers are no longer finite has diverged: it fails and gives no result.

Each step notes on the device whether the losses are finite, without waiting for the device. Each evaluation reads the
notes and checks the weights. Seeds that diverged end there; those that train with them go on.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .runs import Case, Result


class Diverged(ArithmeticError):
    """Trainings that diverged, each with the reason; `results` has the seeds that trained with them."""

    def __init__(self, reasons: Mapping[Case, str], results: Sequence[Result] = ()) -> None:
        self.reasons, self.results = dict(reasons), list(results)
        super().__init__("; ".join(f"{case.title} seed {case.seed}: {reason}" for case, reason in reasons.items()))

    def __reduce__(self) -> tuple[Any, ...]:  # by default an exception is pickled by its text
        return Diverged, (self.reasons, self.results)


class Watch:
    """Which members of an ensemble have diverged, and why."""

    def __init__(self, members: int, device: torch.device) -> None:
        self.reasons: dict[int, str] = {}
        self._step = torch.zeros(members, device=device)  # the first step whose loss was not finite; 0: none

    def note(self, losses: Tensor, step: Tensor) -> None:
        """Note the losses (members,) of a step, counted from 1. It may be part of a CUDA graph."""
        bad = ~losses.detach().isfinite() & (self._step == 0)
        self._step.copy_(torch.where(bad, step, self._step))

    def reset(self) -> None:
        self._step.zero_()

    def find(self, epoch: int, steps: int, tensors: Mapping[str, Iterable[Tensor]], rows: Sequence[Any]) -> list[int]:
        """The members that diverged since the last call, up to this epoch; an epoch has `steps` steps.

        `tensors` are (members, ...) by name; `rows` are the measured numbers of each member.
        """
        finite = {name: finite_members(several) for name, several in tensors.items()}
        noted = [self._step, *(whole.float() for whole in finite.values())]
        found = torch.stack(noted).tolist()  # the one wait for the device
        new = []
        for i, (step, *whole) in enumerate(zip(*found, strict=True)):
            if i in self.reasons:
                continue
            if step:
                self.reasons[i] = f"the loss was not finite in epoch {math.ceil(step / steps)} (step {step:.0f})"
            elif not all(whole):
                name = next(name for name, right in zip(finite, whole, strict=True) if not right)
                self.reasons[i] = f"{name} was not finite after epoch {epoch}"
            elif name := next((name for name, value in rows[i].items() if not _finite(value)), ""):
                self.reasons[i] = f"{name} was not finite after epoch {epoch}"
            else:
                continue
            new.append(i)
        return new


def finite_members(tensors: Iterable[Tensor]) -> Tensor:
    """Which members are finite in all of these tensors (members, ...): (members,)."""
    return torch.stack([tensor.detach().reshape(len(tensor), -1).isfinite().all(1) for tensor in tensors]).all(0)


def remedy(case: Case) -> str:
    """What to change after a divergence: first the settings that --set has changed."""
    settings = dict(case.settings)
    changed = [name for name, values in _usual(case.model).items() if settings.get(name, values[0]) not in values]
    names = ["rate", *(name for name in ("balance", "hardening") if case.model.endswith("FFF") and settings.get(name))]
    named = {name: f"{name} (here {settings.get(name)})" for name in (*changed, *names)}
    lower = f"lower {' or '.join(named[name] for name in names if name not in changed)}"
    if not changed:
        return f"{lower.capitalize()} with --set."
    told = f"No recipe uses {', '.join(named[name] for name in changed)}: leave that --set out"
    return f"{told}, or {lower}." if set(names) - set(changed) else f"{told}."


def _usual(model: str) -> dict[str, list[float]]:
    """The values of each float setting of a model, over all experiments."""
    from .experiments import EXPERIMENTS

    found: dict[str, list[float]] = {}
    for experiment in EXPERIMENTS.values():
        for settings in {case.settings for case in experiment.cases(seeds=(0,)) if case.model == model}:
            for name, value in settings:
                if isinstance(value, float):
                    found.setdefault(name, []).append(value)
    return found


def _finite(value: Any) -> bool:
    return all(map(_finite, value)) if isinstance(value, list) else math.isfinite(value)
