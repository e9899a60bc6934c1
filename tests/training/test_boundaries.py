"""shift_biases_ and rebalance_: what each leaf gets, and which boundaries move."""

import pytest
import torch

import fastff
from fastff.training.boundaries import shift_biases_
from helpers import make


@pytest.mark.parametrize("node_width", [1, 3])
def test_rebalance_gives_every_leaf_its_part_and_moves_no_more_than_that(node_width):
    torch.manual_seed(0)
    layer = make(6, 2, depth=5, leaf_width=1, node_width=node_width, dtype=torch.float32, activation="tanh")
    bias = layer.node_bias if node_width == 1 else layer.node_out_bias
    with torch.no_grad():
        bias += 0.5 * torch.randn_like(bias)
    x = torch.randn(1000, 6)
    count = torch.bincount(layer.route(x), minlength=32)
    assert count.min() == 0
    others = {name: value.clone() for name, value in layer.state_dict().items()}
    fastff.rebalance_(layer, x, min_share=0.5)
    count = torch.bincount(layer.route(x), minlength=32)
    assert count.min() >= 0.5 * 1000 / 32
    changed = [name for name, value in layer.state_dict().items() if not torch.equal(value, others[name])]
    assert changed == ["node_bias" if node_width == 1 else "node_out_bias"]
    # Balanced enough, it stays as it is; asked for all, every leaf gets it.
    settled = bias.clone()
    fastff.rebalance_(layer, x, min_share=0.5)
    assert torch.equal(bias, settled)
    fastff.rebalance_(layer, x, min_share=1.0)
    assert torch.bincount(layer.route(x), minlength=32).min() == 31


def test_rebalance_leaves_boundaries_that_are_good_enough():
    layer = fastff.FFF(1, 1, depth=2, leaf_width=1)
    with torch.no_grad():
        layer.node_weight.fill_(1)
        layer.node_bias.copy_(torch.tensor([0.0, 0.5, -5.0]))  # the right half goes left at 5: nothing beyond
    x = torch.linspace(-1, 1, 80).unsqueeze(1)
    fastff.rebalance_(layer, x, min_share=0.1)
    assert torch.bincount(layer.route(x), minlength=4).tolist() == [20, 20, 37, 3]  # 2 are asked for, and one to spare
    assert layer.node_bias[:2].tolist() == [0, 0.5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rebalance_in_low_precision_goes_by_the_biases_it_stores(dtype):
    torch.manual_seed(0)
    layer = make(6, 2, depth=5, leaf_width=1, dtype=dtype)
    x = torch.randn(2000, 6).to(dtype)
    fastff.rebalance_(layer, x, min_share=0.5)
    assert torch.bincount(layer.route(x), minlength=32).min() >= 0.3 * 2000 / 32


def test_trees_are_balanced_together_as_each_by_itself():
    torch.manual_seed(0)
    layers = [fastff.FFF(6, 2, depth=4, leaf_width=1) for _ in range(3)]
    x = torch.randn(3, 500, 6)
    with torch.no_grad():
        for layer in layers:
            layer.node_bias += torch.randn_like(layer.node_bias)
        bias = torch.stack([layer.node_bias for layer in layers])
        logits = torch.stack([layer.node_logits(own) for layer, own in zip(layers, x, strict=True)])
    before = bias.clone()
    shift_biases_(bias, logits, 0.5)
    for i, (layer, own) in enumerate(zip(layers, x, strict=True)):
        assert torch.bincount(layer.route(own), minlength=16).min() < 16
        fastff.rebalance_(layer, own, min_share=0.5)
        assert not torch.equal(layer.node_bias, before[i])
        assert torch.equal(bias[i], layer.node_bias)
        assert torch.bincount(layer.route(own), minlength=16).min() >= 16  # half of 500 / 16


@pytest.mark.parametrize(("samples", "each"), [(3, 0), (4, 1), (8, 2), (9, 2), (12, 3), (40, 6), (41, 7)])
def test_a_leaf_gets_its_part_and_one_to_spare_where_there_are_enough(samples, each):
    layer = fastff.FFF(1, 1, depth=2, leaf_width=1)
    with torch.no_grad():
        layer.node_weight.fill_(1)
        layer.node_bias.fill_(-5.0)  # all go left
    x = torch.linspace(-1, 1, samples).unsqueeze(1)
    fastff.rebalance_(layer, x, min_share=0.5)
    assert torch.bincount(layer.route(x), minlength=4)[1:].tolist() == [each, each, each]


@pytest.mark.parametrize(
    ("values", "bias", "counts"),
    [
        ([0.0] * 60 + [1.0] * 4, -0.5, [60, 4]),  # enough: it stays
        ([0.0] * 4 + [1.0] * 60, -0.5, [4, 60]),
        ([0.0] * 60 + [1.0] * 4, -9.0, [60, 4]),  # a fifth one could not be told from the rest
        ([0.0] * 4 + [1.0] * 60, 9.0, [4, 60]),
        ([0.0] * 59 + [1.0] * 5, -9.0, [59, 5]),
    ],
)
def test_no_sample_is_spared_among_equal_ones(values, bias, counts):
    layer = fastff.FFF(1, 1, depth=1, leaf_width=1)
    with torch.no_grad():
        layer.node_weight.fill_(1)
        layer.node_bias.fill_(bias)
    x = torch.tensor(values).unsqueeze(1)
    fastff.rebalance_(layer, x, min_share=0.1)  # 4 are asked for
    assert torch.bincount(layer.route(x), minlength=2).tolist() == counts
    assert layer.node_bias.item() == -0.5


@pytest.mark.parametrize("least", [-0.1, 1.1])
def test_rebalance_refuses_shares_that_are_none(least):
    with pytest.raises(ValueError, match="min_share must be from 0 to 1"):
        fastff.rebalance_(make(), torch.randn(4, 5), min_share=least)
