import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import fastff
from fastff.training.rebalance import Cost
from helpers import make, two_layers


def data():
    """Two rings, which no plane parts."""
    generator = torch.Generator().manual_seed(0)
    angle = 2 * math.pi * torch.rand(400, generator=generator)
    y = torch.arange(400) % 2
    radius = 1 + y + 0.1 * torch.randn(400, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), y


def train(model, x, y, steps, **options):
    recipe = fastff.Recipe(model, x, steps=steps, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        loss = F.cross_entropy(model(x), y) + recipe.loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        recipe.step()
    return recipe


@pytest.mark.slow
def test_two_lines_in_a_loop():
    """It learns, every leaf is used, the mixture says what the hard route says, and evaluation is not blurred."""
    torch.manual_seed(0)
    x, y = data()
    model = nn.Sequential(fastff.FFF(2, 2, depth=4, leaf_width=2))
    train(model, x, y, 300, noise=0.2)
    layer = model[0]
    hard = model.eval()(x)
    assert (hard.argmax(1) == y).float().mean() > 0.97
    assert fastff.usage(model, x)["0"].smallest_share >= 0.1
    assert layer.temperature == 1000
    assert (layer.soft(x).argmax(1) == hard.argmax(1)).float().mean() > 0.98
    assert torch.equal(model(x), hard)
    model.train()
    assert torch.equal(layer(x), layer(x))  # the noise is gone


def test_a_mean_of_the_weights_is_finished_as_the_model_is():
    torch.manual_seed(0)
    x = torch.randn(256, 3)
    model = nn.Sequential(fastff.FFF(3, 2, depth=3, leaf_width=1))
    recipe = fastff.Recipe(model, x, steps=10, min_share=0.5, final_temperature=50.0)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].node_bias += 1.0
    assert fastff.usage(twin, x)["0"].smallest_share < 0.5
    before = copy.deepcopy(model.state_dict())
    recipe.finish_(twin)
    assert fastff.usage(twin, x)["0"].smallest_share >= 0.5
    assert twin[0].temperature == 50
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    bare = copy.deepcopy(model)
    fastff.Recipe(nn.Sequential(fastff.FFF(3, 2, depth=3, leaf_width=1)), steps=10).finish_(bare)  # without data
    assert bare[0].temperature == 1000
    assert torch.equal(bare[0].node_bias, model[0].node_bias)


def test_a_look_on_the_way_does_not_change_the_training():
    layer = fastff.FFF(3, 2, depth=1, leaf_width=1)
    recipe = fastff.Recipe(layer, DataLoader(torch.randn(64, 3), batch_size=16, shuffle=True), steps=4)
    before = torch.get_rng_state()
    recipe.finish_(copy.deepcopy(layer))
    assert torch.equal(torch.get_rng_state(), before)


def test_leaves_start_alike():
    model = two_layers().float()
    frozen = model[0].leaf_in_bias.requires_grad_(False)
    before, tree = frozen.clone(), model[0].node_weight.detach().clone()
    with pytest.raises(ValueError, match="logit_std must be finite and positive"):
        fastff.Recipe(model, torch.randn(64, 5), steps=4, sharing=0.3, logit_std=-1.0)
    assert not all(torch.equal(p, p[:1].expand_as(p)) for p in model[2].leaf_parameters())  # nothing has happened
    fastff.Recipe(model, torch.randn(64, 5), steps=4, sharing=0.3, reset_trees=False)
    assert not all(torch.equal(p, p[:1].expand_as(p)) for p in model[2].leaf_parameters())
    assert torch.equal(model[0].node_weight, tree)
    fastff.Recipe(model, torch.randn(64, 5), steps=4, sharing=0.3)
    assert torch.equal(frozen, before)
    leaves = [p for layer in (model[0], model[2]) for p in layer.leaf_parameters() if p is not frozen]
    assert all(torch.equal(p, p[:1].expand_as(p)) for p in leaves)
    assert (model[0].sharing, model[2].sharing) == (0.3, 0.3)


def test_with_full_sharing_leaves_stay_alike():
    model = two_layers().float()
    recipe = fastff.Recipe(model, steps=5, noise=0, sharing=1.0)
    optimizer = torch.optim.AdamW(model.parameters())
    before = model[0].leaf_in_weight.detach().clone()
    for _ in range(3):
        (model(torch.randn(16, 5)).square().mean() + recipe.loss()).backward()
        optimizer.step()
        optimizer.zero_grad()
        recipe.step()
    after = model[0].leaf_in_weight.detach()
    assert not torch.equal(after, before)
    torch.testing.assert_close(after, after[:1].expand_as(after))


