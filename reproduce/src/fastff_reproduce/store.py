"""Results in an SQLite file: a row for each training, found by the key of its case.

A result is on disk when `put` returns, so that whoever kills the process loses nothing that was stored. The key is the
primary key: of several processes that store the same case the first one wins, and no case is there twice. A file that
holds anything else is refused before it is touched.
"""

import csv
import dataclasses
import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import quote

from fastff.atomic import SQLITE, replacing
from fastff.bench import rows as bench
from fastff.provenance import checkout, command_line

from .runs import GOALS, MODELS, Case, Result
from .settings import Settings, completed, shortened

VERSION = 2
APPLICATION = 0x46464631  # "FFF1": says whose database it is, in SQLite's own field for that
PATIENCE = 60.0  # seconds to wait for another writer
LARGEST = 1 << 27  # of a field in a CSV file: a history

CASE = [field.name for field in dataclasses.fields(Case)]
FOUND = [field.name for field in dataclasses.fields(Result) if field.name not in ("case", "history")]
ABOUT = ["date", "machine", "device", "torch", "python", "fastff", "commit", "command"]
SMALL = [*CASE, *FOUND, *ABOUT]
COLUMNS = ["key", *SMALL, "history"]
KINDS = {"key": "TEXT PRIMARY KEY"}
KINDS |= dict.fromkeys(("width", "leaf_width", "depth", "seed", "inference_size", "epochs"), "INTEGER")
KINDS |= dict.fromkeys(("ETT_M", "ETT", "leaves_used"), "INTEGER")
KINDS |= dict.fromkeys(("M_A", "G_A", "soft_hard_gap", "smallest_share", "seconds"), "REAL")
ORDER = ["dataset", "model", "width", "leaf_width", "depth", "recipe", "goal", "seed", "key"]


class StoreError(OSError):
    """A store that cannot be read or written; the message says what to do."""


class Record(NamedTuple):
    """A stored result, and where, when and how it was made."""

    result: Result
    about: dict[str, str]


def about(device: str, commit: str = "") -> dict[str, str]:
    """Where, when and how this process makes results."""
    known = bench.about(device, command_line(), commit or checkout()) | {"device": device}
    return {name: str(known[name]) for name in ABOUT}


