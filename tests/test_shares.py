"""Balance from the paths alone: shares of the nodes, their running mean, and the loss on it."""

import math

import pytest
import torch
from torch import nn

import fastff
from fastff.backends import paths
from fastff.functional import mixture, walk
from fastff.shares import counted, node_shares, unevenness, update
from fastff.tree import log_flow
from helpers import make


def forward(depth=3, batch=200, scale=1.0, **options):
    torch.manual_seed(0)
    layer = make(depth=depth, decision="sampled", scale=scale, **options)
    x = torch.randn(batch, 5, dtype=torch.float64)
    layer(x)
    return layer, x


def walked(layer):
    return layer.last_path, layer.last_leaf, layer.last_weight


def test_weighted_paths_have_the_shares_of_the_soft_mixture_and_their_gradient():
    """All leaves as paths, by their mixture weights: the shares are then exactly the soft ones, with their gradient."""
    torch.manual_seed(0)
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)  # all nodes of depth 3
    leaf = torch.arange(8).expand(5, 8)
    on_path = logits.gather(1, paths.nodes(leaf.flatten(), 3).view(5, -1)).view(5, 8, 3)
    found = node_shares(on_path, leaf, mixture(logits).detach())
    wanted = log_flow(logits).exp().mean(0)
    torch.testing.assert_close(found, wanted)
    direction = torch.randn_like(found)
    gradients = [torch.autograd.grad((part * direction).sum(), logits)[0] for part in (found, wanted)]
    torch.testing.assert_close(*gradients)


def test_the_path_entropy_of_weighted_paths_is_that_of_the_mixture():
    layer, x = forward()
    logits = layer.node_logits(x)
    with torch.no_grad():
        layer.last_leaf = torch.arange(8).expand(len(x), 8)
        layer.last_path = logits.gather(1, paths.nodes(layer.last_leaf.flatten(), 3).view(len(x), -1)).view(-1, 8, 3)
        layer.last_weight = mixture(logits)
        c = mixture(logits)
        torch.testing.assert_close(fastff.hardening_loss(layer, "path"), -(c * c.log()).sum(-1).mean())


def test_the_weights_of_the_paths_are_those_of_the_draw():
    layer, x = forward(alternatives=2)
    weights = layer.mixture(x).gather(1, layer.last_leaf[:, :1])
    assert layer.last_path.shape == (200, 3, 3)
    torch.testing.assert_close(layer.last_weight[:, :1], weights)
    torch.testing.assert_close(layer.last_weight.sum(1), torch.ones(200, dtype=torch.float64))
    assert (layer.last_leaf[:, 1:] != layer.last_leaf[:, :1]).all()
    assert forward(estimator="even")[0].last_weight.shape == (200, 1)


def test_shares_are_means_over_the_samples_that_reach_a_node():
    layer, x = forward(estimator="even")
    logits = layer.node_logits(x)
    leaf, found = walk(logits), node_shares(*walked(layer))
    for node in range(7):
        level = (node + 1).bit_length() - 1
        reached = 2**level - 1 + (leaf >> (3 - level)) == node
        right = torch.where(reached, torch.sigmoid(logits[:, node]), 0).mean()
        left = torch.where(reached, torch.sigmoid(-logits[:, node]), 0).mean()
        torch.testing.assert_close(found[node], torch.stack([left, right]))
    assert found[0].sum().item() == pytest.approx(1)


def test_after_one_batch_the_running_mean_is_that_batch():
    layer, _ = forward()
    batch = node_shares(*walked(layer))
    total, sides = batch.sum(-1), batch.log()
    wanted = total.log() - sides.mean(-1)
    found = unevenness(counted(layer, batch), batch)
    assert counted(layer, batch) is layer.running_shares  # the batch counts once
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=0)


def test_the_gradient_is_that_of_the_batch_at_the_running_mean():
    """Over batches of the same data, at the mean of all of them: the gradient for all samples together."""
    layer, x = forward(batch=400, estimator="even")  # whose paths are not random
    running = update(None, node_shares(*walked(layer)))
    layer.zero_grad()
    unevenness(running, node_shares(*walked(layer))).sum().backward()
    wanted = layer.node_weight.grad.clone()
    layer.zero_grad()
    for part in x.split(100):
        layer(part)
        unevenness(running, node_shares(*walked(layer))).sum().div(4).backward()
    torch.testing.assert_close(layer.node_weight.grad, wanted)


def test_deeper_levels_remember_more_batches():
    """Boundaries that follow old shares swing: levels of up to 16 nodes see the last batch alone."""
    torch.manual_seed(0)
    first, second = (
        (torch.randn(50, 1, 7), torch.randint(128, (50, 1)), torch.ones(50, 1)) for _ in range(2)
    )  # paths of depth 7
    one, other = node_shares(*first), node_shares(*second)
    running = update(update(None, node_shares(*first)), node_shares(*second))
    torch.testing.assert_close(running[:31], other[:31])
    torch.testing.assert_close(running[31:63], 0.25 * one[31:63] + 0.5 * other[31:63])  # 16 / 32 = 1 / 2
    torch.testing.assert_close(running[63:], 0.1875 * one[63:] + 0.25 * other[63:])
    empty = torch.zeros(0, 1, 7), torch.zeros(0, 1, dtype=torch.int64), torch.zeros(0, 1)
    assert torch.equal(update(running, node_shares(*empty)), running)


