"""benchmarks/sampled_gpu.py: its ways on a small layer, without a GPU: kernels by Triton's interpreter, no graphs."""

import argparse

import pytest
import sampled_gpu
import torch

from fastff.backends import triton_training

pytest.importorskip("triton")
SIZES = {"device": "cpu", "dtype": "float32", "features": 8, "leaf_width": 8, "batch": 20, "repetitions": 1}


@pytest.mark.slow
def test_every_way_has_a_row_or_a_reason(monkeypatch, capsys):
    o = argparse.Namespace(**SIZES, most_dense=40, ways=",".join(sampled_gpu.WAYS))
    kernels = [True]
    monkeypatch.setattr(triton_training, "takes", lambda *_: kernels[0])
    real = sampled_gpu.kernels

    def choose(x, by_torch):
        kernels[0] = not by_torch
        return real(x, by_torch)

    monkeypatch.setattr(sampled_gpu, "kernels", choose)
    rows = sampled_gpu.measure(o, 2) + sampled_gpu.measure(o, 3)
    found = [(row["depth"], row["way"]) for row in rows]
    small = [name for name in sampled_gpu.WAYS if name != "top1-grouped"]  # grouped_mm wants bfloat16
    assert [way for depth, way in found if depth == 2 and way != "top1-grouped"] == small
    assert (3, "sampled-mixture-1") in found
    assert (3, "dense") not in found
    assert "depth 3, dense: skipped: more than 40 neurons" in capsys.readouterr().out
    assert all(row["median_ms"] > 0 for row in rows)


def test_a_wrong_gradient_stops_the_benchmark(monkeypatch):
    monkeypatch.setattr(triton_training, "takes", lambda *_: False)
    o = argparse.Namespace(**SIZES, most_dense=40)
    draws = iter((0.0, 1.0))
    real = sampled_gpu.kernels

    def choose(x, by_torch):
        x.data += next(draws)
        return real(x, by_torch)

    monkeypatch.setattr(sampled_gpu, "kernels", choose)
    with pytest.raises(AssertionError, match="gradients differ"):
        sampled_gpu.Way("sampled-even-1", o, 2, torch.randn(20, 8))