class Store:
    """The results in a file, which is made if it is not there.

    read_only: a copy of the results in memory, of a file that must be there and is not touched.
    """

    def __init__(self, path: Path | str, *, read_only: bool = False) -> None:
        self.path = Path(path)
        _check(self.path)
        with _told(self.path):
            self._db = _copy(self.path) if read_only else self._connect()

    def _connect(self) -> sqlite3.Connection:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{self.path} cannot be made: {error.strerror}. Choose another directory.") from None
        # isolation_level=None: a statement is a transaction of its own unless BEGIN says otherwise.
        db = sqlite3.connect(self.path, timeout=PATIENCE, isolation_level=None)
        try:
            _patiently(db, "PRAGMA journal_mode = WAL")  # readers and a writer do not wait for each other
            db.execute("PRAGMA synchronous = FULL")
            _make(db)
        except BaseException:
            db.close()
            raise
        return db

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put(self, result: Result, about: dict[str, str]) -> bool:
        """Store a result, unless its case has one: whether it was stored."""
        return self.put_all([result], about) == 1

    def put_all(self, results: Iterable[Result], about: dict[str, str]) -> int:
        """Store all of these results or none, leaving out those whose case has one: how many were stored."""
        return self._insert([_values(result, about) for result in results])

    def _insert(self, rows: Sequence[dict[str, Any]]) -> int:
        insert = f"INSERT OR IGNORE INTO results VALUES ({', '.join(f':{name}' for name in COLUMNS)})"
        with _told(self.path), _written(self._db):
            return sum(self._db.execute(insert, row).rowcount for row in rows)

    def get(self, case: Case) -> Result | None:
        """The result of a case, if it is there."""
        found = self.records(key=case.key)
        return found[0].result if found else None

    def keys(self) -> set[str]:
        """The keys of the cases that have a result."""
        with _told(self.path):
            return {key for (key,) in self._db.execute("SELECT key FROM results")}

    def results(self, history: bool = True, **where: Any) -> list[Result]:
        """The results with these values, such as `dataset="mnist", leaf_width=[8, 4]`. Without `history` it is {}."""
        return [record.result for record in self.records(history, **where)]

    def records(self, history: bool = True, **where: Any) -> list[Record]:
        """The same, each with where, when and how it was made."""
        unknown = [name for name in where if name not in COLUMNS]
        if unknown:
            raise ValueError(f"results have no column {unknown[0]!r}. There are: {', '.join(COLUMNS)}.")
        tests, values = ["1"], list[Any]()
        for name, wanted in where.items():
            several = wanted if isinstance(wanted, Sequence) and not isinstance(wanted, str) else [wanted]
            tests.append(f'"{name}" IN ({", ".join("?" for _ in several)})')
            values += several
        names = [*SMALL, "history"] if history else SMALL
        query = f"SELECT {_quoted(names)} FROM results WHERE {' AND '.join(tests)} ORDER BY {_quoted(ORDER)}"
        with _told(self.path):
            return [_record(dict(zip(names, row, strict=True))) for row in self._db.execute(query, values)]

    def export(self, path: Path, history: bool = False) -> int:
        """Write all results to a CSV file: how many rows it has.

        Of the settings there are those that differ from the defaults of `Settings`. With `history`, the last column has
        what happened in each epoch.
        """
        names = [*SMALL, "history"] if history else SMALL
        rows = [_values(result, about) for result, about in self.records(history)]
        for row in rows:
            row["settings"] = json.dumps(shortened(_tuples(json.loads(row["settings"]))))
        with replacing(path) as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(names)
            for row in rows:
                values = (row[name] for name in names)
                writer.writerow([f"{v:.6g}" if isinstance(v, float) else v for v in values])
        return len(rows)

    def include(self, *paths: Path) -> int:
        """Store the results of CSV files that `export` wrote, unless their cases have one: how many were stored.

        A history in a file is stored with the same result without one. An error in a file stores nothing.
        """
        records = [record for path in paths for record in _read(path)]
        made = self._insert([_values(result, about) for result, about in records])
        with _told(self.path), _written(self._db):
            for result, about in records:
                if result.history:
                    update = "UPDATE results SET history = ? WHERE key = ? AND date = ? AND history = '{}'"
                    self._db.execute(update, (json.dumps(result.history), result.case.key, about["date"]))
        return made


def _read(path: Path) -> list[Record]:
    """The results of a CSV file, or an error that names it."""
    csv.field_size_limit(max(csv.field_size_limit(), LARGEST))
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            if reader.fieldnames not in (SMALL, [*SMALL, "history"]):
                raise ValueError("it has other columns")
            return [_record(_typed(row)) for row in reader]
    except (KeyError, ValueError, TypeError, OSError, csv.Error) as error:
        raise ValueError(f"{path} is not a file of results, of `fastff report --export`: {error}.") from None


def _typed(row: dict[str, str]) -> dict[str, Any]:
    """A row of a CSV file as the database has it."""
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
        raise ValueError(f"a row has the model {made['model']!r}; there are {', '.join(MODELS)}")
    if made["seed"] < 0:
        raise ValueError(f"a row has the seed {made['seed']}; seeds are 0 or more")
    if made["goal"] not in GOALS:
        raise ValueError(f"a row has the goal {made['goal']!r}")
    settings = completed(json.loads(row["settings"]))
    Settings(**dict(settings))  # or an error
    history = row.get("history") or "{}"
    if not isinstance(json.loads(history), dict):
        raise ValueError("a row has no history")
    return made | {"settings": json.dumps(settings), "history": history}


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _values(result: Result, about: dict[str, str]) -> dict[str, Any]:
    case, found = dataclasses.asdict(result.case), {name: getattr(result, name) for name in FOUND}
    made = {name: about[name] for name in ABOUT}
    texts = {"settings": json.dumps(case["settings"]), "history": json.dumps(result.history)}
    return {"key": result.case.key} | case | found | made | texts


def _record(row: dict[str, Any]) -> Record:
    settings = completed(dict(_tuples(json.loads(row["settings"]))))
    case = Case(**{name: row[name] for name in CASE} | {"settings": settings})
    history = json.loads(row.get("history") or "{}")
    result = Result(case, **{name: row[name] for name in FOUND}, history=history)
    return Record(result, {name: row[name] for name in ABOUT})


