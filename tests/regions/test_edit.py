"""edit_: the least change in float64, only the leaves that are reached, all or nothing."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize

import fastff
from fastff.backends import available
from fastff.regions import class_target, edit, edit_, edit_class_, edits, layer_inputs
from helpers import Block, make, plain_leaf


def bits(layer):
    return {name: p.detach().clone().view(torch.uint8) for name, p in layer.named_parameters()}


def same(layer, before):
    return all(torch.equal(value, before[name]) for name, value in bits(layer).items())


def hidden_of(layer, x, leaf):
    """The hidden layer of one leaf at x, with a column of ones for the bias, through plain torch."""
    identity = copy.deepcopy(layer)
    width = layer.leaf_width
    identity.leaf_out_weight = nn.Parameter(torch.eye(width, dtype=x.dtype).expand(layer.num_leaves, -1, -1).clone())
    identity.leaf_out_bias = None
    hidden = plain_leaf(identity, x, leaf).detach()
    return torch.cat([hidden, torch.ones(len(x), 1, dtype=x.dtype)], 1) if layer.bias else hidden


def second(layer, leaf):
    """The second matrix of a leaf, with the bias as its last row."""
    weight = layer.leaf_out_weight.detach()[leaf]
    return torch.cat([weight, layer.leaf_out_bias.detach()[leaf][None]]) if layer.bias else weight.clone()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "relu", "swiglu", torch.tanh])
def test_the_change_is_the_least_one(activation, bias):
    layer = make(7, 5, depth=2, leaf_width=3, activation=activation, bias=bias, scale=5.0).eval()
    x, target = torch.randn(9, 7, dtype=torch.float64), torch.randn(9, 5, dtype=torch.float64)
    leaf, old = layer.route(x), copy.deepcopy(layer)
    record = edit_(layer, x, target)
    assert record.leaves == tuple(leaf.unique().tolist())
    for j in range(4):
        rows = leaf == j
        found = second(layer, j) - second(old, j)
        h = hidden_of(old, x[rows], j)
        wanted = torch.linalg.pinv(h, rtol=1e-12) @ (target[rows] - plain_leaf(old, x[rows], j).detach())
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    worst = (layer(x).detach() - target).abs().max()
    assert record.error == pytest.approx(float(worst), rel=1e-6, abs=1e-12)
    assert record.error_before == pytest.approx(float((old(x).detach() - target).abs().max()))
    for name in ("node_weight", "leaf_in_weight"):
        assert torch.equal(getattr(layer, name), getattr(old, name))


def test_as_many_inputs_as_neurons_are_met_exactly():
    """A leaf of 3 neurons and a bias solves 4 inputs; float32 costs its own rounding."""
    layer = fastff.FFF(6, 5, depth=0, leaf_width=3, activation="tanh").eval()
    x, target = torch.randn(2, 2, 6), torch.randn(2, 2, 5)
    record = edit_(layer, x, target)
    assert record.error < 1e-4 < record.error_before
    torch.testing.assert_close(layer(x), target, rtol=1e-4, atol=1e-4)


def test_keep_gives_the_smallest_change_there():
    layer = make(6, 2, depth=0, leaf_width=5, activation="gelu")
    x, keep = torch.randn(2, 6, dtype=torch.float64), torch.randn(40, 6, dtype=torch.float64)
    target, old = torch.randn(2, 2, dtype=torch.float64), copy.deepcopy(layer)
    edit_(layer, x, target, keep=keep)
    h, k = hidden_of(old, x, 0), hidden_of(old, keep, 0)
    # Lagrange: minimise |root D|^2 / 2 with h D = r.
    metric = k.T @ k / len(k)
    metric += edit._RIDGE * metric.diagonal().mean() * torch.eye(6, dtype=torch.float64)
    system = torch.cat([torch.cat([metric, h.T], 1), torch.cat([h, torch.zeros(2, 2, dtype=torch.float64)], 1)])
    r = target - old(x).detach()
    wanted = torch.linalg.solve(system, torch.cat([torch.zeros(6, 2, dtype=torch.float64), r]))[:6]
    torch.testing.assert_close(second(layer, 0) - second(old, 0), wanted, rtol=1e-7, atol=1e-9)
    plain = copy.deepcopy(old)
    edit_(plain, x, target)
    moved = [(one(keep) - old(keep)).detach().norm() for one in (layer, plain)]
    assert moved[0] < moved[1]


def test_contradicting_targets_are_met_halfway():
    layer = make(depth=1)
    x = torch.randn(1, 5, dtype=torch.float64).repeat(2, 1)
    target = torch.tensor([[1.0, 2.0, 3.0, 4.0], [3.0, 2.0, 3.0, 8.0]], dtype=torch.float64)
    record = edit_(layer, x, target)
    torch.testing.assert_close(layer.eval()(x).detach(), target.mean(0).expand(2, -1))
    assert record.error == pytest.approx(2.0)


def test_steps_reach_what_the_closed_form_does_not():
    layer = make(6, 1, depth=1, leaf_width=4, activation="tanh", scale=3.0).eval()
    x, target = torch.randn(16, 6, dtype=torch.float64), torch.randn(16, 1, dtype=torch.float64)
    other = copy.deepcopy(layer)
    plain, stepped = edit_(other, x, target), edit_(layer, x, target, steps=200)
    assert stepped.error < 0.1 * plain.error
    assert set(plain.parameters) == {"leaf_out_weight", "leaf_out_bias"}
    assert "leaf_in_weight" in stepped.parameters
    before = bits(layer)
    again = edit_(layer, x[:1], layer(x[:1]).detach(), steps=200)  # reached already: no steps
    assert set(again.parameters) <= {"leaf_out_weight", "leaf_out_bias"}
    again.undo()
    assert same(layer, before)


@pytest.mark.parametrize("backend", available())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_elsewhere_keep_every_bit(backend, dtype):
    layer = fastff.FFF(13, 5, depth=3, leaf_width=3, dtype=dtype).eval().requires_grad_(False)
    x = torch.randn(63, 13, dtype=dtype)
    with fastff.backend(backend):
        before = layer(x)
        record = edit_class_(layer, x[:2], torch.tensor([1, 4]))
        after = layer(x)
    outside = ~torch.isin(layer.route(x), torch.tensor(record.leaves))
    assert 0 < outside.sum() < len(x)
    assert torch.equal(before[outside], after[outside])
    assert not torch.equal(before[:2], after[:2])
    assert after[:2].argmax(1).tolist() == [1, 4]


def test_the_cached_plan_sees_an_edit_and_its_undoing():
    """Changes are in place, where the native backend's plan reads."""
    layer, x = fastff.FFF(13, 5, depth=3, leaf_width=3).eval(), torch.randn(4, 13)
    with torch.inference_mode():
        before = layer(x)
        place = layer.leaf_out_weight.data_ptr()
        record = edit_(layer, x, torch.ones(4, 5), tolerance=1e-4)
        torch.testing.assert_close(layer(x), torch.ones(4, 5), rtol=1e-4, atol=1e-4)
        record.undo()
        assert torch.equal(layer(x), before)
    assert layer.leaf_out_weight.data_ptr() == place
    layer.train()(x).sum().backward()  # still an ordinary parameter
    assert layer.leaf_out_weight.grad is not None


