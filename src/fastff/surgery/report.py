"""Reports of surgery and distillation, as data and as tables. closeness.py defines the measures."""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .blocks import Block

MEASURES = {
    "missed": "the fraction of the dense block's output variance that the layer's hard pass misses, on held-out inputs",
    "drift": "the difference from the teacher as a fraction of the teacher's variance, on held-out batches, at the "
    "inputs of each block and at the output",
    "loss": "the given loss, on held-out batches",
}
HELD_OUT = "held-out inputs"
_NOTHING, _FAR = 1e-6, 0.5  # fractions of the variance: below, rounding; from here on, unusable


class Replaced(NamedTuple):
    """One block that was replaced; `weights` says how its layer got its weights.

    missed: the fraction of the block's output variance that the hard pass, eval(), misses on `measured_on`. None if it
    was not measured; then `measured_on` says why.
    """

    name: str
    form: str
    in_features: int
    width: int
    out_features: int
    depth: int
    leaf_width: int
    activation: str
    weights: str
    missed: float | None = None
    measured_on: str = "not measured"


class Skipped(NamedTuple):
    """Something that looked like a feedforward block and was left unchanged."""

    name: str
    why: str


@dataclass(frozen=True)
class Report:
    """What `replace_` replaced and skipped; str() gives a table and says how good eval() is.

    parameters_before, parameters_after: of the whole model. neurons_before, neurons_after: the neurons of the replaced
    blocks that one input uses in evaluation. specification: for `apply_`, which repeats the surgery on a fresh model;
    plain lists, dicts, strings and numbers, which fit into JSON. blocks: the dense blocks by name, for `distill_`.
    """

    replaced: list[Replaced]
    skipped: list[Skipped]
    parameters_before: int
    parameters_after: int
    neurons_before: int
    neurons_after: int
    specification: list[dict[str, Any]] = field(repr=False)
    blocks: dict[str, Block] = field(repr=False, compare=False, default_factory=dict)

    @property
    def missed(self) -> float | None:
        """The fraction of the output variance that eval() misses in the worst block; None if nothing was measured."""
        return None if (worst := self._worst()) is None else worst.missed

    def __str__(self) -> str:
        head = ("replaced", "form", "dense", "leaves x width", "activation", "weights", "eval() misses")
        rows = [
            (
                r.name,
                r.form,
                f"{r.in_features} -> {r.width} -> {r.out_features}",
                f"{2**r.depth} x {r.leaf_width}",
                r.activation,
                r.weights,
                "?" if r.missed is None else percent(r.missed),
            )
            for r in self.replaced
        ]
        lines = table([head, *rows])
        if self.skipped:
            lines += ["", *table([("skipped", "why"), *self.skipped])]
        lines += ["", f"parameters: {self.parameters_before:,} -> {self.parameters_after:,}"]
        lines += [f"inference neurons in the replaced blocks: {self.neurons_before:,} -> {self.neurons_after:,}"]
        return "\n".join([*lines, *self._verdict()])

    def _worst(self) -> Replaced | None:
        return max((r for r in self.replaced if r.missed is not None), key=lambda r: r.missed or 0.0, default=None)

    def _verdict(self) -> list[str]:
        """How good eval() is now, and how to improve it."""
        worst = self._worst()
        if worst is None or worst.missed is None:
            why = self.replaced[0].measured_on if self.replaced else "nothing was replaced"
            return [f"eval() was not measured: {why}. Compare it with the dense model before you use it."]
        if worst.missed < _NOTHING:
            return [f"eval() computes the same as the dense blocks: on {worst.measured_on}, it misses nothing."]
        far = worst.missed >= _FAR
        which = "" if len(self.replaced) == 1 else ", the worst block"
        part = f"the hard pass misses {percent(worst.missed)} of the output variance of {worst.name}{which}"
        worth = "is not usable yet" if far else "approximates the dense blocks"
        said = f"eval() {worth}: on {worst.measured_on}, {part}."
        if worst.measured_on == HELD_OUT:
            return [
                said,
                ("Wider leaves and more data miss less. " if far else "") + "fastff.distill_ brings it closer.",
            ]
        fit = 'Or start again from the dense model: replace_(..., init="data", data=...), then fastff.distill_.'
        return [said, f"Train it with fastff.Recipe. {fit}"]


class Distilled(NamedTuple):
    """What `distill_` did at one place: `measure` before and after, on held-out data.

    measure: "missed" (a layer against its dense block), "drift" (the model against its teacher) or "loss"; MEASURES
    defines them. NaN if it could not be measured. kept: whether the new leaves were kept; if not, the old ones were
    restored, and `note` says why.
    """

    name: str
    before: float
    after: float
    measure: str = "missed"
    kept: bool = True
    note: str = ""

    def __str__(self) -> str:
        _, measure, before, after, leaves = self._cells()
        return f"{self.name}: {measure} {before} -> {after}, leaves {leaves}"

    def _cells(self) -> tuple[str, str, str, str, str]:
        leaves = "kept" if self.kept else "restored"
        leaves += f": {self.note}" if self.note else ""
        return self.name, self.measure, _show(self.before, self.measure), _show(self.after, self.measure), leaves


class Distillation(list[Distilled]):
    """What `distill_` did: a list with one entry per place; str() gives a table."""

    def __str__(self) -> str:
        rows = [one._cells() for one in self]
        told = [f"{name}: {MEASURES[name]}" for name in dict.fromkeys(one.measure for one in self)]
        return "\n".join([*table([("place", "measure", "before", "after", "leaves"), *rows]), "", *told])

    __repr__ = __str__

    @property
    def trouble(self) -> str:
        """Why nothing changed although something was missed, and how to fix it; "" if something changed."""
        if any(one.kept for one in self) or all(one.before < _NOTHING for one in self):
            return ""
        first = next(one for one in self if not one.before < _NOTHING and one.note)
        remedy = "Pass data that varies." if math.isnan(first.before) else "Try a lower rate, more data, or more steps."
        return f"distill_ changed nothing: all leaves were restored ({first.name}: {first.note}). {remedy}"


def too_few(inputs: int) -> str:
    return f"{inputs} inputs are too few" if inputs != 1 else "1 input is too few"


def diverged(step: int, loss: float) -> str:
    return f"the loss was {loss} at step {step}: lower the rate"


def no_better(before: float, after: float, measure: str = "missed") -> str:
    if before < _NOTHING and measure != "loss":
        return "there was nothing left to learn"
    return f"training ended at {_show(after, measure)}"


def _show(value: float, measure: str) -> str:
    if math.isnan(value):
        return "?"
    return f"{value:.4g}" if measure == "loss" else percent(value)


def percent(share: float) -> str:
    if not math.isfinite(share):
        return f"{share} %"
    return "0.0 %" if share < _NOTHING else f"{100 * share:,.0f} %" if share >= 1 else f"{100 * share:.3g} %"


def table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