def _tuples(value: Any) -> Any:
    """JSON has lists only; a case has tuples, which can be hashed."""
    return tuple(_tuples(part) for part in value) if isinstance(value, list) else value


def _check(path: Path) -> None:
    """Refuse what is not a store of this version, by reading alone."""
    if path.is_dir():
        raise StoreError(f"{path} is a directory; a store of results is a file. Add a file name, or choose another.")
    if path.exists() and not path.is_file():
        raise StoreError(f"{path} is no regular file; a store of results is one. Choose another file.")
    if not path.exists() or not path.stat().st_size:
        return
    try:
        with path.open("rb") as file:
            start = file.read(len(SQLITE))
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}. Allow it, or choose another file.") from None
    if start != SQLITE:
        raise StoreError(f"{path} is not a store of results (an SQLite database). Choose another file.")
    with _told(path), closing(_reader(path)) as db:
        db.execute("BEGIN")  # one consistent view: another process may be making the store
        owner, version = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
        tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if owner != APPLICATION and tables:  # without tables: another process is making it
        raise StoreError(f"{path} is a database of another program. Choose another file.")
    if owner == APPLICATION and not 1 <= version <= VERSION:
        raise StoreError(
            f"{path} has results in version {version} of the schema; this fastff reads version {VERSION}. "
            "Choose another file, or the fastff that made it."
        )


def _reader(path: Path) -> sqlite3.Connection:
    """A connection that changes nothing, and leaves no files beside a store that no process has open."""
    # Without a log all is in the file, and is read where nothing may be written.
    way = "mode=ro" if path.with_name(f"{path.name}-wal").exists() else "immutable=1"
    return sqlite3.connect(f"file:{quote(str(path.resolve()))}?{way}", uri=True, timeout=PATIENCE)


def _copy(path: Path) -> sqlite3.Connection:
    """The store in memory, as this version has it."""
    if not path.exists():
        raise StoreError(f"{path} is not there. `fastff reproduce` makes a store.")
    db = sqlite3.connect(":memory:", isolation_level=None)
    with closing(_reader(path)) as file:
        file.backup(db)
    _make(db)
    return db


def _make(db: sqlite3.Connection) -> None:
    columns = ", ".join(f'"{name}" {KINDS.get(name, "TEXT")}' for name in COLUMNS)
    with _written(db):
        db.execute(f"CREATE TABLE IF NOT EXISTS results ({columns})")
        if db.execute("PRAGMA user_version").fetchone()[0] == 1:
            _renew(db)
        db.execute(f"PRAGMA application_id = {APPLICATION}")
        db.execute(f"PRAGMA user_version = {VERSION}")


def _renew(db: sqlite3.Connection) -> None:
    """In version 1 a key had all settings, those that are as usual, too."""
    for key, *row in db.execute(f"SELECT key, {_quoted(SMALL)} FROM results").fetchall():
        case = _record(dict(zip(SMALL, row, strict=True))).result.case
        new = {"old": key, "key": case.key, "settings": json.dumps(case.settings)}
        db.execute("UPDATE OR IGNORE results SET key = :key, settings = :settings WHERE key = :old", new)


@contextmanager
def _written(db: sqlite3.Connection) -> Iterator[None]:
    """All that happens in the block, or nothing."""
    db.execute("BEGIN IMMEDIATE")
    with db:
        yield


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """What SQLite says, as an error that names the file and the remedy."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if type(error) not in (sqlite3.DatabaseError, sqlite3.OperationalError):
            raise  # it is not about the file
        kept = "what was stored is kept"
        remedies = {
            "full": f"Make room on its disk and run the command again: {kept}.",
            "readonly": "Allow writing to the file and its directory, or choose another file.",
            "unable to open": "Allow reading and writing in its directory, or copy it elsewhere.",
            "locked": f"Another process holds it: wait for that, or end it; {kept}.",
            "I/O": f"Its disk may be full: make room and run the command again; {kept}.",
        }
        usual = "It is damaged: choose another file, or recover what it has with `sqlite3 FILE .recover`."
        remedy = next((text for word, text in remedies.items() if word in str(error)), usual)
        raise StoreError(f"{path} cannot be used as a store of results: {error}. {remedy}") from None


def _patiently(db: sqlite3.Connection, statement: str) -> None:
    """SQLite does not wait for others where it changes the journal mode, so this does."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            db.execute(statement)
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.02)
