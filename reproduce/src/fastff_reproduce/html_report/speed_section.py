"""The section on speed, from rows of `fastff bench`: figures, speed-ups by depth, and Tables 1 and 3."""

from collections.abc import Iterable, Mapping, Sequence

from fastff.bench import presets
from fastff.bench.presets import BERT
from fastff.bench.rows import Row

from .. import figures
from .entries import NOTHING, Entry, Made, Section, Table, heads

Place = tuple[str, str, str]  # machine, threads, dtype
Size = tuple[int, int, int, int, int]  # inputs, outputs, leaf width, depth, batch


def trees(rows: Iterable[Row]) -> dict[Place, dict[Size, Row]]:
    """The latest row of each FFF, CPUs first. A layer with wrong outputs has no speed-up and is left out."""
    found: dict[Place, dict[Size, Row]] = {}
    for row in rows:
        if row["model"] == "FFF" and row["backend"] == "auto" and row["speedup_dense"]:
            place = (row["machine"], row["threads"], row["dtype"])
            size = (row["in"], row["out"], row["leaf_width"], row["depth"], row["batch"])
            found.setdefault(place, {})[size] = row
    return dict(sorted(found.items(), key=lambda item: next(iter(item[1].values()))["device"] != "cpu"))


def is_bert(size: Size) -> bool:
    return size[:3] == (BERT.in_features, BERT.out_features, BERT.leaf_width)


def name_of(place: Place) -> str:
    machine, threads, dtype = place
    return f"{machine}{f', {threads} threads' if threads else ''}, {dtype}"


def speed(section: Section, rows: Sequence[Row]) -> Section:
    drawn = figures.speed(rows)
    tables: list[Table] = []
    for place, by_size in trees(rows).items():
        if any(map(is_bert, by_size)):
            tables.append(_by_depth(place, by_size, folded=bool(tables)))
        lines = []
        for name, inputs in presets.DATASETS.items():
            for leaf, theirs in presets.TABLE1[name].items():
                sizes = [(inputs, 10, leaf, presets.depth_of(width, leaf), 2048) for width in presets.WIDTHS]
                lines.append(_speedups(f"{name}, l = {leaf}", [by_size.get(size) for size in sizes], theirs))
        for leaf, their in presets.TABLE3.items():
            size = (128, 128, leaf, presets.depth_of(128, leaf), 2048)
            lines.append(_speedups(f"ViT, l = {leaf}", [by_size.get(size)], [their]))
        full = [[*line, *[Entry("")] * (5 - len(line))] for line in lines if any(entry.note for entry in line)]
        if full:
            columns = heads(["layer", "w = 16 (ViT: 128)", "w = 32", "w = 64", "w = 128"])
            caption = f"Speed-up over FF at batch 2048, the paper's in brackets: {name_of(place)}"
            tables.append(Table(caption, [columns], full, folded=True))
    commands = dict.fromkeys((row["machine"], row["command"]) for row in rows) if drawn or tables else {}
    made = [
        Made(machine, [command for where, command in commands if where == machine])
        for machine in dict.fromkeys(where for where, _ in commands)
    ]
    return section._replace(figures=drawn, tables=tables, made=made)


def _by_depth(place: Place, by_size: Mapping[Size, Row], folded: bool) -> Table:
    """Speed-ups at the size of BERT: a row for each depth, a column for each batch."""
    found = {size[3:]: row for size, row in by_size.items() if is_bert(size)}
    batches = sorted({batch for _, batch in found})
    lines = []
    for depth in sorted({depth for depth, _ in found}):
        speedups = (found.get((depth, batch)) for batch in batches)
        line = [Entry(f"{2**depth:,}", head=True), *(Entry(times(row)) if row else Entry(NOTHING) for row in speedups)]
        lines.append([*line, Entry(f"{BERT.leaf_width + depth} of {BERT.leaf_width << depth:,}")])
    columns = heads(["leaves", *(f"batch {batch:,}" for batch in batches), "neurons"])
    caption = (
        f"Speed-up over FF, {BERT.in_features} → {BERT.out_features}, leaf width {BERT.leaf_width}: {name_of(place)}"
    )
    return Table(caption, [columns], lines, folded)


def times(row: Row) -> str:
    ratio = row["speedup_dense"]
    return f"{ratio:,.0f}x" if ratio >= 9.95 else f"{ratio:.1f}x"


def _speedups(name: str, ours: Sequence[Row | None], theirs: Sequence[float]) -> list[Entry]:
    line = [Entry(name, head=True)]
    for row, their in zip(ours, theirs, strict=True):
        line.append(Entry(f"{row['speedup_dense']:.2f}x", f"({their:.2f}x)") if row else Entry(NOTHING))
    return line
