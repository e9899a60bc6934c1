"""What the benchmarks share: where a row comes from, and rows read from and appended to a CSV file."""

import csv
import sys
from collections.abc import Sequence
from pathlib import Path

from fastff.atomic import replacing
from fastff.bench import rows as bench
from fastff.provenance import checkout


def about(device: str, script: str, commit: str = "") -> dict[str, object]:
    """Date, machine, versions, commit and command of the rows that this process makes."""
    known = bench.about(device, " ".join([script, *sys.argv[1:]]), commit or checkout()) | {"device": device}
    names = ("date", "machine", "device", "torch", "python", "fastff", "commit", "command")
    return {name: known[name] for name in names}


def read(path: Path | None) -> list[dict[str, str]]:
    """The rows of a file; none if there is no file yet."""
    if path is None or not path.exists() or not path.stat().st_size:
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def append(path: Path, rows: Sequence[dict[str, object]]) -> None:
    """Add rows to a file with the same columns; the file is replaced as a whole."""
    if not rows:
        return
    old = read(path)
    if old and list(old[0]) != list(rows[0]):
        raise SystemExit(f"{path} has other columns than these rows. Choose another --output.")
    with replacing(path) as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows([*old, *rows])
