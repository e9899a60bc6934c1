"""One page with all results: every table and figure of the paper beside ours, with what made them.

`page(records, rows)` makes the HTML from a store's records and rows of `fastff bench`. It needs nothing but itself:
figures are SVG in it, and no address is loaded. A stored result belongs to an experiment if it is one of its cases as
they are by default; what was trained otherwise (other data, other settings) is shown at the end, by data set.
"""

import datetime
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from fastff.bench import presets
from fastff.bench.rows import Row
from fastff.provenance import machine

from . import figures, paper, summary
from .figures import Figure
from .runs import Case
from .store import Record
from .summary import Cell, Stat, rounded

RECIPES = ("paper", "fastff")
NOTHING = "-"
TEMPLATE = Path(__file__).with_name("html_report.html.j2")


class Entry(NamedTuple):
    """What stands in a field of a table."""

    text: str = ""
    note: str = ""  # smaller, after it
    difference: float | None = None  # to the paper, marked by colour and sign
    head: bool = False
    span: int = 1  # columns
    rows: int = 1


class Table(NamedTuple):
    caption: str
    head: list[list[Entry]]
    rows: list[list[Entry]]
    folded: bool = False  # behind a click


class Made(NamedTuple):
    """What made the results of a section."""

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


def page(records: Sequence[Record], rows: Sequence[Row], regions: bool = True) -> str:
    """The page as HTML. `regions`: with the paper's first figure, whose models are trained meanwhile."""
    from .experiments import EXPERIMENTS

    sections, glance, taken = [], list[list[Entry]](), set[Case]()
    for experiment in EXPERIMENTS.values():
        fill = FILLS.get(experiment.name, f"fastff reproduce {experiment.name}")
        section = Section(experiment.name, experiment.title, experiment.about, fill)
        cases = experiment.cases(datasets=None, widths=None, leaf_widths=None, recipes=RECIPES, seeds=(0,), changes={})
        groups = {case.group for case in cases}
        taken |= groups
        found = [record for record in records if record.result.case.group in groups]
        if experiment.name == "speed":
            section = _speed(section, rows)
        elif experiment.name == "regions" and regions:
            section = _regions(section)
        elif found:
            section = BUILDERS.get(experiment.name, _general)(section, found)._replace(made=_made(found))
            glance += _glance(section, found) if experiment.name.startswith("table") else []
        sections.append(section)
    rest = [record for record in records if record.result.case.group not in taken]
    for name in dict.fromkeys(record.result.case.dataset for record in rest):
        found = [record for record in rest if record.result.case.dataset == name]
        section = _general(Section(_slug(f"data-{name}"), f"Other trainings: {name}", OTHER, ""), found)
        sections.append(section._replace(made=_made(found)))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.globals.update(safe=Markup)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        sections=[section for section in sections if section.tables or section.figures],
        missing=[section for section in sections if not (section.tables or section.figures)],
        glance=Table("At a glance", [_heads(GLANCE)], glance) if glance else None,
        trainings=len(records),
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


# Entries and tables


def _heads(names: Iterable[str]) -> list[Entry]:
    return [Entry(name, head=True) for name in names]


def _number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _accuracy(cell: Cell | None, name: str) -> Entry:
    """Our mean and deviation, and the difference to the paper."""
    stat: Stat | None = getattr(cell, name) if cell else None
    if cell is None or stat is None:
        return Entry(NOTHING)
    spread = f"± {stat.deviation:.1f}" if stat.deviation is not None else "one seed"
    return Entry(_number(stat.mean), spread, cell.difference(name))


def _cells(section: Section, records: Sequence[Record]) -> list[Cell]:
    return summary.cells((record.result for record in records), section.name)


def _recipes(cells: Iterable[Cell]) -> list[str]:
    """In the order of RECIPES."""
    found = dict.fromkeys(cell.recipe for cell in cells)
    return sorted(found, key=lambda name: (name.split()[0] != "paper", len(name), name))  # h = 5 before h = 10


