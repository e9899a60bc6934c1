"""Results as tables in a terminal: our mean, standard deviation and best of the seeds beside the paper's numbers."""

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from fastff.cli.printing import console

from . import summary
from .runs import Result


def show(experiment: str, title: str, results: Sequence[Result]) -> None:
    """Print a table for each data set."""
    cells = summary.cells(results, experiment)
    for name in dict.fromkeys(cell.dataset for cell in cells):
        some = [cell for cell in cells if cell.dataset == name]
        known = any(number is not None for cell in some for number in cell.paper)
        table = Table(title=escape(f"{title}: {name}"), padding=(0, 1) if console.width >= 100 else 0)
        beside = ["paper", ""] if known else []
        columns = ("model", "w", "l", "neurons", "recipe", "seeds", "M_A", *beside, "G_A", *beside, "ETT", "gap")
        for column in (*columns, "smallest share"):  # in a narrow terminal these wrap
            wrap, left = column in ("M_A", "G_A", "smallest share"), column in ("model", "recipe")
            table.add_column(column, justify="left" if left else "right", no_wrap=not wrap)
        for i, cell in enumerate(some):
            if i and (cell.model, cell.width) != (some[i - 1].model, some[i - 1].width):
                table.add_section()
            size = [cell.model, *map(str, (cell.width, cell.leaf_width, cell.inference_size))]
            size += [escape(cell.recipe), str(cell.seeds)]
            table.add_row(*size, *_beside(cell, "M_A", known), *_beside(cell, "G_A", known), *_rest(cell))
        console.print(table)
    theirs = "; then the paper's number, the best of its runs, and the difference of our mean to it"
    compared = any(number is not None for cell in cells for number in cell.paper)
    console.print(
        "w: training width. l: width of a leaf or expert. neurons: used per sample at inference. M_A, G_A: accuracy on "
        "training and test data in percent, hard pass, mean ± standard deviation (best) over seeds"
        f"{theirs if compared else ''}. ETT: epochs to the best validation accuracy. gap: largest difference of soft "
        "and hard accuracy. smallest share: samples in the least used leaf, over samples / leaves.",
        style="dim",
    )


def _beside(cell: summary.Cell, name: str, known: bool) -> list[str]:
    stat, theirs, difference = getattr(cell, name), getattr(cell.paper, name), cell.difference(name)
    ours = "" if stat is None else f"{stat.mean:.1f}"
    if stat is not None and stat.deviation is not None:
        ours += f" ± {stat.deviation:.1f} ({stat.best:.1f})"
    colour = "" if difference is None else "green" if difference >= 0 else "red"
    marked = "" if difference is None else f"[{colour}]{difference:+.1f}[/]"
    return [ours, *(["" if theirs is None else f"{theirs:.1f}", marked] if known else [])]


def _rest(cell: summary.Cell) -> list[str]:
    return [
        "" if cell.ETT is None else f"{cell.ETT:.0f}",
        "" if cell.soft_hard_gap is None else f"{cell.soft_hard_gap:+.2f}",
        "" if cell.smallest_share is None else f"{cell.smallest_share:.2f}",
    ]