def test_loss_is_the_sum_of_its_parts():
    model = two_layers().float()
    recipe = fastff.Recipe(model, steps=3, noise=0, balance=0.3, hardening=0.7, reduction="path", decision="soft")
    model.train()(torch.randn(8, 5))
    expected = 0.3 * fastff.balance_loss(model) + 0.7 * fastff.hardening_loss(model, "path")
    torch.testing.assert_close(recipe.loss(), expected)
    assert fastff.Recipe(model, steps=3, noise=0, balance=0).loss() == 0


def test_with_sampled_decisions_the_temperature_does_not_scale_the_balance():
    model, x = make(depth=3, decision="sampled"), torch.randn(40, 5).double()
    recipe = fastff.Recipe(model, x, steps=2, noise=0, balance=0.3, decision="sampled", temperature=(4.0, 8.0))
    model(x)
    torch.testing.assert_close(recipe.loss(), 0.3 / 4 * fastff.balance_loss(model))
    recipe.step()
    model(x)
    torch.testing.assert_close(recipe.loss(), 0.3 / recipe.temperature * fastff.balance_loss(model))


def test_temperature_rises_by_equal_ratios_and_ends_hard():
    layer = fastff.FFF(3, 2, depth=2, leaf_width=1)
    recipe = fastff.Recipe(layer, steps=2, temperature=(1.0, 16.0), final_temperature=64.0)
    seen = [layer.temperature]
    for _ in range(3):
        recipe.step()
        seen.append(layer.temperature)
    assert seen == pytest.approx([1, 4, 64, 64])


def test_state_goes_on_where_it_was():
    layer = fastff.FFF(3, 2, depth=2, leaf_width=1)
    recipe = fastff.Recipe(layer, steps=10, temperature=(1.0, 2.0))
    for _ in range(4):
        recipe.step()
    other = fastff.FFF(3, 2, depth=2, leaf_width=1)
    again = fastff.Recipe(other, steps=10, temperature=(1.0, 2.0))
    again.load_state_dict(recipe.state_dict())
    assert (other.temperature, again.deviation) == (layer.temperature, recipe.deviation)


def test_layers_are_prepared():
    model = two_layers().float()
    fastff.Recipe(model, torch.randn(256, 5), steps=5, transposition=0.2, decision="straight_through")
    for layer in (model[0], model[2]):
        assert (layer.decision, layer.transposition) == ("straight_through", 0.2)
    assert fastff.usage(model, torch.randn(256, 5))["0"].smallest_share > 0.3


