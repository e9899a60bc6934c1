"""Whole trainings: what they measure, on real data, and that a stopped one reaches the same numbers."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from small_cases import cases, numbers

from fastff_reproduce import members, trainer
from fastff_reproduce.trainer import train

SHARED = Path(os.environ.get("FASTFF_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))


@pytest.mark.slow
def test_real_images_with_leaves_of_one_neuron():
    """USPS where it is at hand, else digits. One neuron tells no ten digits apart: only the tree can."""
    real = (SHARED / "usps").is_dir()
    dataset, floor = ("usps", 85.0) if real else ("digits", 80.0)
    trained = cases(depth=5, leaf_width=1, goal="G_A", dataset=dataset, steps=1500 if real else 800)
    for result in train(trained, device="cpu", root=SHARED if real else None):
        assert result.G_A - floor > 0
        assert abs(result.soft_hard_gap) <= 0.5
        assert result.smallest_share >= 0.1
        assert result.leaves_used == 32
        assert result.inference_size == 6


@pytest.mark.slow
def test_a_broken_tree_would_not_pass(monkeypatch):
    """What the test above would see if every sample went to one leaf."""
    monkeypatch.setattr(members.Recipe, "loss", lambda self: 0.0)

    monkeypatch.setattr(members, "shift_biases_", lambda bias, logits, least: bias.detach().fill_(1e3))
    (result,) = train(cases(seeds=[0], depth=5, leaf_width=1, goal="G_A", steps=800), device="cpu", root=None)
    assert result.G_A < 60
    assert result.smallest_share == 0


@pytest.mark.slow
@pytest.mark.parametrize("model", ["FF", "MoE", "FFF"])
def test_models_learn_and_are_measured(model):
    depth = {"FF": 0, "MoE": 0, "FFF": 3}[model]
    options = {"depth": depth} if model != "MoE" else {"depth": 0, "leaf_width": 4}
    made = cases(model=model, **options, steps=400)
    if model != "FFF":
        made = [dataclasses.replace(case, width=32, leaf_width=4 if model == "MoE" else 32) for case in made]
    for result in train(made, device="cpu", root=None):
        assert result.M_A > 85
        assert result.G_A > 80
        assert 0 < result.ETT <= result.epochs
        assert result.epochs == result.history["epoch"][-1]
        assert max(result.history["training"]) == pytest.approx(result.M_A, abs=1e-3)
        assert len(result.history["validation"]) == len(result.history["epoch"])
        assert (result.soft_hard_gap is None) == (model != "FFF")
        assert ("entropy" in result.history) == (model == "FFF")
        if model == "FFF":  # a number for each layer in each epoch
            used, shares = result.history["leaves_used"], result.history["smallest_share"]
            assert len(used) == len(shares) == len(result.history["epoch"])
            assert used[-1] == [8]
            assert all((count == 8) == (0 < share <= 1) for (count,), (share,) in zip(used, shares, strict=True))


@pytest.mark.slow
def test_goals_measure_what_they_are_for():
    (memory,) = train(cases(seeds=[0], goal="M_A"), device="cpu", root=None)
    assert (memory.G_A, memory.ETT) == (None, None)
    assert memory.M_A > 80
    (general,) = train(cases(seeds=[0], goal="G_A"), device="cpu", root=None)
    assert (general.M_A, general.ETT_M) == (None, None)
    assert general.G_A > 80


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_training_goes_on_where_it_was_stopped(tmp_path, monkeypatch, device):
    """With noise, transposition, averaging and a rate that halves: everything that could go wrong."""
    monkeypatch.setattr(trainer, "CHECKPOINT_SECONDS", 0.0)
    made = cases(transposition=0.1, averaging=0.9, plateau=2, patience=30)
    whole = train(made, device=device, root=None)
    path = tmp_path / "checkpoint.pt"

    class Stop(Exception):
        pass

    def stop(epoch, most, text):
        if path.exists() and epoch > most / 2:
            raise Stop

    with pytest.raises(Stop):
        train(made, device=device, root=None, checkpoint=path, report=stop)
    torch.manual_seed(99)  # whatever the process did in between
    assert numbers(train(made, device=device, root=None, checkpoint=path)) == numbers(whole)
    with pytest.raises(ValueError, match="checkpoint belongs to another training"):
        train(cases(seeds=[5, 6]), device=device, root=None, checkpoint=path)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_short_training_is_not_averaged_with_its_start(optimizer):
    rate = {"adam": 3e-3, "sgd": 0.2}[optimizer]
    found = {
        averaging: train(
            cases(seeds=[0], averaging=averaging, optimizer=optimizer, rate=rate, steps=200), device="cpu", root=None
        )[0].G_A
        for averaging in (0.0, 0.999)
    }
    assert found[0.999] > found[0.0] - 5 > 60


def test_training_leaves_the_generator_of_the_process_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train(cases(seeds=[0], steps=20), device="cpu", root=None)
    assert torch.equal(torch.rand(3), expected)


def test_cases_that_do_not_belong_together():
    with pytest.raises(ValueError, match="differ in the seed alone"):
        train([*cases(seeds=[0]), *cases(seeds=[1], rate=0.5)], device="cpu", root=None)


@pytest.mark.slow
def test_a_killed_sweep_goes_on(tmp_path):
    """kill -9 in the middle, run again: the rows of a sweep that nobody killed, none twice."""

    def command(store):
        words = "reproduce table1 --dataset digits --widths 16 --leaf-widths 4,2 --runs 2 --recipe fastff --device cpu"
        words += " --set steps=150 --format json --store"
        return [sys.executable, "-m", "fastff", *words.split(), str(store)]

    whole = subprocess.run(command(tmp_path / "whole.sqlite"), capture_output=True, text=True, check=True).stdout
    store = tmp_path / "killed.sqlite"
    process = subprocess.Popen(command(store), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if line.startswith("2 of"):  # two groups are stored, and the third is on its way
            break
    time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    again = subprocess.run(command(store), capture_output=True, text=True, check=True)
    assert again.stderr.count("seeds 0 to 1") < 6  # it did not begin anew

    def rows(text):
        return [{name: value for name, value in row.items() if name != "seconds"} for row in json.loads(text)]

    assert rows(again.stdout) == rows(whole)
    assert len(rows(whole)) == 6
