"""The regions of leaves as polyhedra: against the hard pass and against loops in float64."""

import math

import pytest
import torch

from fastff import FFF
from fastff import tree as heap
from fastff.regions import margin
from helpers import make


def oracle_margin(layer, x):
    """The distance and the node of one input, by a loop in Python floats."""
    best = math.inf, -1
    for node, right in heap.path(int(layer.route(x)), layer.depth):
        w, b = layer.node_weight[node].double().tolist(), layer.node_bias[node].item()
        norm = math.sqrt(sum(v * v for v in w))
        if norm:
            z = math.fsum([*(v * u for v, u in zip(w, x.double().tolist(), strict=True)), b])
            best = min(best, (max(z if right else -z, 0) / norm, node))
    return best


@pytest.mark.parametrize(("inputs", "depth"), [(1, 3), (5, 0), (5, 1), (7, 5)])
def test_margin_is_the_distance_to_the_nearest_plane_of_the_path(inputs, depth):
    layer = make(inputs, 2, depth=depth).float()
    x = torch.randn(3, 0, inputs), torch.randn(3, 21, inputs)
    assert margin(layer, x[0]).distance.shape == (3, 0)
    found = margin(layer, x[1])
    assert found.distance.dtype == torch.float32 and found.node.dtype == torch.int64
    for row, distance, node in zip(
        x[1].reshape(-1, inputs), found.distance.flatten(), found.node.flatten(), strict=True
    ):
        wanted = oracle_margin(layer, row)
        assert int(node) == wanted[1]
        assert float(distance) == pytest.approx(wanted[0], rel=1e-6)


def test_one_input_has_one_margin():
    layer = make(5, 2, depth=2)
    x = torch.randn(5, dtype=torch.float64)
    assert margin(layer, x).distance.shape == ()
    assert float(margin(layer, x).distance) == pytest.approx(oracle_margin(layer, x)[0], rel=1e-12)


def test_a_node_without_weights_has_no_boundary():
    layer = make(5, 2, depth=2, scale=0.0)
    found = margin(layer, torch.randn(4, 5, dtype=torch.float64))
    assert found.distance.isinf().all() and (found.node == -1).all()
    with torch.no_grad():
        layer.node_weight[0, 1] = 2.0
    x = torch.randn(4, 5, dtype=torch.float64)
    found = margin(layer, x)
    torch.testing.assert_close(found.distance, (x[:, 1] + layer.node_bias[0] / 2).abs())
    assert (found.node == 0).all()


def test_tiny_and_huge_weights_do_not_underflow_or_overflow():
    layer = make(3, 2, depth=1)
    x = torch.randn(6, 3, dtype=torch.float64)
    for scale in (1e-200, 1e200):
        with torch.no_grad():
            layer.node_weight.copy_(torch.tensor([[3.0, 0.0, 4.0]], dtype=torch.float64) * scale)
            layer.node_bias.fill_(scale)
        torch.testing.assert_close(margin(layer, x).distance, (3 * x[:, 0] + 4 * x[:, 2] + 1).abs() / 5)


def test_inputs_that_are_not_finite_have_no_margin():
    layer = make(3, 2, depth=2).float()
    x = torch.tensor([[math.nan, 0, 0], [math.inf, 0, 0], [0, 0, 0]])
    assert margin(layer, x).distance.isnan().tolist() == [True, True, False]


def test_margins_of_chunks_are_the_margins_of_the_whole(monkeypatch):
    layer = make(5, 2, depth=3).float()
    x = torch.randn(33, 5)
    whole = margin(layer, x)
    monkeypatch.setattr("fastff.regions.geometry._ELEMENTS", 12)
    parts = margin(layer, x)
    assert torch.equal(whole.distance, parts.distance) and torch.equal(whole.node, parts.node)


def test_margin_says_what_it_needs():
    with pytest.raises(ValueError, match="needs linear nodes, node_width=1.*got node_width=2"):
        margin(FFF(3, 2, depth=1, leaf_width=1, node_width=2), torch.randn(1, 3))
    with pytest.raises(TypeError, match="expects an FFF layer; got Sequential"):
        margin(torch.nn.Sequential(FFF(3, 2, depth=1, leaf_width=1)), torch.randn(1, 3))
    with pytest.raises(ValueError, match=r"inputs of shape \(..., 3\)"):
        margin(FFF(3, 2, depth=1, leaf_width=1), torch.randn(1, 4))