def _every(cells: Sequence[Cell], folded: bool = True) -> Table:
    """A row for each cell, with all that is known about it."""
    beside = ["paper"] if any(number is not None for cell in cells for number in cell.paper) else []
    heads = ["data", "model", "w", "l", "d", "neurons", "recipe", "seeds", "M_A", "best", *beside, "ETT"]
    heads += ["G_A", "best", *beside, "ETT", "gap", "leaves used", "least share", "time"]
    rows = []
    for cell in cells:
        sizes = (cell.model, cell.width, cell.leaf_width, cell.depth, cell.inference_size, cell.recipe, cell.seeds)
        row = [Entry(cell.dataset, head=True), *(Entry(str(value)) for value in sizes)]
        for name, ett in (("M_A", cell.ETT_M), ("G_A", cell.ETT)):
            stat: Stat | None = getattr(cell, name)
            row += [_accuracy(cell, name), Entry(_number(stat and stat.best)), *(_paper(cell, name) for _ in beside)]
            row.append(Entry(_number(ett, 0)))
        used = "" if cell.leaves_used is None else f"{cell.leaves_used} of {cell.leaves}"
        gap = "" if cell.soft_hard_gap is None else f"{cell.soft_hard_gap:+.2f}"
        rows.append([*row, *map(Entry, (gap, used, _number(cell.smallest_share, 2), _time(cell.seconds)))])
    return Table("Every cell, with the deviation and the best over its seeds", [_heads(heads)], rows, folded)


def _paper(cell: Cell, name: str) -> Entry:
    """The paper's number, with the deviation that its appendix gives."""
    number = getattr(cell.paper, name)
    if number is None:
        return Entry("")
    spread = paper.deviation(cell.dataset, cell.model, cell.width, cell.leaf_width, name)
    return Entry(_number(number), "" if spread is None else f"± {spread:.1f}")


def _time(seconds: float) -> str:
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 10 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


# Sections


def _table1(section: Section, records: Sequence[Record]) -> Section:
    """For each data set a table as the paper has it, its rows followed by ours."""
    cells = _cells(section, records)
    tables = []
    for name in dict.fromkeys(cell.dataset for cell in cells):
        ours = {(c.model, c.leaf_width, c.width, c.recipe): c for c in cells if c.dataset == name}
        shown = paper.NAMES.get(name, name)
        head = [
            [Entry("", head=True, span=2), *(Entry(metric, head=True, span=4) for metric in ("M_A", "G_A"))],
            [*_heads(["model", "from"]), *_heads(f"w = {width}" for width in presets.WIDTHS * 2)],
        ]
        rows: list[list[Entry]] = []
        for leaf, theirs in paper.TABLE1.get(shown, {}).items():
            model = "FFF" if leaf else "FF"
            lines = [[Entry("the paper"), *(Entry(_number(v)) for v in (*theirs.M_A, *theirs.G_A))]]
            for recipe in _recipes(ours.values()):
                found = [ours.get((model, leaf or width, width, recipe)) for width in presets.WIDTHS]
                if any(found):
                    marks = (_accuracy(cell, metric) for metric in ("M_A", "G_A") for cell in found)
                    lines.append([Entry(f"recipe {recipe}"), *marks])
            rows += _group(f"l = {leaf}" if leaf else "FF", lines)
        tables.append(Table(shown, head, rows))
    return section._replace(tables=[*tables, _every(cells)], notes=[BESIDE])


def _group(name: str, lines: list[list[Entry]]) -> list[list[Entry]]:
    """Lines with one name in front of all of them."""
    return [[*([Entry(name, head=True, rows=len(lines))] if i == 0 else []), *line] for i, line in enumerate(lines)]


