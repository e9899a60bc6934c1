"""Numbers that change over training: the temperature, or the weight of a loss."""

import math
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..checks import check_choice, check_int, check_number
from ..interrupts import uninterrupted
from ..layer import FFF, fff_layers


def set_temperature_(model: nn.Module, value: float) -> None:
    """Set the temperature of every FFF layer of a model. An error changes nothing."""
    layers = fff_layers(model).values()
    value = check_temperature("temperature", value, layers)
    with uninterrupted():
        for layer in layers:
            layer.temperature = value


def check_temperature(name: str, value: float, layers: Iterable[FFF]) -> float:
    """The value as a float; raises if it is no valid temperature of these layers."""
    value = check_number(name, value, 0, above=True)
    for dtype in {layer.temperature_tensor.dtype for layer in layers}:
        if not torch.finfo(dtype).tiny <= value <= torch.finfo(dtype).max:
            raise ValueError(f"{name} must be positive and finite in {dtype}; got {value}.")
    return value


class Schedule:
    """A number that changes over training, such as the temperature or the hardening weight h.

    Args:
        kind: "constant" (start), or the way from start to end: "linear", "cosine" (slow at both ends) or "exponential"
            (equal ratios).
        steps: calls of step() from start to end. After these, the value stays at `end`.
    """

    def __init__(self, kind: str, start: float, end: float | None = None, steps: int = 0) -> None:
        check_choice("kind", kind, ("constant", "linear", "cosine", "exponential"))
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
            raise ValueError(
                f"from {start} to {end} is too far for a float. Choose a start and an end closer together."
            )
        self.count = 0

    @property
    def value(self) -> float:
        """The number now."""
        return self.at(self.count)

    def at(self, count: int) -> float:
        """The number after `count` steps."""
        if self.kind == "constant" or count >= self.steps:
            return self.end
        t = count / self.steps
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
