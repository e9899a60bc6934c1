"""Bad arguments, bad states and interrupts leave the model of a Recipe unchanged."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import fastff
from helpers import two_layers


def test_data_that_can_be_read_once():
    with pytest.raises(TypeError, match="data is read again"):
        fastff.Recipe(fastff.FFF(3, 2, depth=1, leaf_width=1), (torch.randn(8, 3) for _ in range(2)), steps=4)


def state(model):
    """All that a recipe may change, by name."""
    found = {"training": [m.training for m in model.modules()]}
    for name, layer in model.named_modules():
        found[f"{name} hooks"] = list(layer._forward_pre_hooks.values())
        found |= {f"{name} {key}": getattr(layer, key, None) for key in ("decision", "transposition", "sharing")}
        found |= {f"{name} {key}": getattr(layer, key, None) for key in ("fitted_tree", "fitted_leaves")}
    found |= {f"{name} grad": p.requires_grad for name, p in model.named_parameters()}
    return found | {name: value.tolist() for name, value in model.state_dict().items()}


BAD = [
    ({"steps": 0}, "steps"),
    ({"noise": -1.0}, "noise must be finite, and 0 or more; got -1"),
    ({"noise": 1e39}, "noise must be finite, and 0 or more, and at most 3.403e.38; got 1e.39"),
    ({"balance": math.nan}, "balance must be finite, and 0 or more"),
    ({"hardening": 10**400}, "hardening must be finite"),
    ({"final_temperature": math.inf}, "final_temperature must be finite and positive; got inf"),
    ({"final_temperature": 1e39}, "final_temperature must be positive and finite in torch.float32; got 1e.39"),
    ({"transposition": 2.0}, "transposition"),
    ({"sharing": 1.5}, "sharing"),
    ({"decision": "hard"}, "decision must be 'soft', 'straight_through' or 'sampled'"),
    ({"reduction": "x"}, "reduction must be 'mean', 'sum' or 'path'; got 'x'"),
    ({"temperature": (1.0, 0.0)}, "temperature must be finite and positive; got 0"),
    ({"temperature": (1e-60, 1.0)}, "temperature must be positive and finite in torch.float32; got 1e-60"),
    ({"logit_std": math.inf}, "logit_std must be finite and positive; got inf"),
    ({"logit_std": 0.0}, "logit_std must be finite and positive; got 0"),
    ({"min_share": -0.1}, "min_share must be from 0 to 1"),
    ({"rebalance_every": -1}, "rebalance_every must be at least 0"),
]
NUMBERS = ("noise", "balance", "hardening", "final_temperature", "logit_std", "min_share", "sharing", "transposition")
WRONG = [({name: value}, f"{name} .* number") for name in NUMBERS for value in ("1", None, True, [1.0])]
WRONG += [
    ({"temperature": value}, "temperature must be two numbers") for value in (1.0, (1.0,), (1.0, 1.0, 1.0), "ab!", None)
]
WRONG += [
    ({"temperature": ("1", 2.0)}, "temperature must be a number"),
    ({"reset_trees": "yes"}, "reset_trees must be True, False or"),
]
WRONG += [
    ({"steps": 2.5}, "steps must be an integer"),
    ({"rebalance_every": "3"}, "rebalance_every must be an integer"),
]
BOTH = [(ValueError, *one) for one in BAD] + [(TypeError, *one) for one in WRONG]


@pytest.mark.parametrize(("error", "options", "message"), BOTH, ids=[str(one[1]) for one in BOTH])
def test_bad_arguments_change_nothing(error, options, message):
    """`temperature=(1e-60, 1)` raised after the trees were placed, `reduction="x"` in the training."""
    model = two_layers().float()
    before = state(model)
    with pytest.raises(error, match=message):
        fastff.Recipe(model, torch.randn(8, 5), **{"steps": 5} | options)
    assert state(model) == before


def test_the_numbers_of_numpy_are_numbers():
    layer = fastff.FFF(3, 2, depth=2, leaf_width=1)
    numbers = {name: np.float32(0.5) for name in NUMBERS}
    recipe = fastff.Recipe(
        layer, torch.randn(8, 3), steps=np.int64(2), temperature=(np.float32(1), np.int32(2)), **numbers
    )
    recipe.step()
    recipe.step()
    assert (type(layer.sharing), layer.sharing, layer.temperature) == (float, 0.5, 0.5)


class Trap(nn.Module):
    """Passes its inputs on for `left` forwards, then raises."""

    def __init__(self):
        super().__init__()
        self.left = math.inf

    def forward(self, x):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return x


@pytest.mark.parametrize("forwards", range(5))
def test_an_interrupted_start_changes_nothing(forwards):
    """Leaves were made alike, or the first tree placed, and then the start was interrupted."""
    first, _, second = two_layers().float()
    model = nn.Sequential(first, Trap(), second)
    fastff.Recipe(model, steps=3, decision="soft", noise=0.1)  # whose noise stays
    model[2].eval()
    before = state(model)
    model[1].left = forwards
    with pytest.raises(KeyboardInterrupt):
        fastff.Recipe(model, [torch.randn(32, 5)] * 2, steps=4, sharing=0.5, transposition=0.1)
    assert state(model) == before


@pytest.mark.parametrize("last", [False, True])
def test_an_interrupted_step_did_not_happen(last):
    first, _, second = two_layers().float()
    model = nn.Sequential(first, Trap(), second)
    x = [torch.randn(64, 5), torch.randn(64, 5)]
    recipe = fastff.Recipe(model, x, steps=1 if last else 9, rebalance_every=1, min_share=1.0, temperature=(1.0, 2.0))
    with torch.no_grad():
        model[0].node_bias += 0.5
    before, count = state(model), recipe.count
    model[1].left = 3 if last else 1
    with pytest.raises(KeyboardInterrupt):
        recipe.step()
    assert (state(model), recipe.count) == (before, count)
    model[1].left = math.inf
    recipe.step()
    assert recipe.count == 1
    assert state(model) != before


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ({}, ValueError, "a recipe's state has a count; got nothing"),
        ({"count": "a"}, TypeError, "count must be an integer"),
        ({"count": 1, "trained": "a"}, TypeError, "trained must be a number"),
        ({"count": 1, "spent": float("nan")}, ValueError, "spent must be finite"),
        ({"count": 1, "last": None}, TypeError, "last must be an integer"),
    ],
)
def test_a_bad_state_changes_nothing(state, error, message):
    """Some raised in the next step, after it had counted."""
    recipe = fastff.Recipe(fastff.FFF(2, 2, depth=2, leaf_width=2), torch.randn(400, 2), steps=5)
    before = recipe.state_dict()
    with pytest.raises(error, match=message):
        recipe.load_state_dict(state)
    assert recipe.state_dict() == before
