"""The regions of leaves as polyhedra: against the hard pass and against loops in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastff import FFF
from fastff import tree as heap
from fastff.regions import boundaries, contains, halfspaces, margin, path
from helpers import make
from region_helpers import draw_layer


def satisfies(layer, leaf, x):
    """Whether x (batch, in) satisfies the half-spaces of a leaf, the left ones strictly, in float64."""
    A, b = halfspaces(layer, leaf)
    left = torch.tensor([not right for _, right in heap.path(leaf, layer.depth)], dtype=torch.bool)
    value = x.double() @ A.double().T + b.double()
    return ((value > 0) | ((value == 0) & ~left)).all(-1)


SIZES = {"seed": st.integers(0, 2**31), "inputs": st.integers(1, 6), "depth": st.integers(0, 5)}


@settings(max_examples=30, deadline=None)
@given(whole=st.booleans(), **SIZES)
def test_every_input_satisfies_the_half_spaces_of_its_own_leaf_alone(seed, inputs, depth, whole):
    """Inputs of whole numbers may lie on a boundary; others that rounding could take to either side are left out."""
    layer, x = draw_layer(seed, inputs, depth, whole)
    inside = torch.stack([satisfies(layer, leaf, x) for leaf in range(layer.num_leaves)], 1)
    sure = margin(layer, x).distance > (-1 if whole else 1e-5)
    assert (inside.sum(1) == 1).all()
    assert torch.equal(inside.long().argmax(1)[sure], layer.route(x)[sure])
    for leaf in range(layer.num_leaves):
        assert torch.equal(contains(layer, leaf, x)[sure], inside[sure, leaf])


@settings(max_examples=30, deadline=None)
@given(wide=st.booleans(), **SIZES)
def test_the_route_changes_just_past_the_margin_and_not_before(seed, inputs, depth, wide):
    layer, x = draw_layer(seed, inputs, depth, dtype=torch.float64 if wide else torch.float32)
    distance, node = margin(layer, x)
    some = (distance > (1e-9 if wide else 1e-2)) & distance.isfinite()
    x, distance, node, leaf = x[some], distance[some], node[some], layer.route(x)[some]
    # Towards the plane of that node.
    towards = layer.node_weight[node].detach()
    towards = towards * torch.where((x * towards).sum(-1) + layer.node_bias[node].detach() >= 0, -1, 1).unsqueeze(1)
    towards = towards / towards.norm(dim=-1, keepdim=True)
    least = 1e-6 if wide else 1e-3
    step = distance.unsqueeze(1) * towards
    assert torch.equal(layer.route(x + (1 - least) * step), leaf)
    assert (layer.route(x + (1 + least) * step) != leaf).all()
    # In no direction does a smaller change leave the region.
    other = torch.nn.functional.normalize(torch.randn(x.shape, dtype=x.dtype), dim=-1)
    assert torch.equal(layer.route(x + (1 - least) * distance.unsqueeze(1) * other), leaf)


@pytest.mark.parametrize(("inputs", "depth"), [(3, 0), (3, 4), (4, 7), (2, 9)])
def test_a_path_has_the_nodes_turns_and_logits_of_the_hard_pass(inputs, depth):
    """Small trees compute all logits, deep ones only those on the way."""
    layer = make(inputs, 2, depth=depth)
    x = torch.randn(2, 5, inputs, dtype=torch.float64)
    found, logits = path(layer, x), layer.node_logits(x)
    assert torch.equal(found.leaf, layer.route(x))
    assert found.node.shape == found.right.shape == found.logit.shape == found.distance.shape == (2, 5, depth)
    for at in [(0, 0), (1, 4)]:
        steps = heap.path(int(found.leaf[at]), depth)
        assert list(zip(found.node[at].tolist(), found.right[at].tolist(), strict=True)) == steps
    torch.testing.assert_close(found.logit, logits.gather(-1, found.node))
    assert torch.equal(found.right, found.logit >= 0)
    torch.testing.assert_close(found.distance, found.logit.abs() / layer.node_weight.norm(dim=-1)[found.node])


def test_half_spaces_keep_the_bits_of_the_weights():
    layer = make(5, 2, depth=3).bfloat16()
    A, b = halfspaces(layer, 5)  # right, left, right
    assert A.dtype == b.dtype == torch.float32
    assert torch.equal(A, torch.stack([layer.node_weight[0], -layer.node_weight[2], layer.node_weight[5]]).float())
    assert torch.equal(b, torch.stack([layer.node_bias[0], -layer.node_bias[2], layer.node_bias[5]]).float())
    assert not A.requires_grad


def test_minimal_half_spaces_leave_out_what_others_imply():
    """x >= 0, then x >= -1 (implied), then x < 2; on the other side x < -1 after x >= 0 is a contradiction."""
    layer = make(2, 2, depth=3, scale=0.0)
    with torch.no_grad():
        layer.node_weight[[0, 2, 6]] = torch.tensor([[1.0, 0.0]] * 3, dtype=torch.float64)
        layer.node_bias[[0, 2, 6]] = torch.tensor([0.0, 1.0, -2.0], dtype=torch.float64)
        layer.node_bias[5] = 1.0
    assert boundaries(layer, 6) == [0, 6]
    A, b = halfspaces(layer, 6, minimal=True)
    assert A.tolist() == [[1, 0], [-1, 0]]
    assert b.tolist() == [0, 2]
    assert boundaries(layer, 7) == [6]
    assert boundaries(layer, 5) == [0, 2]  # empty: the two contradict each other
    assert boundaries(layer, 4) == [5]  # empty: a node without weights sends all inputs the other way


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), inputs=st.integers(1, 4), depth=st.integers(1, 5))
def test_minimal_half_spaces_are_the_ones_that_linear_programs_keep(seed, inputs, depth):
    linprog = pytest.importorskip("scipy.optimize").linprog
    layer, _ = draw_layer(seed, inputs, depth, dtype=torch.float64)
    leaf = seed % layer.num_leaves
    A, b = (part.numpy() for part in halfspaces(layer, leaf))
    free = [(None, None)] * inputs
    feasible = linprog([0.0] * inputs, -A, b, bounds=free).status == 0
    nodes, kept = [node for node, _ in heap.path(leaf, depth)], boundaries(layer, leaf)
    rows = [nodes.index(node) for node in kept]
    if not feasible:  # what is kept still contradicts itself, and no part of it does
        assert linprog([0.0] * inputs, -A[rows], b[rows], bounds=free).status == 2
        for row in rows:
            others = [i for i in rows if i != row]
            assert not others or linprog([0.0] * inputs, -A[others], b[others], bounds=free).status == 0
        return
    for row in range(depth):
        others = [i for i in range(depth) if i != row]
        limit = linprog(A[row], -A[others], b[others], bounds=free) if others else None
        needed = limit is None or limit.status != 0 or limit.fun + b[row] < -1e-7
        assert (row in rows) == needed


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
    assert found.distance.dtype == torch.float32
    assert found.node.dtype == torch.int64
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
    assert found.distance.isinf().all()
    assert (found.node == -1).all()
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
    assert torch.equal(whole.distance, parts.distance)
    assert torch.equal(whole.node, parts.node)


def test_margin_says_what_it_needs():
    with pytest.raises(ValueError, match=r"needs linear nodes, node_width=1.*got node_width=2"):
        margin(FFF(3, 2, depth=1, leaf_width=1, node_width=2), torch.randn(1, 3))
    with pytest.raises(TypeError, match="expects an FFF layer; got Sequential"):
        margin(torch.nn.Sequential(FFF(3, 2, depth=1, leaf_width=1)), torch.randn(1, 3))
    with pytest.raises(ValueError, match=r"inputs of shape \(..., 3\)"):
        margin(FFF(3, 2, depth=1, leaf_width=1), torch.randn(1, 4))