def operated(init="data"):
    """A dense block replaced by a fitted layer, and its inputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 4)))
    x = torch.randn(2000, 6)
    dense = copy.deepcopy(model)
    fastff.replace_(model, depth=2, leaf_width=16, init=init, **({"data": x} if init == "data" else {}))
    return model, dense, x


def missed(model, dense, x):
    y = dense(x)
    return ((model.eval()(x) - y).square().sum() / (y - y.mean(0)).square().sum()).item()


@pytest.mark.parametrize("sharing", [0.0, 0.5])
def test_what_surgery_fitted_is_kept(sharing):
    """The recipe drew new trees, and with sharing new leaves, without a word: the error rose from 7.5 % to 25.8 %."""
    model, dense, x = operated()
    before, error = {name: p.clone() for name, p in model.named_parameters()}, missed(model, dense, x)
    recipe = fastff.Recipe(model, x, steps=9, sharing=sharing)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert recipe.kept_trees == ["0"]
    assert "kept the tree of 1 ('0')" in repr(recipe)
    assert missed(model, dense, x) == error
    fastff.Recipe(model, x, steps=9, reset_trees=True)
    assert missed(model, dense, x) > 2 * error  # asked for


def test_a_tree_of_zeros_is_placed_and_carried_leaves_are_kept():
    """After init="dense" all decisions are alike, so that there is no tree to keep; also after a state dict."""
    model, _, x = operated("dense")
    leaves = {name: p.clone() for name, p in model.named_parameters() if ".leaf_" in name}
    twin, _, _ = operated("dense")
    twin.load_state_dict(model.state_dict())
    for one in (model, twin):
        recipe = fastff.Recipe(one, x, steps=9, sharing=0.5)
        assert recipe.kept_trees == []
        assert fastff.usage(one, x)["0"].smallest_share > 0.9
        assert all(torch.equal(leaves[name], p) for name, p in one.named_parameters() if name in leaves)


def test_what_counts_as_fitted(tmp_path):
    x = torch.randn(64, 3)

    def kept(layer):
        return fastff.Recipe(copy.deepcopy(layer), x, steps=4).kept_trees == [""]

    layer = fastff.FFF(3, 2, depth=2, leaf_width=1)
    assert not kept(layer)
    fastff.initialize_tree_(layer, x)
    assert kept(layer)
    assert kept(pickle.loads(pickle.dumps(layer)))
    other = fastff.FFF(3, 2, depth=2, leaf_width=1)
    other.load_state_dict(layer.state_dict())
    assert kept(other)
    other.reset_parameters()
    assert not kept(other)
    model, _, inputs = operated()
    fastff.save(model, tmp_path)
    loaded = nn.Sequential(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 4)))
    fastff.load_(loaded, tmp_path)
    assert fastff.Recipe(loaded, inputs, steps=4).kept_trees == ["0"]


def test_a_second_training_keeps_what_the_first_learned():
    x, y = data()
    layer = fastff.FFF(2, 2, depth=2, leaf_width=2)
    train(layer, x, y, 3, sharing=0.5, noise=0.0)
    before = {name: p.clone() for name, p in layer.named_parameters()}
    fastff.Recipe(layer, x, steps=3, sharing=0.5)
    assert all(torch.equal(before[name], p) for name, p in layer.named_parameters())


def test_a_new_layer_beside_a_fitted_one_is_placed():
    model = two_layers().float()
    x = torch.randn(256, 5)
    fastff.initialize_tree_(model[0], x)
    tree = model[0].node_weight.clone()
    recipe = fastff.Recipe(model, x, steps=3)
    assert recipe.kept_trees == ["0"]
    assert torch.equal(model[0].node_weight, tree)
    assert fastff.usage(model, x)["2"].smallest_share > 0.3  # many outputs of the first are equal


def test_a_tree_trained_without_data_is_kept():
    """A recipe with data drew it anew: what a training had taught it was lost without a word."""
    x, y = data()
    layer = fastff.FFF(2, 2, depth=2, leaf_width=2)
    first = fastff.Recipe(layer, steps=1)
    (F.cross_entropy(layer(x), y) + first.loss()).backward()
    first.step()
    before = layer.node_weight.clone()
    assert fastff.Recipe(layer, x, steps=3).kept_trees == [""]
    assert torch.equal(layer.node_weight, before)


def test_steps_past_the_last_rebalance_no_more_often_than_those_before(monkeypatch):
    """Each of them rebalanced in full: a Trainer of more steps than its recipe spent most of its time there."""
    x, _ = data()
    layer, calls = fastff.FFF(2, 2, depth=2, leaf_width=2), []
    recipe = fastff.Recipe(layer, x, steps=3, rebalance_every=10)

    def rebalance(*_, passes):
        calls.append((recipe.count + 1, passes))
        return Cost(1, len(x))

    monkeypatch.setattr("fastff.training.recipe.rebalance", rebalance)
    for _ in range(24):
        recipe.step()
    assert calls == [(3, None), (13, 1), (23, 1)]
    assert recipe.temperature == 1000


def test_a_state_of_another_length_is_told():
    """A tree became hard at once, where the state of 50 steps of 100 was loaded into a recipe of 7."""
    x = torch.randn(64, 5)
    recipe = fastff.Recipe(make(dtype=torch.float32), x, steps=100)
    state = recipe.state_dict() | {"count": 50}
    with pytest.warns(UserWarning, match="made for steps=7; the state comes from one with steps=100"):
        fastff.Recipe(make(dtype=torch.float32), x, steps=7).load_state_dict(state)


@pytest.mark.parametrize(
    "wrong", [torch.full((127, 2), torch.nan), -torch.ones(127, 2), torch.ones(3, 2), torch.ones(127, 2).long(), "x"]
)
def test_running_shares_that_cannot_be_are_refused(wrong):
    layer = make(depth=7, decision="sampled", dtype=torch.float32)  # more nodes than inputs: it keeps running shares
    recipe = fastff.Recipe(layer, torch.randn(256, 5), steps=3, decision="sampled")
    layer(torch.randn(64, 5))
    state = recipe.state_dict()
    with pytest.raises(ValueError, match="the running shares of the FFF layer ''"):
        recipe.load_state_dict(state | {"running_shares": {"": wrong}})
    recipe.load_state_dict(state)


def test_the_state_holds_the_running_shares_of_sampled_layers():
    """A training that goes on after a restart has the same balance loss as one that never stopped."""
    torch.manual_seed(0)
    x = torch.randn(200, 5, dtype=torch.float64)
    model, again = make(), make()
    recipe = fastff.Recipe(model, x, steps=9, decision="sampled", noise=0.0)
    for _ in range(3):
        (model(x).sum() + recipe.loss()).backward()
        recipe.step()
    state = recipe.state_dict()
    other = fastff.Recipe(again, x, steps=9, decision="sampled", noise=0.0)
    again.load_state_dict(model.state_dict())
    other.load_state_dict(state)
    losses = []
    for one, layer in ((recipe, model), (other, again)):
        torch.manual_seed(1)
        layer(x)
        losses.append(one.loss())
    assert torch.equal(*losses)
    before = other.state_dict()["running_shares"][""].clone()
    with pytest.raises(ValueError, match=r"running shares of \['x'\]; the model has \[''\]"):
        other.load_state_dict(state | {"count": 8, "running_shares": {"x": before}})
    assert other.count == 3