def test_the_loss_is_least_for_halves_and_finite_for_nodes_without_samples():
    layer = make(depth=4, decision="sampled", scale=0.0)  # p = 1/2 everywhere, and all samples on one path
    with torch.no_grad():
        layer.node_bias.zero_()
    layer(torch.randn(9, 5, dtype=torch.float64))
    loss = fastff.balance_loss(layer)
    assert loss.item() == pytest.approx(4 * math.log(2))
    loss.backward()
    assert layer.node_bias.grad.isfinite().all()
    with torch.no_grad():
        layer.node_bias[0] = 200.0
    layer(torch.randn(9, 5, dtype=torch.float64))
    loss = fastff.balance_loss(layer)
    loss.backward()
    assert loss > 4 * math.log(2)
    assert layer.node_bias.grad.isfinite().all()


def test_the_loss_balances_a_tree():
    torch.manual_seed(0)
    layer, x = fastff.FFF(8, 4, depth=3, leaf_width=2, decision="sampled"), torch.randn(2048, 8)
    with torch.no_grad():
        layer.node_bias += 1.5
    before = fastff.usage(layer, x)[""].smallest_share
    least = 3 * math.log(2)
    layer(x)
    assert fastff.balance_loss(layer) > 1.1 * least
    optimizer = torch.optim.Adam(layer.tree_parameters(), lr=0.02)
    for _ in range(150):
        optimizer.zero_grad()
        layer(x[torch.randperm(2048)[:64]])
        loss = fastff.balance_loss(layer)
        loss.backward()
        optimizer.step()
    assert loss < 1.01 * least
    assert fastff.usage(layer, x)[""].smallest_share > 2 * before


def test_other_losses_and_statistics_read_the_paths():
    layer, x = forward()
    logits = layer.node_logits(x)
    used = fastff.usage(layer)[""]
    assert torch.equal(used.leaf_count, walk(logits).bincount(minlength=8))
    entropy = fastff.training.losses.bernoulli_entropy(layer.last_path[:, 0])
    torch.testing.assert_close(fastff.hardening_loss(layer), entropy.mean())
    torch.testing.assert_close(fastff.hardening_loss(layer, "sum"), entropy.sum())
    root = fastff.training.entropies(layer)[""][0]
    torch.testing.assert_close(root, fastff.training.losses.bernoulli_entropy(logits[:, 0]).mean())
    with pytest.raises(ValueError, match='kind "leaf" needs all leaves; decision="sampled" sees one'):
        fastff.balance_loss(layer, "leaf")


def test_copies_and_reshaped_layers_start_from_a_mean_that_fits():
    import copy

    layer, x = forward()
    fastff.balance_loss(layer)
    other = copy.deepcopy(layer)
    assert other.last_path is None
    assert not other.shares_due
    assert other.last_weight is None
    assert torch.equal(other.running_shares, layer.running_shares)
    fastff.regions.split_leaf_(layer, 0, x)
    assert layer.running_shares is None
    layer(x)
    fastff.balance_loss(layer)
    assert layer.running_shares.shape == (layer.num_nodes, 2)


def test_a_recipe_trains_a_model_with_sampled_decisions():
    torch.manual_seed(0)
    x = torch.randn(512, 6)
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = nn.Sequential(fastff.FFF(6, 2, depth=4, leaf_width=4))
    recipe = fastff.Recipe(model, x, steps=200, decision="sampled", alternatives=2, noise=0.1)
    assert (model[0].decision, model[0].alternatives) == ("sampled", 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(200):
        at = torch.randint(512, (128,))
        optimizer.zero_grad()
        (nn.functional.cross_entropy(model(x[at]), y[at]) + recipe.loss()).backward()
        optimizer.step()
        recipe.step()
    assert (model.eval()(x).argmax(-1) == y).float().mean() > 0.9
    assert fastff.usage(model, x)["0"].leaves_used == 16


def test_localised_optimizers_refuse_sampled_layers():
    layer = make(decision="sampled")
    optimizer = fastff.optim.LocalSGD(layer, 0.1)
    layer(torch.randn(9, 5, dtype=torch.float64)).sum().backward()
    with pytest.raises(ValueError, match='has decision="sampled", which has none'):
        optimizer.step()


def test_a_batch_with_nan_does_not_count():
    """A NaN stayed in the running mean, and so in the balance loss, for good."""
    layer = fastff.FFF(5, 3, depth=2, leaf_width=2, decision="sampled")
    layer(torch.full((1, 5), torch.nan))
    layer(torch.randn(64, 5))
    assert fastff.balance_loss(layer).isfinite()
