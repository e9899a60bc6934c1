"""One pass for all layers, and no more of a training than its part. What each leaf gets is in test_initialize.py."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fastff
from fastff.training import rebalance as module
from fastff.training.rebalance import expected, rebalance


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fff = fastff.FFF(8, 8, depth=3, leaf_width=4)

    def forward(self, x):
        return x + self.fff(x)


def stack(layers=4, shift=1.0):
    """Blocks whose trees were balanced and then disturbed; data; and a list that counts forwards."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(layers)])
    x = list(torch.randn(1024, 8).split(256))
    fastff.initialize_tree_(model, x)
    with torch.no_grad():
        for block in model:
            block.fff.node_bias += shift * torch.randn(7)
    forwards = []
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    return model, x, forwards


def smallest(model, x):
    return min(used.smallest_share for used in fastff.usage(model, x).values())


def test_one_pass_where_nothing_must_move():
    """It was a pass for each layer, and one more."""
    model, x, forwards = stack(shift=0.0)
    fastff.rebalance_(model, x)
    assert len(forwards) == 4
    assert rebalance(model, x, 0.1) == module.Cost(4, 1024)


@pytest.mark.parametrize("least", [0.1, 0.5, 1.0])
def test_more_passes_until_every_share_holds(least):
    model, x, forwards = stack()
    assert smallest(model, x) < 0.1
    forwards.clear()
    fastff.rebalance_(model, x, min_share=least)
    assert len(forwards) <= 4 * 4  # no more than one for each layer
    assert smallest(model, x) >= least


def test_one_pass_comes_near():
    model, x, forwards = stack(shift=0.5)
    forwards.clear()
    rebalance(model, x, 0.3, passes=1)
    assert len(forwards) == 4
    assert smallest(model, x) >= 0.2


def test_logits_that_do_not_fit_together(monkeypatch):
    """A pass for each part, and the same shares."""
    model, x, forwards = stack()
    monkeypatch.setattr(module, "_KEPT", 2 * 1024 * 7 * 4)  # of two layers
    forwards.clear()
    rebalance(model, x, 0.5, samples=1024, passes=1)
    assert len(forwards) == 8
    rebalance(model, x, 0.5, samples=1024)
    assert smallest(model, x) >= 0.5


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.fff = fastff.FFF(8, 8, depth=3, leaf_width=4)

    def forward(self, x):
        return self.fff(x + self.fff(x))


def test_a_layer_that_is_called_twice_counts_both():
    torch.manual_seed(0)
    model, x = Twice(), torch.randn(512, 8)
    fastff.rebalance_(model, x, min_share=0.3)
    used = fastff.usage(model, x)["fff"]
    assert used.samples == 1024
    assert used.leaves_used == 8


@pytest.mark.parametrize("kind", ["list", "loader", "tensor"])
def test_what_a_pass_will_take(kind):
    model, x, _ = stack()
    data = {"list": x, "loader": DataLoader(torch.cat(x), batch_size=256, shuffle=True), "tensor": torch.cat(x)}[kind]
    before = torch.get_rng_state()
    assert expected(model, data) == rebalance(model, data, 0.0)
    assert torch.equal(torch.get_rng_state(), before) or kind == "loader"
    assert expected(model, x, samples=300).forwards == 2


def drive(model, x, steps, batch, total=1000, **options):
    """So many steps of a training, without its optimiser; returns the recipe."""
    recipe = fastff.Recipe(model, x, steps=total, noise=0.0, **options)
    for _ in range(steps):
        model.train()(torch.randn(batch, 8))
        recipe.loss()
        recipe.step()
    return recipe


def test_a_recipe_postpones_rebalancing_that_costs_too_much(monkeypatch):
    """It ran 832 forwards every 10 steps for 12 layers: 40 steps took 216 s instead of 3.6."""
    monkeypatch.setattr(module, "_CALL", 0.0)  # inputs alone
    model, x, forwards = stack()
    drive(model, x, 40, batch=256)
    # 1024 inputs are 5 % of what 26 steps of 3 * 256 are, not of what 10 are.
    assert sum(forwards) - 40 == 1 + 4  # the first batch, and a rebalancing
    model, x, forwards = stack()
    recipe = drive(model, x, 40, batch=256, rebalance_every=10)
    assert sum(forwards) - 40 == 4 * 4  # asked for
    assert recipe.rebalance_seconds > 0
    assert 0 < recipe.rebalance_share < 1


def test_the_last_step_rebalances_whatever_it_costs():
    model, x, _ = stack()
    with torch.no_grad():
        model[0].fff.node_bias[0] += 50
    drive(model, x, 2, batch=1, total=2)
    assert smallest(model, x) >= 0.1


def test_going_on_from_a_state_is_the_same_training():
    """Also when rebalancing is postponed: the work so far is part of the state."""

    def run(parts):
        model, x, _ = stack()
        state, when = None, []
        for steps in parts:
            recipe = fastff.Recipe(model, x, steps=1000, noise=0.0)
            if state is not None:
                recipe.load_state_dict(state)
            for _ in range(steps):
                model.train()(torch.zeros(4096, 8))
                recipe.loss()
                times = recipe._budget.times
                recipe.step()
                if recipe._budget.times > times:
                    when.append(recipe.count)
            state = recipe.state_dict()
            recipe.close()
        return when

    whole = run([120])
    assert len(whole) > 2
    assert run([50, 70]) == run([13, 1, 106]) == whole


def test_biases_that_have_no_place_are_refused():
    """They were infinite."""
    layer = fastff.FFF(4, 2, depth=2, leaf_width=1)
    with torch.no_grad():
        layer.node_weight.fill_(1e20)
    before = layer.node_bias.clone()
    with pytest.raises(
        ValueError, match=r"the FFF layer '' has node logits or boundaries that are not finite in torch\.float32"
    ):
        fastff.rebalance_(layer, 1e20 * torch.randn(64, 4), min_share=0.9)
    assert torch.equal(layer.node_bias, before)
