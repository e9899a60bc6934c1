"""What the page is made of: sections with tables and figures, and the text of one field of a table.

Numbers come first in every table: a row starts with the model's name, then its accuracies, then its sizes. On a phone
the first columns are the ones in view.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .. import paper, summary
from ..figures import Figure
from ..store import Record
from ..summary import Cell, Stat

RECIPES = ("paper", "fastff")
NEW, TRAINING = "accuracy on new data (G_A)", "accuracy on training data (M_A)"
METRICS = {"G_A": NEW, "M_A": TRAINING}
NOTHING = "-"


class Entry(NamedTuple):
    """A field of a table."""

    text: str = ""
    note: str = ""  # smaller, after the text
    difference: float | None = None  # to the paper, marked by colour and sign
    head: bool = False
    span: int = 1  # columns
    rows: int = 1


class Table(NamedTuple):
    caption: str
    head: list[list[Entry]]
    rows: list[list[Entry]]
    folded: bool = False  # behind a click

    @property
    def columns(self) -> int:
        return sum(entry.span for entry in self.head[0])


class Made(NamedTuple):
    """A machine, and the commands that made results on it."""

    where: str
    commands: list[str]


class Section(NamedTuple):
    name: str  # in the address
    title: str
    about: str
    fill: str  # the command that makes its results
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    made: Sequence[Made] = ()
    notes: Sequence[str] = ()


def heads(names: Iterable[str]) -> list[Entry]:
    return [Entry(name, head=True) for name in names]


def number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.2f}"


def duration(seconds: float) -> str:
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 10 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def dataset(name: str) -> str:
    return paper.NAMES.get(name, name)


def accuracy(cell: Cell | None, name: str) -> Entry:
    """Our mean and deviation, and the difference to the paper."""
    stat: Stat | None = getattr(cell, name) if cell else None
    if cell is None or stat is None:
        return Entry(NOTHING)
    spread = f"± {stat.deviation:.1f}" if stat.deviation is not None else "one seed"
    return Entry(number(stat.mean), spread, cell.difference(name))


def published(cell: Cell, name: str) -> Entry:
    """The paper's number, with the deviation that its appendix gives."""
    theirs = getattr(cell.paper, name)
    if theirs is None:
        return Entry("")
    spread = paper.deviation(cell.dataset, cell.model, cell.width, cell.leaf_width, name)
    return Entry(number(theirs), "" if spread is None else f"± {spread:.1f}")


def cells_of(section: Section, records: Sequence[Record]) -> list[Cell]:
    return summary.cells((record.result for record in records), section.name)


def recipes(cells: Iterable[Cell]) -> list[str]:
    """The paper's recipe first; h = 5 before h = 10."""
    found = dict.fromkeys(cell.recipe for cell in cells)
    return sorted(found, key=lambda name: (name.split()[0] != "paper", len(name), name))


def group(name: str, lines: list[list[Entry]]) -> list[list[Entry]]:
    """Lines that share one row header."""
    return [[*([Entry(name, head=True, rows=len(lines))] if i == 0 else []), *line] for i, line in enumerate(lines)]


def every_cell(cells: Sequence[Cell], folded: bool = True) -> Table:
    """A row for each cell: accuracies first, then sizes and everything else that is known about it."""
    beside = ["published"] if any(theirs is not None for cell in cells for theirs in cell.paper) else []
    first = ["mean", "best", *beside]
    last = ["neurons", "depth", "seeds", "gap", "leaves used", "smallest share", "time"]
    top = [Entry("model", head=True, rows=2)]
    top += [Entry(METRICS[name], head=True, span=len(first)) for name in METRICS]
    top += [Entry("epochs (ETT)", head=True, span=2), *(Entry(name, head=True, rows=2) for name in last)]
    rows = []
    for cell in cells:
        size = f"l = {cell.leaf_width}, " if cell.leaf_width != cell.width else ""
        row = [Entry(f"{dataset(cell.dataset)} {cell.model}", f"w = {cell.width}, {size}{cell.recipe}", head=True)]
        for name in METRICS:
            stat: Stat | None = getattr(cell, name)
            row += [accuracy(cell, name), Entry(number(stat and stat.best)), *(published(cell, name) for _ in beside)]
        used = "" if cell.leaves_used is None else f"{cell.leaves_used} of {cell.leaves}"
        numbers = [number(cell.ETT, 0), number(cell.ETT_M, 0), *map(str, (cell.inference_size, cell.depth, cell.seeds))]
        numbers += [signed(cell.soft_hard_gap), used, number(cell.smallest_share, 2), duration(cell.seconds)]
        rows.append([*row, *map(Entry, numbers)])
    head = [top, heads([*first * len(METRICS), *METRICS])]
    return Table("Every cell: mean ± standard deviation and best over its seeds", head, rows, folded)
