"""The sections that are figures, and the section for trainings that are in no experiment of the paper."""

from collections.abc import Sequence

from fastff.provenance import machine

from .. import figures, summary
from ..figures import Figure
from ..store import Record
from . import entries
from .entries import Made, Section

OTHER = (
    "Trainings outside the paper's experiments: other data, sizes or settings, such as the demo's short trainings. The "
    "commands below say which"
)


def counterparts(section: Section, records: Sequence[Record]) -> Section:
    cells = entries.cells_of(section, records)
    drawn: list[Figure] = []
    for name in dict.fromkeys(cell.dataset for cell in cells):
        drawn += figures.counterparts([c for c in cells if c.dataset == name], entries.dataset(name))
    return section._replace(figures=drawn, tables=[entries.every_cell(cells)])


def entropy(section: Section, records: Sequence[Record]) -> Section:
    """Two figures for each recipe. The paper shows the training that ended by validation."""
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
    tables = [entries.every_cell(entries.cells_of(section, records))]
    return section._replace(figures=drawn, tables=tables, notes=notes)


def regions(section: Section) -> Section:
    """The paper's first figure, trained while the page is made."""
    made = [Made(f"{machine('cpu')}, trained with this page", ["fastff reproduce regions"])]
    return section._replace(figures=figures.regions(), made=made)


def general(section: Section, records: Sequence[Record]) -> Section:
    """Any results: accuracy over inference size, and a table."""
    cells = entries.cells_of(section, records)
    drawn = figures.counterparts(cells, section.title) if len(cells) > 1 else []
    return section._replace(tables=[entries.every_cell(cells, folded=False)], figures=drawn)


def made(records: Sequence[Record]) -> list[Made]:
    """Machines and versions, each with its commands."""
    places: dict[str, list[Record]] = {}
    for record in records:
        about = record.about
        versions = f"torch {about['torch']}, Python {about['python']}, fastff {about['fastff']}"
        commit = f" at {about['commit']}" if about["commit"] else ""
        places.setdefault(f"{about['machine']} ({about['device']}), {versions}{commit}", []).append(record)
    found = []
    for where, some in places.items():
        days = sorted(record.about["date"][:10] for record in some)
        when = days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
        time = entries.duration(sum(record.result.seconds for record in some))
        commands = list(dict.fromkeys(record.about["command"] for record in some))
        found.append(Made(f"{where}: {len(some)} trainings, {time}, {when}", commands))
    return found
