"""Low-rank blocks: exact at full rank, best at a given rank, and at the FLOPs of a tree."""

import copy

import pytest
import torch
from torch import nn

from fastff.surgery.choose import choose
from fastff.surgery.controls import flops_of_tree
from fastff.surgery.lowrank import LowRank, fit_low_rank_, flops_of_rank, rank_for
from surgery_models import LLAMA, TOKENS, Mlp, hf


def plain(bias=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 48, bias=bias), nn.GELU(), nn.Linear(48, 16, bias=bias)).eval()


def block_of(model, example=None):
    return choose(nn.Sequential(model) if example is None else model, example, None)[0][0]


@pytest.mark.parametrize(
    ("model", "example"),
    [
        (plain(), None),
        (plain(bias=False), None),
        (Mlp(packed=True).eval(), None),
        (hf("Llama", **LLAMA).eval(), TOKENS),
    ],
    ids=["plain", "no bias", "packed", "gated"],
)
def test_full_rank_is_the_block(model, example):
    """At the rank of the narrowest side nothing is lost: gates, biases and their absence included."""
    block = block_of(model, example)
    x = torch.randn(257, 16)
    layer = LowRank(block, rank_for(block, 10**9))
    assert layer.rank == 16
    fit_low_rank_(layer, block, x)
    fresh = torch.randn(63, 16)
    error = (layer(fresh) - block(fresh)).norm() / block(fresh).norm()
    assert error < 1e-4


def test_more_rank_misses_less_and_beats_a_plain_svd():
    """The factors fit the inputs: where inputs vary in few directions, an SVD of the weights alone is worse."""
    model, x = plain(), torch.randn(2000, 16) * torch.logspace(0.5, -1.5, 16) + 0.3
    block = block_of(model)
    errors = []
    for rank in (1, 3, 7, 15):
        layer = LowRank(block, rank)
        fit_low_rank_(layer, block, x[:1500])
        errors.append((layer(x[1500:]) - block(x[1500:])).square().mean().item())
    assert errors == sorted(errors, reverse=True)
    plain_svd = copy.deepcopy(model)
    for linear in (plain_svd[0], plain_svd[2]):
        u, s, v = torch.linalg.svd(linear.weight.detach(), full_matrices=False)
        linear.weight.data = u[:, :3] * s[:3] @ v[:3]
    assert errors[1] < 0.5 * (plain_svd(x[1500:]) - block(x[1500:])).square().mean().item()


def test_the_rank_takes_at_most_the_flops_of_a_tree():
    """Rounded up, a tiny block's low rank had a fifth more FLOPs than the tree beside it."""
    block = block_of(plain())
    flops = flops_of_tree(block, 2, 13)
    assert flops == 2 * (2 * 16 + 13 * 32)
    rank = rank_for(block, flops)
    assert flops_of_rank(block, rank) <= flops < flops_of_rank(block, rank + 1)
    layer = LowRank(block, rank)
    products = sum(linear.weight.numel() for linear in layer.modules() if isinstance(linear, nn.Linear))
    assert flops_of_rank(block, rank) == 2 * products
    assert rank_for(block, 1) == 1


def test_numbers_out_of_range_are_refused():
    block = block_of(plain())
    with pytest.raises(ValueError, match=r"exceed the range of torch\.float32"):
        fit_low_rank_(LowRank(block, 2), block, torch.full((20, 16), 3e38))
