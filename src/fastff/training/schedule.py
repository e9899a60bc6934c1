"""Numbers that change over training: the temperature, and any weight that follows a schedule."""

import math
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..checks import check_int, check_number
from ..interrupts import uninterrupted
from ..layer import FFF, fff_layers


def set_temperature_(model: nn.Module, value: float) -> None:
    """Set the temperature of every FFF layer of a model; of none if one of them cannot have it."""
    found = fff_layers(model).values()
    value = check_temperature("temperature", value, found)
    with uninterrupted():
        for layer in found:
            layer.temperature = value


def check_temperature(name: str, value: float, found: Iterable[FFF]) -> float:
    """The value as a float, if it is a temperature that each of these layers can have."""
    value = check_number(name, value, 0, above=True)
    for dtype in {layer.temperature_tensor.dtype for layer in found}:
        if not torch.finfo(dtype).tiny <= value <= torch.finfo(dtype).max:
            raise ValueError(f"{name} must be positive and finite in {dtype}; got {value}.")
    return value


class Schedule:
    """A number that changes over training, for the temperature or the hardening weight h.

    kind: "constant" (start), "linear", "cosine" (slow at both ends) or "exponential" (equal ratios) from start to end
    in `steps` calls of step(), then end. `value` is the number now; step() advances by one and returns the new value.
    """

    def __init__(self, kind: str, start: float, end: float | None = None, steps: int = 0) -> None:
        if kind not in ("constant", "linear", "cosine", "exponential"):
            raise ValueError(f"kind must be 'constant', 'linear', 'cosine' or 'exponential'; got {kind!r}.")
        steps = check_int("steps", steps, 0)
        if kind != "constant" and (end is None or steps < 1):
            raise ValueError(f"a {kind} schedule needs an end and at least 1 step; got end={end}, steps={steps}.")
        lowest, positive = (0.0, True) if kind == "exponential" else (-sys.float_info.max, False)
        self.kind, self.start, self.steps = kind, check_number("start", start, lowest, above=positive), steps
        self.end = self.start if end is None else check_number("end", end, lowest, above=positive)
        if kind == "constant":
            self.end = self.start
        change = self.end / self.start if kind == "exponential" else self.end - self.start
        if not math.isfinite(change) or (kind == "exponential" and not change):
            raise ValueError(f"the way from {start} to {end} is too far for a float.")
        self.count = 0

    @property
    def value(self) -> float:
        """The number now."""
        if self.kind == "constant":
            return self.start
        if self.count >= self.steps:
            return self.end
        t = self.count / self.steps
        if self.kind == "exponential":
            return self.start * math.pow(self.end / self.start, t)
        if self.kind == "cosine":
            t = (1 - math.cos(math.pi * t)) / 2
        return self.start + (self.end - self.start) * t

    def step(self) -> float:
        """Advance by one and return the new value."""
        self.count += 1
        return self.value

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.keys() != vars(self).keys():
            raise ValueError(f"a schedule's state has {', '.join(vars(self))}; got {', '.join(state) or 'nothing'}.")
        vars(self).update(state)

    def __repr__(self) -> str:
        return f"Schedule({self.kind!r}, {self.start}, {self.end}, steps={self.steps})  # {self.value} at {self.count}"
