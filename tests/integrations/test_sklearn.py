"""fastff.integrations.sklearn: what scikit-learn asks of an estimator, and how well it does with its defaults."""

import pickle

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes, load_digits, load_iris
from sklearn.model_selection import KFold, cross_val_score, train_test_split
from sklearn.utils.estimator_checks import parametrize_with_checks

from fastff.integrations.sklearn import FFFClassifier, FFFRegressor

SHORT = {"depth": 2, "leaf_width": 8, "epochs": 12, "batch_size": 32, "learning_rate": 3e-2, "noise": 0.2}


COUNTED = {
    "check_sample_weight_equivalence_on_dense_data": "a sample of weight 2 is one for tree, noise and batches; "
    "given twice, it is two"
}


@pytest.mark.slow
@parametrize_with_checks([FFFClassifier(**SHORT), FFFRegressor(**SHORT)], expected_failed_checks=lambda _: COUNTED)
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


@pytest.mark.slow
def test_digits():
    x, y = load_digits(return_X_y=True)
    x, new, y, wanted = train_test_split(x, y, random_state=0)
    model = FFFClassifier(epochs=30, random_state=0).fit(x, y)
    assert model.score(new, wanted) >= 0.95
    leaf = model.apply(x)
    assert leaf.shape == (len(x),)
    # The recipe's promise: a tenth of its fair share for every leaf.
    assert np.bincount(leaf, minlength=8).min() >= 0.1 * len(x) / 8


FOLDS = KFold(4, shuffle=True, random_state=0)


@pytest.mark.slow
def test_iris():
    x, y = load_iris(return_X_y=True)
    model = FFFClassifier(noise=0.2, random_state=0)
    assert cross_val_score(model, x, np.array(["a", "b", "c"])[y], cv=FOLDS).mean() >= 0.9


@pytest.mark.slow
def test_diabetes():
    """R2 in half the default's epochs; scikit-learn's Ridge() has 0.41 on these folds, its MLPRegressor() 0.22."""
    x, y = load_diabetes(return_X_y=True)
    assert cross_val_score(FFFRegressor(epochs=50, random_state=0), x, y, cv=FOLDS).mean() >= 0.4


def rings(n=200):
    rng = np.random.default_rng(0)
    angle, y = rng.uniform(0, 2 * np.pi, n), np.arange(n) % 2
    radius = 1 + y + 0.1 * rng.normal(size=n)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1), y


def test_the_layer_answers():
    """predict_proba is the softmax of the layer's hard pass, apply its route, both on standardised inputs."""
    x, y = rings()
    x[:, 1] = 1000 * x[:, 1] + 5
    model = FFFClassifier(**SHORT, random_state=0).fit(x, y)
    inputs = torch.tensor((x - x.mean(0)) / x.std(0)).float()
    assert not model.layer_.training
    with torch.no_grad():
        expected = model.layer_(inputs).double().softmax(1).numpy()
    np.testing.assert_allclose(model.predict_proba(x), expected, rtol=1e-6)
    assert (model.apply(x) == model.layer_.route(inputs).numpy()).all()
    assert (model.predict(x) == expected.argmax(1)).all()


def test_standardize_false_leaves_inputs_alone():
    x, y = rings()
    model = FFFClassifier(**SHORT, standardize=False, random_state=0).fit(x, y)
    expected = model.layer_.route(torch.tensor(x).float()).numpy()
    assert (model.apply(x) == expected).all()


@pytest.mark.slow
def test_random_state_fixes_the_result_and_no_generator_is_touched():
    x, y = rings()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = FFFClassifier(**SHORT, random_state=1).fit(x, y)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    again, other = (FFFClassifier(**SHORT, random_state=seed).fit(x, y).predict_proba(x) for seed in (1, 2))
    assert (first.predict_proba(x) == again).all()
    assert (again != other).any()


def test_pickle_holds_no_training_data():
    """The recipe's hooks on the layer would have carried it along."""
    x, y = rings(2000)
    model = FFFClassifier(**SHORT | {"epochs": 1}, random_state=0).fit(x, y)
    stored = pickle.dumps(model)
    assert len(stored) < 2000 * 2 * 4
    assert (pickle.loads(stored).predict_proba(x) == model.predict_proba(x)).all()


def test_several_targets():
    x, _ = rings()
    y = np.stack([x[:, 0], 100 + 50 * x[:, 1]], 1)
    model = FFFRegressor(**SHORT, random_state=0).fit(x, y)
    assert model.predict(x).shape == (200, 2)
    assert model.score(x, y) > 0.9


def test_validation_keeps_the_best_epoch_and_stops():
    """Labels drawn at random: the loss on new samples rises as the training learns them by heart."""
    x, _ = rings()
    y = np.random.default_rng(1).integers(2, size=200)
    options = SHORT | {"epochs": 300, "noise": 0.0, "weight_decay": 0.0, "leaf_width": 32}
    model = FFFClassifier(**options, validation=0.25, patience=10, random_state=0).fit(x, y)
    curve = model.validation_loss_curve_
    assert model.n_iter_ == len(curve) == int(np.argmin(curve)) + 11 < 300
    _, held, _, wanted = train_test_split(
        x, y, test_size=0.25, random_state=np.random.RandomState(0).randint(2**31)
    )  # what fit() held out
    loss = -np.log(model.predict_proba(held)[np.arange(50), wanted]).mean()
    assert loss == pytest.approx(min(curve), rel=1e-5)
    assert FFFClassifier(**SHORT).fit(x, y).n_iter_ == 12