def _table2(section: Section, records: Sequence[Record]) -> Section:
    cells = _cells(section, records)
    ours = {(cell.model, cell.width, cell.recipe): cell for cell in cells}
    models = {"FF": "feedforward", "MoE": "mixture of experts (e = 16, k = 2)", "FFF": "fast feedforward (l = 32)"}
    head = [
        [Entry("", head=True, span=2), *(Entry(title, head=True, span=4) for title in models.values())],
        [*_heads(["width", "from"]), *_heads(["M_A", "ETT", "G_A", "ETT"] * 3)],
    ]
    rows: list[list[Entry]] = []
    for width in paper.TABLE2["FF"]:
        theirs = [paper.TABLE2[model][width] for model in models]
        numbers = [(_number(t.M_A), str(t.ETT_M), _number(t.G_A), str(t.ETT)) for t in theirs]
        lines = [[Entry("the paper"), *(Entry(text) for four in numbers for text in four)]]
        for recipe in _recipes(cells):
            found = [ours.get((model, width, recipe)) for model in models]
            if any(found):
                lines.append([Entry(f"recipe {recipe}"), *(entry for cell in found for entry in _trained(cell))])
        rows += _group(f"w = {width}", lines)
    return section._replace(tables=[Table("CIFAR10", head, rows), _every(cells)], notes=[BESIDE])


def _trained(cell: Cell | None) -> list[Entry]:
    ett = (_number(cell.ETT_M, 0), _number(cell.ETT, 0)) if cell else ("", "")
    return [_accuracy(cell, "M_A"), Entry(ett[0] or NOTHING), _accuracy(cell, "G_A"), Entry(ett[1] or NOTHING)]


def _table3(section: Section, records: Sequence[Record]) -> Section:
    cells = _cells(section, records)
    heads = ["model", "from", "depth", "training size", "inference size", "speed-up"]
    heads += ["G_A", "best", "behind FF", "gap", "least share"]
    by_seed = summary.rows(record.result for record in records)
    rows: list[list[Entry]] = []
    for leaf, theirs in paper.TABLE3.items():
        speedup = f"{presets.TABLE3[leaf]:.2f}x" if leaf else "1.00x"
        sizes = [Entry(str(number)) for number in theirs[:3]]
        behind = _number(paper.TABLE3[paper.FF].G_A - theirs.G_A) if leaf else ""
        numbers = [_number(theirs.G_A), "", behind, "", ""]
        lines = [[Entry("the paper"), *sizes, Entry(speedup), *map(Entry, numbers)]]
        for cell in sorted(cells, key=lambda cell: _recipes(cells).index(cell.recipe)):
            if cell.model == ("ViT-FFF" if leaf else "ViT-FF") and leaf in (0, cell.leaf_width):
                size = (2**cell.depth - 1) + cell.width
                lines.append(
                    [
                        *[Entry(f"recipe {cell.recipe}"), Entry(str(cell.depth)), Entry(str(size))],
                        *[Entry(str(cell.leaf_width + cell.depth)), Entry(""), _accuracy(cell, "G_A")],
                        Entry(_number(cell.G_A and cell.G_A.best)),
                        Entry(_number(summary.behind(cell, by_seed) if leaf else None, 2)),
                        Entry("" if cell.soft_hard_gap is None else f"{cell.soft_hard_gap:+.2f}"),
                        Entry(_number(cell.smallest_share, 2)),
                    ]
                )
        rows += _group(f"l = {leaf}" if leaf else "FF", lines)
    note = "Speed-ups here are in the section on speed."
    return section._replace(tables=[Table("CIFAR10", [_heads(heads)], rows), _every(cells)], notes=[BESIDE, note])