def test_bfloat16_reports_the_error_that_rounding_leaves():
    layer = fastff.FFF(16, 4, depth=2, leaf_width=8, dtype=torch.bfloat16).eval()
    x, target = torch.randn(3, 16, dtype=torch.bfloat16), torch.randn(3, 4)
    record = edit_(layer, x, target)
    now = layer(x).detach().double()
    assert record.error == pytest.approx(float((now - target).abs().max()))
    # Each of 9 products and sums rounds by 2**-9 at most, of numbers below 8.
    assert 0 < record.error < 9 * 8 * 2**-9


def test_a_missed_tolerance_changes_nothing():
    layer = make(depth=1, leaf_width=1)
    x, before = torch.randn(20, 5, dtype=torch.float64), bits(layer)
    with pytest.raises(ValueError, match=r"tolerance=0.001 was asked for. Pass steps"):
        edit_(layer, x, torch.randn(20, 4, dtype=torch.float64), tolerance=1e-3)
    assert same(layer, before)
    assert edits(layer) == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_after_the_writing_changes_nothing(error, monkeypatch):
    layer = make(depth=2)
    x, target, before = torch.randn(3, 5, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64), bits(layer)
    calls, hard = [], edit.hard

    def failing(*args, **options):
        calls.append(same(layer, before))
        if len(calls) == 2:
            raise error
        return hard(*args, **options)

    monkeypatch.setattr(edit, "hard", failing)
    with pytest.raises(error):
        edit_(layer, x, target)
    assert calls == [True, False]  # it had been written
    assert same(layer, before)
    assert edits(layer) == []


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_any_size(depth, width, count, bias, dtype):
    layer = fastff.FFF(4, 3, depth=depth, leaf_width=width, bias=bias, dtype=dtype).eval().requires_grad_(False)
    x, other, before = torch.randn(count, 4, dtype=dtype), torch.randn(40, 4, dtype=dtype), bits(layer)
    target, old = torch.randn(count, 3, dtype=dtype), layer(other)
    record = edit_(layer, x, target)
    outside = ~torch.isin(layer.route(other), layer.route(x))
    assert torch.equal(layer(other)[outside], old[outside])
    assert record.leaves == tuple(layer.route(x).unique().tolist())
    assert record.error == float((layer(x).double() - target).abs().max())
    record.undo()
    assert same(layer, before)


