"""Rows on stdout as JSON or CSV, for other programs. Everything else goes to stderr."""

import csv
import json
import sys
from collections.abc import Sequence
from typing import Any

FORMATS = ("table", "json", "csv")


def write_rows(rows: Sequence[dict[str, Any]], format: str, columns: Sequence[str]) -> None:
    """All rows in a format, "json" or "csv". In CSV, lists are joined by spaces and mappings by "; "."""
    if format == "json":
        print(json.dumps(rows, indent=2))
        return
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_field(row[name]) for name in columns] for row in rows)


def _field(value: Any) -> Any:
    if isinstance(value, dict):
        return "; ".join(f"{name}: {part}" for name, part in value.items())
    return " ".join(map(str, value)) if isinstance(value, list) else value
