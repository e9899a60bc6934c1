"""A training whose numbers are no longer finite is no result, and harms none that trains beside it."""

import dataclasses
import math
import pickle

import pytest
import torch

from fastff_reproduce import scoring, trainer
from fastff_reproduce.divergence import Diverged, Watch, remedy
from fastff_reproduce.loop import Training
from fastff_reproduce.recipes import FASTFF, PAPER
from fastff_reproduce.resume import Damaged, load, save
from fastff_reproduce.runs import Case, Result
from fastff_reproduce.trainer import train

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def cases(seeds=(0, 1), model="FFF", goal="both", settings=FASTFF, **changes):
    settings = settings.changed({"epochs": 90} | changes)
    depth, leaf_width = {"FFF": (3, 4), "FF": (0, 32), "MoE": (0, 8)}[model]
    return [Case("digits", model, 32, leaf_width, depth, "fastff", goal, seed, settings.items()) for seed in seeds]


def numbers(results):
    return [dataclasses.asdict(dataclasses.replace(result, seconds=0)) for result in results]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("model", "settings", "changes", "epoch"),
    [
        ("FFF", FASTFF, {"rate": 1e30}, 1),
        ("FFF", FASTFF, {"balance": 1e38}, 2),
        ("FFF", PAPER, {"rate": 1e30}, 1),
        ("FF", FASTFF, {"rate": 1e30, "averaging": 0.0}, 1),
        ("MoE", PAPER, {"rate": 1e30}, 1),
    ],
)
def test_a_diverged_training_is_no_result(model, settings, changes, epoch, device):
    """They reached 10.6 % and a plausible 65 %, and were stored."""
    made = cases(model=model, settings=settings, **changes)
    with pytest.raises(Diverged) as info:
        train(made, device=device, root=None)
    assert info.value.results == []
    assert list(info.value.reasons) == made
    for reason in info.value.reasons.values():
        assert reason.startswith(f"the loss was not finite in epoch {epoch} (step ")
        for name in ("rate", *(["balance"] if changes.get("balance") else [])):
            assert f"{name} (here {dict(made[0].settings)[name]})" in reason


def poison(what):
    """An epoch of training that leaves the first member of an ensemble with a number that is not finite."""
    epoch = Training._train_epoch

    def train_epoch(self):
        epoch(self)
        with torch.no_grad():
            if self.epoch == 37:
                what(self)

    return train_epoch


def a_weight(self):
    self.ensemble.flat[0, 5] = -math.inf


def a_moment(self):
    self.optimizer.moments[1][0, 7] = math.inf  # its weight would never move again


def a_mean(self):
    self.mean[0, 3] = math.nan


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("what", [a_weight, a_moment, a_mean])
def test_the_others_of_an_ensemble_are_as_if_it_had_not(what, device, monkeypatch, tmp_path):
    """Of three that train at once the first diverges: the numbers of the others are the same, its checkpoint finite."""
    whole = train(cases(seeds=(0, 1, 2)), device=device, root=None)
    monkeypatch.setattr(Training, "_train_epoch", poison(what))
    monkeypatch.setattr(trainer, "CHECKPOINT_SECONDS", 0.0)
    made, path = cases(seeds=(0, 1, 2)), tmp_path / "checkpoint.pt"
    with pytest.raises(Diverged) as info:
        train(made, device=device, root=None, checkpoint=path)
    assert list(info.value.reasons) == made[:1]
    assert numbers(info.value.results) == numbers(whole[1:])
    state = load(path, "cpu")
    assert all(tensor.isfinite().all() for tensor in [*state["ensemble"].values(), *state["optimizer"]["moments"]])

    with pytest.raises(Diverged) as again:  # it goes on from there, and remembers
        train(made, device=device, root=None, checkpoint=path)
    assert again.value.reasons == info.value.reasons
    assert numbers(again.value.results) == numbers(whole[1:])


