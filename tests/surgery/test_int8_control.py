"""int8 weights for the original: torchao or torch's own, or a reason why neither."""

import sys

import pytest
import torch
from torch import nn

from fastff.surgery.choose import choose
from fastff.surgery.int8_control import NoInt8, int8_copy
from surgery_models import TOKENS, VECTORS, encoder, hf


@pytest.fixture
def without_torchao(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)


def test_torchs_own_is_used_where_torchao_is_missing(without_torchao):
    model = encoder().eval()
    made, how = int8_copy(model, choose(model, None, None)[0])
    assert how == "torch, dynamic"
    assert type(model.layers[0].linear1) is nn.Linear
    assert type(made.layers[0].linear1) is not nn.Linear
    with torch.no_grad():  # the fused path of torch.nn would read the weights of linear1
        ours, theirs = made(VECTORS), model(VECTORS)
    assert 0 < (ours - theirs).norm() < 0.05 * theirs.norm()


def test_torchao_comes_first():
    pytest.importorskip("torchao")
    model = encoder().eval()
    made, how = int8_copy(model, choose(model, None, None)[0])
    assert how == "torchao"
    with torch.no_grad():
        assert 0 < (made(VECTORS) - model(VECTORS)).norm() < 0.05 * model(VECTORS).norm()


def test_blocks_without_nn_linear_are_named():
    """GPT-2 has Conv1D, which both libraries leave alone: a row of unchanged numbers would be no int8 row."""
    model = hf("GPT2", vocab_size=50, n_positions=40, n_embd=16, n_layer=1, n_head=2).eval()
    with pytest.raises(NoInt8, match="the linear layers of the blocks are Conv1D"):
        int8_copy(model, choose(model, TOKENS, None)[0])


def test_if_neither_can_run_both_reasons_are_given(without_torchao, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.ao.quantization", None)
    model = encoder().eval()
    with pytest.raises(NoInt8, match="torchao is not installed; this torch has no dynamic quantisation"):
        int8_copy(model, choose(model, None, None)[0])
