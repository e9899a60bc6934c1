"""How results and plans look in a terminal."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..bench import presets
from ..bench.plan import Choice
from ..bench.rows import SIZE, Row


def show(console: Console, table: Table) -> None:
    """With every number: a table wider than the terminal loses its frame, and is broken by the terminal alone."""
    everything = console.options.update(max_width=1000)
    if console.measure(table, options=everything).maximum > console.width:
        table.box, table.padding = None, (0, 1, 0, 0)
    own, needed = console.width, console.measure(table, options=everything).maximum
    console.width = max(own, needed)
    try:
        console.print(table)
    finally:
        console.width = own


def results(console: Console, rows: Sequence[Row], title: str) -> None:
    """All rows. What is the same in all of them stands above."""
    varying = [name for name in SIZE if len({row[name] for row in rows}) > 1]
    fixed = [f"{name} {rows[0][name]}" for name in SIZE if name not in varying]
    table = Table(title=escape(f"{title}\n{', '.join(fixed)}"))
    for name in varying:
        table.add_column(name.replace("_", " "), justify="right")
    table.add_column("model")
    table.add_column("backend")
    for name in ("median µs", "p20 to p80", "over FF", "over gather", "over MoE", "times floor"):
        table.add_column(name, justify="right", no_wrap=True)
    last: list[Any] = []
    for row in rows:
        size = [row[name] for name in varying]
        if last and size != last:
            table.add_section()
        cells = [str(value) for value in size] if size != last else ["" for _ in size]
        last = size
        table.add_row(
            *cells, row["model"], row["backend"], *_found(row), style="red" if row["status"] == "wrong" else ""
        )
    show(console, table)
    notes = dict.fromkeys(f"{_where(row)}: {row['note']}" for row in rows if row["note"] and row["status"] != "ok")
    reasons = dict.fromkeys(row["note"] for row in rows if row["note"] and row["status"] == "ok")
    for line in [*notes, *reasons]:
        console.print(escape(line), style="dim")
    _other_load(console, max((row["other_load"] or 0.0 for row in rows), default=0.0))


def _other_load(console: Console, load: float) -> None:
    if load > 0.2:
        console.print(
            f"Other processes kept up to {load:.1f} cores busy meanwhile: threads that wait for each other are slower "
            "than they are on a quiet machine, and ratios to them larger. Measure again.",
            style="yellow",
        )


def _found(row: Row) -> list[str]:
    if row["status"] == "wrong":
        return ["WRONG", "", "", "", "", ""]
    if row["median_us"] is None:
        return ["skipped", "", "", "", "", ""]
    spread = f"{number(row['p20_us'])} to {number(row['p80_us'])}"
    names = ("speedup_dense", "speedup_gather", "speedup_moe", "times_floor")
    return [number(row["median_us"]), spread, *(_times(row[name]) for name in names)]


def _where(row: Row) -> str:
    model = f"{row['model']} {row['backend']}".strip()
    size = f"{row['in']} -> {row['out']}, l={row['leaf_width']}, d={row['depth']}, batch {row['batch']}"
    return f"{model} at {size}, {row['dtype']} {row['status']}"


def beside_paper(console: Console, name: str, rows: Sequence[Row]) -> None:
    """The speed-ups of FFF over FF, ours and the paper's."""
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
    """auto, unless it was not asked for."""
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
    return "-" if row is None or row["speedup_dense"] is None else _times(row["speedup_dense"])


def choices(console: Console, found: Sequence[Choice], title: str) -> None:
    """A plan."""
    table = Table(title=escape(title))
    if found[0].fits is not None:
        table.add_column("fits")
    names = ["leaf width", "depth", "training width", "training size", "inference size", "parameters"]
    for name in [*names, "time", "p20 to p80", "speed-up"]:
        table.add_column(name, justify="right")
    for choice in found:
        cells = [] if choice.fits is None else ["yes" if choice.fits else ""]
        cells += [str(choice.leaf_width), str(choice.depth), str(choice.training_width), str(choice.training_size)]
        cells += [str(choice.inference_size), bytes_(choice.parameter_bytes)]
        if choice.time_us is None:
            cells += [choice.note or "-", "-", "-"]
        else:
            spread = f"{number(choice.p20_us or 0)} to {number(choice.p80_us or 0)}"
            cells += [f"{number(choice.time_us)} µs", spread, _times(choice.speedup) or "-"]
        table.add_row(*cells, style="" if choice.fits is not False else "dim")
    show(console, table)
    if times := dict.fromkeys(f"{number(choice.dense_us)} µs" for choice in found if choice.dense_us):
        console.print(f"The dense layer, timed in turn with them: {', '.join(times)}.", style="dim")
    _other_load(console, max((choice.other_load or 0.0 for choice in found), default=0.0))
    if found[0].fits is not None and not any(choice.fits for choice in found):
        console.print("Nothing fits the budget.", style="yellow")


def number(value: float) -> str:
    """Three digits or more, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def bytes_(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size < 2**30 else f"{size / 2**30:.1f} GiB"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x" if value < 10 else f"{number(value)}x"