def broken(kind):
    layer = make(depth=2).eval()
    if kind == "int8":
        fastff.quantize_(layer)
    elif kind == "parametrized":
        parametrize.register_parametrization(layer, "leaf_out_weight", nn.Identity())
    elif kind == "expanded":
        layer.leaf_out_weight = nn.Parameter(layer.leaf_out_weight.detach()[:1].expand(4, -1, -1))
    elif kind == "meta":
        layer = layer.to("meta")
    elif kind == "sharded":
        layer.leaf_out_weight.full_tensor = lambda: None
    return layer


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("int8", "int8 leaves cannot be edited.*before fastff.quantize_"),
        ("parametrized", "computes its leaves"),
        ("expanded", "share the memory of leaf_out_weight"),
        ("meta", "meta device"),
        ("sharded", "sharded layer"),
    ],
)
def test_leaves_that_cannot_change_alone_are_refused(kind, message):
    layer, x = broken(kind), torch.randn(1, 5, dtype=torch.float64)
    with pytest.raises((TypeError, ValueError), match=message):
        edit_(layer, x, torch.zeros(1, 4, dtype=torch.float64))


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match="one of several processes"):
        edit_(make(), torch.randn(1, 5, dtype=torch.float64), torch.zeros(1, 4, dtype=torch.float64))


def test_tied_leaves_are_refused_when_the_model_is_given():
    first, other = make(5, 5, depth=1), make(5, 5, depth=1)
    other.leaf_out_weight = first.leaf_out_weight
    model, x = nn.Sequential(first, other), torch.randn(1, 5, dtype=torch.float64)
    with pytest.raises(ValueError, match="leaf_out_weight is tied to another module"):
        edit_(first, x, x, model=model)
    edit_(first, x, x, model=nn.Sequential(first))


