"""int8 for the original by torch or by torchao, for a model with FFF layers by what there is, or a reason why not."""

import sys

import pytest
import torch
from torch import nn

import fastff
from fastff.surgery.choose import choose
from fastff.surgery.int8_control import Dense, NoInt8, int8_copy, int8_trained
from surgery_models import TOKENS, VECTORS, encoder, hf


@pytest.fixture
def without_torchao(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)


@pytest.fixture
def without_dynamic(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.ao.quantization", None)


def test_int8_is_torchs_own():
    model = encoder().eval()
    made, how = int8_copy("int8", model, choose(model, None, None)[0])
    assert how == "torch, dynamic"
    assert type(model.layers[0].linear1) is nn.Linear
    assert type(made.layers[0].linear1) is not nn.Linear
    with torch.no_grad():  # the fused path of torch.nn would read the weights of linear1
        ours, theirs = made(VECTORS), model(VECTORS)
    assert 0 < (ours - theirs).norm() < 0.05 * theirs.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_weights_are_torchaos(dtype):
    pytest.importorskip("torchao")
    model, x = encoder().eval().to(dtype), VECTORS.to(dtype)
    made, how = int8_copy("int8 weights", model, choose(model, None, None)[0])
    assert how == "torchao"
    with torch.no_grad():
        assert 0 < (made(x) - model(x)).norm() < 0.05 * model(x).norm()


def test_blocks_without_nn_linear_are_named():
    """GPT-2 has Conv1D, which both libraries leave alone: a row of unchanged numbers would be no int8 row."""
    model = hf("GPT2", vocab_size=50, n_positions=40, n_embd=16, n_layer=1, n_head=2).eval()
    with pytest.raises(NoInt8, match="the linear layers of the blocks are Conv1D"):
        int8_copy("int8", model, choose(model, TOKENS, None)[0])


@pytest.mark.parametrize(
    ("method", "why"),
    [("int8", "this torch has no dynamic quantisation"), ("int8 weights", "torchao is not installed")],
)
def test_a_tool_that_is_missing_is_the_reason(without_torchao, without_dynamic, method, why):
    model = encoder().eval()
    with pytest.raises(NoInt8, match=why):
        int8_copy(method, model, choose(model, None, None)[0])


def test_int8_takes_float32_alone():
    model = encoder().eval().bfloat16()
    with pytest.raises(NoInt8, match=r"takes float32; the model has torch\.bfloat16"):
        int8_copy("int8", model, choose(model, None, None)[0])


def trees():
    torch.manual_seed(0)
    return nn.Sequential(fastff.FFF(16, 16, depth=2, leaf_width=8), nn.Linear(16, 16)).eval()


def runs(model):
    """Every model does."""


def test_trees_get_int8_leaves_and_int8_linears():
    model, x = trees(), torch.randn(50, 16)
    made, how = int8_trained(model, runs)
    assert how == "fastff and torch, dynamic"
    assert made[0].leaves.is_int8
    assert type(made[1]) is not nn.Linear
    assert type(model[1]) is nn.Linear
    assert not model[0].leaves.is_int8
    with torch.no_grad():
        assert 0 < (made(x) - model(x)).norm() < 0.05 * model(x).norm()


def test_trees_that_torchs_own_does_not_take_get_int8_weights():
    pytest.importorskip("torchao")
    assert int8_trained(trees().bfloat16(), runs)[1] == "fastff and torchao"


def test_trees_without_a_tool_have_int8_leaves_alone(without_torchao, without_dynamic):
    made, how = int8_trained(trees(), runs)
    assert how == "fastff, the leaves alone: this torch has no dynamic quantisation; torchao is not installed"
    assert made[0].leaves.is_int8
    assert type(made[1]) is nn.Linear
    assert int8_trained(trees()[:1], runs)[1] == "fastff"  # nothing else to quantise


def test_a_tool_whose_model_does_not_run_is_left_out():
    """transformers reads the weight of some linear layers, which torch's int8 layers do not have."""
    pytest.importorskip("torchao")

    def check(model):
        if not isinstance(model[1].weight, torch.Tensor):
            raise ValueError("no weight")

    assert int8_trained(trees(), check)[1] == "fastff and torchao"

    def never(model):
        raise ValueError("it does not run")

    made, how = int8_trained(trees(), never)
    assert how == "fastff, the leaves alone: it does not run; it does not run"
    assert made[0].leaves.is_int8
    with pytest.raises(NoInt8, match="it does not run; it does not run"):
        int8_trained(nn.Sequential(fastff.FFF(16, 16, depth=0, leaf_width=8)), never)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_a_layer_of_depth_0_becomes_linear_layers(activation, bias):
    torch.manual_seed(0)
    layer = fastff.FFF(16, 12, depth=0, leaf_width=8, activation=activation, bias=bias).eval()
    x = torch.randn(3, 7, 16)
    torch.testing.assert_close(Dense(layer)(x), layer(x))
    made, how = int8_trained(nn.Sequential(layer), runs)
    assert how == "torch, dynamic"
    assert isinstance(made[0], Dense)
    assert type(made[0].up) is not nn.Linear
    with torch.no_grad():
        assert 0 < (made(x) - layer(x)).norm() < 0.05 * layer(x).norm()


def test_leaves_that_cannot_be_int8_are_a_reason():
    model = nn.Sequential(*(fastff.FFF(16, 16, depth=1, leaf_width=8) for _ in range(2))).eval()
    model[1].leaf_in_weight, model[1].leaf_out_weight = model[0].leaf_in_weight, model[0].leaf_out_weight
    with pytest.raises(NoInt8, match="tied to other modules: 0, 1"):
        int8_trained(model, runs)
