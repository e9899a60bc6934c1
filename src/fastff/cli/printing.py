"""How tables and rows are printed: tables for a terminal, JSON and CSV for programs."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ..bench import rows as store

errors = Console(stderr=True)
console = Console()
if not console.is_terminal:
    console = Console(width=150)  # a file has room for a table


def show(console: Console, table: Table) -> None:
    """Print a table with every number. A table wider than the terminal loses its frame, and the terminal wraps it."""
    everything = console.options.update(max_width=1000)
    if console.measure(table, options=everything).maximum > console.width:
        table.box, table.padding = None, (0, 1, 0, 0)
    own, needed = console.width, console.measure(table, options=everything).maximum
    console.width = max(own, needed)
    try:
        console.print(table)
    finally:
        console.width = own


def records(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], format: str) -> None:
    """Print rows with all their columns, as "json" or "csv"."""
    if format == "csv":
        store.write(sys.stdout, rows, columns, end="\n")
        return
    print(json.dumps([{name: _finite(row[name]) for name in columns} for row in rows], indent=2))


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def other_load(console: Console, load: float) -> None:
    """Warn if other processes disturbed a measurement."""
    if load > 0.2:
        console.print(
            f"Other processes kept up to {load:.1f} cores busy. That slows multi-threaded layers and inflates "
            "speed-ups over them. Measure again on a quiet machine.",
            style="yellow",
        )


def number(value: float) -> str:
    """Three digits or more, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def bytes_(size: int) -> str:
    """A size in KiB, MiB or GiB."""
    power = 1 if size < 2**20 else 2 if size < 2**30 else 3
    return f"{size / 2 ** (10 * power):.1f} {' KMG'[power]}iB"


def times(value: float | None) -> str:
    """A ratio such as 3.15x; empty if there is none."""
    return "" if value is None else f"{value:.2f}x" if value < 10 else f"{number(value)}x"
