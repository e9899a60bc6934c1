import pytest
import torch

from fastff.bench import Case, count_visited, floor_bytes
from fastff.bench.models import Problem


def test_floor_by_hand():
    """Three samples, two in leaf 0 and one in leaf 3 of a tree of depth 2: 2 leaves and all 3 nodes."""
    leaf = torch.tensor([0, 3, 0])
    assert count_visited(leaf, 2) == (2, 3)
    assert count_visited(torch.tensor([0, 1]), 2) == (2, 2)
    assert count_visited(torch.tensor([5]), 3) == (1, 3)
    assert count_visited(torch.tensor([0, 0]), 0) == (1, 0)
    case = Case(in_features=10, out_features=7, leaf_width=3, depth=2, batch=3)
    one_leaf = 3 * 10 + 3 + 3 * 7 + 7
    one_node = 10 + 1
    assert floor_bytes(case, 2, 3) == 4 * (2 * one_leaf + 3 * one_node + 3 * (10 + 7))
    gated = Case(10, 7, 3, 2, 3, "bfloat16", activation="swiglu", node_width=5)
    one_leaf, one_node = 2 * (3 * 10 + 3) + 3 * 7 + 7, 5 * 10 + 5 + 5 + 1
    assert floor_bytes(gated, 1, 2) == 2 * (one_leaf + 2 * one_node + 3 * (10 + 7))
    for size in (case, gated):
        layer = Problem(size).layer
        assert size.parameter_bytes == sum(p.numel() * p.element_size() for p in layer.parameters())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"depth": -1}, "depth must be at least 0; got -1"),
        ({"batch": 0}, "batch must be at least 1; got 0"),
        ({"dtype": "int8"}, "dtype must be one of float32, .*; got 'int8'"),
        ({"device": "tpu"}, "device must be one of cpu, cuda; got 'tpu'"),
        ({"activation": "sine"}, "activation must be one of .*; got 'sine'"),
    ],
)
def test_bad_cases(options, error):
    size = {"in_features": 5, "out_features": 5, "leaf_width": 2, "depth": 1, "batch": 3}
    with pytest.raises(ValueError, match=error):
        Case(**size | options)
