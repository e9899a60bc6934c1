"""The paper's three tables with our rows under its own, the ablation, and the count of cells that match the paper."""

from collections.abc import Iterable, Mapping, Sequence

from fastff.bench import presets

from .. import paper, summary
from ..runs import Case
from ..store import Record
from ..summary import Cell, rounded
from . import entries
from .entries import METRICS, NEW, NOTHING, TRAINING, Entry, Section, Table, accuracy, heads, number

BESIDE = "Our numbers are means ± standard deviation over seeds. ▲ and ▼: our mean minus the paper's best run."
MATCH = "Trees whose mean over seeds matches or beats the paper's best run"


def table1(section: Section, records: Sequence[Record]) -> Section:
    """For each data set the paper's table, each of its rows followed by ours."""
    cells = entries.cells_of(section, records)
    tables = []
    for name in dict.fromkeys(cell.dataset for cell in cells):
        ours = {(c.model, c.leaf_width, c.width, c.recipe): c for c in cells if c.dataset == name}
        shown = entries.dataset(name)
        head = [
            [Entry("", head=True, span=2), *(Entry(METRICS[metric], head=True, span=4) for metric in METRICS)],
            [*heads(["model", "recipe"]), *heads(f"w = {width}" for width in presets.WIDTHS * 2)],
        ]
        rows: list[list[Entry]] = []
        for leaf, theirs in paper.TABLE1.get(shown, {}).items():
            model = "FFF" if leaf else "FF"
            lines = [[Entry("published"), *(Entry(number(v)) for v in (*theirs.G_A, *theirs.M_A))]]
            for recipe in entries.recipes(ours.values()):
                found = [ours.get((model, leaf or width, width, recipe)) for width in presets.WIDTHS]
                if any(found):
                    marks = (accuracy(cell, metric) for metric in METRICS for cell in found)
                    lines.append([Entry(recipe), *marks])
            rows += entries.group(f"l = {leaf}" if leaf else "FF", lines)
        tables.append(Table(shown, head, rows))
    return section._replace(tables=[*tables, entries.every_cell(cells)], notes=[BESIDE])


def table2(section: Section, records: Sequence[Record]) -> Section:
    """FFF, MoE and FF side by side: their accuracies first, then the epochs that each took."""
    cells = entries.cells_of(section, records)
    ours = {(cell.model, cell.width, cell.recipe): cell for cell in cells}
    models = {"FFF": "FFF (l = 32)", "MoE": "MoE (e = 16, k = 2)", "FF": "FF"}
    groups = (NEW, TRAINING, "epochs to G_A (ETT)", "epochs to M_A (ETT)")
    head = [
        [Entry("", head=True, span=2), *(Entry(title, head=True, span=3) for title in groups)],
        [*heads(["width", "recipe"]), *heads(list(models.values()) * 4)],
    ]
    rows: list[list[Entry]] = []
    for width in paper.TABLE2["FF"]:
        theirs = [paper.TABLE2[model][width] for model in models]
        texts = [number(getattr(each, name)) for name in METRICS for each in theirs]
        texts += [str(getattr(each, name)) for name in ("ETT", "ETT_M") for each in theirs]
        lines = [[Entry("published"), *map(Entry, texts)]]
        for recipe in entries.recipes(cells):
            found = [ours.get((model, width, recipe)) for model in models]
            if any(found):
                marks = [accuracy(cell, name) for name in METRICS for cell in found]
                epochs = [_epochs(cell, name) for name in ("ETT", "ETT_M") for cell in found]
                lines.append([Entry(recipe), *marks, *epochs])
        rows += entries.group(f"w = {width}", lines)
    tables = [Table("CIFAR10", head, rows), entries.every_cell(cells)]
    return section._replace(tables=tables, notes=[BESIDE])


def _epochs(cell: Cell | None, name: str) -> Entry:
    return Entry((number(getattr(cell, name), 0) if cell else "") or NOTHING)


