"""Leaves from data, and distillation layer by layer."""

import copy
import warnings

import pytest
import torch
from torch import nn

import fastff
from surgery_models import build, encoder, varied


@pytest.mark.slow
@pytest.mark.parametrize("gated", [False, True])
def test_leaves_from_data_are_near_the_block_at_once_and_nearer_after_distillation(gated):
    torch.manual_seed(0)
    block = fastff.baselines.FF(16, 8, width=64, activation="swiglu" if gated else "gelu")
    model = nn.Sequential(block, nn.LayerNorm(8)).train()
    x = varied(model)
    dense = model.eval()(x).detach()
    model.train()
    report = fastff.replace_(model, depth=3, leaf_width=24, init="data", data=x, samples=3000)
    assert model[0].training
    assert report.replaced[0].weights == "fitted to 2,700 inputs"
    assert report.replaced[0].measured_on == "held-out inputs"
    assert 0 < report.missed < 0.25
    assert torch.bincount(model[0].route(x[:3000]), minlength=8).min() > 200
    tree = [parameter.clone() for parameter in model[0].tree_parameters()]
    (made,) = fastff.distill_(model, report, [x[:2000], x[2000:]], steps=300, batch=256, rate=3e-3, progress=False)
    assert made.name == "0"
    assert made.before == pytest.approx(report.missed, rel=0.3)
    assert made.after < 0.9 * made.before
    assert model.training
    assert all(torch.equal(a, b) for a, b in zip(tree, model[0].tree_parameters(), strict=True))
    after = nn.functional.mse_loss(model.eval()(x), dense)
    assert after < 0.3 * dense.var()


def test_data_in_a_transformer_reaches_every_block():
    torch.manual_seed(0)
    model = encoder().eval()
    x = torch.randn(64, 10, model.layers[0].linear1.in_features)
    dense = model(x).detach()
    report = fastff.replace_(model, depth=1, init="data", leaf_width=model.layers[0].linear1.out_features, data=x)
    torch.testing.assert_close(model(x), dense, rtol=1e-3, atol=1e-3)  # leaves as wide as the block say the same
    assert len(report.blocks) == len(report.replaced) > 1


def test_data_that_cannot_be_learned_from():
    def model(dtype=torch.float32):
        return nn.Sequential(fastff.baselines.FF(16, 8, width=64, dtype=dtype))

    few = fastff.replace_(model(), depth=2, init="data", data=torch.randn(5, 16))
    assert few.missed is None
    assert "eval() was not measured: 5 inputs are too few. " in str(few)
    wrong = torch.randn(100, 16)
    wrong[3, 0] = torch.nan
    with pytest.raises(ValueError, match="contain NaN or infinity"):
        fastff.replace_(model(), depth=2, init="data", data=wrong)
    half = model(torch.float16)
    report = fastff.replace_(half, depth=1, leaf_width=16)
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        fastff.distill_(half, report, torch.randn(100, 16).half(), progress=False)


def test_distillation_needs_the_model_of_the_report():
    model = nn.Sequential(fastff.baselines.FF(16, 8, width=64))
    report = fastff.replace_(model, depth=1)
    with pytest.raises(ValueError, match="'0' is not an FFF layer in this model"):
        fastff.distill_(nn.Sequential(fastff.baselines.FF(16, 8, width=64)), report, torch.randn(8, 16))
    with pytest.raises(ValueError, match="'0' is not an FFF layer in this model"):
        fastff.distill_(nn.ModuleDict({"a": model[0]}), report, torch.randn(8, 16))
    with pytest.raises(ValueError, match="0: in_features is 4 in the layer and 16 in the dense one"):
        fastff.distill_(nn.Sequential(fastff.FFF(4, 8, depth=1, leaf_width=32)), report, torch.randn(8, 4))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 0}, "steps must be at least 1; got 0"),
        ({"steps": 1.5}, "steps must be an integer; got 1.5"),
        ({"batch": 0}, "batch must be at least 1; got 0"),
        ({"batch": "8"}, "batch must be an integer; got '8'"),
        ({"samples": 1}, "samples must be at least 2; got 1"),
        ({"rate": 0.0}, "rate must be positive and finite; got 0.0"),
        ({"rate": float("nan")}, "rate must be positive and finite; got nan"),
        ({"rate": float("inf")}, "rate must be positive and finite; got inf"),
        ({"rate": "fast"}, "rate must be a number; got 'fast'"),
        ({"teacher": "dense"}, "teacher must be an nn.Module; got str"),
        ({"model": "model"}, "model must be an nn.Module; got str"),
        ({"report": []}, "report must be the Report that replace_ returned for this model; got list"),
        ({"loss": 3}, "loss must be a function"),
        ({"data": 3}, "data must be"),
        ({"model": nn.Sequential(fastff.FFF(16, 8, depth=1, leaf_width=32).half())}, "float32 or bfloat16"),
    ],
)
def test_distillation_checks_its_arguments_before_any_work(wrong, message):
    """Some were found out in the middle of the training, by an error of torch, or not at all."""
    model = nn.Sequential(fastff.baselines.FF(16, 8, width=64))
    report = fastff.replace_(model, depth=1)
    ran = []
    model.register_forward_hook(lambda *_: ran.append(1))
    arguments = {"model": model, "report": report, "data": torch.randn(8, 16)} | wrong
    with pytest.raises((TypeError, ValueError), match=message):
        fastff.distill_(**arguments, progress=False)
    assert not ran
    with torch.inference_mode(), pytest.raises(ValueError, match=r"within torch.inference_mode\(\)"):
        fastff.distill_(model, report, torch.randn(8, 16), progress=False)


