"""benchmarks/vit_search.py: the whole path on handwritten digits, from a dense teacher to rows."""

import csv
import json
from pathlib import Path

import pytest
import torch
import vit_search

from fastff_reproduce.experiments import EXPERIMENTS
from fastff_reproduce.recipes import VIT
from fastff_reproduce.settings import completed
from fastff_reproduce.teacher import path_of
from fastff_reproduce.trainer import train

COMMON = ["--dataset", "digits", "--epochs", "2", "--teacher-epochs", "2", "--common", "evaluate_every=1,batch=256"]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A dense transformer of two epochs."""
    folder = tmp_path_factory.mktemp("teacher")
    torch.set_num_threads(1)
    changes = {"epochs": 2, "evaluate_every": 1, "batch": 256}
    table3 = EXPERIMENTS["table3"].cases
    (case,) = table3(["digits"], models=["ViT-FF"], recipes=["fastff"], seeds=[100], changes=changes)
    train([case], device="cpu", root=None, checkpoint=folder / "own.pt")
    return path_of(folder, case)


@pytest.mark.slow
def test_trials_are_trained_from_one_teacher(teacher, tmp_path, capfd):
    """Mixed images, two leaf widths, two processes; a row for each trial, in the columns of results/search.csv."""
    rows = tmp_path / "search.csv"
    words = [*COMMON, "--teacher", str(teacher), "--leaf-widths", "32,8", "--processes", "2", "--output", str(rows)]
    assert vit_search.main([*words, "--trial", "sharing=0.5,noise=0.2"]) == 0
    with rows.open(newline="") as file:
        made = list(csv.DictReader(file))
    with (Path(__file__).parents[2] / "results" / "search.csv").open(newline="") as file:
        assert list(made[0]) == next(csv.reader(file))
    assert sorted((row["leaf_width"], "sharing" in row["settings"]) for row in made) == [
        ("32", False),
        ("32", True),
        ("8", False),
        ("8", True),
    ]
    for row in made:
        settings = dict(completed(json.loads(row["settings"])))
        assert (settings["epochs"], settings["teacher_share"], settings["cutmix"]) == (2, 1.0, 0.5)
        assert 5 < float(row["validation"]) <= 100
        assert row["epochs"] == "2"
    told = capfd.readouterr().out
    assert told.count("validation") == 4
    assert "sharing=0.5, noise=0.2" in told


@pytest.mark.slow
def test_a_trial_ends_in_time(teacher):
    options = vit_search.argparse.Namespace(
        causes=[], trial=[], epochs=50, teacher_epochs=2, leaf_widths=[32], dataset="digits", seed=100, common={}
    )
    (trial,) = vit_search.trials(options)
    result, _ = vit_search.run(trial.case, teacher, "cpu", None, 0.0)
    assert result.epochs == VIT.evaluate_every  # the first evaluation


def test_causes_are_tried_one_at_a_time(tmp_path, capsys):
    file = tmp_path / "x.dense.pt"
    file.write_text("")
    words = ["--teacher", str(file), "--leaf-widths", "8,1", "--list"]
    assert vit_search.main([*words, "--causes", "leaves,fit", "--trial", "rate=5e-4", "sharing=0.5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(set(lines)) == 2 * (1 + 4 + 3 + 1)  # sharing=0.5 is one of the leaves' trials
    assert lines[0] == "l=8   the recipe"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seed", "3"], "--seed must be 100 or more: lower ones belong to the table; got 3"),
        (["--causes", "luck"], "unknown cause 'luck'; choose from fit, leaves, optimisation"),
        (["--trial", "cutmix=0.1"], "cutmix=0.1 needs another teacher"),
        (["--trial", "loud"], "a trial is name=value,name=value; got 'loud'"),
        (["--trial", "nois=1"], "unknown setting 'nois'"),
        (["--teacher", "nowhere.pt"], "nowhere.pt is not a file. Train it"),
    ],
)
def test_what_cannot_be_tried_is_refused(tmp_path, capsys, words, message):
    file = tmp_path / "x.dense.pt"
    file.write_text("")
    with pytest.raises(SystemExit):
        vit_search.main(["--teacher", str(file), *words])
    assert message in capsys.readouterr().err
