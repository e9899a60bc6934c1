"""One HTML page with all results: headline numbers, then every table and figure of the paper beside ours.

`page(records, rows)` makes it from a store's records and rows of `fastff bench`. The page is one file: figures are
inline SVG, and it loads nothing. A stored result belongs to an experiment if it is one of its cases with default
settings. All other trainings (other data, other settings) have sections at the end, one for each data set.

    entries.py         sections, tables, and the text of a field
    headline.py        the three cards at the top
    paper_tables.py    Tables 1 to 3 and the ablation
    speed_section.py   speed, from rows of `fastff bench`
    other_sections.py  figures, other trainings, machines and commands
"""

import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fastff.bench.rows import Row

from ..runs import Case
from ..store import Record
from ..summary import Cell
from . import headline, other_sections, paper_tables, speed_section
from .entries import RECIPES, Entry, Section, Table, cells_of, heads

BUILDERS: Mapping[str, Callable[[Section, Sequence[Record]], Section]] = {
    "table1": paper_tables.table1,
    "table2": paper_tables.table2,
    "table3": paper_tables.table3,
    "ablation": paper_tables.ablation,
    "inference_counterparts": other_sections.counterparts,
    "entropy_mnist": other_sections.entropy,
    "entropy_vit": other_sections.entropy,
}
# Commands for the sections that need no stored trainings.
FILLS = {"speed": headline.MEASURE, "regions": "fastff report"}


def page(records: Sequence[Record], rows: Sequence[Row], regions: bool = True) -> str:
    """The page as HTML. `regions`: with the paper's first figure, which trains three small layers (seconds)."""
    from ..experiments import EXPERIMENTS

    sections, glance, taken = [], list[list[Entry]](), set[Case]()
    trained: list[tuple[Section, list[Cell]]] = []
    for experiment in EXPERIMENTS.values():
        fill = FILLS.get(experiment.name, f"fastff reproduce {experiment.name}")
        section = Section(experiment.name, experiment.title, experiment.about, fill)
        cases = experiment.cases(datasets=None, widths=None, leaf_widths=None, recipes=RECIPES, seeds=(0,), changes={})
        groups = {case.group for case in cases}
        taken |= groups
        found = [record for record in records if record.result.case.group in groups]
        if experiment.name == "speed":
            section = speed_section.speed(section, rows)
        elif experiment.name == "regions" and regions:
            section = other_sections.regions(section)
        elif found:
            build = BUILDERS.get(experiment.name, other_sections.general)
            section = build(section, found)._replace(made=other_sections.made(found))
            glance += paper_tables.glance(section, found) if experiment.name.startswith("table") else []
            trained.append((section, cells_of(section, found)))
        sections.append(section)
    rest = [record for record in records if record.result.case.group not in taken]
    for name in dict.fromkeys(record.result.case.dataset for record in rest):
        found = [record for record in rest if record.result.case.dataset == name]
        section = Section(_slug(f"data-{name}"), f"Other trainings: {name}", other_sections.OTHER, "")
        section = other_sections.general(section, found)._replace(made=other_sections.made(found))
        trained.append((section, cells_of(section, found)))
        sections.append(section)
    full = [section for section in sections if section.tables or section.figures]
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            cards=headline.cards(trained, rows),
            first=[section for section in full if section.name == "regions"],
            glance=Table(paper_tables.MATCH, [heads(paper_tables.GLANCE)], glance) if glance else None,
            sections=[section for section in full if section.name != "regions"],
            missing=[section for section in sections if not (section.tables or section.figures)],
            trainings=len(records),
            date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        )
    )


def _environment() -> Environment:
    loader = FileSystemLoader(Path(__file__).parent)
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.globals.update(safe=Markup)
    return made


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
