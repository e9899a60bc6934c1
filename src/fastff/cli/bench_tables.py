"""The tables of `fastff bench`: times and speed-ups, and our speed-ups beside the paper's."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..bench import presets
from ..bench.rows import SIZE, Row
from .printing import number, other_load, show, times

_RATIOS = {
    "speedup_dense": "over FF",
    "speedup_gather": "over gather",
    "speedup_moe": "over MoE",
    "times_floor": "times floor",
}


def results(console: Console, rows: Sequence[Row], *, everything: bool) -> None:
    """The rows. Columns with the same value in all rows stand above the table.

    Without `everything`: the time and the speed-up over FF, and the backend only if one was asked for by name.
    """
    varying = [name for name in SIZE if len({row[name] for row in rows}) > 1]
    console.print(escape(", ".join(f"{name} {rows[0][name]}" for name in SIZE if name not in varying)))
    backend = everything or any(row["backend"] not in ("", "auto") for row in rows)
    ratios = _RATIOS if everything else {"speedup_dense": "speed-up over FF"}
    table = Table()
    for name in varying:
        table.add_column(name.replace("_", " "), justify="right")
    for name in ("model", "backend") if backend else ("model",):
        table.add_column(name)
    for name in ("median µs", "p20 to p80", *ratios.values()):
        table.add_column(name, justify="right", no_wrap=True)
    last: list[Any] = []
    for row in rows:
        size = [row[name] for name in varying]
        if last and size != last:
            table.add_section()
        cells = [str(value) for value in size] if size != last else ["" for _ in size]
        cells += [row["model"], row["backend"]] if backend else [row["model"]]
        last = size
        table.add_row(*cells, *_found(row, list(ratios)), style="red" if row["status"] == "wrong" else "")
    show(console, table)


def notes(console: Console, rows: Sequence[Row]) -> None:
    """Why rows have no time, why auto chose its backend, and whether other processes disturbed the measurement."""
    missing = dict.fromkeys(f"{_where(row)}: {row['note']}" for row in rows if row["note"] and row["status"] != "ok")
    reasons = dict.fromkeys(row["note"] for row in rows if row["note"] and row["status"] == "ok")
    for line in [*missing, *reasons]:
        console.print(escape(line), style="dim")
    other_load(console, max((row["other_load"] or 0.0 for row in rows), default=0.0))


def _found(row: Row, ratios: list[str]) -> list[str]:
    if row["status"] == "wrong" or row["median_us"] is None:
        return ["WRONG" if row["status"] == "wrong" else "skipped", "", *("" for _ in ratios)]
    spread = f"{number(row['p20_us'])} to {number(row['p80_us'])}"
    return [number(row["median_us"]), spread, *(times(row[name]) for name in ratios)]


def _where(row: Row) -> str:
    model = f"{row['model']} {row['backend']}".strip()
    size = f"{row['in']} -> {row['out']}, l={row['leaf_width']}, d={row['depth']}, batch {row['batch']}"
    return f"{model} at {size}, {row['dtype']} {row['status']}"


def beside_paper(console: Console, name: str, rows: Sequence[Row]) -> None:
    """The speed-ups of FFF over FF on this machine, beside the paper's."""
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        ours = {
            (row["in"], row["leaf_width"], row["depth"]): row
            for row in rows
            if row["model"] == "FFF" and row["backend"] == _best_name(rows) and row["dtype"] == dtype
        }
        if name == "table3":
            _table3(console, ours, dtype)
        else:
            _table1(console, ours, dtype)


def _best_name(rows: Sequence[Row]) -> str:
    """The backend of our column: auto if it was measured, otherwise the first."""
    names = [row["backend"] for row in rows if row["model"] == "FFF"]
    return "auto" if "auto" in names else str(names[0])


def _table1(console: Console, ours: dict[tuple[int, int, int], Row], dtype: str) -> None:
    table = Table(title=f"Table 1: speed-up over FF, here (in the paper), {dtype}")
    table.add_column("data")
    table.add_column("leaf width", justify="right")
    for width in presets.WIDTHS:
        table.add_column(f"w = {width}", justify="right", no_wrap=True)
    for data, inputs in presets.DATASETS.items():
        for leaf, paper in presets.TABLE1[data].items():
            cells = []
            for width, theirs in zip(presets.WIDTHS, paper, strict=True):
                cells.append(_beside(ours.get((inputs, leaf, presets.depth_of(width, leaf))), theirs))
            table.add_row(data, str(leaf), *cells)
        table.add_section()
    show(console, table)


def _table3(console: Console, ours: dict[tuple[int, int, int], Row], dtype: str) -> None:
    table = Table(title=f"Table 3: 128 -> 128, training width 128, {dtype}")
    for name in ("leaf width", "depth", "inference size", "speed-up here", "in the paper"):
        table.add_column(name, justify="right")
    for leaf, theirs in presets.TABLE3.items():
        depth = presets.depth_of(128, leaf)
        row = ours.get((128, leaf, depth))
        table.add_row(str(leaf), str(depth), str(leaf + depth), _speedup(row), f"{theirs:.2f}x")
    show(console, table)


def _beside(row: Row | None, theirs: float) -> str:
    return f"{_speedup(row)} ({theirs:.2f}x)"


def _speedup(row: Row | None) -> str:
    return "-" if row is None or row["speedup_dense"] is None else times(row["speedup_dense"])
