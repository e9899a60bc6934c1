"""The training loop: averages, balance, rates, augmentation."""

import math

import pytest
import torch
import torch.nn.functional as F
from small_cases import cases, numbers

from fastff.regions import smallest_share
from fastff_reproduce import data, loop, members, scoring, trainer
from fastff_reproduce.loop import Training, rate_factor
from fastff_reproduce.mixing import probabilities
from fastff_reproduce.recipes import FASTFF, PAPER
from fastff_reproduce.scoring import accuracy
from fastff_reproduce.trainer import train


@pytest.mark.slow
def test_the_gap_is_that_of_the_goal():
    """At a temperature of 1 the mixture is another model; what it is right about is counted on the data of the goal."""
    for case in cases((0,), goal="M_A", steps=50, final_temperature=1.0) + cases(
        (0,), goal="G_A", steps=50, final_temperature=1.0
    ):
        training = Training([case], torch.device("cpu"), data.load("digits", None))
        while not training.finished:
            training.advance()
        (result,) = training.results()
        with torch.no_grad(), training._averaged():
            if case.goal == "M_A":
                training._rebalance()
                model = training.ensemble.member(0)
                x, y = (
                    training.samples.x[training.samples.training[0]],
                    training.samples.y[training.samples.training[0]],
                )
            else:
                model, (x, y) = training.ensemble.member(0, training.generalised.state), training.samples.test
            gap = (model.soft(x).argmax(1) == y).double().mean() - (model(x).argmax(1) == y).double().mean()
        assert result.soft_hard_gap == pytest.approx(100 * gap.item())
        assert result.soft_hard_gap != 0


@pytest.mark.slow
def test_sharing_keeps_leaves_near_each_other():
    def spread(**changes):
        training = Training(cases(goal="G_A", steps=60, **changes), torch.device("cpu"), trainer._load("digits", None))
        before = training.ensemble.parameters["leaf_in_weight"].detach().std(1).mean().item()
        while not training.finished:
            training.advance()
        return before, training.ensemble.parameters["leaf_in_weight"].detach().std(1).mean().item()

    apart, close = spread(), spread(sharing=0.9)
    assert apart[0] > 0.01
    assert close[0] == 0  # they start alike
    assert 0 < close[1] < apart[1] / 2


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_evaluated_and_kept_is_the_mean_of_the_weights(device):
    training = Training(cases(averaging=0.9, min_share=0.0), torch.device(device), trainer._load("digits", None))
    flat = training.ensemble.flat
    mean, step, seen = flat.clone(), training._step, []

    def watched():
        step()
        seen.append(None)
        kept = min(0.9, (1 + len(seen)) / (10 + len(seen)))
        mean.mul_(kept).add_(flat, alpha=1 - kept)

    training._step = watched
    for _ in range(2):
        training.advance()
    raw = flat.clone()
    torch.testing.assert_close(training.mean, mean, rtol=1e-5, atol=1e-7)
    assert not torch.allclose(mean, raw, rtol=1e-2)
    with training._averaged():
        expected = {name: tensor.clone() for name, tensor in training.ensemble.state_dict().items()}
        assert torch.equal(flat, training.mean)
    assert torch.equal(flat, raw)
    assert training.generalised.epoch == [training.epoch] * 2  # it learns: the last is the best
    for name, tensor in training.generalised.state.items():
        assert torch.equal(tensor, expected[name]), name
    x, y = training.samples.test
    for i, result in enumerate(training.results()):
        assert accuracy(training.ensemble.member(i, expected), x, y) == result.G_A
    assert torch.equal(flat, raw)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("goal", ["M_A", "G_A"])
def test_means_are_balanced(goal, device):
    for result in train(cases(averaging=0.9, min_share=0.5, balance=0.0, depth=4, goal=goal), device=device, root=None):
        assert result.smallest_share >= 0.5


