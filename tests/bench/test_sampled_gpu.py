"""benchmarks/sampled_gpu.py: its ways on a small layer, without a GPU: kernels by Triton's interpreter, no graphs."""

import argparse
import weakref

import pytest
import sampled_gpu
import torch

from fastff.backends import triton_training

pytest.importorskip("triton")
SIZES = {
    "device": "cpu",
    "dtype": "float32",
    "features": 8,
    "leaf_width": 8,
    "batch": 20,
    "repetitions": 1,
    "modes": "eager,graph",
}


def options(ways="", depths="2", most_dense=40):
    return argparse.Namespace(**SIZES, ways=ways, depths=depths, most_dense=most_dense)


@pytest.mark.slow
def test_every_way_has_a_row_or_a_reason(monkeypatch, capsys):
    used = [True]
    monkeypatch.setattr(triton_training, "takes", lambda *_: used[0])
    real = sampled_gpu.choice

    def choose(x, backend):
        used[0] = backend == "triton"
        return real(x, backend)

    monkeypatch.setattr(sampled_gpu, "choice", choose)
    rows = [row for rows in sampled_gpu.measure(options(depths="2,3")) for row in rows]
    found = [(row["depth"], row["way"]) for row in rows]
    small = [name for name in sampled_gpu.WAYS if name != "top1-grouped"]  # grouped_mm wants bfloat16
    assert [way for depth, way in found if depth == 2 and way != "top1-grouped"] == small
    assert (3, "sampled-mixture-1") in found
    assert (3, "dense") not in found
    assert "depth 3, dense: skipped: ValueError: more than 40 neurons" in capsys.readouterr().out
    assert all(row["median_ms"] > 0 for row in rows)


def test_only_sampled_ways_ask_for_the_kernels():
    """Straight-through layers of 32,768 neurons had no row: the kernels of the soft pass refuse so many."""
    x, _ = sampled_gpu.batch(options())
    asked = {name: sampled_gpu.Way(name, options(), 2, x).backend for name in sampled_gpu.WAYS}
    own = {name: "triton" for name in asked if name.startswith("sampled")} | {"sampled-mixture-1-torch": "aten"}
    assert asked == dict.fromkeys(sampled_gpu.WAYS, "auto") | own


def test_deep_trees_leave_out_one_product_after_another():
    left_out = set(sampled_gpu.names(options(), 10)) - set(sampled_gpu.names(options(), 15))
    assert left_out == {"sampled-mixture-1-torch"}
    assert sampled_gpu.names(options("sampled-mixture-1-torch"), 15) == ["sampled-mixture-1-torch"]


def test_a_wrong_gradient_has_no_time(monkeypatch, capsys):
    """It ended the benchmark, with the rows of the other ways."""
    monkeypatch.setattr(triton_training, "takes", lambda *_: False)
    draws, real = iter((0.0, 1.0)), sampled_gpu.choice

    def choose(x, backend):
        x.data += next(draws, 0.0)
        return real(x, backend)

    monkeypatch.setattr(sampled_gpu, "choice", choose)
    (rows,) = sampled_gpu.measure(options("sampled-even-1,dense"))
    assert [row["way"] for row in rows] == ["dense"]
    assert "depth 2, sampled-even-1: wrong: gradients differ" in capsys.readouterr().out


def test_an_error_without_words_is_named(capsys):
    """A message without a line ended the benchmark."""
    sampled_gpu.refuse(5, "dense", RuntimeError())
    assert capsys.readouterr().out.startswith("depth 5, dense: skipped: RuntimeError")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a graph that fails")
def test_a_graph_that_fails_costs_its_way_alone(capsys):
    """A capture that fails may ruin its process, so each then has its own, after all eager rows."""
    eager = sampled_gpu.measure_eager(options("dense,top1-loop"), 2)
    assert sampled_gpu.measure_graphs(options(), 2, eager) == []
    out = capsys.readouterr().out
    assert "depth 2, dense in a graph: skipped: RuntimeError: torch.cuda.Stream requires CUDA support" in out
    assert "top1-loop in a graph" not in out  # it asks the host


def test_models_live_as_long_as_their_graphs(monkeypatch):
    """A graph does not keep the memory of the parameters that it steps: a replay read what was freed."""
    monkeypatch.setattr(triton_training, "takes", lambda *_: False)

    def in_graph(run):
        model, replay = weakref.ref(run.func.__self__), lambda: alive.append(model() is not None)
        return replay

    alive = []
    monkeypatch.setattr(sampled_gpu, "in_graph", in_graph)
    times = sampled_gpu.graph_times(options(), 2, ["dense", "sampled-even-1"])
    assert alive == [True] * 4
    assert [len(found) for found in times.values()] == [1, 1]
