"""A recipe rebalances no more often than its share of the work allows."""

import pytest
import torch

import fastff
from fastff.training import budget
from helpers import smallest_share, stack


def drive(model, x, steps, batch, total=1000, **options):
    """Run `steps` steps of training without an optimizer; returns the recipe."""
    recipe = fastff.Recipe(model, x, steps=total, noise=0.0, **options)
    for _ in range(steps):
        model.train()(torch.randn(batch, 8))
        recipe.loss()
        recipe.step()
    return recipe


def test_a_recipe_postpones_rebalancing_that_costs_too_much(monkeypatch):
    """It ran 832 forwards every 10 steps for 12 layers: 40 steps took 216 s instead of 3.6."""
    monkeypatch.setattr(budget, "_CALL", 0.0)  # inputs alone
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
    assert smallest_share(model, x) >= 0.1


@pytest.mark.slow
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
                times = recipe._budget.rebalances
                recipe.step()
                if recipe._budget.rebalances > times:
                    when.append(recipe.count)
            state = recipe.state_dict()
            recipe.close()
        return when

    whole = run([120])
    assert len(whole) > 2
    assert run([50, 70]) == run([13, 1, 106]) == whole
