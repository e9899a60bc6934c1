"""Results as CSV rows and back; rows that no training can have produced are refused."""

import csv
import dataclasses
import json

import pytest
from stored import ABOUT, CASE, result, seeds

from fastff_reproduce import result_rows
from fastff_reproduce.recipes import FASTFF, PAPER
from fastff_reproduce.runs import Case, Result
from fastff_reproduce.store import Store


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "folder" / "results.sqlite") as store:
        yield store


def test_small_rows_as_csv(store, tmp_path):
    store.put_all(seeds(2), ABOUT)
    file = tmp_path / "out" / "results.csv"
    file.parent.mkdir()
    file.write_text("old")
    assert store.export(file) == 2
    rows = list(csv.DictReader(file.open()))
    assert list(rows[0]) == [*result_rows.CASE, *result_rows.FOUND, *result_rows.ABOUT]
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


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [("seed", "-1", "a row has the seed -1; seeds are 0"), ("model", "foo", "a row has the model 'foo'; models are")],
)
def test_rows_that_no_training_has_are_refused(name, value, error, tmp_path):
    """`report --rows` stored them."""
    path = tmp_path / "rows.csv"
    with Store(tmp_path / "a.sqlite") as store:
        case = Case("usps", "FFF", 16, 8, 1, "fastff", "G_A", 3, FASTFF.items())
        store.put(Result(case, G_A=90.0), dict.fromkeys(result_rows.ABOUT, "x"))
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
