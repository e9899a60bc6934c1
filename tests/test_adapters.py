"""Structures as PEFT builds them, without PEFT; tests/integrations/test_peft.py has the real ones."""

import pytest
import torch
from torch import nn

import fastff
from fastff.adapters import check_int8, is_original, outside_checkpoints
from fastff.layer import fff_layers


def layer():
    return fastff.FFF(5, 3, depth=2, leaf_width=3).eval()


def test_the_unused_original_is_left_out():
    wrapper = nn.Module()
    wrapper.original_module, wrapper.modules_to_save = layer(), nn.ModuleDict({"default": layer()})
    assert list(fff_layers(wrapper)) == ["modules_to_save.default"]
    model = nn.ModuleDict({"a": wrapper, "b": layer()})
    assert list(fff_layers(model)) == ["a.modules_to_save.default", "b"]
    assert outside_checkpoints(model, fff_layers(model)) == []  # not adapted
    model.peft_config = {}
    assert outside_checkpoints(model, fff_layers(model)) == ["b"]


def test_the_name_alone_hides_no_layer():
    model = nn.ModuleDict({"original_module": layer()})
    assert list(fff_layers(model)) == ["original_module"]
    assert not is_original("a.original_module", ["a.original_module", "b.modules_to_save.default"])


def test_int8_weights_that_are_computed():
    class Add(nn.Module):
        def forward(self, weight):
            return weight + torch.full_like(weight, 0.4, dtype=torch.float32).to(weight.dtype)

    found = layer()
    fastff.quantize_(found)
    check_int8(found)
    nn.utils.parametrize.register_parametrization(found, "leaf_in_weight", Add(), unsafe=True)
    for grad in (torch.enable_grad(), torch.no_grad()):
        with grad, pytest.raises(TypeError, match=r"int8 leaves must be plain parameters.*of leaf_in_weight. Merge"):
            found(torch.randn(7, 5))
