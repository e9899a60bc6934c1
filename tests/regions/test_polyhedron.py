"""The nearest point of a polyhedron, against all subsets of its planes and against scipy's linear programs."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastff.regions.polyhedron import inside_box, irredundant, project
from region_helpers import nearest_distance


def drawn(seed, inputs, rows, whole):
    """A random polyhedron and a point; whole numbers make parallel and repeated planes and corners of many planes."""
    generator = torch.Generator().manual_seed(seed)
    normals = torch.randn(rows, inputs, generator=generator, dtype=torch.float64)
    offsets = torch.randn(rows, generator=generator, dtype=torch.float64)
    x = 3 * torch.randn(inputs, generator=generator, dtype=torch.float64)
    if whole:
        normals, offsets = normals.round(), offsets.round()
        normals[~normals.any(1), 0] = 1.0
    norm = normals.norm(dim=1)
    return normals / norm.unsqueeze(1), offsets / norm, x


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(0, 5), st.booleans())
def test_the_projection_is_the_nearest_point_that_satisfies_all(seed, inputs, rows, whole):
    normals, offsets, x = drawn(seed, inputs, rows, whole)
    point, distance = project(normals, offsets, x), nearest_distance(normals, offsets, x)
    assert (point is None) == (distance is None)
    if point is not None:
        assert (normals @ point + offsets >= -1e-8).all()
        assert (point - x).norm().item() == pytest.approx(distance, abs=1e-6, rel=1e-6)


def test_a_projection_has_multipliers_that_prove_it():
    """In 300 dimensions: the way is a positive combination of normals of planes that the point lies on."""
    normals, offsets, x = drawn(1, 300, 12, False)
    point = project(normals, offsets, x)
    value = normals @ point + offsets
    assert value.min() >= -1e-12
    force = torch.linalg.lstsq(normals.T, (point - x).unsqueeze(1)).solution[:, 0]
    torch.testing.assert_close(normals.T @ force, point - x)
    assert force.min() >= -1e-12
    assert (force * value).abs().max() < 1e-12
    assert 1 < (force > 1e-9).sum() < 12


def test_rows_that_others_imply_are_found():
    """A square, one plane that touches a corner, one that is parallel and further out, one that is doubled."""
    square = [[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]
    normals = torch.tensor([*square, [0.5**0.5, 0.5**0.5], [1.0, 0.0], [0.0, -1.0]], dtype=torch.float64)
    offsets = torch.tensor([1, 1, 1, 1, 2**0.5, 3, 1], dtype=torch.float64)
    assert irredundant(normals, offsets, 1e-9) == [0, 1, 2, 6]


def test_a_point_in_a_box():
    pytest.importorskip("scipy")
    normals, offsets = torch.tensor([[1.0, 0.0]], dtype=torch.float64), torch.tensor([-0.9], dtype=torch.float64)
    low, high = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    point = inside_box(normals, offsets, low, high)
    assert 0.9 <= point[0] <= 1
    assert 0 <= point[1] <= 1
    assert inside_box(normals, offsets - 0.2, low, high) is None


def test_without_scipy_an_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    zero = torch.zeros(1, dtype=torch.float64)
    with pytest.raises(ImportError, match=r'linear programs need scipy: pip install ".\[regions\]"'):
        inside_box(zero.reshape(1, 1), zero, zero, zero)
