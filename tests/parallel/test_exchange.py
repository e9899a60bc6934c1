"""Rows go to their leaf and come back. Several ranks: test_shards.py."""

import pytest
import torch
import torch.distributed as dist

import fastff
from fastff.functional import visit
from fastff.parallel.exchange import at_owner, exchange
from fastff.ranks import Ranks
from helpers import make, one_rank

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")


@pytest.mark.parametrize("batch", [0, 1, 63])
def test_one_rank_computes_what_a_plain_layer_does(tmp_path, batch):
    """In any order of leaves, with the gradients of rows and leaves."""
    with one_rank(tmp_path):
        layer, plain = make(depth=3, activation="swiglu"), make(depth=3, activation="swiglu")
        plain.load_state_dict(layer.state_dict())
        fastff.parallel.shard_leaves_(layer)
        leaf = torch.randint(8, (batch,))
        x, other = (torch.randn(batch, 5, dtype=torch.float64) for _ in range(2))
        other = x.clone().requires_grad_()
        x.requires_grad_()

        def run(rows, number, leaves):
            return visit(rows, number, leaves, "swiglu")

        y, expected = at_owner(Ranks(), x, leaf, layer.leaves, run), visit(other, leaf, plain.leaves, "swiglu")
        torch.testing.assert_close(y, expected)
        y.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(x.grad, other.grad)
        for parameter, wanted in zip(layer.leaf_parameters(), plain.leaf_parameters(), strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), wanted.grad)


def test_exchange_has_the_gradient_of_a_permutation(tmp_path):
    with one_rank(tmp_path):
        x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda x: exchange(x, [4], [4], None), x)