def _ablation(section: Section, records: Sequence[Record]) -> Section:
    """G_A of the recipe, and of the recipe with one part changed, less that of the recipe: over the seeds of both."""
    seeds: dict[tuple[str, int, int], dict[str, set[int]]] = {}
    for case in (record.result.case for record in records):
        place = (case.dataset, case.width, case.leaf_width)
        seeds.setdefault(place, {}).setdefault(case.recipe, set()).add(case.seed)
    cells = _cells(section, [record for record in records if _is_common(record.result.case, seeds)])
    ours = {(c.recipe, c.dataset, c.width, c.leaf_width): c for c in cells}
    places = list(dict.fromkeys((c.dataset, c.width, c.leaf_width) for c in cells))
    heads = ["recipe", *(f"{paper.NAMES.get(name, name)} w = {width}, l = {leaf}" for name, width, leaf in places)]
    rows = []
    for recipe in sorted({cell.recipe for cell in cells}, key=lambda name: (name != "fastff", name)):
        line = [Entry(recipe, head=True)]
        for place in places:
            whole, changed = (ours.get((name, *place)) for name in ("fastff", recipe))
            entry = _accuracy(changed, "G_A")
            both = [cell.G_A for cell in (whole, changed) if cell is not None and cell.G_A is not None]
            change = rounded(both[1].mean - both[0].mean) if recipe != "fastff" and len(both) == 2 else None
            line.append(entry._replace(difference=change))
        rows.append(line)
    note = "G_A: means over seeds with their deviation; ▲ and ▼ mark the mean minus that of the whole recipe."
    return section._replace(tables=[Table("", [_heads(heads)], rows), _every(cells)], notes=[note])


def _is_common(case: Case, seeds: Mapping[tuple[str, int, int], Mapping[str, set[int]]]) -> bool:
    """Whether all recipes have the seed of a case."""
    return all(case.seed in some for some in seeds[case.dataset, case.width, case.leaf_width].values())


def _counterparts(section: Section, records: Sequence[Record]) -> Section:
    cells = _cells(section, records)
    drawn: list[Figure] = []
    for name in dict.fromkeys(cell.dataset for cell in cells):
        drawn += figures.counterparts([c for c in cells if c.dataset == name], paper.NAMES.get(name, name))
    return section._replace(figures=drawn, tables=[_every(cells)])


def _entropy(section: Section, records: Sequence[Record]) -> Section:
    """Two figures for each recipe. The training that ended by validation is the one that the paper shows."""
    found = [record.result for record in records if record.result.case.goal != "M_A"]
    found = found or [record.result for record in records]
    name = summary.naming([result.case for result in found])
    drawn = []
    for recipe in dict.fromkeys(name(result.case) for result in found):
        some = [result for result in found if name(result.case) == recipe]
        lines = [f"d = {result.case.depth}" for result in some]
        both = (draw(some, lines, f"Recipe {recipe}") for draw in (figures.entropies, figures.leaves))
        drawn += [figure for figure in both if figure]
    notes = [] if drawn else ["The stored trainings have no entropies."]
    return section._replace(figures=drawn, tables=[_every(_cells(section, records))], notes=notes)


def _regions(section: Section) -> Section:
    return section._replace(
        figures=[figures.regions()], made=[Made(f"{machine('cpu')}, with this page", ["fastff reproduce regions"])]
    )


def _general(section: Section, records: Sequence[Record]) -> Section:
    """What is known about any results: a table, and accuracy over inference size."""
    cells = _cells(section, records)
    drawn = figures.counterparts(cells, section.title) if len(cells) > 1 else []
    return section._replace(tables=[_every(cells, folded=False)], figures=drawn)


BUILDERS: Mapping[str, Callable[[Section, Sequence[Record]], Section]] = {
    "table1": _table1,
    "table2": _table2,
    "table3": _table3,
    "ablation": _ablation,
    "inference_counterparts": _counterparts,
    "entropy_mnist": _entropy,
    "entropy_vit": _entropy,
}
# What makes a section that needs no stored trainings.
FILLS = {"speed": "fastff bench blocks --output results/inference.csv", "regions": "fastff report"}
OTHER = (
    "Trainings that are not as in the paper's experiments: on other data, of other sizes or with other settings, such "
    "as the short ones of a trial or of the demo. The commands below say which"
)
BESIDE = (
    "Ours are means over seeds with their deviation, the paper's the best of its runs; ▲ and ▼ mark our mean minus the "
    "paper's best."
)


