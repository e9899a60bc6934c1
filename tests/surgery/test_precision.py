"""Other libraries' quantisation skips FFF layers without a message; precision_of shows it."""

import copy
import warnings

import pytest
import torch
from torch import nn

import fastff
from fastff.surgery import precision_of


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 8), fastff.FFF(8, 7, depth=2, leaf_width=3, activation="swiglu"), nn.Linear(7, 5))


def dynamic(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is on its way out
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear, fastff.FFF}, dtype=torch.qint8)


def by_torchao(model, names=None):
    """The linear layers as int8, or the parameters of these names. torchao takes seconds to import."""
    torchao = pytest.importorskip("torchao.quantization")
    config, options = torchao.Int8WeightOnlyConfig(), {}
    if names:
        config, options = torchao.FqnToConfig(dict.fromkeys(names, config)), {"filter_fn": None}
    torchao.quantize_(model, config, **options)
    return model


@pytest.mark.parametrize("quantise", [dynamic, pytest.param(by_torchao, marks=pytest.mark.slow)])
def test_others_leave_the_leaves_out(quantise):
    """Both say nothing, even if FFF is among the types to quantise; fastff.quantize_ does the rest."""
    x = torch.randn(11, 8)
    net = model().eval()
    alone = copy.deepcopy(net[1])
    net = quantise(net)
    assert torch.equal(net[1](x), alone(x))
    found = precision_of(net)
    assert found.float_leaves == ["1"]
    leaves = [f"1.leaf_{part}_weight" for part in ("in", "out", "gate")]
    assert {weight.name for weight in found.full} == {"1.node_weight", *leaves}
    assert {weight.name for weight in found.weights if weight.is_quantized} == {"0.weight", "2.weight"}
    assert "float leaves: 1. Call fastff.quantize_(model) to make them int8." in str(found)

    fastff.quantize_(net)
    found = precision_of(net)
    assert found.float_leaves == []
    assert [weight.name for weight in found.full] == ["1.node_weight"]
    assert "quantize_" not in str(found)
    fastff.quantize_(alone)
    assert torch.equal(net[1](x), alone(x))
    assert net(torch.randn(11, 9)).isfinite().all()


@pytest.mark.slow
def test_bytes_are_those_of_the_stored_numbers():
    net = by_torchao(model())
    sizes = {weight.name: weight.bytes for weight in precision_of(net).weights}
    assert 8 * 9 <= sizes["0.weight"] < 8 * 9 * 4  # int8 and scales
    assert sizes["1.leaf_in_weight"] == 4 * 3 * 8 * 4
    fastff.quantize_(net)
    sizes = {weight.name: weight.bytes for weight in precision_of(net).weights}
    assert sizes["1.leaf_in_weight"] == 4 * 3 * 8


def test_a_tied_weight_counts_once():
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    found = precision_of(nn.Sequential(first, second))
    assert [weight.name for weight in found.weights] == ["0.weight"]
    assert found.float_leaves == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["leaf_in_weight", "node_weight"])
def test_torchao_on_a_parameter_of_an_fff_does_not_run(name):
    """FqnToConfig can reach the 3-D parameters. The layer refuses them, with gradients and without."""
    net = by_torchao(model().eval(), [f"1.{name}"])
    told = rf"{name.partition('_')[2]} must be a plain tensor; got torchao's Int8Tensor.*fastff.quantize_"
    for grad in (torch.enable_grad(), torch.no_grad()):
        with grad, pytest.raises(TypeError, match=told):
            net(torch.randn(3, 9))
