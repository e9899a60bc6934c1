"""What is measured of a model, against the loop that says it."""

import pytest
import torch
from torch import nn

import fastff
from fastff.experiments import measure
from fastff.experiments.measure import accuracy


def model(depth=2):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), fastff.FFF(4, 4, depth=depth, leaf_width=2), nn.Dropout(0.5)).eval()


def test_accuracy_is_of_all_samples(monkeypatch):
    monkeypatch.setattr(measure, "_at_once", lambda x: 3)
    y = torch.tensor([0, 1, 0, 1, 0, 1, 1])
    assert accuracy(nn.Identity(), torch.eye(2)[torch.tensor([0, 1, 0, 1, 0, 0, 0])], y) == pytest.approx(500 / 7)


def test_soft_is_the_mixture_and_all_else_as_in_evaluation():
    net, x = model(), torch.randn(50, 3)
    expected = net[1].soft(net[0](x))  # the dropout is off
    assert torch.equal(measure.soft(net)(x), expected)
    assert not torch.allclose(net(x), expected)  # the hard route is back


def test_entropies_are_of_trees_at_their_temperature():
    net, x = model(), torch.randn(50, 3)
    fastff.set_temperature_(net, 3.0)
    p = torch.sigmoid(3.0 * net[1].node_logits(net[0](x))).double()
    expected = -(p * p.log() + (1 - p) * (1 - p).log()).mean().item()
    assert measure.entropies(net, x) == pytest.approx([expected], rel=1e-5)
    assert measure.entropies(model(depth=0), x) == []
    assert measure.entropies(nn.Linear(3, 4), x) == []


def test_spread_counts_all_samples(monkeypatch):
    monkeypatch.setattr(measure, "_at_once", lambda x: 7)
    net, x = model(), torch.randn(50, 3)
    (used,) = measure.spread(net, x)
    assert used.leaf_count.tolist() == net[1].route(net[0](x)).bincount(minlength=4).tolist()
    assert measure.spread(nn.Linear(3, 4), x) == []
