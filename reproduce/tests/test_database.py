"""The SQLite file of a store: other files, full disks, damage, and several processes at once."""

import dataclasses
import functools
import hashlib
import json
import multiprocessing
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from stored import ABOUT, CASE, result, seeds

from fastff_reproduce import database
from fastff_reproduce.recipes import FASTFF
from fastff_reproduce.store import Store, StoreError


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "folder" / "results.sqlite") as store:
        yield store


def other_database(path):
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE results (a)")
    db.close()


def of_tomorrow(path):
    Store(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 3")
    db.close()


def damaged(path):
    path.write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 20)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda path: path.write_text("a,b\n1,2\n"), "is not a store of results"),
        (other_database, "is a database of another program"),
        (of_tomorrow, "has schema version 3; this fastff reads version 2"),
        (damaged, "cannot be used as a store of results: .* It is damaged: choose another file, or recover"),
    ],
)
def test_another_file_is_refused_and_untouched(make, error, tmp_path):
    file = tmp_path / "file"
    make(file)
    before, names = hashlib.sha256(file.read_bytes()).digest(), set(tmp_path.iterdir())
    with pytest.raises(StoreError, match=error):
        Store(file)
    assert hashlib.sha256(file.read_bytes()).digest() == before
    assert set(tmp_path.iterdir()) == names


def test_a_directory_is_refused(tmp_path):
    with pytest.raises(StoreError, match="is a directory"):
        Store(tmp_path)


def test_an_empty_file_becomes_a_store(tmp_path):
    """mktemp makes one; so does a process that was killed before its first write."""
    file = tmp_path / "file"
    file.touch()
    with Store(file) as store:
        assert store.results() == []


@pytest.fixture
def folder():
    """A directory of a user who may not write everywhere, as root may."""
    with TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        user = os.geteuid()
        yield Path(name)
        os.seteuid(user)
        Path(name).chmod(0o755)


def only_read(folder):
    """From here on the files of a folder can be read, and nothing can be written there."""
    for path in (*folder.iterdir(), folder):
        path.chmod(0o555 if path.is_dir() else 0o444)
    if os.geteuid() == 0:
        os.seteuid(65534)


def test_a_store_that_may_only_be_read_is_read(folder):
    """A report of one ended in "attempt to write a readonly database"."""
    path = folder / "results.sqlite"
    with Store(path) as store:
        store.put_all(seeds(3), ABOUT)
        store._db.execute("PRAGMA user_version = 1")  # an old one is read as one of today
        before = store.records()
    only_read(folder)
    names = set(folder.iterdir())
    with Store(path, read_only=True) as store:
        assert store.records() == before
        assert store.keys() == {record.result.case.key for record in before}
    assert set(folder.iterdir()) == names
    with pytest.raises(
        StoreError, match=r"results.sqlite cannot be used .* Allow writing to the file and its directory"
    ):
        Store(path)
    with pytest.raises(StoreError, match=r"new.sqlite cannot be used .* Allow reading and writing in its directory"):
        Store(folder / "new.sqlite")
    with pytest.raises(StoreError, match=r"new.sqlite cannot be created: Permission denied\. Choose another directory"):
        Store(folder / "sub" / "new.sqlite")


def test_a_store_is_read_while_another_process_writes(tmp_path):
    with Store(tmp_path / "results.sqlite") as writer:
        writer.put_all(seeds(2), ABOUT)  # they are in the log, and not yet in the file
        with Store(tmp_path / "results.sqlite", read_only=True) as reader:
            assert reader.results() == writer.results()
    with pytest.raises(StoreError, match=r"nothere\.sqlite does not exist"):
        Store(tmp_path / "nothere.sqlite", read_only=True)


def test_a_full_disk_is_told_and_what_was_stored_is_kept(store):
    store.put_all(seeds(2), ABOUT)
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreError, match=r"disk is full\. Make room .* again: stored results are kept\."):
        store.put_all(seeds(200, width=32), ABOUT)
    assert store.results() == seeds(2)


