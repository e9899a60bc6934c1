"""What the table functions share: rows of results/*.csv, and Markdown tables and numbers made from them."""

import csv
import functools
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

Row = dict[str, str]
ROOT = Path(__file__).parent.parent
HISTORY = 1 << 27  # characters of a CSV field: entropies.csv keeps whole histories


@functools.cache
def read(name: str) -> tuple[Row, ...]:
    """All rows of results/NAME.csv."""
    csv.field_size_limit(HISTORY)
    with (ROOT / "results" / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


def matching(name: str, **values: object) -> list[Row]:
    """The rows of a file that have these values; an error if there are none."""
    wanted = {key: str(value) for key, value in values.items()}
    found = [row for row in read(name) if wanted.items() <= row.items()]
    if not found:
        raise LookupError(f"results/{name}.csv has no row with {wanted}.")
    return found


def one(name: str, **values: object) -> Row:
    """The row of a file that has these values; of several, the last: it was measured last."""
    return matching(name, **values)[-1]


def mean(rows: Iterable[Row], column: str) -> float:
    return statistics.fmean(float(row[column]) for row in rows)


def table(header: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A Markdown table. Columns of numbers stand to the right."""
    cells = list(body)
    numbers = [all(not cell or cell[0] in "-0123456789" for cell in column) for column in zip(*cells, strict=True)]
    lines = [header, ["---:" if number else "---" for number in numbers], *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def times(value: float) -> str:
    """A ratio: 1.06x, 4.2x, 73x. Three digits at most, one after the point from 2 on."""
    if value < 2:
        return f"{value:.2f}x"
    return f"{value:.1f}x" if value < 100 else f"{value:,.0f}x"


def micro(value: float) -> str:
    """Microseconds, without the unit."""
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"