def table3(section: Section, records: Sequence[Record]) -> Section:
    """Vision transformers: accuracies and the distance to the dense model first, then sizes."""
    cells = entries.cells_of(section, records)
    columns = ["model", "recipe", NEW, "best", "behind FF", "depth", "training size", "inference size", "speed-up"]
    columns += ["gap", "smallest share"]
    by_seed = summary.rows(record.result for record in records)
    rows: list[list[Entry]] = []
    for leaf, theirs in paper.TABLE3.items():
        behind = number(paper.TABLE3[paper.FF].G_A - theirs.G_A) if leaf else ""
        speedup = f"{presets.TABLE3[leaf]:.2f}x" if leaf else "1.00x"
        texts = [number(theirs.G_A), "", behind, *map(str, theirs[:3]), speedup, "", ""]
        lines = [[Entry("published"), *map(Entry, texts)]]
        for cell in sorted(cells, key=lambda cell: entries.recipes(cells).index(cell.recipe)):
            if cell.model == ("ViT-FFF" if leaf else "ViT-FF") and leaf in (0, cell.leaf_width):
                behind = number(summary.behind(cell, by_seed) if leaf else None, 2)
                texts = [number(cell.G_A and cell.G_A.best), behind, str(cell.depth)]
                texts += [str(2**cell.depth - 1 + cell.width), str(cell.leaf_width + cell.depth), ""]
                texts += [entries.signed(cell.soft_hard_gap), number(cell.smallest_share, 2)]
                lines.append([Entry(cell.recipe), accuracy(cell, "G_A"), *map(Entry, texts)])
        rows += entries.group(f"l = {leaf}" if leaf else "FF", lines)
    tables = [Table("CIFAR10", [heads(columns)], rows), entries.every_cell(cells)]
    return section._replace(tables=tables, notes=[BESIDE, "The section on speed has our speed-ups."])


def ablation(section: Section, records: Sequence[Record]) -> Section:
    """The recipe, and the recipe with one part changed, over the seeds that all of them have."""
    seeds: dict[tuple[str, int, int], dict[str, set[int]]] = {}
    for case in (record.result.case for record in records):
        place = (case.dataset, case.width, case.leaf_width)
        seeds.setdefault(place, {}).setdefault(case.recipe, set()).add(case.seed)
    cells = entries.cells_of(section, [record for record in records if _is_common(record.result.case, seeds)])
    ours = {(c.recipe, c.dataset, c.width, c.leaf_width): c for c in cells}
    places = list(dict.fromkeys((c.dataset, c.width, c.leaf_width) for c in cells))
    columns = ["recipe", *(f"{entries.dataset(name)} w = {width}, l = {leaf}" for name, width, leaf in places)]
    rows = []
    for recipe in sorted({cell.recipe for cell in cells}, key=lambda name: (name != "fastff", name)):
        line = [Entry(recipe, head=True)]
        for place in places:
            whole, changed = (ours.get((name, *place)) for name in ("fastff", recipe))
            both = [cell.G_A for cell in (whole, changed) if cell is not None and cell.G_A is not None]
            change = rounded(both[1].mean - both[0].mean) if recipe != "fastff" and len(both) == 2 else None
            line.append(accuracy(changed, "G_A")._replace(difference=change))
        rows.append(line)
    note = "Means ± standard deviation over seeds. ▲ and ▼: the changed recipe's mean minus the full recipe's."
    return section._replace(tables=[Table(NEW, [heads(columns)], rows), entries.every_cell(cells)], notes=[note])


def _is_common(case: Case, seeds: Mapping[tuple[str, int, int], Mapping[str, set[int]]]) -> bool:
    """Whether all recipes have the seed of a case."""
    return all(case.seed in some for some in seeds[case.dataset, case.width, case.leaf_width].values())


GLANCE = ["", "recipe", "on new data (G_A)", "on training data (M_A)", "largest gap", "smallest share", "cells"]


def glance(section: Section, records: Sequence[Record]) -> list[list[Entry]]:
    """For each recipe: in how many trees our mean matches or beats the paper's best run."""
    lines: list[list[Entry]] = []
    for recipe in entries.recipes(cells := entries.cells_of(section, records)):
        some = [cell for cell in cells if cell.recipe == recipe]
        trees = [cell for cell in some if cell.depth]
        if not trees:
            continue
        gaps = [cell.soft_hard_gap for cell in trees if cell.soft_hard_gap is not None]
        shares = [cell.smallest_share for cell in trees if cell.smallest_share is not None]
        texts = [_matching(trees, name) for name in METRICS]
        texts += [entries.signed(max(gaps, key=abs, default=None)), number(min(shares, default=None), 2)]
        lines.append([*map(Entry, (recipe, *texts, str(len(some))))])
    return entries.group(section.title, lines)


def _matching(cells: Iterable[Cell], name: str) -> str:
    good, compared = matching(cells, name)
    return f"{good} of {compared}" if compared else ""


def matching(cells: Iterable[Cell], name: str) -> tuple[int, int]:
    """How many cells match or beat the paper, and how many can be compared with it."""
    differences = [difference for cell in cells if (difference := cell.difference(name)) is not None]
    return sum(difference >= 0 for difference in differences), len(differences)
