"""`fastff reproduce list` and `--dry-run`."""

import csv
import io
import json
import os
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
from fakes import cells, fastff_, install, store_file, train

from fastff_reproduce import data


@pytest.fixture(autouse=True)
def _fakes(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path)


@pytest.fixture
def untrained(monkeypatch):
    def never(*_, **__):
        raise AssertionError("it was trained")

    monkeypatch.setitem(sys.modules, "fastff_reproduce.trainer", SimpleNamespace(train=never))


def test_a_dry_run_says_what_is_stored_and_what_is_not(untrained, monkeypatch):
    done = fastff_("reproduce table1 --device cpu --dataset usps --runs 4 --recipe paper --dry-run")
    assert done.exit_code == 0, done.output
    assert not os.path.exists(store_file())
    assert "0 trainings stored, 16 to do" in done.stdout
    monkeypatch.setitem(sys.modules, "fastff_reproduce.trainer", SimpleNamespace(train=train))
    assert fastff_("reproduce table1 --device cpu --dataset usps --runs 2 --recipe paper").exit_code == 0
    done = fastff_("reproduce table1 --device cpu --dataset usps --runs 4 --recipe paper --dry-run --format json")
    rows = json.loads(done.stdout)
    assert [(row["model"], row["goal"], row["stored"], row["to_train"]) for row in rows] == [
        (model, goal, [0, 1], [2, 3]) for model in ("FF", "FFF") for goal in ("M_A", "G_A")
    ]
    text = fastff_("reproduce table1 --device cpu --dataset usps --runs 4 --recipe paper --dry-run --format csv").stdout
    assert next(csv.DictReader(io.StringIO(text)))["to_train"] == "2 3"
    table = fastff_("reproduce table1 --device cpu --dataset usps --runs 9 --recipe paper --dry-run")
    assert cells(table.stdout)[1] == ["usps", "FF", "16", "16", "0", "paper", "G_A", "2", "7"]  # and no seeds


def test_a_dry_run_looks_for_the_data(untrained, monkeypatch):
    def load(name, root=None, **_):
        assert str(root) == "/nodata"
        raise FileNotFoundError(f"{name} needs files")

    monkeypatch.setattr("fastff_reproduce.data.load", load)
    done = fastff_("reproduce table1 --device cpu --dataset usps --dry-run --data /nodata --format json")
    assert done.exit_code == 0
    assert done.stderr == "usps: not here, in /nodata. Training downloads it if it can.\n"
    assert json.loads(done.stdout)


def test_list_tells_what_there_is(monkeypatch):
    def load(name, root=None, *, download=True, **_):
        assert not download
        if name == "mnist":
            raise FileNotFoundError

    monkeypatch.setattr(data, "load", load)
    done = fastff_("reproduce list --format json")
    assert json.loads(done.stdout) == [
        {
            "experiment": "table1",
            "title": "Table 1",
            "about": "the training counterparts",
            "trainings": 2 * 2 * 2 * 2 * 10,
            "data": {"usps": "here", "mnist": "not here"},
        },
        {"experiment": "speed", "title": "Speed", "about": "run fastff bench blocks", "trainings": 0, "data": {}},
        {"experiment": "regions", "title": "Regions", "about": "the first figure", "trainings": 0, "data": {}},
    ]
    rows = list(csv.DictReader(io.StringIO(fastff_("reproduce list --format csv").stdout)))
    assert [row["experiment"] for row in rows] == ["table1", "speed", "regions"]
    assert rows[0]["data"] == "usps: here; mnist: not here"
    table = fastff_("reproduce list").stdout
    assert ["table1", "Table 1", "160", "usps"] in cells(table)
    assert "mnist: not here" in table
