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


@pytest.mark.parametrize(
    ("sizes", "batch", "words"),
    [
        ((128, 128, 3, 4), 2048, "tiles of 16 samples walk the tree"),
        ((512, 512, 8, 8), 100, "one program a sample"),
        ((4096, 4096, 6, 64), 1, "spread over many programs"),
        ((768, 768, 8, 32), 2**14, "listed by leaf, and tiles of them go through both products of the leaf; "),
        ((768, 768, 8, 32), 2**18, "sorted by leaf"),
        ((4096, 4096, 5, 512), 4096, "spread over neurons and outputs"),
    ],
)
def test_describe(sizes, batch, words):
    features, out, depth, leaf_width = sizes
    options = {"device": "meta", "dtype": torch.float32 if features == 128 else torch.bfloat16}
    layer = fastff.FFF(features, out, depth=depth, leaf_width=leaf_width, **options).requires_grad_(False)
    said = triton.describe(request(torch.empty(batch, features, **options), layer.tree, layer.leaves))
    assert words in said
    assert "us predicted (H200)" in said
