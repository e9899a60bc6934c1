"""From a selection of data sets, widths, recipes and seeds to the list of trainings.

The experiments (experiments.py) say which models to train; this file makes a case for each recipe, goal and seed.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from . import data
from .recipes import FASTFF
from .runs import Case
from .settings import Settings
from .teacher import teacher_of

RECIPES = ("paper", "fastff")
Cases = Callable[..., list[Case]]


class Selection(NamedTuple):
    """The part of an experiment to train; None: as in the paper."""

    datasets: Sequence[str] | None
    widths: Sequence[int] | None
    leaf_widths: Sequence[int] | None
    recipes: Sequence[str]
    seeds: Sequence[int]
    changes: Mapping[str, Any]
    models: Sequence[str] | None

    def check(self) -> None:
        for name in self.datasets or ():
            if name not in data.NAMES:
                raise ValueError(f"unknown data set {name!r}; choose from {', '.join(data.NAMES)}.")
        for name in self.recipes:
            if name not in RECIPES:
                raise ValueError(f"unknown recipe {name!r}; choose from {', '.join(RECIPES)}.")
        for what, numbers in (("width", self.widths), ("leaf width", self.leaf_widths)):
            for number in numbers or ():
                if number < 1:
                    raise ValueError(f"a {what} must be at least 1; got {number}.")

    def refuse_widths(self, of: str) -> None:
        if self.widths:
            raise ValueError(f"this experiment derives widths from its {of}; got widths. Choose leaf_widths instead.")


def sweep(make: Callable[[Selection], list[Case]]) -> Cases:
    def cases(
        datasets: Sequence[str] | None = None,
        widths: Sequence[int] | None = None,
        leaf_widths: Sequence[int] | None = None,
        recipes: Sequence[str] = RECIPES,
        seeds: Sequence[int] = range(10),
        changes: Mapping[str, Any] | None = None,
        models: Sequence[str] | None = None,
    ) -> list[Case]:
        selection = Selection(datasets, widths, leaf_widths, recipes, seeds, changes or {}, models)
        selection.check()
        made = make(selection)
        for model in models or ():
            if all(case.model != model for case in made):
                there = dict.fromkeys(case.model for case in make(selection._replace(models=None)))
                raise ValueError(f"the experiment has no model {model!r}; choose from {', '.join(there) or 'none'}.")
        return made

    return cases


def trainings(selection: Selection, cases: Sequence[Case], paper: Settings, ours: Settings = FASTFF) -> list[Case]:
    """The trainings of these models, for every recipe and seed.

    The paper's recipe measures M_A and G_A in one training. Ours has two: for G_A with weight decay and transposition,
    for M_A without.
    """
    made = []
    if "teacher_share" in selection.changes:
        raise ValueError("teacher_share is for transformers: use it with table3 or entropy_vit.")
    for case, recipe, seed in itertools.product(cases, selection.recipes, selection.seeds):
        one = dataclasses.replace(case, recipe=recipe, seed=seed)
        if recipe == "paper":
            made.append(dataclasses.replace(one, goal="both", settings=paper.changed(selection.changes).items()))
            continue
        free = dataclasses.replace(ours, weight_decay=0.0, transposition=0.0)
        made.append(dataclasses.replace(one, goal="G_A", settings=ours.changed(selection.changes).items()))
        made.append(dataclasses.replace(one, goal="M_A", settings=free.changed(selection.changes).items()))
    return made


def one_model(selection: Selection, dataset: str, model: str, width: int, leaf_width: int) -> list[Case]:
    """One model on one data set; [] if the selection leaves it out."""
    if selection.models and model not in selection.models:
        return []
    depth = depth_of(width, leaf_width) if model.endswith("FFF") else 0
    return [Case(dataset, model, width, leaf_width, depth, "", "both", 0)]


def depth_of(width: int, leaf_width: int) -> int:
    """The depth of a tree with `width` leaf neurons in total."""
    leaves = width // leaf_width
    if leaves * leaf_width != width or leaves & (leaves - 1):
        raise ValueError(f"width must be a power of two times leaf_width; got {width} and {leaf_width}.")
    return leaves.bit_length() - 1


def transformers(selection: Selection, cases: Sequence[Case], paper: Sequence[Settings], ours: Settings) -> list[Case]:
    """The trainings of vision transformers, for G_A alone, as in the paper."""
    made = []
    for case, recipe in itertools.product(cases, selection.recipes):
        for settings in paper if recipe == "paper" else [ours]:
            changed = settings.changed(selection.changes)
            if changed.teacher_share and list(selection.models or ()) == ["ViT-FF"]:
                _refuse_for_teachers(selection.changes, changed)
            for seed in selection.seeds:
                one = dataclasses.replace(case, recipe=recipe, goal="G_A", seed=seed, settings=changed.items())
                made.append(teacher_of(one) if case.model == "ViT-FF" and changed.teacher_share else one)
    return list(dict.fromkeys(made))  # a change may make two levels of hardening equal


def _refuse_for_teachers(changes: Mapping[str, Any], changed: Settings) -> None:
    """Settings that would not change a teacher, which has its own."""
    own = {"weight_decay": "teacher_decay"} | ({"rate": "teacher_rate"} if changed.teacher_rate else {})
    for name, instead in own.items():
        if name in changes:
            raise ValueError(f"{name} is for the trees here; FF is their teacher. Set {instead} instead.")
