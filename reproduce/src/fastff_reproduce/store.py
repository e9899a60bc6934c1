"""Results in an SQLite file: a row for each training, found by the key of its case.

A result is on disk when `put` returns, so a killed process loses nothing that was stored. The key is the primary key:
when several processes store the same case, the first one wins and no case is stored twice.
"""

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from fastff.atomic import replacing
from fastff.bench import rows as bench
from fastff.provenance import checkout, command_line

from . import database
from .database import StoreError, quoted, readable_errors, transaction
from .result_rows import ABOUT, COLUMNS, SMALL, Record, from_row, read_csv, to_csv, to_row
from .runs import Case, Result

__all__ = ["ABOUT", "Record", "Store", "StoreError", "about"]

ORDER = ["dataset", "model", "width", "leaf_width", "depth", "recipe", "goal", "seed", "key"]


def about(device: str, commit: str = "") -> dict[str, str]:
    """Where, when and how this process measures: the columns ABOUT."""
    known = bench.about(device, command_line(), commit or checkout()) | {"device": device}
    return {name: str(known[name]) for name in ABOUT}


class Store:
    """The results in a file, which is created if missing.

    read_only: read the results of an existing file into memory, and never write to it.
    """

    def __init__(self, path: Path | str, *, read_only: bool = False) -> None:
        self.path = Path(path)
        database.check(self.path)
        with readable_errors(self.path):
            self._db = database.copy(self.path) if read_only else database.connect(self.path)

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put(self, result: Result, about: dict[str, str]) -> bool:
        """Store a result unless its case has one. Returns whether it was stored."""
        return self.put_all([result], about) == 1

    def put_all(self, results: Iterable[Result], about: dict[str, str]) -> int:
        """Store results in one transaction, skipping cases that have one. Returns the number stored."""
        return self._insert([to_row(result, about) for result in results])

    def _insert(self, rows: Sequence[dict[str, Any]]) -> int:
        insert = f"INSERT OR IGNORE INTO results VALUES ({', '.join(f':{name}' for name in COLUMNS)})"
        with readable_errors(self.path), transaction(self._db):
            return sum(self._db.execute(insert, row).rowcount for row in rows)

    def get(self, case: Case) -> Result | None:
        """The result of a case, or None."""
        found = self.records(key=case.key)
        return found[0].result if found else None

    def keys(self) -> set[str]:
        """The keys of the cases that have a result."""
        with readable_errors(self.path):
            return {key for (key,) in self._db.execute("SELECT key FROM results")}

    def results(self, history: bool = True, **where: Any) -> list[Result]:
        """The results with these values, such as `dataset="mnist", leaf_width=[8, 4]`. `history`: with theirs."""
        return [record.result for record in self.records(history, **where)]

    def records(self, history: bool = True, **where: Any) -> list[Record]:
        """Like `results`, each with where, when and how it was measured."""
        unknown = [name for name in where if name not in COLUMNS]
        if unknown:
            raise ValueError(f"results have no column {unknown[0]!r}; choose from {', '.join(COLUMNS)}.")
        tests, values = ["1"], list[Any]()
        for name, wanted in where.items():
            several = wanted if isinstance(wanted, Sequence) and not isinstance(wanted, str) else [wanted]
            tests.append(f'"{name}" IN ({", ".join("?" for _ in several)})')
            values += several
        names = [*SMALL, "history"] if history else SMALL
        query = f"SELECT {quoted(names)} FROM results WHERE {' AND '.join(tests)} ORDER BY {quoted(ORDER)}"
        with readable_errors(self.path):
            return [from_row(dict(zip(names, row, strict=True))) for row in self._db.execute(query, values)]

    def export(self, path: Path, history: bool = False) -> int:
        """Write all results to a CSV file. Returns the number of rows.

        Settings that equal the defaults of `Settings` are left out. With `history`, the last column has the numbers of
        each epoch.
        """
        names = [*SMALL, "history"] if history else SMALL
        rows = [to_row(result, about) for result, about in self.records(history)]
        with replacing(path) as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(names)
            writer.writerows(to_csv(row, names) for row in rows)
        return len(rows)

    def include(self, *paths: Path) -> int:
        """Store the results of CSV files from `export`, skipping cases that have one. Returns the number stored.

        A result that is stored without a history gets the one in the file. An error in any file stores nothing.
        """
        records = [record for path in paths for record in read_csv(path)]
        made = self._insert([to_row(result, about) for result, about in records])
        with readable_errors(self.path), transaction(self._db):
            for result, about in records:
                if result.history:
                    update = "UPDATE results SET history = ? WHERE key = ? AND date = ? AND history = '{}'"
                    self._db.execute(update, (json.dumps(result.history), result.case.key, about["date"]))
        return made
