import csv
import dataclasses
import functools
import hashlib
import json
import math
import multiprocessing
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest

from fastff_reproduce import store as module
from fastff_reproduce.runs import Case, Result
from fastff_reproduce.settings import FASTFF, PAPER, completed
from fastff_reproduce.store import Store, StoreError

ABOUT = {name: f"the {name}" for name in module.ABOUT}
CASE = Case("usps", "FFF", 16, 8, 1, "paper", "G_A", 0, (("h", 3.0), ("steps", (1, 2))))


def result(case=CASE, **found):
    return Result(case, **{"G_A": 92.5, "ETT": 7, "seconds": 1.5, "history": {"entropy": [0.5, 0.25]}} | found)


def seeds(count, **changes):
    return [result(dataclasses.replace(CASE, seed=seed, **changes), G_A=90.0 + seed) for seed in range(count)]


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "folder" / "results.sqlite") as store:
        yield store


def test_what_is_put_is_found_by_its_case(store):
    stored = result(M_A=None, soft_hard_gap=0.1, leaves_used=2, smallest_share=1 / 3, inference_size=9, epochs=12)
    assert store.get(CASE) is None
    assert store.put(stored, ABOUT)
    found = store.get(CASE)
    assert found == stored
    assert hash(found.case) == hash(CASE)  # tuples came back as tuples
    assert found.case.key == CASE.key
    assert store.get(dataclasses.replace(CASE, seed=1)) is None
    assert store.get(dataclasses.replace(CASE, settings=(("h", 5.0),))) is None
    assert store.records()[0].about == ABOUT


def test_an_infinite_setting_comes_back(tmp_path):
    """h = infinity is a setting of the paper."""
    case = dataclasses.replace(CASE, settings=(("h", math.inf),))
    with Store(tmp_path / "s") as store:
        store.put(result(case), ABOUT)
        assert store.get(case).case.settings == (("h", math.inf),)


def test_the_first_result_of_a_case_stays(store):
    assert store.put(result(G_A=92.5), ABOUT)
    assert not store.put(result(G_A=11.0), ABOUT)
    assert store.put_all(seeds(3), ABOUT) == 2
    assert [found.G_A for found in store.results()] == [92.5, 91.0, 92.0]


def test_several_are_stored_all_or_none(store):
    bad = result(dataclasses.replace(CASE, seed=9), G_A=object())
    with pytest.raises((sqlite3.Error, TypeError)):
        store.put_all([*seeds(3), bad], ABOUT)
    assert store.results() == []
    assert store.put_all(seeds(3), ABOUT) == 3  # no transaction was left open


def test_results_are_filtered(store):
    store.put_all([*seeds(3), *seeds(2, dataset="mnist", leaf_width=4)], ABOUT)
    assert len(store.results()) == 5
    assert {found.case.dataset for found in store.results(leaf_width=4)} == {"mnist"}
    assert [found.case.seed for found in store.results(seed=[0, 2], dataset="usps")] == [0, 2]
    assert store.results(seed=[]) == []
    assert [found.history for found in store.results(history=False, dataset="mnist")] == [{}, {}]
    assert store.keys() == {found.case.key for found in store.results()}
    with pytest.raises(ValueError, match=r"no column 'leaf'\. There are: key, dataset"):
        store.results(leaf=4)


def test_small_rows_as_csv(store, tmp_path):
    store.put_all(seeds(2), ABOUT)
    file = tmp_path / "out" / "results.csv"
    file.parent.mkdir()
    file.write_text("old")
    assert store.export(file) == 2
    rows = list(csv.DictReader(file.open()))
    assert list(rows[0]) == [*module.CASE, *module.FOUND, *module.ABOUT]
    assert list(rows[0])[:4] == ["dataset", "model", "width", "leaf_width"]
    assert [(row["dataset"], row["seed"], row["G_A"], row["M_A"]) for row in rows] == [
        ("usps", "0", "90", ""),
        ("usps", "1", "91", ""),
    ]
    assert json.loads(rows[0]["settings"]) == {"h": 3.0, "steps": [1, 2]}
    assert [path.name for path in file.parent.iterdir()] == ["results.csv"]  # no draft is left