def _speed(section: Section, rows: Sequence[Row]) -> Section:
    """From rows of `fastff bench`: the figures, and the speed-ups of Tables 1 and 3."""
    drawn = figures.speed(rows)
    kept = [row for row in rows if row["model"] == "FFF" and row["backend"] == "auto" and row["speedup_dense"]]
    by_size = {}
    for row in kept:
        place = (row["machine"], row["threads"], row["dtype"])
        by_size[place, row["in"], row["out"], row["leaf_width"], row["depth"], row["batch"]] = row
    tables = []
    for place in dict.fromkeys(key[0] for key in by_size):
        lines = []
        for name, inputs in presets.DATASETS.items():
            for leaf, theirs in presets.TABLE1[name].items():
                sizes = [(inputs, 10, leaf, presets.depth_of(width, leaf), 2048) for width in presets.WIDTHS]
                lines.append(_speedups(f"{name}, l = {leaf}", [by_size.get((place, *s)) for s in sizes], theirs))
        for leaf, their in presets.TABLE3.items():
            size = (128, 128, leaf, presets.depth_of(128, leaf), 2048)
            lines.append([*_speedups(f"ViT, l = {leaf}", [by_size.get((place, *size))], [their])])
        full = [[*line, *[Entry("")] * (5 - len(line))] for line in lines if any(entry.note for entry in line)]
        if full:
            machine, threads, dtype = place
            title = f"{machine}{f', {threads} threads' if threads else ''}, {dtype}"
            heads = _heads(["layer", "w = 16 (ViT: 128)", "w = 32", "w = 64", "w = 128"])
            tables.append(Table(f"Speed-up over FF at batch 2048, here (in the paper): {title}", [heads], full, True))
    commands = dict.fromkeys((row["machine"], row["command"]) for row in rows) if drawn or tables else {}
    made = [
        Made(machine, [command for where, command in commands if where == machine])
        for machine in dict.fromkeys(where for where, _ in commands)
    ]
    return section._replace(figures=drawn, tables=tables, made=made)


def _speedups(name: str, ours: Sequence[Row | None], theirs: Sequence[float]) -> list[Entry]:
    entries = [Entry(name, head=True)]
    for row, their in zip(ours, theirs, strict=True):
        entries.append(Entry(f"{row['speedup_dense']:.2f}x", f"({their:.2f}x)") if row else Entry(NOTHING))
    return entries


GLANCE = ["", "recipe", "cells", "M_A at or above the paper", "G_A at or above the paper", "largest gap", "least share"]


def _glance(section: Section, records: Sequence[Record]) -> list[list[Entry]]:
    """For each recipe: in how many cells our mean is at or above the paper's best."""
    lines = []
    for recipe in _recipes(cells := _cells(section, records)):
        some = [cell for cell in cells if cell.recipe == recipe]
        trees = [cell for cell in some if cell.depth]
        gaps = [cell.soft_hard_gap for cell in trees if cell.soft_hard_gap is not None]
        shares = [cell.smallest_share for cell in trees if cell.smallest_share is not None]
        gap = f"{max(gaps, key=abs):+.2f}" if gaps else ""
        above = [_above(trees, "M_A"), _above(trees, "G_A")]
        share = _number(min(shares), 2) if shares else ""
        lines.append([Entry(section.title, head=True), *map(Entry, (recipe, str(len(some)), *above, gap, share))])
    return lines


def _above(cells: Iterable[Cell], name: str) -> str:
    differences = [difference for cell in cells if (difference := cell.difference(name)) is not None]
    return f"{sum(d >= 0 for d in differences)} of {len(differences)}" if differences else ""


def _made(records: Sequence[Record]) -> list[Made]:
    """Machines and versions, each with its commands."""
    places: dict[str, list[Record]] = {}
    for record in records:
        about = record.about
        versions = f"torch {about['torch']}, Python {about['python']}, fastff {about['fastff']}"
        commit = f" at {about['commit']}" if about["commit"] else ""
        places.setdefault(f"{about['machine']} ({about['device']}), {versions}{commit}", []).append(record)
    made = []
    for where, some in places.items():
        days = sorted(record.about["date"][:10] for record in some)
        when = days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
        time = _time(sum(record.result.seconds for record in some))
        commands = list(dict.fromkeys(record.about["command"] for record in some))
        made.append(Made(f"{where}: {len(some)} trainings, {time}, {when}", commands))
    return made


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
