"""What a surgery did, as data and as a table."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .blocks import Block


class Replaced(NamedTuple):
    """One block that was replaced; `weights` says how the dense weights were carried over."""

    name: str
    form: str
    in_features: int
    width: int
    out_features: int
    depth: int
    leaf_width: int
    activation: str
    weights: str


class Skipped(NamedTuple):
    """Something that looked like a feedforward block and was left as it was."""

    name: str
    why: str


@dataclass(frozen=True)
class Report:
    """What `replace_` replaced and skipped; str() makes a table of it.

    parameters_before, parameters_after: of the whole model. neurons_before, neurons_after: that one input uses in
    evaluation, in the replaced blocks. specification: what `apply_` needs to do the same to a fresh model; plain lists,
    dicts, strings and numbers, so that it fits into JSON. blocks: the dense blocks by name, for `distill_`.
    """

    replaced: list[Replaced]
    skipped: list[Skipped]
    parameters_before: int
    parameters_after: int
    neurons_before: int
    neurons_after: int
    specification: list[dict[str, Any]] = field(repr=False)
    blocks: dict[str, Block] = field(repr=False, compare=False, default_factory=dict)

    def __str__(self) -> str:
        head = ("replaced", "form", "dense", "depth x leaf", "activation", "weights")
        rows = [
            (
                r.name,
                r.form,
                f"{r.in_features} -> {r.width} -> {r.out_features}",
                f"{r.depth} x {r.leaf_width}",
                r.activation,
                r.weights,
            )
            for r in self.replaced
        ]
        lines = _table([head, *rows])
        if self.skipped:
            lines += ["", *_table([("skipped", "why"), *self.skipped])]
        lines += ["", f"parameters: {self.parameters_before:,} -> {self.parameters_after:,}"]
        lines += [f"inference neurons in the replaced blocks: {self.neurons_before:,} -> {self.neurons_after:,}"]
        return "\n".join(lines)


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