def test_a_file_of_results_is_a_store_again(store, tmp_path):
    put = [result(dataclasses.replace(CASE, settings=made.items()), M_A=None) for made in (FASTFF, PAPER)]
    store.put_all(put, ABOUT)
    file = tmp_path / "results.csv"
    store.export(file)
    assert len(file.read_text()) < 1500  # settings that are as always are left out
    with Store(tmp_path / "again.sqlite") as again:
        assert (again.include(file), again.include(file)) == (2, 0)
        assert [found.case.key for found in again.results()] == [found.case.key for found in store.results()]
        assert [found.G_A for found in again.results()] == [92.5, 92.5]
        assert again.records()[0].about == ABOUT


def test_a_file_may_have_histories(store, tmp_path):
    put = [result(dataclasses.replace(CASE, settings=made.items())) for made in (FASTFF, PAPER)]
    store.put_all(put, ABOUT)
    small, whole = tmp_path / "small.csv", tmp_path / "whole.csv"
    assert (store.export(small), store.export(whole, history=True)) == (2, 2)
    for files in ([whole], [small, whole], [whole, small]):  # what a store has without a history gets it
        with Store(tmp_path / f"{len(files)}{files[0].stem}.sqlite") as again:
            assert sum(map(again.include, files)) == 2
            assert [found.history for found in again.results()] == [{"entropy": [0.5, 0.25]}] * 2
    with Store(tmp_path / "own.sqlite") as other:  # and what has one keeps it
        other.put_all([dataclasses.replace(found, history={"epoch": [1]}) for found in put], ABOUT)
        assert other.include(whole) == 0
        assert [found.history for found in other.results()] == [{"epoch": [1]}] * 2


def test_a_history_belongs_to_its_result(store, tmp_path):
    """Another training of the same case does not get it."""
    one = result(dataclasses.replace(CASE, settings=FASTFF.items()))
    with Store(tmp_path / "other.sqlite") as other:
        other.put(one, ABOUT | {"date": "another day"})
        other.export(tmp_path / "other.csv", history=True)
    store.put(dataclasses.replace(one, history={}), ABOUT)
    assert store.include(tmp_path / "other.csv") == 0
    assert store.results()[0].history == {}


def test_a_store_of_version_1_is_made_one_of_today(tmp_path):
    """Its keys had all settings, of which there were fewer, and one was of another type."""
    case = dataclasses.replace(CASE, settings=FASTFF.changed({"augment": 1.0}).items())
    with Store(tmp_path / "old.sqlite") as store:
        store.put(result(case), ABOUT)
    early = dict(case.settings) | {"augment": True}
    del early["taught"]
    with sqlite3.connect(tmp_path / "old.sqlite") as db:
        db.execute("UPDATE results SET key = 'all', settings = ?", [json.dumps(sorted(early.items()))])
        db.execute("PRAGMA user_version = 1")
    db.close()
    for _ in range(2):  # and stays so
        with Store(tmp_path / "old.sqlite") as store:
            assert store.get(case).case == case
            assert store.keys() == {case.key}


def test_a_case_is_found_when_there_are_more_settings(store, tmp_path):
    """Settings that are as usual are not in the key, and those of another type are read as they are now."""
    case = dataclasses.replace(CASE, settings=FASTFF.items())
    early = dataclasses.replace(case, settings=tuple(item for item in case.settings if item[0] != "taught"))
    assert early.key == case.key
    store.put(result(early), ABOUT)
    assert store.get(case).case == case
    assert dict(completed({"augment": True, "rate": 1}))["augment"] == 1.0
    assert type(dict(completed({"augment": True, "rate": 1}))["rate"]) is float


