"""benchmarks/wide_search.py: both rounds on handwritten digits, and the choice by validation."""

import csv
import json
from pathlib import Path

import pytest
import wide_search


@pytest.mark.slow
def test_the_best_trial_of_two_rounds_is_chosen(tmp_path):
    rows, choice = tmp_path / "search.csv", tmp_path / "choice.json"
    words = ["--models", "FF", "--width", "64", "--dataset", "digits", "--epochs", "1", "--evaluate-every", "1"]
    assert wide_search.main([*words, "--output", str(rows), "--choice", str(choice)]) == 0
    with rows.open(newline="") as file:
        made = list(csv.DictReader(file))
    with (Path(__file__).parents[2] / "results" / "search.csv").open(newline="") as file:
        assert list(made[0]) == next(csv.reader(file))
    assert len(made) == len(wide_search.DATA) + len(wide_search.FACTORS)
    assert {row["seeds"] for row in made} == {"100 101"}
    best = max(made, key=lambda row: float(row["validation"]))
    (chosen,) = json.loads(choice.read_text()).values()
    settings = json.loads(best["settings"])
    assert all(settings[name] == value for name, value in chosen.items() if name in settings)


def test_round_two_starts_from_the_best_of_round_one():
    first = wide_search.trial("cifar10", 1024, "FFF", {"shift": 0.125})
    assert {case.goal for case in first.cases} == {"G_A"}
    assert {case.seed for case in first.cases} == set(wide_search.SEEDS)
    settings = dict(first.cases[0].settings)
    lists = wide_search.second(first)
    assert all(changes["shift"] == 0.125 for changes in lists)
    assert {"shift": 0.125, "weight_decay": settings["weight_decay"] * 2} in lists
    assert {"shift": 0.125, "sharing": 0.98} in lists
    assert len(wide_search.second(wide_search.trial("cifar10", 1024, "FF", {}))) == len(wide_search.FACTORS)


def test_another_model_is_refused(capsys):
    with pytest.raises(SystemExit):
        wide_search.main(["--models", "GPT"])
    assert "unknown model 'GPT'; choose from FFF, MoE, FF" in capsys.readouterr().err
