"""The Triton backend: what it refuses, and what it says of a pass."""

import pytest
import torch

import fastff
from fastff.backends import triton
from helpers import request
from triton_helpers import DEVICE, layer_of

pytest.importorskip("triton")


def test_why_not():
    layer = layer_of(7, 5, depth=2, leaf_width=3)
    reason = triton.why_not(request(torch.empty(3, 7, device="meta"), layer.tree, layer.leaves))
    assert reason == "needs a CUDA tensor; got device meta"
    if DEVICE == "cpu":
        assert "triton" not in fastff.backends.available()
        with pytest.raises(ValueError, match="backend='triton' is not available here"):
            fastff.backend("triton")


def test_describe():
    layer = layer_of(768, 768, depth=5, leaf_width=1)
    for batch, words in ((1, "one program a sample"), (2**16, "listed by leaf"), (2**21, "sorted by leaf")):
        x = torch.empty(batch, 768, device="meta")
        assert words in triton.describe(request(x, layer.tree, layer.leaves))
    wide = layer_of(768, 768, depth=1, leaf_width=2048, device="meta", scale=1.0)
    assert "spread over many programs" in triton.describe(request(x[:1], wide.tree, wide.leaves))
    assert "spread over neurons and outputs" in triton.describe(request(x[:4096], wide.tree, wide.leaves))