@pytest.mark.parametrize(
    ("x", "target", "message"),
    [
        (
            torch.zeros(2, 3),
            torch.zeros(2, 4),
            r"x must be inputs of the layer, floats \(..., 5\); got torch.float32 \(2, 3\)",
        ),
        (
            torch.zeros(2, 5),
            torch.zeros(2, 3),
            r"target must be outputs of the layer, \(2, 4\) here; got torch.float32 \(2, 3\)",
        ),
        (torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 4), "got torch.int64"),
        (torch.zeros(0, 5), torch.zeros(0, 4), "x has no input"),
        (torch.full((1, 5), torch.nan), torch.zeros(1, 4), "x has numbers that are not finite"),
        (torch.zeros(1, 5), torch.full((1, 4), torch.inf), "target has numbers that are not finite"),
    ],
)
def test_bad_inputs_are_named(x, target, message):
    layer = make()
    before = bits(layer)
    with pytest.raises(ValueError, match=message):
        edit_(layer, x, target)
    assert same(layer, before)


def test_an_overflow_is_an_error():
    layer = fastff.FFF(5, 4, depth=0, leaf_width=2, dtype=torch.float16)
    before = bits(layer)
    with pytest.raises(ValueError, match=r"overflows leaf_out_.* in torch.float16"):
        edit_(layer, torch.randn(1, 5), torch.full((1, 4), 1e6))
    assert same(layer, before)


numbers = st.lists(st.floats(-5, 5, width=32), min_size=4, max_size=4)


@settings(max_examples=60, deadline=None)
@given(numbers, st.integers(0, 3), st.floats(0.001, 3), numbers)
def test_class_targets_are_the_nearest(z, label, margin, other):
    """A point of a convex set is nearest to z if no other point of the set lies at an acute angle from it."""
    z = torch.tensor([z], dtype=torch.float64)
    target = class_target(z, label, margin)
    rest = torch.cat([target[0, :label], target[0, label + 1 :]])
    assert target[0, label] >= rest.max() + margin - 1e-9
    inside = torch.tensor([other], dtype=torch.float64)
    inside[0, label] = inside.max() + margin
    assert float(((z - target) * (inside - target)).sum()) <= 1e-8
    if z[0, label] >= torch.cat([z[0, :label], z[0, label + 1 :]]).max() + margin:
        assert torch.equal(target, z)


def test_classes_are_checked():
    output = torch.zeros(2, 3)
    with pytest.raises(IndexError, match=r"within 0..2; got 0..3"):
        class_target(output, torch.tensor([0, 3]))
    with pytest.raises(ValueError, match=r"classes must have shape \(2,\)"):
        class_target(output, torch.tensor([0, 1, 2]))
    with pytest.raises(TypeError, match="must be integers"):
        class_target(output, torch.tensor([0.0, 1.0]))


def test_an_edit_of_classes_leads_by_the_margin():
    layer = make(9, 6, depth=3, leaf_width=4).eval()
    x, classes = torch.randn(2, 3, 9, dtype=torch.float64), torch.randint(6, (2, 3))
    edit_class_(layer, x, classes, margin=0.5)
    y = layer(x).detach()
    others = y.scatter(-1, classes[..., None], -torch.inf).amax(-1)
    assert (y.gather(-1, classes[..., None])[..., 0] - others).min() >= 0.5 - 1e-9


def test_the_inputs_of_a_layer_inside_a_model():
    model = nn.Sequential(nn.Linear(8, 8), Block()).train()
    data = [torch.randn(3, 2, 8), torch.randn(1, 2, 8)]
    x = layer_inputs(model, model[1].fff, data)
    torch.testing.assert_close(x, torch.cat([model[0](part).reshape(-1, 8) for part in data]).detach())
    target = torch.randn(1, 8)
    edit_(model[1].fff, x[4:5], target)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(data[0])[2, 0], x[4] + target[0], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="does not have this layer"):
        layer_inputs(model, fastff.FFF(8, 8, depth=1, leaf_width=1), data)


def test_autocast_does_not_round_an_edit():
    layer, x = fastff.FFF(8, 4, depth=2, leaf_width=4).eval(), torch.randn(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        record = edit_(layer, x, torch.ones(2, 4))
    assert record.error < 1e-5


def test_a_margin_of_zero_is_refused():
    """The class was not ahead after 79 of 200 such edits: rounding decided."""
    with pytest.raises(ValueError, match="margin must be above 0"):
        class_target(torch.zeros(1, 4), 0, 0.0)
