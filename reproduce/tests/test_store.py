"""Results are found by their case, once, with all that belongs to them."""

import dataclasses
import math
import sqlite3

import pytest
from stored import ABOUT, CASE, result, seeds

from fastff_reproduce import store as module
from fastff_reproduce.recipes import FASTFF
from fastff_reproduce.settings import completed
from fastff_reproduce.store import Store


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
    with pytest.raises(ValueError, match=r"no column 'leaf'; choose from key, dataset"):
        store.results(leaf=4)


def test_a_case_is_found_when_there_are_more_settings(store, tmp_path):
    """Settings that are as usual are not in the key, and those of another type are read as they are now."""
    case = dataclasses.replace(CASE, settings=FASTFF.items())
    early = dataclasses.replace(case, settings=tuple(item for item in case.settings if item[0] != "teacher_share"))
    assert early.key == case.key
    store.put(result(early), ABOUT)
    assert store.get(case).case == case
    assert dict(completed({"augment": True, "rate": 1}))["augment"] == 1.0
    assert type(dict(completed({"augment": True, "rate": 1}))["rate"]) is float


def test_about_says_where_when_and_how():
    about = module.about("cpu")
    assert list(about) == module.ABOUT
    assert about["device"] == "cpu"
    assert about["date"].startswith("20")
    assert all(isinstance(value, str) for value in about.values())
    assert about["machine"]
