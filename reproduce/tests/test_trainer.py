"""The trainer: what it measures, on real data, and that a stopped training comes to the same numbers."""

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

from fastff_reproduce import scoring, trainer
from fastff_reproduce.experiments import EXPERIMENTS
from fastff_reproduce.runs import Case
from fastff_reproduce.scoring import accuracy
from fastff_reproduce.settings import FASTFF, PAPER
from fastff_reproduce.trainer import Training, train

SHARED = Path(os.environ.get("FASTFF_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))


def cases(seeds=(0, 1), model="FFF", depth=3, leaf_width=4, goal="both", settings=FASTFF, dataset="digits", **changes):
    settings = settings.changed({"steps": 200} | changes)
    width = leaf_width << depth
    return [Case(dataset, model, width, leaf_width, depth, "fastff", goal, seed, settings.items()) for seed in seeds]


def numbers(results):
    """All that a result says but for the time it took."""
    return [dataclasses.asdict(dataclasses.replace(result, seconds=0)) for result in results]


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


def test_a_broken_tree_would_not_pass(monkeypatch):
    """What the test above would see if every sample went to one leaf."""
    monkeypatch.setattr(trainer.Recipe, "loss", lambda self: 0.0)

    monkeypatch.setattr(trainer, "shift_biases_", lambda bias, logits, least: bias.detach().fill_(1e3))
    (result,) = train(cases(seeds=[0], depth=5, leaf_width=1, goal="G_A", steps=800), device="cpu", root=None)
    assert result.G_A < 60
    assert result.smallest_share == 0


def test_the_gap_is_that_of_the_goal():
    """At a temperature of 1 the mixture is another model; what it is right about is counted on the data of the goal."""
    for case in cases((0,), goal="M_A", steps=50, final_temperature=1.0) + cases(
        (0,), goal="G_A", steps=50, final_temperature=1.0
    ):
        training = Training([case], torch.device("cpu"), trainer.data.load("digits", None))
        while not training.finished:
            training.advance()
        (result,) = training.results()
        with torch.no_grad(), training._averaged():
            if case.goal == "M_A":
                training._rebalance()
                model = training.ensemble.member(0)
                x, y = training.x[training.training[0]], training.y[training.training[0]]
            else:
                model, (x, y) = training.ensemble.member(0, training.generalised.state), training.test
            gap = (model.soft(x).argmax(1) == y).double().mean() - (model(x).argmax(1) == y).double().mean()
        assert result.soft_hard_gap == pytest.approx(100 * gap.item())
        assert result.soft_hard_gap != 0


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


def test_goals_measure_what_they_are_for():
    (memory,) = train(cases(seeds=[0], goal="M_A"), device="cpu", root=None)
    assert (memory.G_A, memory.ETT) == (None, None)
    assert memory.M_A > 80
    (general,) = train(cases(seeds=[0], goal="G_A"), device="cpu", root=None)
    assert (general.M_A, general.ETT_M) == (None, None)
    assert general.G_A > 80


def test_seeds_are_different_trainings_of_different_splits():
    training = Training(cases(), torch.device("cpu"), trainer._load("digits", None))
    both = [set(part.tolist()) for part in (*training.training, *training.validation)]
    assert both[0] != both[1]
    assert not both[0] & both[2]
    assert len(both[0] | both[2]) == len(training.x)
    first, second = train(cases(), device="cpu", root=None)
    assert first.history != second.history


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
    with pytest.raises(ValueError, match="checkpoint is of another training"):
        train(cases(seeds=[5, 6]), device=device, root=None, checkpoint=path)


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
    x, y = training.test
    for i, result in enumerate(training.results()):
        assert accuracy(training.ensemble.member(i, expected), x, y) == result.G_A
    assert torch.equal(flat, raw)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("goal", ["M_A", "G_A"])
def test_means_are_balanced(goal, device):
    for result in train(cases(averaging=0.9, min_share=0.5, balance=0.0, depth=4, goal=goal), device=device, root=None):
        assert result.smallest_share >= 0.5


def test_weights_that_are_averaged_stay_balanced():
    """Not only their means, which are what is evaluated."""
    made = cases(averaging=0.9, min_share=0.5, balance=0.0, depth=4, goal="G_A")
    training = Training(made, torch.device("cpu"), trainer._load("digits", None))
    training.advance()
    for i in range(len(made)):
        (visits,) = scoring.visits(training.ensemble.member(i), training.x[training.training[i]])
        assert scoring.smallest_share(visits.tolist()) >= 0.5
        (visits,) = scoring.visits(training.ensemble.member(i, training.generalised.state), training.x)
        assert scoring.smallest_share(visits.tolist()) > 0.3


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


def test_rebalancing_goes_by_parts_of_an_ensemble(monkeypatch):
    made = cases(seeds=[0, 1, 2], depth=4, min_share=0.9, steps=40)
    whole = train(made, device="cpu", root=None)
    monkeypatch.setattr(trainer, "LOGITS", 2 * 15 * 1797)
    assert numbers(train(made, device="cpu", root=None)) == numbers(whole)


def test_training_leaves_the_generator_of_the_process_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train(cases(seeds=[0], steps=20), device="cpu", root=None)
    assert torch.equal(torch.rand(3), expected)


def test_rates_halve_on_a_plateau_and_members_stop():
    made = cases(settings=PAPER, steps=2000, patience=3, plateau=2, rate=1e-9, batch=512)
    training = Training(made, torch.device("cpu"), trainer._load("digits", None))
    while not training.finished:
        training.advance()
    assert training.epoch < training.most_epochs
    assert all(rate < 1e-9 for rate in training.rates)


def test_inputs_are_standardised_by_the_training_file():
    training = Training(cases(), torch.device("cpu"), trainer._load("digits", None))
    assert training.x.mean().item() == pytest.approx(0, abs=1e-5)
    assert training.x.std().item() == pytest.approx(1, abs=1e-5)
    raw = Training(cases(settings=PAPER), torch.device("cpu"), trainer._load("digits", None))
    assert (raw.x.min().item(), raw.x.max().item()) == (0, 1)


def test_by_pixel_needs_standardised_inputs():
    with pytest.raises(ValueError, match="by_pixel is a way to standardise inputs: it needs standardise=true"):
        PAPER.changed({"by_pixel": True})
    assert PAPER.changed({"by_pixel": True, "standardise": True}).by_pixel
    assert not FASTFF.changed({"by_pixel": True}).changed({"standardise": False}).by_pixel


def test_flat_inputs_are_changed_as_images(monkeypatch):
    images = trainer._load("digits", None).train.x
    seen = []

    def still(x, strength, vertical):
        seen.append((x, strength, vertical))
        return x

    monkeypatch.setattr(trainer, "augment", still)
    histories = []
    for change in ({}, {"augment": 0.5}, {"mirror": True}, {"augment": 0.7, "mirror": True}):
        made = train(cases(steps=20, standardise=False, **change), device="cpu", root=None)
        histories.append([result.history for result in made])
    assert all(history == histories[0] for history in histories)
    assert {(strength, vertical) for _, strength, vertical in seen} == {(0.5, True), (0.0, False), (0.7, False)}
    for x, _, _ in seen:
        assert x.shape[1:] == images.shape[1:]
        assert (16 * x[0] == images).flatten(1).all(1).any()  # one of them, as it is


def test_an_epoch_may_have_fewer_steps_than_are_called_before_a_recording():
    training = Training(cases(batch=1000), torch.device("cpu"), trainer._load("digits", None))
    for _ in range(3):
        training._step()
    assert training.steps == 1
    assert training.optimizer.count.item() == 3
    assert training._at.item() == 0


def test_inputs_are_dropped_in_steps_alone(monkeypatch):
    training = Training(cases(input_dropout=0.25), torch.device("cpu"), trainer._load("digits", None))
    whole, seen = training.x.clone(), []
    losses = training.ensemble.losses
    monkeypatch.setattr(training.ensemble, "losses", lambda loss, x, y: seen.append(x) or losses(loss, x, y))
    training._train_epoch()
    batches = whole[training._order]  # (members, steps, batch, pixels)
    dropped = torch.stack(seen, 1) == 0
    torch.testing.assert_close(torch.stack(seen, 1), (batches / 0.75).masked_fill(dropped, 0))
    dropped = dropped[batches != 0]
    bound = 5 * (0.25 * 0.75 / dropped.numel()) ** 0.5  # five standard errors
    assert dropped.float().mean().item() == pytest.approx(0.25, abs=bound)
    assert torch.equal(training.x, whole)  # which is what evaluations see


def test_cases_that_do_not_belong_together():
    with pytest.raises(ValueError, match="differ in the seed alone"):
        train([*cases(seeds=[0]), *cases(seeds=[1], rate=0.5)], device="cpu", root=None)


def test_a_paper_training_measures_both_and_ours_has_two():
    made = EXPERIMENTS["table1"].cases(["usps"], [16], [8], ["paper", "fastff"], [3], {})
    assert [(case.model, case.recipe, case.goal) for case in made] == [
        (model, *rest) for model in ("FF", "FFF") for rest in (("paper", "both"), ("fastff", "G_A"), ("fastff", "M_A"))
    ]
    ours, memory = (dict(case.settings) for case in made[-2:])
    changed = {name for name in ours if ours[name] != memory[name]}
    assert changed <= {"weight_decay", "transposition"}


def test_a_part_that_is_left_out_stays_out_whatever_is_set():
    changes = {"noise": 0.5, "by_pixel": True}
    made = EXPERIMENTS["ablation"].cases(["digits"], [32], [8], seeds=[0], changes=changes)
    settings = {case.recipe: dict(case.settings) for case in made}
    assert settings["fastff"]["noise"] == settings["without weight decay"]["noise"] == 0.5
    assert settings["without noise"]["noise"] == 0
    assert settings["without noise"]["by_pixel"]
    without = settings["without standardised inputs"]
    assert (without["standardise"], without["by_pixel"]) == (False, False)


def test_the_ablation_is_of_our_recipe():
    made = EXPERIMENTS["ablation"].cases(["digits"], [32], [8], seeds=[0])
    assert [case.settings for case in made if case.recipe == "fastff"] == [FASTFF.items()]
    assert all(case.settings != FASTFF.items() for case in made if case.recipe != "fastff")
    with pytest.raises(ValueError, match="of recipe fastff"):
        EXPERIMENTS["ablation"].cases(recipes=["paper"])


def test_experiments_have_the_settings_of_their_rows():
    """Settings of one experiment do not leak into another whose rows are by other ones."""
    names = ("schedule", "input_dropout", "averaging", "batch", "steps", "epochs")
    found = {
        (name, case.model): tuple(dict(case.settings)[setting] for setting in names)
        for name in ("table1", "inference_counterparts", "table2", "table3")
        for case in EXPERIMENTS[name].cases(recipes=["fastff"], seeds=[0])
    }
    table1, table2 = ("constant", 0.2, 0.998, 512, 16800, 0), ("cosine", 0, 0.995, 256, 0, 16)
    assert found == {
        ("table1", "FF"): table1,
        ("table1", "FFF"): table1,
        ("inference_counterparts", "FF"): table1,
        ("inference_counterparts", "FFF"): table1,
        ("table2", "FF"): table2,
        ("table2", "MoE"): table2,
        ("table2", "FFF"): ("cosine", 0, 0.995, 128, 0, 16),
        ("table3", "ViT-FF"): ("cosine", 0, 0, 512, 0, 150),
        ("table3", "ViT-FFF"): ("cosine", 0, 0, 512, 0, 600),
    }


def test_table2_treats_images_as_what_they_show():
    made = EXPERIMENTS["table2"].cases(["cifar10", "svhn", "mnist"], [64], recipes=["fastff", "paper"], seeds=[0])

    def with_setting(name):
        return {(case.dataset, case.recipe) for case in made if dict(case.settings)[name]}

    assert with_setting("mirror") == {("cifar10", "fastff")}  # digits are not mirrored
    assert with_setting("by_pixel") == {("cifar10", "fastff"), ("svhn", "fastff")}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nois": 1.0}, "no setting 'nois'; it has"),
        ({"noise": "loud"}, "noise must be of type float; got 'loud'"),
        ({"noise": True}, "noise must be of type float; got True"),
        ({"batch": True}, "batch must be of type int; got True"),
        ({"input_dropout": -1.0}, "input_dropout must be finite, and 0 or more; got -1"),
        ({"input_dropout": float("nan")}, "input_dropout must be finite, and 0 or more; got nan"),
        ({"mirror": "no"}, "mirror must be true or false; got 'no'"),
        ({"averaging": 1.0}, r"averaging must be below 1, .*; got 1\.0"),
        ({"augment": 10.0}, r"augment must be below 10, .*; got 10\.0"),
        ({"augment": float("nan")}, "augment must be finite, and 0 or more; got nan"),
        ({"noise": -1.0}, "noise must be finite, and 0 or more; got -1"),
        ({"rate": float("inf")}, "rate must be finite, and 1.17549e-38 or more; got inf"),
        ({"transposition": 1.0}, r"transposition must be below 1, .*; got 1\.0"),
        ({"taught": 2.0}, "taught must be from 0 to 1; got 2"),
        ({"input_dropout": 1.0}, "input_dropout must be below 1, which leaves no input; got 1"),
        ({"schedule": "foo"}, "schedule must be one of constant, cosine; got 'foo'"),
        ({"batch": 0}, "batch must be at least 1; got 0"),
        ({"min_share": 5.0}, "least must be from 0 to 1; got 5"),
        ({"steps": 0}, "needs steps or epochs; got 0 of both"),
        ({"steps": 5, "epochs": 2}, "epochs and steps are two ways to say how long; set one of them"),
    ],
)
def test_bad_changes(changes, message):
    with pytest.raises(ValueError, match=message):
        FASTFF.changed(changes)


def test_epochs_and_steps_replace_each_other():
    assert (FASTFF.changed({"epochs": 3}).steps, FASTFF.changed({"epochs": 3}).epochs) == (0, 3)
    assert PAPER.changed({"patience": 5}).patience_steps == 0


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
