"""int8 weights for the original or for a model with FFF layers: torch's own or torchao, or a reason why neither."""

import sys

import pytest
import torch
from torch import nn

import fastff
from fastff.surgery.choose import choose
from fastff.surgery.int8_control import NoInt8, int8_copy, int8_trees
from surgery_models import TOKENS, VECTORS, encoder, hf


@pytest.fixture
def without_torchao(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)


@pytest.fixture
def without_dynamic(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.ao.quantization", None)


def test_on_a_cpu_torchs_own_comes_first():
    """It multiplies as int8; torchao's weight-only product was slower than float32."""
    model = encoder().eval()
    made, how = int8_copy(model, choose(model, None, None)[0])
    assert how == "torch, dynamic"
    assert type(model.layers[0].linear1) is nn.Linear
    assert type(made.layers[0].linear1) is not nn.Linear
    with torch.no_grad():  # the fused path of torch.nn would read the weights of linear1
        ours, theirs = made(VECTORS), model(VECTORS)
    assert 0 < (ours - theirs).norm() < 0.05 * theirs.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchao_is_next(monkeypatch, dtype):
    pytest.importorskip("torchao")
    if dtype == torch.float32:  # which torch's own takes
        monkeypatch.setitem(sys.modules, "torch.ao.quantization", None)
    model, x = encoder().eval().to(dtype), VECTORS.to(dtype)
    made, how = int8_copy(model, choose(model, None, None)[0])
    assert how == "torchao"
    with torch.no_grad():
        assert 0 < (made(x) - model(x)).norm() < 0.05 * model(x).norm()


def test_blocks_without_nn_linear_are_named():
    """GPT-2 has Conv1D, which both libraries leave alone: a row of unchanged numbers would be no int8 row."""
    model = hf("GPT2", vocab_size=50, n_positions=40, n_embd=16, n_layer=1, n_head=2).eval()
    with pytest.raises(NoInt8, match="the linear layers of the blocks are Conv1D"):
        int8_copy(model, choose(model, TOKENS, None)[0])


def test_if_neither_can_run_both_reasons_are_given(without_torchao, without_dynamic):
    model = encoder().eval()
    with pytest.raises(NoInt8, match="this torch has no dynamic quantisation; torchao is not installed"):
        int8_copy(model, choose(model, None, None)[0])


def trees():
    torch.manual_seed(0)
    return nn.Sequential(fastff.FFF(16, 16, depth=2, leaf_width=8), nn.Linear(16, 16)).eval()


def test_trees_get_int8_leaves_and_int8_linears():
    model, x = trees(), torch.randn(50, 16)
    made, how = int8_trees(model)
    assert how == "fastff and torch, dynamic"
    assert made[0].leaves.is_int8
    assert type(made[1]) is not nn.Linear
    assert type(model[1]) is nn.Linear
    assert not model[0].leaves.is_int8
    with torch.no_grad():
        assert 0 < (made(x) - model(x)).norm() < 0.05 * model(x).norm()


def test_trees_without_a_tool_have_int8_leaves_alone(without_torchao, without_dynamic):
    made, how = int8_trees(trees())
    assert how.startswith("fastff, the leaves alone: this torch has no dynamic quantisation")
    assert made[0].leaves.is_int8
    assert type(made[1]) is nn.Linear
    assert int8_trees(trees()[:1])[1] == "fastff"  # nothing else to quantise
