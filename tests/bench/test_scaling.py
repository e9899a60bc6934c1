"""The cost model: its counts are the code's, and its expectations those of draws."""

import math

import pytest
import scaling_check
import torch
from torch.utils.flop_counter import FlopCounterMode

import fastff
from fastff.bench.scaling import H200, Machine, Step, imbalance, seconds, zipf
from helpers import one_rank

SIZE = {"leaf_width": 4, "in_features": 6, "out_features": 5}


def test_bytes_are_those_that_the_code_exchanges(tmp_path):
    """One rank here; four in test_shards.py and results/scaling.csv."""
    with one_rank(tmp_path):
        row = scaling_check.bytes_row((3, 4, 6, 5, 20, 2), 1)
        assert row["counted"] == row["predicted"] == Step(3, **SIZE, batch=20, alternatives=2).exchanged > 0


def test_memory_is_that_of_the_parameters():
    layer, step = fastff.FFF(6, 5, depth=3, leaf_width=4), Step(3, **SIZE, batch=1)
    assert step.resident == 4 * sum(p.nbytes for p in layer.parameters())
    assert step.leaf_bytes * 8 == sum(p.nbytes for p in layer.leaf_parameters())
    half = Step(3, **SIZE, batch=1, ranks=2)
    assert step.resident - half.resident == 4 * 4 * step.leaf_bytes


def test_visited_is_the_mean_over_draws():
    torch.manual_seed(0)
    step = Step(6, **SIZE, batch=50, alternatives=1)
    leaf = torch.randint(64, (2000, 50))
    drawn = sum(len(row.unique()) for row in leaf) / len(leaf)
    # Binomial and Poisson differ by less than 1 / batch; the mean of 2000 draws varies less than that.
    assert step.visited == pytest.approx(drawn, rel=1 / 50)
    paths = torch.randint(64, (2000, 100))
    nodes = sum(sum(len((row >> (6 - m)).unique()) for m in range(6)) for row in paths) / len(paths)
    assert step.visited_nodes == pytest.approx(nodes, rel=1 / 50)


def test_flops_are_those_that_torch_counts():
    """Of the leaves' products, in one step with one rank. The scores' gradients, 2 * out per path, are left out."""
    layer = fastff.FFF(6, 5, depth=3, leaf_width=4, decision="sampled")
    x = torch.randn(20, 6, requires_grad=True)
    with fastff.backend("aten"), FlopCounterMode(display=False) as counter:
        layer(x).sum().backward()
    counts, leaf, scores = counter.get_flop_counts()["Global"], 2 * 4 * (6 + 5) * (3 + 1) * 20, 2 * 5 * 20
    assert counts == {torch.ops.aten.mm: leaf, torch.ops.aten.bmm: scores}
    step = Step(3, **SIZE, batch=20)
    assert step.flops - leaf == 20 * 2 * 3 * (4 * 2 * 6)  # two paths of three nodes, four products of six numbers each


def test_imbalance():
    torch.manual_seed(0)
    assert imbalance(zipf(64, 0.0), 10**6, 4) == pytest.approx(1, abs=5e-3)
    shares = torch.zeros(8, dtype=torch.float64)
    shares[3] = 1
    assert imbalance(shares, 100, 4) == 4
    assert zipf(64, 1.0).sum() == pytest.approx(1)
    expected = 1 + 2 / math.sqrt(math.pi) / 2 * math.sqrt(2 / 1000)  # the larger of two binomials
    assert imbalance(zipf(2, 0.0), 1000, 2, draws=500) == pytest.approx(expected, rel=5e-3)


def test_seconds():
    step = Step(10, 32, 768, 768, batch=1024, ranks=4)
    slow = Machine(1e12, 1e11, 1e9)
    parts = seconds(step, slow, imbalance=2.0)
    assert parts["all-to-all"] == 2 * 0.75 * step.exchanged / 1e9
    assert parts["all-reduce"] == 1.5 * step.reduced / 1e9
    assert set(parts) == set(seconds(step, H200))
    assert seconds(Step(10, 32, 768, 768, batch=1024), slow)["all-to-all"] == 0


def test_split_nodes_leaves_only_the_top_to_be_reduced():
    whole, split = (Step(20, 32, 768, 768, batch=16384, ranks=64, split_nodes=s) for s in (False, True))
    assert split.nodes == 2**14 - 1 + 63
    assert whole.reduced == whole.nodes * (whole.node_bytes + 8)
    assert split.reduced == 63 * (split.node_bytes + 8)
