"""Results over seeds: a row joins the M_A and G_A trainings of a seed, a cell summarises the rows of all seeds.

Rows of one cell differ in the seed alone. If a data set, model, size and recipe were trained with several settings,
such as h = 5 and h = 10, the recipe's name says which.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from . import paper
from .runs import Case, Result

Row = dict[str, Any]
ROW = [
    *["dataset", "model", "width", "leaf_width", "depth", "recipe", "seed", "M_A", "G_A", "ETT", "leaves_used"],
    *["seconds", "ETT_M", "soft_hard_gap", "smallest_share"],
]


class Stat(NamedTuple):
    """Mean, standard deviation and best of a number over seeds."""

    mean: float
    deviation: float | None  # of the sample; None for one seed
    best: float
    seeds: int


class Cell(NamedTuple):
    """All seeds of one data set, model, size and recipe."""

    dataset: str
    model: str
    width: int
    leaf_width: int
    depth: int
    recipe: str
    seeds: int
    inference_size: int
    M_A: Stat | None
    G_A: Stat | None
    ETT_M: float | None  # means
    ETT: float | None
    soft_hard_gap: float | None  # the one with the largest absolute value
    smallest_share: float | None  # the smallest
    leaves_used: int | None  # the smallest
    seconds: float
    paper: paper.Numbers

    @property
    def leaves(self) -> int:
        return 2**self.depth

    def difference(self, name: str) -> float | None:
        """Our mean minus the paper's number (the best of its runs), rounded to the paper's precision."""
        ours, theirs = getattr(self, name), getattr(self.paper, name)
        return None if ours is None or theirs is None else rounded(ours.mean - theirs)


def rounded(difference: float) -> float:
    """Rounded to one decimal; never -0.0."""
    return round(difference, 1) + 0.0


def rows(results: Iterable[Result]) -> list[Row]:
    """A row for each seed. Tree measures are the worse of its two trainings; `seconds` is the sum of both."""
    found = list(results)
    name = naming([result.case for result in found])
    made: dict[tuple[Any, ...], dict[str, Result]] = {}
    for result in found:
        case = result.case
        key = (case.dataset, case.model, case.width, case.leaf_width, case.depth, name(case), case.seed)
        made.setdefault(key, {})[case.goal] = result
    return [dict(zip(ROW, (*key, *_joined(by_goal)), strict=True)) for key, by_goal in made.items()]


def _joined(by_goal: dict[str, Result]) -> list[Any]:
    first = by_goal.get("G_A") or by_goal.get("both") or by_goal["M_A"]
    second = by_goal.get("M_A") or by_goal.get("both")

    def worse(choose: Callable[[list[Any]], Any], name: str) -> Any:
        return _chosen(choose, [getattr(result, name) for result in by_goal.values()])

    seconds = sum(result.seconds for result in by_goal.values())
    memory = (second.M_A, second.ETT_M) if second else (None, None)
    rest = [worse(_largest, "soft_hard_gap"), worse(min, "smallest_share")]
    return [memory[0], first.G_A, first.ETT, worse(min, "leaves_used"), seconds, memory[1], *rest]


def cells(results: Iterable[Result], experiment: str = "") -> list[Cell]:
    """The cells of results, in their order, with the paper's numbers if it has any for the experiment."""
    found = list(results)
    name = naming([result.case for result in found])
    sizes = {_place(result.case, name(result.case)): result.inference_size for result in found}
    made: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows(found):
        made.setdefault(tuple(row[column] for column in ROW[:6]), []).append(row)
    beside = experiment not in paper.FIGURES
    return [_cell(key, seeds, sizes[key], beside) for key, seeds in made.items()]


def _place(case: Case, recipe: str) -> tuple[Any, ...]:
    return (case.dataset, case.model, case.width, case.leaf_width, case.depth, recipe)


def _cell(key: tuple[Any, ...], seeds: Sequence[Row], inference_size: int, beside: bool) -> Cell:
    def of(choose: Callable[[list[Any]], Any], name: str) -> Any:
        return _chosen(choose, [row[name] for row in seeds])

    found: dict[str, Any] = dict(zip(ROW[:6], key, strict=True))
    return Cell(
        **found,
        seeds=len(seeds),
        inference_size=inference_size,
        M_A=of(_stat, "M_A"),
        G_A=of(_stat, "G_A"),
        ETT_M=of(statistics.fmean, "ETT_M"),
        ETT=of(statistics.fmean, "ETT"),
        soft_hard_gap=of(_largest, "soft_hard_gap"),
        smallest_share=of(min, "smallest_share"),
        leaves_used=of(min, "leaves_used"),
        seconds=sum(row["seconds"] for row in seeds),
        paper=paper.beside(*key[:4]) if beside else paper.Numbers(),
    )


def _chosen(choose: Callable[[list[Any]], Any], values: Iterable[Any]) -> Any:
    """choose(...) of the values that are not None; None without any."""
    known = [value for value in values if value is not None]
    return choose(known) if known else None


def _largest(gaps: Sequence[float]) -> float:
    return max(gaps, key=abs)


def _stat(values: Sequence[float]) -> Stat:
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Stat(statistics.fmean(values), deviation, max(values), len(values))


def behind(cell: Cell, rows: Iterable[Row]) -> float | None:
    """How many points a transformer is behind the one with FF, over their common seeds, at any level of hardening."""
    ours, dense = dict[int, float](), dict[int, float]()
    beside = (cell.dataset, "ViT-FF", cell.width, cell.recipe.split()[0])
    for row in rows:
        if all(row[name] == getattr(cell, name) for name in ROW[:6]):
            ours[row["seed"]] = row["G_A"]
        elif (row["dataset"], row["model"], row["width"], row["recipe"].split()[0]) == beside:
            dense[row["seed"]] = row["G_A"]
    common = ours.keys() & dense.keys()
    return statistics.fmean(dense[seed] - ours[seed] for seed in common) if common else None


def naming(cases: Iterable[Case]) -> Callable[[Case], str]:
    """A function from a case to its recipe's name, with the settings that distinguish it from others of its size."""
    several: dict[tuple[Any, ...], dict[str, set[tuple[tuple[str, Any], ...]]]] = {}
    for case in cases:
        several.setdefault(_place(case, case.recipe), {}).setdefault(case.goal, set()).add(case.settings)
    telling = {
        place: _telling([[dict(settings) for settings in some] for some in by_goal.values()])
        for place, by_goal in several.items()
    }

    def name(case: Case) -> str:
        settings = dict(case.settings)
        told = [_told(name, settings) for name in telling.get(_place(case, case.recipe), ())]
        return " ".join([case.recipe, *told])

    return name


def _telling(goals: Sequence[Sequence[dict[str, Any]]]) -> list[str]:
    """The names of settings that distinguish the cases of a goal: one if possible, otherwise all that differ."""
    names = {name for settings in goals for each in settings for name in each}
    differ = sorted(name for name in names if any(len({each.get(name) for each in some}) > 1 for some in goals))
    alone = [name for name in differ if all(len({each.get(name) for each in some}) == len(some) for some in goals)]
    return ["hardening"] if "hardening" in alone else alone[:1] or differ


def _told(name: str, settings: dict[str, Any]) -> str:
    """A setting as text. Hardening is the paper's h, infinite for a tree that does not train."""
    value = settings.get(name)
    if name == "hardening":
        name, value = "h", math.inf if settings.get("frozen") else value
    return f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