@pytest.mark.slow
def test_weights_that_are_averaged_stay_balanced():
    """Not only their means, which are what is evaluated."""
    made = cases(averaging=0.9, min_share=0.5, balance=0.0, depth=4, goal="G_A")
    training = Training(made, torch.device("cpu"), trainer._load("digits", None))
    training.advance()
    for i in range(len(made)):
        (visits,) = scoring.visits(training.ensemble.member(i), training.samples.x[training.samples.training[i]])
        assert smallest_share(visits) >= 0.5
        (visits,) = scoring.visits(training.ensemble.member(i, training.generalised.state), training.samples.x)
        assert smallest_share(visits) > 0.3


@pytest.mark.slow
def test_rebalancing_goes_by_parts_of_an_ensemble(monkeypatch):
    made = cases(seeds=[0, 1, 2], depth=4, min_share=0.9, steps=40)
    whole = train(made, device="cpu", root=None)
    monkeypatch.setattr(members, "LOGITS", 2 * 15 * 1797)
    assert numbers(train(made, device="cpu", root=None)) == numbers(whole)


@pytest.mark.slow
def test_rates_halve_on_a_plateau_and_members_stop():
    made = cases(settings=PAPER, steps=2000, patience=3, plateau=2, rate=1e-9, batch=512)
    training = Training(made, torch.device("cpu"), trainer._load("digits", None))
    while not training.finished:
        training.advance()
    assert training.epoch < training.most_epochs
    assert all(rate < 1e-9 for rate in training.rates)


@pytest.mark.slow
def test_flat_inputs_are_changed_as_images(monkeypatch):
    images = trainer._load("digits", None).train.x
    seen = []

    def still(x, strength, vertical):
        seen.append((x, strength, vertical))
        return x

    monkeypatch.setattr(loop, "augment", still)
    histories = []
    for change in ({}, {"augment": 0.5}, {"mirror": True}, {"augment": 0.7, "mirror": True}):
        made = train(cases(steps=20, standardise=False, **change), device="cpu", root=None)
        histories.append([result.history for result in made])
    assert all(history == histories[0] for history in histories)
    assert {(strength, vertical) for _, strength, vertical in seen} == {(0.5, True), (0.0, False), (0.7, False)}
    for x, _, _ in seen:
        assert x.shape[1:] == images.shape[1:]
        assert (16 * x[0] == images).flatten(1).all(1).any()  # one of them, as it is


def seen_by(training, monkeypatch):
    """The inputs and targets of each step of an epoch: (members, steps, batch, ...)."""
    seen, losses = [], training.ensemble.losses
    monkeypatch.setattr(training.ensemble, "losses", lambda loss, x, y: seen.append((x, y)) or losses(loss, x, y))
    training._train_epoch()
    return [torch.stack(some, 1) for some in zip(*seen, strict=True)]


@pytest.mark.parametrize("model", ["FF", "FFF", "MoE"])
def test_images_and_labels_are_mixed(model, monkeypatch):
    """Flat inputs, too; each member has its own mixtures, which the seed and the epoch determine."""
    changes = {"cutmix": 0.5, "mixup": 0.5, "smoothing": 0.1, "input_dropout": 0.0, "depth": 0 if model == "FF" else 3}
    made = [
        Training(cases(model=model, **changes), torch.device("cpu"), trainer._load("digits", None)) for _ in range(2)
    ]
    (x, y), again = (seen_by(training, monkeypatch) for training in made)
    assert torch.equal(x, again[0])
    whole = made[0].samples.x[made[0]._order]
    labels = probabilities(made[0].samples.y[made[0]._order], 10, 0.1)
    other, others = whole.flip(2), labels.flip(2)
    # The share that a label keeps is the mean share of the pixels; both are found from what was made.
    kept = ((y - others) * (labels - others)).sum(-1) / (labels - others).square().sum(-1)  # NaN for equal labels
    cut = ((x == whole) | (x == other)).all(-1)
    blended = ~cut & kept.isfinite()
    expected = other + kept[..., None] * (whole - other)
    torch.testing.assert_close(x[blended], expected[blended], rtol=0, atol=1e-4)
    torch.testing.assert_close(y.sum(-1), torch.ones(y.shape[:-1]))
    assert blended.float().mean().item() == pytest.approx(0.25 * kept.isfinite().float().mean().item(), abs=0.04)
    assert (kept[cut & kept.isfinite()] < 1 - 1e-6).float().mean() > 0.5  # two thirds of them are cut


