"""What is measured of a model, against the loop that says it."""

import pytest
import torch
from torch import nn

import fastff
from fastff.regions import leaves_used, smallest_share
from fastff_reproduce import scoring
from fastff_reproduce.scoring import accuracy


def model(depth=2):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), fastff.FFF(4, 4, depth=depth, leaf_width=2), nn.Dropout(0.5)).eval()


def test_accuracy_is_of_all_samples(monkeypatch):
    monkeypatch.setattr(scoring, "_at_once", lambda x: 3)
    y = torch.tensor([0, 1, 0, 1, 0, 1, 1])
    assert accuracy(nn.Identity(), torch.eye(2)[torch.tensor([0, 1, 0, 1, 0, 0, 0])], y) == pytest.approx(500 / 7)


def test_soft_is_the_mixture_and_all_else_as_in_evaluation():
    net, x = model(), torch.randn(50, 3)
    expected = net[1].soft(net[0](x))  # the dropout is off
    assert torch.equal(scoring.soft(net)(x), expected)
    assert not torch.allclose(net(x), expected)  # the hard route is back


def test_entropies_are_of_trees_at_their_temperature():
    net, x = model(), torch.randn(50, 3)
    fastff.training.set_temperature_(net, 3.0)
    p = torch.sigmoid(3.0 * net[1].node_logits(net[0](x))).double()
    expected = -(p * p.log() + (1 - p) * (1 - p).log()).mean().item()
    (found,) = scoring.entropies(net, x)
    assert found.item() == pytest.approx(expected, rel=1e-5)
    assert scoring.entropies(model(depth=0), x) == []
    assert scoring.entropies(nn.Linear(3, 4), x) == []


def test_visits_count_all_samples(monkeypatch):
    monkeypatch.setattr(scoring, "_at_once", lambda x: 7)
    net, x = model(), torch.randn(50, 3)
    (found,) = scoring.visits(net, x)
    assert found.tolist() == net[1].route(net[0](x)).bincount(minlength=4).tolist()
    (found,) = scoring.visits(model(depth=0), x)
    assert found.tolist() == [50]
    assert scoring.visits(nn.Linear(3, 4), x) == []


def test_use_of_leaves_as_usage_has_it():
    net, x = model(), torch.randn(50, 3)
    (visits,) = scoring.visits(net, x)
    (used,) = fastff.usage(net, x).values()
    assert leaves_used(visits) == used.leaves_used
    assert smallest_share(visits) == used.smallest_share
    assert leaves_used(torch.tensor([3, 0, 9, 0])) == 2
    assert smallest_share(torch.tensor([3, 1, 9, 3])) == 0.25


def test_layers_are_measured_in_their_order_and_the_rest_does_not_run():
    class Last(nn.Module):
        def forward(self, x):
            raise AssertionError("nothing is left to see")

    torch.manual_seed(0)
    first, second = fastff.FFF(3, 4, depth=1, leaf_width=2), fastff.FFF(4, 4, depth=3, leaf_width=2)
    net, x = nn.Sequential(first, second, Last()).eval(), torch.randn(50, 3)
    assert [len(layer) for layer in scoring.visits(net, x)] == [2, 8]
    twice = nn.Sequential(nn.Linear(3, 4), second, second, fastff.FFF(4, 4, depth=1, leaf_width=2)).eval()
    assert [len(layer) for layer in scoring.visits(twice, x)] == [8, 8, 2]
    assert scoring.entropies(net, x)[1] == scoring.entropies(nn.Sequential(second).eval(), first(x))[0]
