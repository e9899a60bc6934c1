import math

import pytest
import torch
from torch import nn

import fastff
from helpers import make, two_layers


@pytest.mark.parametrize(
    ("kind", "middle"),
    [("constant", 2.0), ("linear", 5.0), ("cosine", 5.0), ("exponential", 4.0)],
)
def test_schedules(kind, middle):
    schedule = fastff.training.Schedule(kind, 2.0, 8.0, steps=10)
    assert schedule.value == 2.0
    values = [schedule.step() for _ in range(12)]
    assert values[4] == pytest.approx(middle)
    assert values[9:] == [2.0 if kind == "constant" else 8.0] * 3
    assert values == sorted(values)
    again = fastff.training.Schedule(kind, 1.0, 1.0, steps=1)
    again.load_state_dict(schedule.state_dict())
    assert (again.value, again.count) == (schedule.value, 12)


def test_cosine_is_slow_at_both_ends():
    schedule = fastff.training.Schedule("cosine", 0.0, 1.0, steps=8)
    values = [schedule.value, *(schedule.step() for _ in range(8))]
    assert values == pytest.approx([(1 - math.cos(math.pi * t / 8)) / 2 for t in range(9)])


def test_schedule_errors():
    with pytest.raises(ValueError, match="kind must be 'constant', 'linear', 'cosine' or 'exponential'; got 'step'"):
        fastff.training.Schedule("step", 1.0)
    with pytest.raises(ValueError, match="needs an end and at least 1 step"):
        fastff.training.Schedule("linear", 1.0)
    with pytest.raises(ValueError, match="start must be finite and positive; got 0"):
        fastff.training.Schedule("exponential", 0.0, 1.0, steps=3)
    with pytest.raises(ValueError, match="start must be finite; got nan"):
        fastff.training.Schedule("linear", math.nan, 1.0, steps=3)
    with pytest.raises(TypeError, match=r"steps must be an integer; got 2.5"):
        fastff.training.Schedule("linear", 0.0, 1.0, steps=2.5)
    for start in ("1", None, True):
        with pytest.raises(TypeError, match="start must be a number"):
            fastff.training.Schedule("constant", start)
    with pytest.raises(
        ValueError, match="too far for a float"
    ):  # it raised or gave infinity in the midst of a training
        fastff.training.Schedule("exponential", 1e-300, 1e300, steps=3)
    with pytest.raises(ValueError, match="too far for a float"):
        fastff.training.Schedule("linear", -1e308, 1e308, steps=3)
    with pytest.raises(ValueError, match=r"state has kind, start, .*; got nothing"):
        fastff.training.Schedule("constant", 1.0).load_state_dict({})


def test_set_temperature():
    model = two_layers()
    fastff.training.set_temperature_(model, 3.0)
    assert (model[0].temperature, model[2].temperature) == (3.0, 3.0)


@pytest.mark.parametrize("value", [1e39, 1e-60, 0.0, math.nan, "2", None, True])
def test_a_temperature_that_one_layer_cannot_have_is_set_in_none(value):
    """The first layer, of float64, had it already when the second raised."""
    model = nn.Sequential(make(5, 6, depth=2), make(6, 3, depth=2, dtype=torch.float32))
    with pytest.raises((ValueError, TypeError), match="temperature must be"):
        fastff.training.set_temperature_(model, value)
    assert (model[0].temperature, model[1].temperature) == (1, 1)
