"""rebalance_: one pass for all layers, and more only where needed. What each leaf gets is in test_boundaries.py."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fastff
from fastff.training import rebalance as module
from fastff.training.rebalance import Cost, estimate, rebalance
from helpers import smallest_share, stack


def test_one_pass_where_nothing_must_move():
    """It was a pass for each layer, and one more."""
    model, x, forwards = stack(shift=0.0)
    fastff.rebalance_(model, x)
    assert len(forwards) == 4
    assert rebalance(model, x, 0.1) == Cost(4, 1024)


@pytest.mark.parametrize("least", [0.1, 0.5, 1.0])
def test_more_passes_until_every_share_holds(least):
    model, x, forwards = stack()
    assert smallest_share(model, x) < 0.1
    forwards.clear()
    fastff.rebalance_(model, x, min_share=least)
    assert len(forwards) <= 4 * 4  # no more than one for each layer
    assert smallest_share(model, x) >= least


def test_one_pass_comes_near():
    model, x, forwards = stack(shift=0.5)
    forwards.clear()
    rebalance(model, x, 0.3, passes=1)
    assert len(forwards) == 4
    assert smallest_share(model, x) >= 0.2


def test_logits_that_do_not_fit_together(monkeypatch):
    """A pass for each part, and the same shares."""
    model, x, forwards = stack()
    monkeypatch.setattr(module, "_LOGIT_BYTES", 2 * 1024 * 7 * 4)  # of two layers
    forwards.clear()
    rebalance(model, x, 0.5, samples=1024, passes=1)
    assert len(forwards) == 8
    rebalance(model, x, 0.5, samples=1024)
    assert smallest_share(model, x) >= 0.5


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.fff = fastff.FFF(8, 8, depth=3, leaf_width=4)

    def forward(self, x):
        return self.fff(x + self.fff(x))


def test_a_layer_that_is_called_twice_counts_both():
    torch.manual_seed(0)
    model, x = Twice(), torch.randn(512, 8)
    fastff.rebalance_(model, x, min_share=0.3)
    used = fastff.usage(model, x)["fff"]
    assert used.samples == 1024
    assert used.leaves_used == 8


@pytest.mark.parametrize("kind", ["list", "loader", "tensor"])
def test_what_a_pass_will_take(kind):
    model, x, _ = stack()
    data = {"list": x, "loader": DataLoader(torch.cat(x), batch_size=256, shuffle=True), "tensor": torch.cat(x)}[kind]
    before = torch.get_rng_state()
    assert estimate(model, data) == rebalance(model, data, 0.0)
    assert torch.equal(torch.get_rng_state(), before) or kind == "loader"
    assert estimate(model, x, samples=300).forwards == 2


def test_biases_that_have_no_place_are_refused():
    """They were infinite."""
    layer = fastff.FFF(4, 2, depth=2, leaf_width=1)
    with torch.no_grad():
        layer.node_weight.fill_(1e20)
    before = layer.node_bias.clone()
    with pytest.raises(
        ValueError, match=r"the FFF layer '' has node logits or boundaries that are not finite in torch\.float32"
    ):
        fastff.rebalance_(layer, 1e20 * torch.randn(64, 4), min_share=0.9)
    assert torch.equal(layer.node_bias, before)
