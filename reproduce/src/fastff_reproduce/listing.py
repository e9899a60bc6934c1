"""What can be trained, and what is still to do: `fastff reproduce list` and `--dry-run`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from fastff.cli.printing import console, errors, records, show

from . import data, summary
from .parts import parts, with_teachers
from .runs import Case
from .store import Store

EXPERIMENT = ("experiment", "title", "about", "trainings", "data")
PENDING = ("dataset", "model", "width", "leaf_width", "depth", "recipe", "goal", "stored", "to_train")


def list_experiments(root: Path | None, format: str) -> None:
    """All experiments: what they show, how many trainings they have, and whether their data is on this machine."""
    from .experiments import EXPERIMENTS

    states: dict[str, str] = {}
    rows: list[dict[str, Any]] = []
    for experiment in EXPERIMENTS.values():
        cases = experiment.cases()
        names = list(dict.fromkeys(case.dataset for case in cases))
        with errors.status("reading the data sets"):
            states |= {name: state(name, root) for name in names if name not in states}
        values = (
            experiment.name,
            experiment.title,
            experiment.about,
            len(cases),
            {name: states[name] for name in names},
        )
        rows.append(dict(zip(EXPERIMENT, values, strict=True)))
    if format != "table":
        _print(rows, EXPERIMENT, format)
        return
    table = Table(title="Experiments, with both recipes and ten seeds", show_lines=True)
    table.add_column("experiment", no_wrap=True)
    table.add_column("description", ratio=1)
    table.add_column("trainings", justify="right")
    table.add_column("data", no_wrap=True)
    for row in rows:
        lines = (name if found == "here" else f"{name}: {found}" for name, found in row["data"].items())
        text = escape(f"{row['title']}\n{row['about']}")
        table.add_row(row["experiment"], text, str(row["trainings"] or ""), escape("\n".join(lines)))
    console.print(table)
    where = escape(str(root or data.directory()))
    console.print(f"Data directory: {where}. digits comes with scikit-learn.", style="dim")


def state(name: str, root: Path | None) -> str:
    """Whether a data set is on this machine: "here", "not here", "damaged", or which package it needs."""
    if name not in data.NAMES:
        return "here"  # generated
    try:
        data.load(name, root, download=False)
    except FileNotFoundError:
        return "not here"
    except ValueError:
        return "damaged"
    except ImportError as error:
        return str(error)
    return "here"


def dry_run(cases: Sequence[Case], path: Path, root: Path | None, ensemble: int, format: str) -> None:
    """Which seeds are stored and which would be trained."""
    stored: set[str] = set()
    if path.exists():
        with Store(path, read_only=True) as opened:
            stored = opened.keys()
    cases = with_teachers(cases, stored)
    for dataset in sorted({case.dataset for case in cases if case.key not in stored}):
        if (found := state(dataset, root)) != "here":
            text = f"{dataset}: {found}, in {root or data.directory()}. Training downloads it if it can."
            errors.print(escape(text), style="yellow", soft_wrap=True)
    rows, name = list[dict[str, Any]](), summary.naming(cases)
    for part in parts(cases, len(cases)):
        case = part[0]
        row = {column: getattr(case, column) for column in PENDING[:5]} | {"recipe": name(case), "goal": case.goal}
        row["stored"] = [case.seed for case in part if case.key in stored]
        row["to_train"] = [case.seed for case in part if case.key not in stored]
        rows.append(row)
    if format != "table":
        _print(rows, PENDING, format)
        return
    table = Table(title=f"Trainings stored in {escape(str(path))}, and trainings to do")
    for column, value in rows[0].items():
        table.add_column(column.replace("_", " "), justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*(str(len(value) if isinstance(value, list) else value) for value in row.values()))
    show(console, table)
    left = sum(len(row["to_train"]) for row in rows)
    console.print(f"{len(cases) - left} trainings stored, {left} to do, {ensemble} seeds at once.")


def _print(rows: Sequence[dict[str, Any]], columns: Sequence[str], format: str) -> None:
    """JSON keeps lists and mappings; a CSV field has their text."""
    if format == "csv":
        rows = [{name: _field(value) for name, value in row.items()} for row in rows]
    records(rows, columns, format)


def _field(value: Any) -> Any:
    if isinstance(value, dict):
        return "; ".join(f"{name}: {part}" for name, part in value.items())
    return " ".join(map(str, value)) if isinstance(value, list) else value