def test_targets_stay_labels_without_mixing(monkeypatch):
    training = Training(cases(), torch.device("cpu"), trainer._load("digits", None))
    _, y = seen_by(training, monkeypatch)
    assert torch.equal(y, training.samples.y[training._order])


def test_a_shift_moves_images(monkeypatch):
    training = Training(
        cases(shift=0.25, input_dropout=0.0, standardise=False), torch.device("cpu"), trainer._load("digits", None)
    )
    x, _ = seen_by(training, monkeypatch)
    before = training.samples.x[training._order].unflatten(-1, (8, 8))
    moved = F.pad(before, (2, 2, 2, 2)).unfold(-2, 8, 1).unfold(-2, 8, 1)  # (..., 5, 5, 8, 8)
    same = (moved == x.unflatten(-1, (8, 8))[..., None, None, :, :]).flatten(-2).all(-1)
    assert same.flatten(-2).any(-1).all()
    assert not same[..., 2, 2].all()


def test_the_rate_warms_up_and_then_follows_its_schedule():
    cosine = FASTFF.changed({"schedule": "cosine", "warmup": 4})
    factors = [rate_factor(epoch, 12, cosine) for epoch in range(12)]
    assert factors[:4] == [0.125, 0.375, 0.625, 0.875]
    assert factors[4:] == [(1 + math.cos(math.pi * i / 8)) / 2 for i in range(8)]
    assert rate_factor(7, 12, cosine.changed({"schedule": "constant"})) == 1
    assert rate_factor(2, 3, cosine) == 0.625  # a training that ends in its warm-up
    training = Training(cases(warmup=4), torch.device("cpu"), trainer._load("digits", None))
    training._train_epoch()
    assert training.optimizer.rate.tolist() == pytest.approx([FASTFF.rate / 8] * 2)


def test_evaluations_may_be_rare():
    training = Training(cases(steps=14, evaluate_every=3), torch.device("cpu"), trainer._load("digits", None))
    while not training.finished:
        training.advance()
    assert training.history[0]["epoch"] == [3, 6, 7]  # the last epoch is always evaluated
    assert {result.ETT for result in training.results()} <= {3, 6, 7}


def test_an_epoch_may_have_fewer_steps_than_are_called_before_a_recording():
    training = Training(cases(batch=1000), torch.device("cpu"), trainer._load("digits", None))
    for _ in range(3):
        training._step()
    assert training.steps == 1
    assert training.optimizer.count.item() == 3
    assert training._at.item() == 0


def test_inputs_are_dropped_in_steps_alone(monkeypatch):
    training = Training(cases(input_dropout=0.25), torch.device("cpu"), trainer._load("digits", None))
    whole, seen = training.samples.x.clone(), []
    losses = training.ensemble.losses
    monkeypatch.setattr(training.ensemble, "losses", lambda loss, x, y: seen.append(x) or losses(loss, x, y))
    training._train_epoch()
    batches = whole[training._order]  # (members, steps, batch, pixels)
    dropped = torch.stack(seen, 1) == 0
    torch.testing.assert_close(torch.stack(seen, 1), (batches / 0.75).masked_fill(dropped, 0))
    dropped = dropped[batches != 0]
    bound = 5 * (0.25 * 0.75 / dropped.numel()) ** 0.5  # five standard errors
    assert dropped.float().mean().item() == pytest.approx(0.25, abs=bound)
    assert torch.equal(training.samples.x, whole)  # which is what evaluations see
