"""Distillation of a whole model against the model that it was."""

import copy
import re
import warnings

import pytest
import torch
from torch import nn

import fastff
from fastff.surgery.closeness import drift, first_tensor
from fastff.surgery.distill_layer import visited
from helpers import make


class Residual(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.mlp = fastff.baselines.FF(16, 16, width=width, activation="gelu")
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(x + 3 * self.mlp(x))


def operated(blocks=3, leaf_width=8):
    """A model, what it was, the report, and data that varies in few directions."""
    torch.manual_seed(0)
    dense = nn.Sequential(*(Residual() for _ in range(blocks))).train()
    x = torch.randn(4000, 16) * torch.linspace(3, 0.1, 16)
    model = copy.deepcopy(dense)
    report = fastff.replace_(model, depth=2, leaf_width=leaf_width, init="data", data=x)
    return model, dense, report, list(x.split(100))


def missed(model, dense, data):
    x = torch.cat(data)
    with torch.no_grad():
        return drift(model.eval()(x), dense.eval()(x)).item()


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(0,), (1,), (63,), (3, 5)])
def test_the_pass_for_learning_is_the_hard_pass_with_its_derivative(activation, bias, shape):
    layer = make(5, 4, depth=3, leaf_width=3, activation=activation, bias=bias).eval()
    x = torch.randn(*shape, 5, dtype=torch.float64, requires_grad=True)
    wanted, found = layer(x), visited(layer, x)
    assert found.shape == wanted.shape
    torch.testing.assert_close(found, wanted)
    weight = torch.randn_like(wanted)
    inputs = [x, *layer.leaf_parameters()]
    expected = torch.autograd.grad((wanted * weight).sum(), inputs)
    for a, b in zip(torch.autograd.grad((found * weight).sum(), inputs), expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
def test_a_teacher_brings_the_output_nearer_than_layer_by_layer():
    model, dense, report, data = operated()
    before = missed(model, dense, data)
    alone = copy.deepcopy(model)
    fastff.distill_(alone, report, data, steps=300, batch=100, rate=3e-3, progress=False)
    made = fastff.distill_(model, report, data, teacher=dense, steps=300, rate=3e-3, progress=False)
    assert [one.name for one in made] == ["0.mlp", "1.mlp", "2.mlp", "output"]
    assert made[0].before == made[0].after == 0  # nothing comes before the first block
    assert all(one.after < one.before for one in made[1:])
    assert made[-1].before == pytest.approx(before, rel=0.3)
    assert made[-1].after == pytest.approx(missed(model, dense, data), rel=0.3)
    assert missed(model, dense, data) < 0.8 * missed(alone, dense, data) < 0.8 * before


def test_a_teacher_changes_the_leaves_alone():
    model, dense, report, data = operated()
    model[0].norm.weight.requires_grad_(False)
    leaves = {p for module in model.modules() if isinstance(module, fastff.FFF) for p in module.leaf_parameters()}
    old = {p: p.detach().clone() for p in model.parameters()}
    wanted = [p.requires_grad for p in model.parameters()]
    teacher = [p.clone() for p in dense.parameters()]
    fastff.distill_(model, report, data, teacher=dense, steps=20, rate=1e-3, progress=False)
    assert {p for p, value in old.items() if not torch.equal(p, value)} == leaves
    assert [p.requires_grad for p in model.parameters()] == wanted
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(dense.parameters(), teacher, strict=True))
    for one in (model, dense):
        assert all(module.training for module in one.modules())
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in one.modules())
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("taught", [True, False])
def test_what_would_be_worse_is_not_kept(taught):
    """With a rate far too high, distillation used to leave the layers worse than it had found them."""
    model, dense, report, data = operated()
    old = copy.deepcopy(model.state_dict())
    teacher = {"teacher": dense} if taught else {}
    with pytest.warns(UserWarning, match=r"distill_ changed nothing.*training ended at .*Try a lower rate, more data"):
        made = fastff.distill_(model, report, data, **teacher, steps=10, rate=10.0, progress=False)
    assert all(one.after == one.before for one in made)
    assert not any(one.kept for one in made)
    assert "restored: training ended at" in str(made[-1])
    assert all(torch.equal(value, old[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("taught", [True, False])
def test_a_training_that_diverges_is_said_and_leaves_nothing_behind(taught):
    """A rate of 1e30 gave equal numbers before and after, and no word."""
    model, dense, report, data = operated()
    old = copy.deepcopy(model.state_dict())
    teacher = {"teacher": dense} if taught else {}
    with pytest.warns(UserWarning, match=r"changed nothing: .*the loss was \w+ at step \d+: lower the rate"):
        made = fastff.distill_(model, report, data, **teacher, steps=50, rate=1e30, progress=False)
    assert not made[-1].kept
    assert all(torch.equal(value, old[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_one_layer_may_be_put_back_and_another_kept():
    """The first layer's leaves are as wide as its block: nothing is left to learn there."""
    model, _, report, data = operated(blocks=1, leaf_width=8)
    exact = nn.Sequential(Residual())
    first = fastff.replace_(exact, depth=1, leaf_width=48, init="data", data=torch.cat(data))
    both = nn.Sequential(exact, model)
    for name in list(first.blocks):
        report.blocks[f"0.{name}"] = first.blocks.pop(name)
    report.blocks["1.0.mlp"] = report.blocks.pop("0.mlp")
    old = copy.deepcopy(both.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = {one.name: one for one in fastff.distill_(both, report, data, steps=100, rate=3e-3, progress=False)}
    assert (made["0.0.mlp"].kept, made["1.0.mlp"].kept) == (False, True)
    assert made["0.0.mlp"].note == "there was nothing left to learn"
    changed = {name for name, value in both.state_dict().items() if not torch.equal(value, old[name])}
    assert changed
    assert all(name.startswith("1.0.mlp.leaf") for name in changed)


@pytest.mark.slow
def test_a_distillation_prints_as_people_read():
    """`misses 7.4 %` and `0.0 -> 0.0` were two measures under one name."""
    model, dense, report, data = operated()
    alone = fastff.distill_(copy.deepcopy(model), report, data, steps=50, rate=3e-3, progress=False)
    text = str(alone)
    assert text == repr(alone)
    assert text.splitlines()[0].split() == ["place", "measure", "before", "after", "leaves"]
    assert "missed: the fraction of the dense block's output variance that the layer's hard pass misses" in text
    assert "drift" not in text
    assert [one.measure for one in alone] == ["missed"] * 3
    assert re.fullmatch(r"0.mlp: missed [\d.]+ % -> [\d.]+ %, leaves kept", str(alone[0]))
    options = {"teacher": dense, "steps": 50, "rate": 3e-3, "progress": False}
    taught = fastff.distill_(copy.deepcopy(model), report, data, **options)
    assert [one.measure for one in taught] == ["drift"] * 4
    assert "missed" not in str(taught)
    own = fastff.distill_(model, report, data, **options, loss=lambda a, b, _: (a - b).square().mean())
    assert [one.measure for one in own] == ["drift"] * 3 + ["loss"]
    assert re.fullmatch(r"output: loss [\d.e-]+ -> [\d.e-]+, leaves kept", str(own[-1]))


def test_gradients_outlive_a_distillation():
    """Its clean-up set all of them to None."""
    for taught in (True, False):
        model, dense, report, data = operated()
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        teacher = {"teacher": dense} if taught else {}
        fastff.distill_(model, report, data, **teacher, steps=20, rate=1e-3, progress=False)
        assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda a, b, batch: (a - b).square(), r"loss must return a tensor with one number; got shape \(100, 16\)"),
        (lambda a, b, batch: 1.0, "loss must return a tensor with one number; got 1.0 of type float"),
        (lambda a, b, batch: (a - b).square().mean().detach(), "loss must be differentiable"),
        (lambda a, b, batch: (a - b).sum() * torch.nan, "the loss of the output is nan before any step"),
    ],
)
def test_losses_that_cannot_teach(loss, message):
    model, dense, report, data = operated(blocks=1)
    old = copy.deepcopy(model.state_dict())
    with pytest.raises((TypeError, ValueError), match=message):
        fastff.distill_(model, report, data, teacher=dense, loss=loss, steps=5, progress=False)
    assert all(torch.equal(value, old[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_a_loss_of_ones_own():
    model, dense, report, data = operated()
    seen = []

    def first_half(ours, theirs, batch):
        seen.append(batch)
        return (ours - theirs)[:, :8].square().mean()

    x = torch.cat(data)
    before = first_half(model.eval()(x), dense.eval()(x), x).item()
    made = fastff.distill_(model, report, data, teacher=dense, loss=first_half, steps=100, rate=3e-3, progress=False)
    assert made[-1].before == pytest.approx(before, rel=0.3)
    assert made[-1].after < 0.8 * made[-1].before
    assert any(batch is data[0] for batch in seen)


def test_the_first_tensor_is_the_answer():
    x = torch.randn(2, 3)
    for output in (x, (x, None), {"loss": None, "ids": torch.arange(2), "hidden": x}, [None, torch.tensor(1.0), x]):
        assert first_tensor(output) is x
    with pytest.raises(TypeError, match=r"returned a dict without a floating-point tensor; pass loss="):
        first_tensor({"a": None})


def test_teachers_that_cannot_teach():
    model, dense, report, data = operated()
    with pytest.raises(ValueError, match=r"no dense block at '0.mlp\.\S+'. Pass a copy of the model from before"):
        fastff.distill_(model, report, data, teacher=model, progress=False)
    with pytest.raises(ValueError, match="pass teacher="):
        fastff.distill_(model, report, data, loss=lambda a, b, c: a.mean(), progress=False)
    with pytest.raises(ValueError, match="data holds no batch"):
        fastff.distill_(model, report, iter([]), teacher=dense, progress=False)
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        fastff.distill_(model.half(), report, data, teacher=dense, progress=False)


def test_a_teacher_of_another_width_is_told_of():
    """An error of torch came through: "mat1 and mat2 shapes cannot be multiplied"."""
    model, _, report, data = operated(blocks=1)
    other = nn.Sequential(Residual())
    other[0].mlp = fastff.baselines.FF(12, 12, width=48)
    with pytest.raises(ValueError, match=r"takes 16 features in the model and 12 in the teacher; they must be equal"):
        fastff.distill_(model, report, data, teacher=other, progress=False)
    wider = nn.Sequential(Residual(), nn.Linear(16, 12))
    with pytest.raises(
        ValueError, match=r"the output has the shape \(100, 16\) in the model and \(100, 12\) in the te"
    ):
        fastff.distill_(model, report, data, teacher=wider, progress=False)


def test_a_teacher_whose_outputs_do_not_vary():
    """The drift was a share of nothing: 2e39 %."""
    model, dense, report, data = operated(blocks=1)
    before = copy.deepcopy(model.state_dict())
    for some, told in (
        (data[0][:1], r"1 input is too few: .*drop_last=True\), or loss="),
        (torch.ones(300, 16), r"the teacher's outputs do not vary on these data: .* Pass larger batches that vary"),
    ):
        with pytest.raises(ValueError, match=told):
            fastff.distill_(model, report, some, teacher=dense, steps=3, progress=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