def test_verbose_shows_a_bar(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # stderr counts as a terminal
    x, y = rings()
    FFFClassifier(**SHORT | {"epochs": 2}, verbose=True).fit(x, y)
    shown = capsys.readouterr().err
    assert "epochs" in shown
    assert "2/2" in shown
    assert "loss " in shown
    FFFClassifier(**SHORT | {"epochs": 2}).fit(x, y)
    assert not any(capsys.readouterr())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1; got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"depth": -1}, "depth must be at least 0; got -1"),
        ({"learning_rate": -1.0}, "learning_rate must be finite, and 0 or more; got -1"),
        ({"noise": float("nan")}, "noise must be finite, and 0 or more"),
        ({"validation": 1.0}, "validation must be a share of the samples"),
        ({"validation": 0.999}, "validation must be a share .* leaves some for training; got 0.999 of 200"),
        ({"validation": 1e308}, "validation must be a share of the samples"),
        ({"activation": "sigmoid"}, "activation"),
        ({"learning_rate": float("inf")}, "learning_rate must be finite"),
        ({"learning_rate": 1e38}, "learning_rate must be finite, and 0 or more, and at most 3.4"),
        ({"learning_rate": 1e20, "weight_decay": 1e30}, "weight_decay must be finite, and 0 or more, and at most 3.4"),
        ({"device": "nope"}, "device must be one of this machine, such as 'cpu'; got 'nope'"),
        ({"device": "meta"}, "device must be one that computes"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        FFFClassifier(**SHORT | options).fit(*rings())


@pytest.mark.parametrize("name", ["learning_rate", "weight_decay", "noise", "balance", "validation", "standardize"])
@pytest.mark.parametrize("value", ["a", None])
def test_arguments_of_another_type_are_refused_by_name(name, value):
    with pytest.raises(TypeError, match=f"{name} must be .*; got {value!r}"):
        FFFClassifier(**SHORT | {name: value}).fit(*rings())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_device_that_is_missing_is_refused():
    """torch raises an AssertionError."""
    with pytest.raises(ValueError, match="device must be one of this machine, such as 'cpu'; got 'cuda'"):
        FFFClassifier(**SHORT, device="cuda").fit(*rings())


def test_unknown_arguments_name_the_estimator_and_the_remedy():
    with pytest.raises(TypeError, match=r"FFFClassifier has no argument 'class_weight'.*compute_sample_weight"):
        FFFClassifier(class_weight="balanced")
    with pytest.raises(TypeError, match=r"FFFRegressor has no argument 'epoch'\. It has depth, leaf_width, .*epochs"):
        FFFRegressor(epoch=3)


@pytest.mark.parametrize("kind", [FFFClassifier, FFFRegressor])
@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("learning_rate", 1e3, "the loss"),
        ("learning_rate", 1e30, "the loss"),
        ("weight_decay", 1e5, "the loss"),
        ("weight_decay", 1e38, "the loss"),
        ("balance", 1e30, "the mean square of the gradients"),
        ("balance", 3e38, "the balance loss"),
        ("noise", 1e38, "the loss"),
    ],
)
def test_a_training_that_diverges_is_no_model(kind, name, value, what):
    """It was: with probabilities of NaN, and where the optimizer's state alone overflowed, with weights that had not
    moved since, and a plausible score."""
    model = kind(**SHORT | {"weight_decay": 0.1, name: value}, random_state=0)
    with pytest.raises(ValueError, match=rf"diverged: {what} was not finite in epoch \d+\. Lower .*{name} \(here"):
        model.fit(*rings())
    assert not hasattr(model, "layer_")


def test_a_training_that_diverges_in_its_last_step_is_no_model():
    """No loss shows it: the outputs do."""
    x, y = rings()
    with pytest.raises(ValueError, match=r"diverged: an output was not finite in epoch 1\. Lower learning_rate"):
        FFFClassifier(depth=0, epochs=1, batch_size=200, learning_rate=1e25, weight_decay=0.0, random_state=0).fit(x, y)


@pytest.mark.parametrize("kind", [FFFClassifier, FFFRegressor])
def test_a_failed_fit_leaves_the_estimator_unchanged(kind):
    """predict() then asked for the number of features that the failed fit had seen."""
    x, y = rings()
    model = kind(**SHORT, random_state=0).fit(x, y)
    before, answer = dict(vars(model)), model.predict(x)
    for options, error in [
        ({"depth": -1}, ValueError),
        ({"learning_rate": 1e30}, ValueError),
        ({"noise": ""}, TypeError),
    ]:
        with pytest.raises(error):
            model.set_params(**options).fit(x[:, :1], y == 2 if kind is FFFRegressor else y + 5)
        model.set_params(**SHORT)
        assert vars(model) == before
        np.testing.assert_array_equal(model.predict(x), answer)