@pytest.mark.parametrize(
    ("column", "value", "error"),
    [
        ("goal", "X", "the goal 'X'"),
        ("G_A", "1234.0", "G_A = 1234"),
        ("M_A", "nan", "M_A = nan"),
        ("seconds", "", "no seconds"),
        ("seed", "", "no seed"),
        ("settings", '{"rat": 1.0}', "rat"),
        ("settings", '{"rate": -1.0}', "rate must be"),
        ("history", "[1]", "no history"),
    ],
)
def test_rows_that_cannot_be_results_are_refused(store, tmp_path, column, value, error):
    store.put(result(dataclasses.replace(CASE, settings=FASTFF.items())), ABOUT)
    good, bad = tmp_path / "good.csv", tmp_path / "bad.csv"
    store.export(good, history=True)
    rows = list(csv.DictReader(good.open()))
    with bad.open("w") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerow(rows[0] | {column: value})
    with Store(tmp_path / "new.sqlite") as new:
        with pytest.raises(ValueError, match=rf"bad\.csv is not a file of results.*{error}"):
            new.include(good, bad)
        assert new.results() == []  # nor are those of the good file stored


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "a,b\n", "dataset\nusps\n", "", "\x00\x01"])
def test_another_file_is_not_taken_for_results(store, tmp_path, text):
    file = tmp_path / "other.csv"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"other\.csv is not a file of results"):
        store.include(file)
    assert store.results() == []


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
        (of_tomorrow, "in version 3 of the schema; this fastff reads version 2"),
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
    with pytest.raises(StoreError, match=r"new.sqlite cannot be made: Permission denied\. Choose another directory"):
        Store(folder / "sub" / "new.sqlite")


def test_a_store_is_read_while_another_process_writes(tmp_path):
    with Store(tmp_path / "results.sqlite") as writer:
        writer.put_all(seeds(2), ABOUT)  # they are in the log, and not yet in the file
        with Store(tmp_path / "results.sqlite", read_only=True) as reader:
            assert reader.results() == writer.results()
    with pytest.raises(StoreError, match=r"nothere\.sqlite is not there"):
        Store(tmp_path / "nothere.sqlite", read_only=True)


def test_a_full_disk_is_told_and_what_was_stored_is_kept(store):
    store.put_all(seeds(2), ABOUT)
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreError, match=r"disk is full\. Make room .* again: what was stored is kept\."):
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
                        f"BEGIN; CREATE TABLE results (a); PRAGMA application_id = {module.APPLICATION}; COMMIT"
                    )
                return answer

        monkeypatch.setattr(module.sqlite3, "connect", functools.partial(sqlite3.connect, factory=Reader))
        module._check(path)
        assert maker.execute("SELECT count(*) FROM sqlite_master").fetchone() == (1,)


def test_a_lock_is_waited_for_where_sqlite_does_not():
    """Six processes that made one store at once failed now and then: "database is locked", in spite of a timeout."""
    answers = [sqlite3.OperationalError("database is locked")] * 2 + [None, sqlite3.OperationalError("disk I/O error")]

    def execute(statement):
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    db = SimpleNamespace(execute=execute)
    module._patiently(db, "PRAGMA")
    assert len(answers) == 1
    with pytest.raises(sqlite3.OperationalError, match="disk"):
        module._patiently(db, "PRAGMA")


def test_about_says_where_when_and_how():
    about = module.about("cpu")
    assert list(about) == module.ABOUT
    assert about["device"] == "cpu"
    assert about["date"].startswith("20")
    assert all(isinstance(value, str) for value in about.values())
    assert about["machine"]


def test_a_store_is_a_regular_file(tmp_path):
    """Of /dev/null and of a FIFO it was said that their disk may be full."""
    os.mkfifo(tmp_path / "fifo")
    for path in (Path("/dev/null"), tmp_path / "fifo"):
        with pytest.raises(StoreError, match="is no regular file; a store of results is one"):
            Store(path)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [("seed", "-1", "a row has the seed -1; seeds are 0"), ("model", "foo", "a row has the model 'foo'; there are")],
)
def test_rows_that_no_training_has_are_refused(name, value, error, tmp_path):
    """`report --rows` stored them."""
    path = tmp_path / "rows.csv"
    with Store(tmp_path / "a.sqlite") as store:
        case = Case("usps", "FFF", 16, 8, 1, "fastff", "G_A", 3, FASTFF.items())
        store.put(Result(case, G_A=90.0), dict.fromkeys(module.ABOUT, "x"))
        store.export(path)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerow(rows[0] | {name: value})
    with Store(tmp_path / "b.sqlite") as store:
        with pytest.raises(ValueError, match=error):
            store.include(path)
        assert not store.keys()