def test_distillation_of_a_copied_model():
    """An activation without a name is a module; its copy is another object, which was taken for another activation."""
    model, batch = build("clip")
    report = fastff.replace_(model, depth=1, leaf_width=24, init="data", data=[batch] * 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        made = fastff.distill_(copy.deepcopy(model), report, [batch] * 4, steps=2, progress=False)
    assert [one.name for one in made] == [r.name for r in report.replaced]


def test_distillation_after_the_model_was_converted():
    """The dense blocks of the report stay in float32 when the model becomes bfloat16."""
    torch.manual_seed(0)
    model, x = nn.Sequential(fastff.baselines.FF(16, 8, width=64)), varied(None, 400)
    report = fastff.replace_(model, depth=1, leaf_width=16, init="data", data=x)
    model.bfloat16()
    (made,) = fastff.distill_(model, report, x.bfloat16(), steps=50, progress=False)
    assert made.kept
    assert made.after < made.before


@pytest.mark.parametrize(
    "data", [torch.randn(30, 5), torch.randn(30, 8).double(), torch.ones(30, 8).long(), {"foo": torch.randn(30, 8)}]
)
def test_data_that_the_model_does_not_run_on_is_said(data):
    """An error of torch came through, without a word of data=."""
    dense = nn.Sequential(fastff.baselines.FF(8, 8, width=16))
    model = copy.deepcopy(dense)
    told = r"{} does not run on data=: .*[^.]\. Pass batches as the model takes them\.$"
    with pytest.raises(ValueError, match=told.format("the model")):
        fastff.replace_(model, depth=1, init="data", data=data)
    report = fastff.replace_(model, depth=1)
    with pytest.raises(ValueError, match=told.format("the model")):
        fastff.distill_(model, report, data, progress=False)
    with pytest.raises(ValueError, match=told.format("the teacher")):
        fastff.distill_(model, report, data, teacher=dense, progress=False)


@pytest.mark.parametrize("taught", [True, False])
def test_frozen_leaves_are_distilled_and_stay_frozen(taught):
    """A frozen dense model gives frozen leaves; distill_ is there to train them all the same."""
    torch.manual_seed(0)
    dense = nn.Sequential(fastff.baselines.FF(16, 16, width=64)).requires_grad_(False)
    model, x = copy.deepcopy(dense), varied(None)
    report = fastff.replace_(model, depth=2, leaf_width=16, init="data", data=x)
    old = copy.deepcopy(model.state_dict())
    options = {"teacher": dense} if taught else {}
    made = fastff.distill_(model, report, list(x.split(200)), **options, steps=100, rate=3e-3, progress=False)
    assert made[-1].kept
    assert not any(p.requires_grad for p in model.parameters())
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, old[name])}
    assert changed == {f"0.{n}" for n in ("leaf_in_weight", "leaf_in_bias", "leaf_out_weight", "leaf_out_bias")}


def test_a_tree_that_learns_comes_closer():
    torch.manual_seed(0)
    original = nn.Sequential(fastff.baselines.FF(4, 4, width=8, activation="relu"), nn.Identity()).eval()
    x = torch.randn(4000, 4)
    after, batches = {}, list(x.split(250))
    for train_tree in (False, True):
        torch.manual_seed(0)
        model = copy.deepcopy(original)
        report = fastff.replace_(model, depth=2, leaf_width=2, init="data", data=batches)
        frozen = model[0].freeze_tree_().node_weight.clone()
        options = {"steps": 150, "batch": 250, "rate": 1e-2, "progress": False}
        after[train_tree] = fastff.distill_(model, report, batches, train_tree=train_tree, **options)[-1].after
        assert torch.equal(model[0].node_weight, frozen) != train_tree
        assert not model[0].node_weight.requires_grad
    assert after[True] < 0.95 * after[False]
    with pytest.raises(TypeError, match="train_tree must be True or False; got 'yes'"):
        fastff.distill_(model, report, batches, train_tree="yes")
    with pytest.raises(ValueError, match="train_tree=True trains layer by layer"):
        fastff.distill_(model, report, batches, train_tree=True, teacher=original)


def test_a_tree_that_ends_up_worse_is_restored():
    torch.manual_seed(0)
    model = nn.Sequential(fastff.baselines.FF(4, 4, width=8, activation="relu"))
    x = torch.randn(400, 4)
    report = fastff.replace_(model, depth=2, leaf_width=4, init="data", data=x)
    before = copy.deepcopy(model.state_dict())
    with pytest.warns(UserWarning, match="distill_ changed nothing"):
        fastff.distill_(model, report, x, steps=5, rate=1e30, train_tree=True, progress=False)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
