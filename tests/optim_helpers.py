"""What the tests of the optimizers share. Almost all run in float64 with sums of a few dozen terms of order one, so
that 1e-10 is rounding with room to spare.
"""

import pytest
import torch
from torch import nn

from fastff.optim import LocalAdam, LocalSGD

TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}
NEVER = 1e9  # a local batch that no block reaches


def loss_of(model, x, target):
    return (model(x) - target).square().sum(-1).mean()


def data(batches, size=13, in_features=5, out_features=4):
    """Batches of inputs and targets; `size` may be one number or one a batch."""
    sizes = [size] * batches if isinstance(size, int) else size
    return [(torch.randn(n, in_features).double(), torch.randn(n, out_features).double()) for n in sizes]


def train(model, optimizer, batches, run=None):
    for x, target in batches:
        optimizer.zero_grad()
        loss_of(run or model, x, target).backward()
        optimizer.step()


def snapshot(tensors):
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def parameters(model):
    return snapshot(dict(model.named_parameters()))


def assert_same(a, b, **tolerance):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(
            a[name], b[name], **(tolerance or {"rtol": 0, "atol": 0}), msg=lambda m, n=name: n + m
        )


def around(layer):
    """A model with parameters that belong to no FFF layer, on both sides of one."""
    return nn.Sequential(nn.Linear(5, layer.in_features), nn.Tanh(), layer, nn.Linear(layer.out_features, 4)).double()


SAME = {
    "sgd": (LocalSGD, torch.optim.SGD, {"lr": 0.3}),
    "momentum": (LocalSGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "momentum_decay": (LocalSGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.7, "weight_decay": 0.2}),
    "adam": (LocalAdam, torch.optim.AdamW, {"lr": 0.03, "weight_decay": 0.0}),
    "adam_decay": (LocalAdam, torch.optim.AdamW, {"lr": 0.03, "weight_decay": 0.3, "betas": (0.7, 0.9), "eps": 1e-3}),
}
same = pytest.mark.parametrize(("local", "plain", "options"), SAME.values(), ids=SAME)
