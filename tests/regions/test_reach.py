"""Empty regions, and the smallest change of an input that reaches a region."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastff import FFF
from fastff.regions import empty_regions, halfspaces, margin, smallest_change
from helpers import make
from region_helpers import draw_layer, nearest_distance


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(0, 4))
def test_regions_are_empty_where_linear_programs_find_no_ball(seed, inputs, depth):
    linprog = pytest.importorskip("scipy.optimize").linprog
    layer, _ = draw_layer(seed, inputs, depth, dtype=torch.float64)
    found = empty_regions(layer, radius=1e-3)
    for leaf in range(layer.num_leaves):
        A, b = halfspaces(layer, leaf)
        norm = A.norm(dim=1, keepdim=True)
        # The largest radius r <= 1 of a ball: a . x + b >= r ||a||.
        rows = torch.cat([-A, norm], 1).numpy() if depth else None
        ball = linprog(
            [0.0] * inputs + [-1.0], rows, b.numpy() if depth else None, bounds=[(None, None)] * inputs + [(None, 1)]
        )
        assert (leaf in found) == (ball.x[-1] < 1e-3)


def test_leaves_that_inputs_reach_are_not_empty():
    torch.manual_seed(0)
    layer = FFF(2, 1, depth=6, leaf_width=1)
    empty = set(empty_regions(layer))
    assert 0 < len(empty) < 64
    assert empty.isdisjoint(layer.route(30 * torch.randn(20000, 2)).tolist())
    for leaf in set(range(64)) - empty:
        assert layer.route(smallest_change(layer, torch.randn(2), leaf).x) == leaf


def test_a_region_between_equal_planes_is_empty():
    """x0 >= 0, then x0 < 0: the closed half-spaces meet in a plane, the region itself is empty."""
    layer = make(3, 1, depth=2, scale=0.0)
    with torch.no_grad():
        layer.node_weight[:, 0] = 1.0
        layer.node_bias.zero_()
    assert empty_regions(layer) == [1, 2]
    with torch.no_grad():
        layer.node_weight[2] = 0.0  # sends all right
    assert empty_regions(layer) == [1, 2]
    with pytest.raises(ValueError, match="leaf 2 is empty: node 2 has no weights"):
        smallest_change(layer, torch.zeros(3, dtype=torch.float64), 2)
    with pytest.raises(ValueError, match=r"no torch.float64 input was found in the region of leaf 1"):
        smallest_change(layer, torch.zeros(3, dtype=torch.float64), 1)


def test_a_box_leaves_fewer_regions():
    """x0 >= 2 has no input in the unit box."""
    pytest.importorskip("scipy")
    layer = make(3, 1, depth=1, scale=0.0)
    with torch.no_grad():
        layer.node_weight[0, 0] = 1.0
        layer.node_bias[0] = -2.0
    assert empty_regions(layer) == []
    assert empty_regions(layer, bounds=(0, 1)) == [1]
    assert empty_regions(layer, bounds=(torch.tensor([2.5, 0, 0]), 3.0)) == [0]
    with pytest.raises(ValueError, match="low <= high"):
        empty_regions(layer, bounds=(1, 0))
    with pytest.raises(ValueError, match=r"two tensors of shape \(3,\)"):
        empty_regions(layer, bounds=(torch.zeros(2), 1))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 4))
def test_the_change_is_the_smallest_one(seed, inputs, depth):
    layer, x = draw_layer(seed, inputs, depth, dtype=torch.float64)
    leaf = seed % layer.num_leaves
    A, b = halfspaces(layer, leaf)
    norm = A.norm(dim=1)
    wanted = nearest_distance(A / norm.unsqueeze(1), b / norm, x[0])
    if leaf in empty_regions(layer):
        with pytest.raises(ValueError, match=f"the region of leaf {leaf}"):
            smallest_change(layer, x[0], leaf)
        return
    found = smallest_change(layer, x[0], leaf)
    assert layer.route(found.x) == leaf
    assert found.distance.item() == pytest.approx(wanted, rel=1e-6, abs=1e-6)
    assert found.distance.item() == pytest.approx((found.x - x[0]).norm().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_change_reaches_its_leaf_in_every_dtype(dtype):
    torch.manual_seed(0)
    layer = FFF(30, 1, depth=4, leaf_width=1, dtype=dtype)
    x = torch.randn(3, 7, 30).to(dtype)
    leaf = torch.arange(21).reshape(3, 7) % 16
    found = smallest_change(layer, x, leaf)
    assert torch.equal(layer.route(found.x), leaf)
    assert found.x.dtype == dtype
    stayed = layer.route(x) == leaf
    assert torch.equal(found.x[stayed], x[stayed])
    assert torch.equal(found.distance == 0, stayed)
    # As far as in float64, up to the rounding of each number.
    exact = smallest_change(make(30, 1, depth=4).requires_grad_(False), x[:0].double(), leaf[:0])
    assert exact.distance.shape == (0, 7)
    wide = FFF(30, 1, depth=4, leaf_width=1, dtype=torch.float64)
    wide.load_state_dict(layer.state_dict())
    least = smallest_change(wide, x.double(), leaf).distance
    rounding = torch.finfo(dtype).eps * found.x.double().norm(dim=-1)
    assert (found.distance.double() <= least + 8 * rounding).all()
    assert (found.distance.double() >= least * (1 - 1e-6) - rounding).all()


def test_the_change_past_one_boundary_is_the_margin():
    layer = make(6, 1, depth=1).float()
    x = torch.randn(9, 6)
    found = smallest_change(layer, x, 1 - layer.route(x))
    torch.testing.assert_close(found.distance, margin(layer, x).distance, rtol=1e-4, atol=1e-6)


def test_wrong_arguments_are_named():
    layer = FFF(3, 1, depth=2, leaf_width=1)
    x = torch.randn(4, 3)
    with pytest.raises(ValueError, match=r"leaf must be within 0..3; got 4"):
        smallest_change(layer, x, 4)
    with pytest.raises(ValueError, match=r"leaf must be within 0..3; got 9"):
        smallest_change(layer, x, torch.tensor([0, 1, 2, 9]))
    with pytest.raises(ValueError, match=r"the shape \(4,\) of the inputs"):
        smallest_change(layer, x, torch.tensor([0, 1]))
    with pytest.raises(TypeError, match="leaf must be an integer"):
        smallest_change(layer, x, torch.tensor(1.0))
    with pytest.raises(ValueError, match="finite inputs"):
        smallest_change(layer, x / 0, 1)
    with pytest.raises(ValueError, match="radius"):
        empty_regions(layer, radius=-1.0)
    with torch.no_grad():
        layer.node_weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        empty_regions(layer)
    with pytest.raises(ValueError, match="not finite"):
        smallest_change(layer, x, 3)