def test_damage_in_the_middle_is_told(store):
    """It was a traceback of sqlite3."""
    store.put_all(seeds(100), ABOUT)
    store.close()
    data = bytearray(store.path.read_bytes())
    data[4096:] = bytes([255]) * (len(data) - 4096)
    store.path.write_bytes(data)
    with Store(store.path) as again, pytest.raises(StoreError, match=r"malformed\. It is damaged: choose another file"):
        again.results()


def write(path, start, stored):
    start.wait()
    with Store(path) as store:
        stored.put(sum(store.put(result, ABOUT) for result in seeds(20)))


def test_writers_at_once_store_each_case_once(tmp_path):
    """The file is made by all of them at once, too."""
    path, context = tmp_path / "results.sqlite", multiprocessing.get_context("fork")
    start, stored = context.Barrier(4), context.Queue()
    writers = [context.Process(target=write, args=(path, start, stored)) for _ in range(4)]
    for writer in writers:
        writer.start()
    assert sum(stored.get(timeout=60) for _ in writers) == 20
    for writer in writers:
        writer.join()
    with Store(path) as store:
        assert [found.G_A for found in store.results()] == [90.0 + seed for seed in range(20)]


def test_a_store_that_is_being_made_is_not_of_another_program(tmp_path, monkeypatch):
    """Of four processes that made one store at once, one read whose it was too early and of tables too late."""
    path = tmp_path / "results.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as maker:
        maker.execute("PRAGMA journal_mode = WAL")
        maker.execute("SELECT * FROM sqlite_master")

        class Reader(sqlite3.Connection):
            def execute(self, statement, *values):
                answer = super().execute(statement, *values)
                if "application_id" in statement:
                    maker.executescript(
                        f"BEGIN; CREATE TABLE results (a); PRAGMA application_id = {database.APPLICATION}; COMMIT"
                    )
                return answer

        monkeypatch.setattr(database.sqlite3, "connect", functools.partial(sqlite3.connect, factory=Reader))
        database.check(path)
        assert maker.execute("SELECT count(*) FROM sqlite_master").fetchone() == (1,)


def test_a_lock_is_waited_for_where_sqlite_does_not():
    """Six processes that made one store at once failed now and then: "database is locked", in spite of a timeout."""
    answers = [sqlite3.OperationalError("database is locked")] * 2 + [None, sqlite3.OperationalError("disk I/O error")]

    def execute(statement):
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    db = SimpleNamespace(execute=execute)
    database._patiently(db, "PRAGMA")
    assert len(answers) == 1
    with pytest.raises(sqlite3.OperationalError, match="disk"):
        database._patiently(db, "PRAGMA")


def test_a_store_is_a_regular_file(tmp_path):
    """Of /dev/null and of a FIFO it was said that their disk may be full."""
    os.mkfifo(tmp_path / "fifo")
    for path in (Path("/dev/null"), tmp_path / "fifo"):
        with pytest.raises(StoreError, match="is not a regular file, as a store must be"):
            Store(path)


def test_a_store_of_version_1_is_made_one_of_today(tmp_path):
    """Its keys had all settings, of which there were fewer, and one was of another type."""
    case = dataclasses.replace(CASE, settings=FASTFF.changed({"augment": 1.0}).items())
    with Store(tmp_path / "old.sqlite") as store:
        store.put(result(case), ABOUT)
    early = dict(case.settings) | {"augment": True}
    del early["teacher_share"]
    with sqlite3.connect(tmp_path / "old.sqlite") as db:
        db.execute("UPDATE results SET key = 'all', settings = ?", [json.dumps(sorted(early.items()))])
        db.execute("PRAGMA user_version = 1")
    db.close()
    for _ in range(2):  # and stays so
        with Store(tmp_path / "old.sqlite") as store:
            assert store.get(case).case == case
            assert store.keys() == {case.key}
