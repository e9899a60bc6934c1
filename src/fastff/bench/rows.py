"""Rows of results in a CSV file. The file is replaced as a whole, and no row is measured twice."""

import csv
import datetime
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch

import fastff

from ..atomic import replacing
from ..provenance import machine
from .case import Case
from .results import Measurement

Row = dict[str, Any]

ABOUT = ["date", "machine", "threads", "torch", "python", "fastff", "commit", "tf32", "command"]
SIZE = ["in", "out", "leaf_width", "depth", "node_width", "activation", "batch", "dtype", "device"]
FOUND = [
    *["model", "backend", "status", "median_us", "p20_us", "p80_us", "samples"],
    *["speedup_dense", "speedup_gather", "speedup_moe", "floor_us", "times_floor", "bandwidth_gb_s", "other_load"],
    *["error", "allowed_error", "note"],
]
COLUMNS = [*ABOUT, *SIZE, *FOUND]
WORDS = {*ABOUT, "activation", "dtype", "device", "model", "backend", "status", "note"}  # the rest are numbers
# What makes two rows the same measurement.
KEY = ["machine", "threads", "commit", "tf32", *SIZE, "model", "backend"]


def about(device: str, command: str, commit: str) -> Row:
    """Where, when and how rows are measured."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(device),
        "threads": torch.get_num_threads() if device == "cpu" else "",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "fastff": fastff.__version__,
        "commit": commit,
        "tf32": torch.backends.cuda.matmul.allow_tf32 if device == "cuda" else "",
        "command": command,
    }


def rows_of(found: Measurement, about: Row) -> list[Row]:
    """The results of a case as rows; `about` says where, when and how they were measured."""
    made = []
    for result in found.results:
        times = result.times
        floor = found.floor_us
        made.append(
            about
            | found.case.columns
            | {
                "model": result.model,
                "backend": result.backend,
                "status": result.status,
                "median_us": times and times.median,
                "p20_us": times and times.p20,
                "p80_us": times and times.p80,
                "samples": times and times.samples,
                "speedup_dense": found.speedup(result, "FF"),
                "speedup_gather": found.speedup(result, "gather"),
                "speedup_moe": found.speedup(result, "MoE") if result.model == "FFF" else None,
                "floor_us": floor,
                "times_floor": found.times_floor(result) if result.model == "FFF" else None,
                "bandwidth_gb_s": found.bandwidth / 1e9 or None,
                "other_load": found.other_load,
                "error": result.error,
                "allowed_error": result.allowed,
                "note": result.note,
            }
        )
    return made


def read(path: Path) -> list[Row]:
    """The rows of a file, with numbers parsed; empty if the file is missing."""
    if not path.exists() or (path.is_file() and not path.stat().st_size):
        return []
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            if reader.fieldnames != COLUMNS:
                raise ValueError("it has other columns")
            return [{name: _parse(name, value) for name, value in row.items()} for row in reader]
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path} holds no rows of `fastff bench`: {error}. Choose another file.") from None


def append(path: Path, rows: Iterable[Row]) -> None:
    """Add rows to a file. It is replaced as a whole: after an interrupt it holds the old rows or all of them."""
    everything = [*read(path), *rows]
    with replacing(path) as file:
        write(file, everything)


def write(
    file: IO[str], rows: Iterable[Mapping[str, Any]], columns: Sequence[str] = COLUMNS, end: str = "\r\n"
) -> None:
    """Write rows as CSV, with six digits of each float. `end` ends a line."""
    writer = csv.DictWriter(file, columns, lineterminator=end)
    writer.writeheader()
    writer.writerows({name: _text(value) for name, value in row.items()} for row in rows)


def key(row: Row) -> tuple[str, ...]:
    return tuple(_text(row[name]) for name in KEY)


def is_done(case: Case, pairs: Iterable[tuple[str, str]], about: Row, done: set[tuple[str, ...]]) -> bool:
    """Whether the rows with these keys cover all (model, backend) pairs of a case. Ratios need all pairs at once."""
    return all(key(about | case.columns | {"model": model, "backend": name}) in done for model, name in pairs)


def finished(rows: Iterable[Row]) -> set[tuple[str, ...]]:
    """The keys of the rows that need not be measured again. Wrong rows are measured again."""
    return {key(row) for row in rows if row["status"] != "wrong"}


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _parse(name: str, value: str) -> Any:
    if name in WORDS:
        return value
    if value == "":
        return None
    return int(value) if value.lstrip("-").isdigit() else float(value)
