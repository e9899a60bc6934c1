"""What the tests of the Triton kernels share: layers, and their passes against float64."""

import copy

import torch

from fastff.backends import reference
from fastff.tensors import dequantize
from helpers import make, plain_hard, relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def layer_of(*sizes, **options):
    """A float32 layer for inference on the device that runs the kernels."""
    layer = make(*sizes, **({"dtype": torch.float32, "scale": 2.0} | options))
    return layer.to(options.get("device", DEVICE)).eval().requires_grad_(False)


def in_float64(layer):
    """The same numbers; int8 leaves stay int8, with scales in float64."""
    return copy.deepcopy(layer).double()


def run(hard, layer, x, way=None):
    """A hard pass, into memory that held NaN before."""
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns
    try:
        y, leaf = hard(x, layer.tree, layer.leaves, layer.activation, way)
    finally:
        torch.use_deterministic_algorithms(False)
    assert leaf.dtype == torch.int64
    assert y.dtype == x.dtype
    assert y.shape == (len(x), layer.out_features)
    return y, leaf


def exact_pass(layer, x):
    """Output and leaves in float64."""
    return reference.hard(x.double(), in_float64(layer).tree, in_float64(layer).leaves, layer.activation)


def check(hard, layer, x, way=None):
    """The leaves of the reference in float64, and its outputs to float32 rounding."""
    y, leaf = run(hard, layer, x, way)
    exact, expected = exact_pass(layer, x)
    assert torch.equal(leaf, expected)
    # Sums of at most a few hundred terms of order one.
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-6)


def check_error(hard, layer, x, way=None):
    """The leaves of float64, and at most twice the error of plain torch in the input's dtype.

    Plain torch has int8 leaves as floats. Sums of nodes are float32: no logit is to be within their rounding of zero.
    """
    y, leaf = run(hard, layer, x, way)
    exact, expected = exact_pass(layer, x)
    assert torch.equal(leaf, expected)
    plain = copy.deepcopy(layer)
    for name, part in dequantize(in_float64(layer).leaves)._asdict().items():
        setattr(plain, f"leaf_{name}", None if part is None else torch.nn.Parameter(part.to(x.dtype), False))
    ours, allowed = relative_error(y, exact), 2 * relative_error(plain_hard(plain, x, leaf), exact)
    assert ours <= allowed, f"{ours:.2e}, allowed: {allowed:.2e}"


def check_ties(hard, batch, way):
    """A logit of zero goes right, a NaN left; and a NaN stays in its row."""
    layer, x = layer_of(7, 5, depth=3, leaf_width=3), torch.randn(batch, 7, device=DEVICE)
    y, leaf = run(hard, layer, x, way)
    bad, at = x.clone(), batch - 1
    bad[at, 2] = torch.nan
    y_bad, leaf_bad = run(hard, layer, bad, way)
    assert leaf_bad[at] == 0
    assert y_bad[at].isnan().all()
    rest = torch.arange(batch, device=DEVICE) != at
    assert torch.equal(y_bad[rest], y[rest])
    assert torch.equal(leaf_bad[rest], leaf[rest])
    layer.node_weight.zero_()
    layer.node_bias.zero_()
    assert (run(hard, layer, x, way)[1] == 7).all()
