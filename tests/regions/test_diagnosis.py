import pytest
import torch
import torch.nn.functional as F

import fastff
from fastff.regions import diagnose, statistics
from helpers import make


def problems(*args, **kwargs):
    return [finding.problem for finding in diagnose(*args, **kwargs)]


def hard_balanced(depth=2, samples=400):
    torch.manual_seed(0)
    layer = make(5, 3, depth=depth)
    x = torch.randn(samples, 5, dtype=torch.float64)
    fastff.initialize_tree_(layer, x)
    layer.temperature = 1000.0
    return layer, x


def test_a_balanced_hard_tree_has_no_problem():
    layer, x = hard_balanced()
    assert diagnose(statistics(layer, x)) == []


def test_collapse():
    layer, x = hard_balanced(depth=3)
    with torch.no_grad():
        layer.node_bias[0] = layer.node_bias[1] = layer.node_bias[3] = 1e3
        layer.node_bias[2] = -1e3
        layer.node_bias[5] = 1e3
    (found,) = diagnose(statistics(layer, x))
    assert found.problem == "collapse"
    assert found.evidence == "the inputs use 1.0 of 8 leaves effectively; 7 are dead, and the fullest takes 100%."
    assert "fastff.Recipe" in found.setting
    assert "rebalance_" in str(found)


def test_a_single_leaf_has_no_problem():
    layer, x = hard_balanced(depth=0)
    assert diagnose(statistics(layer, x[:3])) == []


def test_fragments_and_small_batches():
    layer, x = hard_balanced(depth=5)
    assert problems(statistics(layer, x)) == ["overfragmentation"]  # 12.5 inputs a leaf
    assert problems(statistics(layer, list(x.split(100)))) == ["overfragmentation", "shrinking batches"]
    layer, x = hard_balanced(depth=2)
    found = statistics(layer, x)
    assert problems(found, batch_size=20) == ["shrinking batches"]
    assert "a batch of 20 inputs gives the median leaf 5.0" in diagnose(found, batch_size=20)[0].evidence
    assert problems(found, batch_size=32) == []


def test_localised_overfitting_needs_both_losses():
    layer, x = hard_balanced()
    y = layer.eval()(x).argmax(-1)
    loss = lambda output, target: F.cross_entropy(50 * output, target, reduction="none")  # noqa: E731
    training, held_out = statistics(layer, (x, y), loss=loss), statistics(layer, (x, (y + 1) % 3), loss=loss)
    (found,) = diagnose(training, held_out)
    assert found.problem == "overfragmentation"
    assert "exceeds 1.5 times the training loss in 4 of 4 leaves" in found.evidence
    assert "transposition" in found.setting
    assert diagnose(training, training) == []
    assert diagnose(training, statistics(layer, x)) == []
    with pytest.raises(ValueError, match="of one layer; got depths 2 and 1"):
        diagnose(training, statistics(make(5, 3, depth=1), x))


def test_soft_boundaries():
    layer, x = hard_balanced()
    layer.temperature = 1.0
    (found,) = diagnose(statistics(layer, x))
    assert found.problem == "soft boundaries"
    assert "hardening_loss" in found.setting