@pytest.mark.slow
def test_a_number_in_the_history_that_is_not_finite_is_a_divergence(monkeypatch):
    """The weights may be finite where what is measured of them is not."""
    found = Training._measure_trees

    def overflow(self, measure):
        layers = found(self, measure)
        if measure is scoring.entropies and self.epoch > 30:
            layers[0][1] = math.nan
        return layers

    monkeypatch.setattr(Training, "_measure_trees", overflow)
    with pytest.raises(Diverged, match=r"seed 1: entropy was not finite after epoch \d+\. Lower rate") as info:
        train(cases(), device="cpu", root=None)
    assert [result.case.seed for result in info.value.results] == [0]


@pytest.mark.slow
def test_no_training_goes_on_from_what_is_not_finite(tmp_path):
    made, path = cases(), tmp_path / "checkpoint.pt"
    training = Training(made, torch.device("cpu"), trainer._load("digits", None))
    training.advance()
    with torch.no_grad():
        training.ensemble.flat[1, 0] = math.nan
    save(training.state_dict(), path)
    with pytest.raises(
        Damaged, match=r"checkpoint.pt has numbers that are not finite\. Remove it: the training starts"
    ):
        train(made, device="cpu", root=None, checkpoint=path)


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"text" * 99])
def test_a_damaged_checkpoint_is_refused_in_a_sentence(tmp_path, damage):
    made, path = cases(), tmp_path / "checkpoint.pt"
    training = Training(made, torch.device("cpu"), trainer._load("digits", None))
    save(training.state_dict(), path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(Damaged, match=r"checkpoint.pt is damaged\. Remove it: its training starts again\."):
        train(made, device="cpu", root=None, checkpoint=path)


@pytest.mark.parametrize("state", [{}, [], {"keys": []}, {"keys": None, "epoch": 3}])
def test_another_file_is_no_checkpoint(tmp_path, state):
    path = tmp_path / "checkpoint.pt"
    torch.save(state, path)
    with pytest.raises(Damaged, match="Remove it"):
        train(cases(), device="cpu", root=None, checkpoint=path)


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    """Written half, it is removed; torch says RuntimeError where the disk is full."""
    path = tmp_path / "checkpoint.pt"
    save({"epoch": 1}, path)
    before = path.read_bytes()

    def full(state, file):
        file.write(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"checkpoint.pt cannot be written: .*file write failed.* Free some space"):
        save({"epoch": 2}, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_the_first_step_that_is_not_finite_is_told():
    watch = Watch(3, torch.device("cpu"))
    for step, losses in enumerate([[1, 1, 1], [1, math.nan, 1], [math.inf, 1, 1]], 1):
        watch.note(torch.tensor(losses), torch.tensor(float(step)))
    rows = [{}, {}, {}]
    assert watch.find(2, 2, {"a weight": [torch.zeros(3, 4)]}, rows) == [0, 1]
    assert watch.reasons == {
        0: "the loss was not finite in epoch 2 (step 3)",
        1: "the loss was not finite in epoch 1 (step 2)",
    }
    assert watch.find(2, 2, {"a weight": [torch.zeros(3, 4)]}, rows) == []  # known by now
    assert watch.find(4, 2, {"a weight": [torch.zeros(3), torch.full((3, 1), math.nan)]}, rows) == [2]
    assert watch.reasons[2] == "a weight was not finite after epoch 4"


@pytest.mark.parametrize("name", ["weight_decay", "noise", "logit_std"])
def test_the_remedy_names_what_was_set(name):
    """It named the rate and the balance, which were the recipe's own."""
    (usual,), (case,) = cases(seeds=[0]), cases(seeds=[0], **{name: 1e30})
    assert remedy(usual) == "Lower rate (here 0.003) or balance (here 0.3) with --set."
    assert remedy(case).startswith(f"No recipe uses {name} (here 1e+30): leave that --set out, or lower rate (here")


def test_an_error_travels_between_processes():
    (case,) = cases(seeds=[0])
    error = pickle.loads(pickle.dumps(Diverged({case: "why"}, [Result(case, G_A=1.0)])))
    assert (error.reasons, error.results) == ({case: "why"}, [Result(case, G_A=1.0)])
    assert str(error) == "digits FFF w=32 l=4 fastff both seed 0: why"
