import pytest
import torch

import fastff
from fastff import functional
from helpers import make


def test_soft_returns_what_the_losses_need():
    layer = make(depth=3)
    x = torch.randn(2, 7, 5, dtype=torch.float64)
    output, logits, mixture = functional.soft(x, layer._tree, layer._leaves, temperature=2.0)
    layer.temperature = 2.0
    torch.testing.assert_close(output, layer(x))
    torch.testing.assert_close(logits, 2 * layer.node_logits(x).reshape(14, 7))
    torch.testing.assert_close(mixture, layer.mixture(x).reshape(14, 8))


def test_arguments_that_do_not_fit():
    layer, gated = make(depth=2), make(depth=2, activation="swiglu")
    x = torch.randn(3, 5, dtype=torch.float64)
    for run in (functional.soft, functional.hard):
        with pytest.raises(ValueError, match="activation 'swiglu' needs leaves with a gate_weight"):
            run(x, layer._tree, layer._leaves, activation="swiglu")
        with pytest.raises(ValueError, match="activation 'relu' needs leaves with no gate_weight"):
            run(x, gated._tree, gated._leaves)
        with pytest.raises(ValueError, match="a tree of 3 nodes has one leaf more; got 8 leaves"):
            run(x, layer._tree, make(depth=3)._leaves)
        with pytest.raises(ValueError, match="activation must be one of"):
            run(x, layer._tree, layer._leaves, activation="foo")
    with pytest.raises(ValueError, match="transposition is a probability"):
        functional.soft(x, layer._tree, layer._leaves, transposition=2.0)
    with pytest.raises(ValueError, match=r"temperature must be positive; got -1.0"):
        functional.soft(x, layer._tree, layer._leaves, temperature=-1.0)


def test_parts_compose_to_the_hard_pass():
    layer = make(depth=3, activation="silu")
    x = torch.randn(9, 5, dtype=torch.float64)
    leaf = functional.route(x, layer._tree)
    expected = fastff.backends.reference.visit(x, leaf, layer._leaves, "silu")
    torch.testing.assert_close(functional.hard(x, layer._tree, layer._leaves, activation="silu"), expected)


def test_mixture_of_given_logits():
    logits = torch.tensor([0.0, torch.inf, -torch.inf])  # undecided at the root, then right, or left
    assert functional.mixture(logits).tolist() == [0.0, 0.5, 0.5, 0.0]
    assert functional.mixture(torch.zeros(2, 3, 0)).shape == (2, 3, 1)
    with pytest.raises(ValueError, match="power of two of leaves; got 5"):
        functional.mixture(torch.zeros(2, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_no_leaf_in_the_hard_pass(dtype):
    """Casting the weights would touch every leaf: the output is the float32 one, rounded once."""
    layer = make(depth=4, dtype=torch.float32).eval()
    x = torch.randn(9, 5)
    expected = layer(x)
    with torch.autocast("cpu", dtype):
        y = layer(x)
        assert layer.node_logits(x).dtype == torch.float32
    assert torch.equal(y, expected.to(dtype))


def test_float64_is_exempt_from_autocast_as_in_torch():
    layer = make(depth=2)
    x = torch.randn(9, 5, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.train()(x).dtype == torch.float64
        assert layer.eval()(x).dtype == torch.float64
