"""The rate of a dropout without a module is read off a training pass, and kept."""

import copy

import pytest
import torch
from torch import nn

import fastff
from surgery_models import VECTORS, Functional, stack


@pytest.mark.parametrize("f", [nn.functional.silu, nn.functional.relu, nn.functional.gelu])
@pytest.mark.parametrize(("hidden", "output"), [(0.1, 0.0), (0.0, 0.25), (0.05, 0.3)])
def test_functional_dropout_is_kept(hidden, output, f):
    model = stack(Functional(hidden, f=f, drop_out=output))
    dense = copy.deepcopy(model).eval()
    fastff.replace_(model, depth=0)
    layer = model[0].mlp.fff if output else model[0].mlp
    assert layer.dropout == hidden
    if output:
        assert model[0].mlp.dropout.p == output
        assert model[0].mlp.dropout.training
    torch.testing.assert_close(model.eval()(VECTORS), dense(VECTORS))


def test_it_drops_as_often_as_before():
    model = nn.Sequential(Functional(0.25, drop_out=0.5))
    x = torch.randn(1, 16).expand(20000, 16)
    with torch.no_grad():
        dense = model.train()(x)
        fastff.replace_(model, depth=0)
        ours = model.train()(x)
    for y in (dense, ours):
        assert abs(float((y == 0).float().mean()) - 0.5) < 0.005
    # Six standard errors, taken twice as large as for a normal distribution, which has lighter tails.
    assert (ours.var(0) / dense.var(0) - 1).abs().max() < 6 * (2 / 20000) ** 0.5 * 2
    assert (ours.mean(0) - dense.mean(0)).abs().max() < 6 * float(dense.std(0).max()) * (2 / 20000) ** 0.5


def test_a_save_repeats_the_rate(tmp_path):
    pytest.importorskip("safetensors")
    model = stack(Functional(0.1, drop_out=0.2))
    fastff.replace_(model, depth=1)
    fastff.save(model, tmp_path)
    fresh = stack(Functional(0.1, drop_out=0.2))
    fastff.load_(fresh, tmp_path)
    assert fresh[0].mlp.dropout.p == 0.2
    assert fresh[0].mlp.fff.dropout == 0.1
    torch.testing.assert_close(fresh.eval()(VECTORS), model.eval()(VECTORS))


@pytest.mark.parametrize("rate", [1.0, 0.0, -0.5, "0.mlp.nothing", True])
def test_a_rate_in_a_specification_is_checked(rate):
    model = stack(Functional(0.1, drop_out=0.2))
    specification = copy.deepcopy(fastff.replace_(model, depth=1).specification)
    specification[0]["dropout_after"] = rate
    with pytest.raises(ValueError, match=r"dropout_after|this model has no"):
        fastff.surgery.apply_(stack(Functional(0.1, drop_out=0.2)), specification)


@pytest.mark.parametrize("place", ["rows", "tokens", "features"])
def test_whole_rows_or_features_are_no_dropout_of_an_fff(place):
    class Odd(Functional):
        def forward(self, x):
            hidden = self.f(self.a(x))
            shape = list(hidden.shape)
            shape[{"rows": 0, "tokens": 1, "features": 2}[place]] = 1
            return self.b(hidden * nn.functional.dropout(hidden.new_ones(shape), 0.25, self.training))

    with pytest.raises(ValueError, match="no dropout that FFF has explains it"):
        fastff.replace_(stack(Odd()), depth=1)
