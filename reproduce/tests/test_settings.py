"""Settings of a training: what can be changed, and what is refused."""

import pytest

from fastff_reproduce.recipes import FASTFF, PAPER
from fastff_reproduce.settings import completed, shortened


def test_by_pixel_needs_standardised_inputs():
    with pytest.raises(ValueError, match="by_pixel needs standardise=true; got standardise=false"):
        PAPER.changed({"by_pixel": True})
    assert PAPER.changed({"by_pixel": True, "standardise": True}).by_pixel
    assert not FASTFF.changed({"by_pixel": True}).changed({"standardise": False}).by_pixel


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nois": 1.0}, "unknown setting 'nois'; choose from"),
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
        ({"cutmix": 2.0}, "cutmix must be from 0 to 1; got 2"),
        ({"smoothing": 1.0}, "smoothing must be below 1, .*; got 1"),
        ({"fit_images": 0}, "fit_images must be at least 1; got 0"),
        ({"input_dropout": 1.0}, "input_dropout must be below 1, which leaves no input; got 1"),
        ({"schedule": "foo"}, "schedule must be one of constant, cosine; got 'foo'"),
        ({"batch": 0}, "batch must be at least 1; got 0"),
        ({"min_share": 5.0}, "min_share must be from 0 to 1; got 5"),
        ({"steps": 0}, "needs steps or epochs; both are 0"),
        ({"steps": 5, "epochs": 2}, "epochs and steps set the same length; set one of them"),
    ],
)
def test_bad_changes(changes, message):
    with pytest.raises(ValueError, match=message):
        FASTFF.changed(changes)


def test_epochs_and_steps_replace_each_other():
    assert (FASTFF.changed({"epochs": 3}).steps, FASTFF.changed({"epochs": 3}).epochs) == (0, 3)
    assert PAPER.changed({"patience": 5}).patience_steps == 0


def test_what_is_for_teachers_alone_goes_with_them():
    taught = FASTFF.changed({"teacher_share": 2.0, "teacher_rate": 1.0, "fit_images": 5, "fit_steps": 7})
    assert (taught.teacher_rate, taught.fit_images, taught.fit_steps) == (1.0, 5, 7)
    assert taught.changed({"teacher_share": 0.0}) == FASTFF


def test_new_settings_leave_old_keys_alone():
    """A row of results/learning.csv is found by its settings: those with default values are not among them."""
    names = ("warmup", "evaluate_every", "shift", "cutmix", "mixup", "smoothing", "teacher_rate", "fit_images")
    assert not shortened(FASTFF.items()).keys() & {*names, "fit_steps"}
    assert completed(shortened(PAPER.items())) == PAPER.items()
