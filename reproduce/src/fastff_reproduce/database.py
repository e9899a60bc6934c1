"""The SQLite file of a store: opened, checked, created and locked, with errors that say what to do.

A file that holds anything else is refused before it is touched.
"""

import json
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from fastff.atomic import SQLITE

from .result_rows import COLUMNS, KINDS, SMALL, from_row

VERSION = 2  # of the schema
APPLICATION = 0x46464631  # "FFF1": the owner of the database, in the SQLite field for that
PATIENCE = 60.0  # seconds to wait for another writer


class StoreError(OSError):
    """A store that cannot be read or written; the message has the remedy."""


def connect(path: Path) -> sqlite3.Connection:
    """A connection that reads and writes; the file and its directory are created if missing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{path} cannot be created: {error.strerror}. Choose another directory.") from None
    # isolation_level=None: each statement is a transaction unless BEGIN says otherwise.
    db = sqlite3.connect(path, timeout=PATIENCE, isolation_level=None)
    try:
        _patiently(db, "PRAGMA journal_mode = WAL")  # readers and a writer do not wait for each other
        db.execute("PRAGMA synchronous = FULL")
        _make(db)
    except BaseException:
        db.close()
        raise
    return db


def copy(path: Path) -> sqlite3.Connection:
    """A copy in memory, in the current schema; the file is not changed."""
    if not path.exists():
        raise StoreError(f"{path} does not exist. `fastff reproduce` creates a store.")
    db = sqlite3.connect(":memory:", isolation_level=None)
    with closing(_reader(path)) as file:
        file.backup(db)
    _make(db)
    return db


def check(path: Path) -> None:
    """Refuse a file that is not a store of this version, without changing it."""
    if path.is_dir():
        raise StoreError(f"{path} is a directory; a store is a file. Add a file name, or choose another.")
    if path.exists() and not path.is_file():
        raise StoreError(f"{path} is not a regular file, as a store must be. Choose another file.")
    if not path.exists() or not path.stat().st_size:
        return
    try:
        with path.open("rb") as file:
            start = file.read(len(SQLITE))
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}. Allow it, or choose another file.") from None
    if start != SQLITE:
        raise StoreError(f"{path} is not a store of results (an SQLite database). Choose another file.")
    with readable_errors(path), closing(_reader(path)) as db:
        db.execute("BEGIN")  # one consistent view: another process may be making the store
        owner, version = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
        tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if owner != APPLICATION and tables:  # without tables: another process is making it
        raise StoreError(f"{path} is a database of another program. Choose another file.")
    if owner == APPLICATION and not 1 <= version <= VERSION:
        raise StoreError(
            f"{path} has schema version {version}; this fastff reads version {VERSION}. "
            "Choose another file, or use the fastff that wrote it."
        )


def _reader(path: Path) -> sqlite3.Connection:
    """A connection that only reads, and leaves no files beside a store that no process has open."""
    # Without a log everything is in the file, which can then be read even in a read-only directory.
    way = "mode=ro" if path.with_name(f"{path.name}-wal").exists() else "immutable=1"
    return sqlite3.connect(f"file:{quote(str(path.resolve()))}?{way}", uri=True, timeout=PATIENCE)


def _make(db: sqlite3.Connection) -> None:
    columns = ", ".join(f'"{name}" {KINDS.get(name, "TEXT")}' for name in COLUMNS)
    with transaction(db):
        db.execute(f"CREATE TABLE IF NOT EXISTS results ({columns})")
        if db.execute("PRAGMA user_version").fetchone()[0] == 1:
            _renew(db)
        db.execute(f"PRAGMA application_id = {APPLICATION}")
        db.execute(f"PRAGMA user_version = {VERSION}")


def _renew(db: sqlite3.Connection) -> None:
    """Schema version 1 had all settings in the key, defaults included."""
    for key, *row in db.execute(f"SELECT key, {quoted(SMALL)} FROM results").fetchall():
        case = from_row(dict(zip(SMALL, row, strict=True))).result.case
        new = {"old": key, "key": case.key, "settings": json.dumps(case.settings)}
        db.execute("UPDATE OR IGNORE results SET key = :key, settings = :settings WHERE key = :old", new)


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """One transaction: the whole block, or nothing."""
    db.execute("BEGIN IMMEDIATE")
    with db:
        yield


@contextmanager
def readable_errors(path: Path) -> Iterator[None]:
    """Turn errors of SQLite into ones that name the file and the remedy."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if type(error) not in (sqlite3.DatabaseError, sqlite3.OperationalError):
            raise  # not about the file
        kept = "stored results are kept"
        remedies = {
            "full": f"Make room on its disk and run the command again: {kept}.",
            "readonly": "Allow writing to the file and its directory, or choose another file.",
            "unable to open": "Allow reading and writing in its directory, or copy it elsewhere.",
            "locked": f"Another process holds it: wait for it, or end it; {kept}.",
            "I/O": f"Its disk may be full: make room and run the command again; {kept}.",
        }
        usual = "It is damaged: choose another file, or recover its rows with `sqlite3 FILE .recover`."
        remedy = next((text for word, text in remedies.items() if word in str(error)), usual)
        raise StoreError(f"{path} cannot be used as a store of results: {error}. {remedy}") from None


def quoted(names: Iterable[str]) -> str:
    """Column names for a statement."""
    return ", ".join(f'"{name}"' for name in names)


def _patiently(db: sqlite3.Connection, statement: str) -> None:
    """Wait for other processes while the journal mode changes: SQLite itself does not."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            db.execute(statement)
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.02)
