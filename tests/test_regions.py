import pytest
import torch
from torch import nn

import fastff
from helpers import make


def test_usage_over_batches_is_the_sum():
    model = nn.Sequential(make(5, 6, depth=2), make(6, 3, depth=3))
    model[0].temperature = 2.0
    x = torch.randn(50, 5, dtype=torch.float64)
    whole, parts = fastff.usage(model, x), fastff.usage(model, iter(x.split(7)))
    for name in ("0", "1"):
        assert whole[name].samples == parts[name].samples == 50
        assert torch.equal(whole[name].leaf_count, parts[name].leaf_count)
        assert torch.equal(whole[name].node_count, parts[name].node_count)
        torch.testing.assert_close(whole[name].leaf_mass, parts[name].leaf_mass)
        assert whole[name].node_count[0] == 50
    assert torch.equal(whole["0"].leaf_count, torch.bincount(model[0].route(x), minlength=4))
    torch.testing.assert_close(whole["0"].leaf_mass, model[0].mixture(x).sum(0))
    assert model.training


def test_a_layer_that_no_data_reaches_is_an_error():
    model = nn.Sequential(make(5, 6, depth=2))
    model.unused = make(6, 3, depth=1)
    model.forward = lambda x: model[0](x)
    with pytest.raises(ValueError, match=r"reaches the layers \['unused'\]"):
        fastff.usage(model, torch.randn(4, 5, dtype=torch.float64))
    with pytest.raises(ValueError, match="no sample"):
        fastff.usage(model, iter([]))


def test_share_and_leaves_used():
    layer = make(depth=2, scale=0.0)
    with torch.no_grad():
        layer.node_bias.copy_(torch.tensor([-1.0, 1.0, 1.0]))  # left, then right: leaf 1
    usage = fastff.usage(layer, torch.randn(8, 5, dtype=torch.float64))[""]
    assert usage.leaf_count.tolist() == [0, 8, 0, 0]
    assert usage.node_count.tolist() == [8, 8, 0]
    assert (usage.leaves_used, usage.smallest_share) == (1, 0.0)
    fastff.initialize_tree_(layer, torch.randn(64, 5, dtype=torch.float64))
    even = fastff.usage(layer, torch.randn(4000, 5, dtype=torch.float64))[""]
    assert even.leaves_used == 4
    assert 0.5 < even.smallest_share <= 1.0


def test_usage_prints_its_facts():
    """It printed four tensors."""
    layer = make(depth=2)
    fastff.initialize_tree_(layer, x := torch.randn(64, 5, dtype=torch.float64))
    assert repr(fastff.usage(layer, x)[""]) == "Usage(64 samples, 4 of 4 leaves used, smallest share 1.00)"
