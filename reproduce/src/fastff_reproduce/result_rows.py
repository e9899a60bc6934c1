"""A result as a row: the columns of a store and of its CSV files, and the way back.

A row has the case, the measured numbers, and where, when and how they were measured. In a CSV file the settings that
equal the defaults of `Settings` are left out.
"""

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

from .runs import GOALS, MODELS, Case, Result
from .settings import Settings, completed, shortened

CASE = [field.name for field in dataclasses.fields(Case)]
FOUND = [field.name for field in dataclasses.fields(Result) if field.name not in ("case", "history")]
ABOUT = ["date", "machine", "device", "torch", "python", "fastff", "commit", "command"]
SMALL = [*CASE, *FOUND, *ABOUT]
COLUMNS = ["key", *SMALL, "history"]
KINDS = {"key": "TEXT PRIMARY KEY"}  # the SQLite types; TEXT for those not named
KINDS |= dict.fromkeys(("width", "leaf_width", "depth", "seed", "inference_size", "epochs"), "INTEGER")
KINDS |= dict.fromkeys(("ETT_M", "ETT", "leaves_used"), "INTEGER")
KINDS |= dict.fromkeys(("M_A", "G_A", "soft_hard_gap", "smallest_share", "seconds"), "REAL")
LARGEST_FIELD = 1 << 27  # bytes of a CSV field: a history


class Record(NamedTuple):
    """A stored result, and where, when and how it was measured."""

    result: Result
    about: dict[str, str]


def to_row(result: Result, about: dict[str, str]) -> dict[str, Any]:
    """The values of all COLUMNS."""
    case, found = dataclasses.asdict(result.case), {name: getattr(result, name) for name in FOUND}
    made = {name: about[name] for name in ABOUT}
    texts = {"settings": json.dumps(case["settings"]), "history": json.dumps(result.history)}
    return {"key": result.case.key} | case | found | made | texts


def from_row(row: dict[str, Any]) -> Record:
    """The record of a row; without a history column, the history is {}."""
    settings = completed(dict(_tuples(json.loads(row["settings"]))))
    case = Case(**{name: row[name] for name in CASE} | {"settings": settings})
    history = json.loads(row.get("history") or "{}")
    result = Result(case, **{name: row[name] for name in FOUND}, history=history)
    return Record(result, {name: row[name] for name in ABOUT})


def to_csv(row: dict[str, Any], names: list[str]) -> list[Any]:
    """The fields of a CSV line: six significant digits, and only the settings that differ from the defaults."""
    short = json.dumps(shortened(_tuples(json.loads(row["settings"]))))
    values = (short if name == "settings" else row[name] for name in names)
    return [f"{value:.6g}" if isinstance(value, float) else value for value in values]


def read_csv(path: Path) -> list[Record]:
    """The records of a CSV file, or an error that names the file."""
    csv.field_size_limit(max(csv.field_size_limit(), LARGEST_FIELD))
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            if reader.fieldnames not in (SMALL, [*SMALL, "history"]):
                raise ValueError("its columns differ")
            return [from_row(_checked(row)) for row in reader]
    except (KeyError, ValueError, TypeError, OSError, csv.Error) as error:
        raise ValueError(f"{path} is not a file of results from `fastff report --export`: {error}.") from None


def _checked(row: dict[str, str]) -> dict[str, Any]:
    """A CSV row with the types of the database; `ValueError` if no training can have produced it."""
    kinds = {"INTEGER": int, "REAL": float, "TEXT": str}
    made: dict[str, Any] = {name: kinds[KINDS.get(name, "TEXT")](row[name]) if row[name] else None for name in SMALL}
    made |= {name: row[name] for name in ABOUT}
    for name in (*CASE, "inference_size", "epochs", "seconds"):
        if made[name] is None:
            raise ValueError(f"a row has no {name}")
    for name in ("M_A", "G_A"):
        if made[name] is not None and not 0 <= made[name] <= 100:
            raise ValueError(f"a row has {name} = {made[name]}")
    if made["model"] not in MODELS:
        raise ValueError(f"a row has the model {made['model']!r}; models are {', '.join(MODELS)}")
    if made["seed"] < 0:
        raise ValueError(f"a row has the seed {made['seed']}; seeds are 0 or more")
    if made["goal"] not in GOALS:
        raise ValueError(f"a row has the goal {made['goal']!r}; goals are {', '.join(GOALS)}")
    settings = completed(json.loads(row["settings"]))
    Settings(**dict(settings))  # raises for bad values
    history = row.get("history") or "{}"
    if not isinstance(json.loads(history), dict):
        raise ValueError("a row has no history")
    return made | {"settings": json.dumps(settings), "history": history}


def _tuples(value: Any) -> Any:
    """JSON has lists only; a case has tuples, which can be hashed."""
    return tuple(_tuples(part) for part in value) if isinstance(value, list) else value