def test_prediction_stays_on_the_device_of_the_training():
    x, y = rings()
    model = FFFClassifier(**SHORT | {"epochs": 1}, random_state=0).fit(x, y)
    answer = model.predict(x)
    np.testing.assert_array_equal(model.set_params(device="meta").predict(x), answer)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e200, 1e307, 1e-200, 1e-300])
def test_standardised_features_and_targets_may_have_any_scale(scale):
    """Squares of such numbers are infinite, or 0: the features then seemed constant."""
    x, y = rings()
    plain, scaled = (FFFClassifier(**SHORT, random_state=0).fit(x * by, y).predict_proba(x * by) for by in (1, scale))
    np.testing.assert_allclose(plain, scaled, rtol=1e-3, atol=1e-5)
    weight = np.linspace(1, 2, len(x)) * scale
    plain, scaled = (
        FFFRegressor(**SHORT, random_state=0).fit(x, x[:, 0] * by, w).predict(x) / by
        for by, w in [(1, weight / scale), (scale, weight)]
    )
    np.testing.assert_allclose(plain, scaled, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_one_huge_value_spoils_no_other_feature():
    x, y = rings()
    x = np.concatenate([x, np.zeros((len(x), 1))], 1)
    x[0, 2] = 1e300
    model = FFFClassifier(**SHORT | {"epochs": 40}, random_state=0).fit(x, y)
    assert model.score(x, y) > 0.95
    assert model.scale_[2] == pytest.approx(x[:, 2].max() / np.sqrt(len(x)), rel=0.01)  # it was infinite


def test_values_that_float32_cannot_hold_are_refused():
    x, y = rings()
    with pytest.raises(ValueError, match="too large for float32"):
        FFFClassifier(**SHORT, standardize=False).fit(x * 1e60, y)
    with pytest.raises(ValueError, match="too small for float32; scale it up"):
        FFFClassifier(**SHORT, standardize=False).fit(x * 1e-60, y)
    model = FFFClassifier(**SHORT, standardize=False, random_state=0).fit(x, y)
    with torch.no_grad():
        model.layer_.leaf_out_weight *= 1000
    for scale in (1e60, 1e38):  # the second overflows in the layer
        with pytest.raises(ValueError, match="too large for float32"):
            model.predict_proba(x * scale)


@pytest.mark.slow
def test_samples_of_little_weight_count_little_in_every_batch():
    """A batch of them counted as much as any other: its loss was divided by its own weights."""
    x, y = rings()
    weight = np.where(y == 0, 1.0, 1e-6)
    model = FFFClassifier(**SHORT | {"batch_size": 1}, random_state=0).fit(x, y, weight)
    assert (model.predict(x) == 0).mean() > 0.8
    weight[y == 1] = 1e-300  # nothing, in float32
    assert (FFFClassifier(**SHORT, random_state=0).fit(x, y, weight * 1e300).predict(x) == 0).all()


@pytest.mark.slow
def test_samples_count_by_their_weight():
    """Where the same point has both labels, the heavier one wins; a sample of weight 0 is as if it were not there."""
    x, y = rings()
    both, labels = np.concatenate([x, x]), np.concatenate([y, 1 - y])
    weight = np.concatenate([np.full(len(x), 3.0), np.full(len(x), 0.1)])
    options = SHORT | {"epochs": 40, "random_state": 0}
    assert FFFClassifier(**options).fit(both, labels, sample_weight=weight).score(x, y) > 0.95
    assert FFFClassifier(**options).fit(both, labels, sample_weight=weight[::-1]).score(x, y) < 0.05
    nothing = np.concatenate([np.ones(len(x)), np.zeros(len(x))])
    far = np.concatenate([x, x + 1e6])
    for kind in (FFFClassifier, FFFRegressor):
        whole, part = (
            kind(**options).fit(far, labels, sample_weight=nothing),
            kind(**options).fit(x, y, np.ones(len(x))),
        )
        np.testing.assert_array_equal(whole.predict(x), part.predict(x))
    with pytest.raises(ValueError, match=r"sample_weight is 0 for every sample|at least one non-zero"):
        FFFClassifier(**options).fit(x, y, np.zeros(len(x)))
    with pytest.raises(ValueError, match=r"[Nn]egative"):
        FFFRegressor(**options).fit(x, y, -np.ones(len(x)))


def test_weights_of_one_change_nothing():
    x, y = rings()
    plain, ones = FFFClassifier(**SHORT, random_state=0).fit(x, y), FFFClassifier(**SHORT, random_state=0)
    np.testing.assert_allclose(ones.fit(x, y, np.full(len(x), 7.0)).predict_proba(x), plain.predict_proba(x), atol=1e-2)


def test_held_out_samples_are_weighted_too():
    x, y = rings()
    weight = np.where(y == 0, 1.0, 1e-6)
    model = FFFClassifier(**SHORT, validation=0.3, random_state=0).fit(x, y, weight)
    assert (model.predict(x) == 0).mean() > 0.9
