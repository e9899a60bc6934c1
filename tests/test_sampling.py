"""How alternatives are drawn: with the stated probabilities, and weights that undo them."""

import pytest
import torch

from fastff.functional import mixture, walk
from fastff.sampling import ESTIMATORS, check_alternatives, draw, leaving, level_chances, place, running_sum, thresholds

DRAWS = 20000


def even_grid(alternatives):
    """In place of random numbers, an even grid over [0, 1): frequencies are then probabilities, up to 1 / DRAWS."""
    numbers = (torch.arange(DRAWS, dtype=torch.float64) + 0.5) / DRAWS
    return numbers.unsqueeze(1).expand(-1, alternatives)


@pytest.mark.parametrize("alternatives", [1, 2, 3, 5])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_weighted_sum_over_draws_is_the_sum_over_levels(estimator, alternatives):
    """sum over draws of weight * f(level) has the mean sum over levels of f; for "mixture", of f times its mass."""
    torch.manual_seed(0)
    logits = 2 * torch.randn(1, 5, dtype=torch.float64)
    level, weight = place(logits.expand(DRAWS, -1), estimator, even_grid(alternatives))
    assert level.shape == weight.shape == (DRAWS, alternatives)
    found = torch.zeros(5, dtype=torch.float64).index_add_(0, level.flatten(), weight.flatten()) / DRAWS
    wanted = leaving(logits)[0] if estimator == "mixture" else torch.ones(5, dtype=torch.float64)
    # One draw more or less falls on a level: at most its weight, over DRAWS.
    torch.testing.assert_close(found, wanted, rtol=0, atol=2 * alternatives * weight.max().item() / DRAWS)


@pytest.mark.parametrize("alternatives", [1, 2, 3, 5])
def test_each_draw_takes_a_level_with_its_chance(alternatives):
    torch.manual_seed(0)
    logits = 2 * torch.randn(1, 5, dtype=torch.float64)
    level, _ = place(logits.expand(DRAWS, -1), "mixture", even_grid(alternatives))
    found = torch.stack([column.bincount(minlength=5) for column in level.unbind(1)]) / DRAWS
    chances = level_chances(logits, alternatives)[0]
    torch.testing.assert_close(found.double(), chances, rtol=0, atol=2 / DRAWS)
    torch.testing.assert_close(chances.sum(-1), torch.ones(alternatives, dtype=torch.float64))
    sure = level_chances(torch.full((1, 3), 1e4), alternatives)
    assert sure.isfinite().all()


def test_as_many_alternatives_as_levels_take_each_once():
    level, weight = draw(torch.randn(7, 4), "even", 4)
    assert torch.equal(level, torch.arange(4).expand(7, 4))
    assert torch.equal(weight, torch.ones(7, 4))


def test_leaving_sums_to_the_mass_of_the_other_leaves():
    """Also where the visited leaf has nearly all of it, and 1 minus its weight would be rounding."""
    torch.manual_seed(0)
    for scale in (1.0, 5.0):
        logits = scale * torch.randn(6, 7, dtype=torch.float64)  # all nodes of depth 3
        leaf = walk(logits)
        path = torch.stack([logits.gather(1, n.unsqueeze(1)).squeeze(1) for n in on_path(leaf, 3)], 1)
        rest = 1 - mixture(logits).gather(1, leaf.unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(leaving(path).sum(-1), rest, rtol=0, atol=1e-15)
    sure = leaving(torch.full((1, 3), 50.0, dtype=torch.float64)).sum()
    torch.testing.assert_close(sure, 3 * torch.sigmoid(torch.tensor(-50.0, dtype=torch.float64)), rtol=1e-12, atol=0)


def test_a_running_sum_is_that_of_torch():
    """Infinities and NaN reach the same columns; and a tree of depth 0 has none."""
    values = torch.tensor([[0.5, -2.0, 3.0], [-torch.inf, 1.0, -torch.inf], [1.0, torch.nan, 1.0]], requires_grad=True)
    found, wanted = running_sum(values), values.cumsum(-1)
    torch.testing.assert_close(found, wanted, equal_nan=True)
    direction = torch.randn(3, 3)
    torch.testing.assert_close(*(torch.autograd.grad((t * direction).sum(), values)[0] for t in (found, wanted)))
    assert running_sum(torch.zeros(4, 0)).shape == (4, 0)


def on_path(leaf, depth):
    return [2**m - 1 + (leaf >> (depth - m)) for m in range(depth)]


def test_a_logit_passes_its_threshold_with_the_probability_of_its_sigmoid():
    torch.manual_seed(0)
    logits = torch.linspace(-3, 3, 7, dtype=torch.float64)
    passes = (logits >= thresholds(logits.expand(DRAWS, -1))).double().mean(0)
    p = torch.sigmoid(logits)
    assert ((passes - p).abs() < 5 * (p * (1 - p) / DRAWS).sqrt()).all()  # five deviations


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_clear_decisions_and_nan_give_valid_levels(estimator):
    logits = torch.tensor([[300.0, -300.0, 300.0], [float("nan"), 1.0, 2.0], [0.0, 0.0, 0.0]])
    level, weight = draw(logits, estimator, 2)
    assert ((level >= 0) & (level < 3)).all()
    assert weight[2].isfinite().all()
    assert not weight[0].isnan().any()


def test_alternatives_are_at_most_the_other_leaves():
    assert check_alternatives(1, 0) == 1
    assert check_alternatives(7, 3) == 7
    with pytest.raises(ValueError, match="at most 7, the other leaves of a tree of depth 3; got 8"):
        check_alternatives(8, 3)
    with pytest.raises(ValueError, match="alternatives must be at least 1; got 0"):
        check_alternatives(0, 3)
