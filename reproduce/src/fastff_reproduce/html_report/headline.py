"""The three cards that open the page: accuracy, neurons and speed-up.

A card has the number first, then what it is, then where it comes from. All of it is computed from the rows: the tree
with the best accuracy on new data, the neurons that it uses, and the range of measured speed-ups. A card without rows
says which command makes them.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fastff.bench.presets import DATASETS
from fastff.bench.rows import Row

from ..summary import Cell, Stat
from . import entries, speed_section
from .entries import NEW, NOTHING, RECIPES, Section
from .paper_tables import matching
from .speed_section import Size, is_bert, times

TRAIN = "fastff reproduce table1"
MEASURE = "fastff bench blocks --output results/inference.csv"


class Card(NamedTuple):
    number: str
    what: str
    text: str
    source: str = ""
    section: str = ""  # of the page, with the rows
    run: str = ""  # the command that makes the rows, where they are missing


class Best(NamedTuple):
    """A tree, and what it is compared with."""

    section: Section
    cell: Cell
    accuracy: Stat
    dense: Cell | None  # of the same training width, data and recipe
    trees: Sequence[Cell]  # of the same section and recipe

    @property
    def data(self) -> str:
        return entries.dataset(self.cell.dataset)


def cards(found: Sequence[tuple[Section, Sequence[Cell]]], rows: Sequence[Row]) -> list[Card]:
    """The cards for the cells of these sections and these rows of `fastff bench`."""
    best = best_tree(found)
    return [_accuracy(best), _neurons(best), _speed_up(rows, best)]


def best_tree(found: Sequence[tuple[Section, Sequence[Cell]]]) -> Best | None:
    """The tree with the best mean accuracy on new data: of the paper's tables, or of other trainings if they have none.

    Changed recipes, as in the ablation, do not count.
    """
    candidates = [
        (section.name.startswith("table"), cell.G_A.mean, -i, section, cell, cells)
        for i, (section, cells) in enumerate(found)
        for cell in cells
        if cell.depth and cell.G_A is not None and cell.recipe.split()[0] in RECIPES
    ]
    if not candidates:
        return None
    *_, section, cell, cells = max(candidates, key=lambda candidate: candidate[:3])
    assert cell.G_A is not None
    recipe = cell.recipe.split()[0]
    alike = (cell.model.replace("FFF", "FF"), cell.dataset, cell.width, recipe)
    dense = [c for c in cells if (c.model, c.dataset, c.width, c.recipe.split()[0]) == alike and c.G_A is not None]
    trees = [c for c in cells if c.depth and c.recipe == cell.recipe]
    return Best(section, cell, cell.G_A, dense[0] if dense else None, trees)


def _accuracy(best: Best | None) -> Card:
    what = NEW
    if best is None:
        return Card(NOTHING, what, "No trained tree in the store yet.", run=TRAIN)
    seeds = best.accuracy.seeds
    text = [f"A tree on {best.data}, {f'mean of {seeds} seeds' if seeds > 1 else 'one seed'}."]
    if best.dense is not None and best.dense.G_A is not None:
        text.append(f"A dense layer of the same training width reaches {best.dense.G_A.mean:.1f} %.")
    if best.cell.paper.G_A is not None:
        text.append(f"The paper's tree of this size reaches {best.cell.paper.G_A:.1f} %.")
    text += _verdict(best)
    among = f"The best of {len(best.trees)} trees" if len(best.trees) > 1 else "The only tree"
    source = f"{among} trained here with recipe {best.cell.recipe}."
    return Card(f"{best.accuracy.mean:.1f} %", what, " ".join(text), source, best.section.name)


def _verdict(best: Best) -> list[str]:
    """How the trees of the best one's table compare with the paper."""
    good, compared = matching(best.trees, "G_A")
    if compared < 2:
        return []
    seeds = {cell.G_A.seeds for cell in best.trees if cell.G_A is not None}
    mean = f"{min(seeds)}-seed mean" if len(seeds) == 1 and min(seeds) > 1 else "mean"
    where = "every tree" if good == compared else f"{good} of {compared} trees"
    return [f"Our {mean} matches or beats the paper's best run in {where} of {best.section.title.split(':')[0]}."]


def _neurons(best: Best | None) -> Card:
    what = "neurons per input at inference"
    if best is None:
        return Card(NOTHING, what, "No trained tree in the store yet.", run=TRAIN)
    cell = best.cell
    chosen = f"{cell.depth} neuron{'s' * (cell.depth > 1)} choose{'s' * (cell.depth == 1)} one of {cell.leaves} leaves"
    answer = (
        f"the leaf's {cell.leaf_width} neurons compute" if cell.leaf_width > 1 else "the leaf's one neuron computes"
    )
    text = f"The same tree on {best.data}: {chosen}, and {answer} the output. A dense layer uses all {cell.width}."
    source = "Inference size: leaf width plus depth."
    return Card(f"{cell.inference_size} of {cell.width}", what, text, source, best.section.name)


def _speed_up(rows: Sequence[Row], best: Best | None) -> Card:
    what = "speed-up over a dense layer"
    places = speed_section.trees(rows)
    if not places:
        return Card(NOTHING, what, "No measured layers here yet.", run=MEASURE)
    place = next(iter(places))
    by_size = {size: row for size, row in places[place].items() if is_bert(size)} or places[place]
    low, high = (choose(by_size.values(), key=lambda row: row["speedup_dense"]) for choose in (min, max))
    shapes = {size[:3] for size in by_size}
    sizes = f"{_shape(high)}, random" if len(shapes) == 1 else "Random"
    text = [f"{sizes} weights, against a dense layer with as many neurons as all leaves together."]
    number = times(high)
    if low is high:
        text.append(f"{_size(high)}.")
    else:
        number = f"{times(low)} to {number}"
        short, long = (f"{'' if len(shapes) == 1 else f'{_shape(row)}, '}{_size(row)}" for row in (low, high))
        text.append(f"Smallest: {short}. Largest: {long}.")
    text += _of_best(places[place], best)
    others = "; other machines and sizes below" if len(places) > 1 or len(places[place]) > len(by_size) else ""
    return Card(number, what, " ".join(text), f"{speed_section.name_of(place)}{others}.", "speed")


def _of_best(by_size: Mapping[Size, Row], best: Best | None) -> list[str]:
    """The speed-up of the tree that the other cards are about, if it was measured."""
    inputs = DATASETS.get(best.data) if best and best.cell.model == "FFF" else None
    if best is None or inputs is None:
        return []
    row = by_size.get((inputs, 10, best.cell.leaf_width, best.cell.depth, 2048))
    return [f"The small {best.data} tree of the other cards gains {times(row)} at batch 2,048."] if row else []


def _shape(row: Row) -> str:
    return f"{row['in']}\u00a0→\u00a0{row['out']}, leaf width {row['leaf_width']}"


def _size(row: Row) -> str:
    return f"{2 ** row['depth']:,} leaves, batch {row['batch']:,}"
