import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import fastff
from helpers import two_layers


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


def test_noise_fades_and_is_for_training_alone():
    torch.manual_seed(0)
    layer = fastff.FFF(3, 2, depth=0, leaf_width=1, activation="identity", bias=False)
    layer.leaf_in_weight.data.fill_(1)
    layer.leaf_out_weight.data.fill_(1)
    x = 5 * torch.randn(20000, 3)
    recipe = fastff.Recipe(layer, steps=4, noise=0.5, balance=0)
    for share in (1, (1 + math.cos(math.pi / 4)) / 2, 0.5):
        change = layer.train()(x)[:, 0] - x.sum(1)
        assert change.std().item() == pytest.approx(0.5 * share * 5 * math.sqrt(3), rel=0.03)
        torch.testing.assert_close(layer.eval()(x)[:, 0], x.sum(1), rtol=1e-4, atol=1e-4)
        recipe.step()
    recipe.step()
    torch.testing.assert_close(layer.train()(x)[:, 0], x.sum(1), rtol=1e-4, atol=1e-4)


def test_a_layer_called_by_keyword_is_blurred_too():
    layer = fastff.FFF(3, 2, depth=1, leaf_width=1)
    fastff.Recipe(layer, steps=4)
    x = torch.randn(8, 3)
    assert not torch.equal(layer.train()(x=x), layer(x=x))
    assert torch.equal(layer.eval()(x=x), layer(x=x))


def test_a_recipe_can_be_closed_early():
    layer = fastff.FFF(3, 2, depth=1, leaf_width=1)
    recipe = fastff.Recipe(layer, steps=4)
    recipe.close()
    x = torch.randn(8, 3)
    assert torch.equal(layer.train()(x), layer(x))


def test_a_second_recipe_takes_over():
    layer = fastff.FFF(3, 2, depth=1, leaf_width=1)
    fastff.Recipe(layer, steps=4)
    recipe = fastff.Recipe(layer, steps=1)
    assert len(layer._forward_pre_hooks) == 1
    recipe.step()
    assert not layer._forward_pre_hooks


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_has_neither_the_noise_nor_the_data(copied):
    layer = fastff.FFF(3, 2, depth=1, leaf_width=1)
    # A loader with workers can be neither copied nor pickled; nor can a function without a name.
    loader = DataLoader(torch.randn(64, 3), batch_size=16, collate_fn=lambda batch: torch.stack(batch))
    recipe = fastff.Recipe(layer, loader, steps=4)
    twin, x = copied(layer), torch.randn(8, 3)
    assert torch.equal(twin.train()(x), twin(x))
    assert not torch.equal(layer.train()(x), layer(x)), "the layer itself is still blurred"
    recipe = fastff.Recipe(twin, steps=1, fresh=False)
    assert not torch.equal(twin.train()(x), twin(x)), "a copy may have a recipe of its own"
    recipe.step()
    assert torch.equal(twin(x), twin(x))


def test_a_mean_of_the_weights_is_finished_as_the_model_is():
    torch.manual_seed(0)
    x = torch.randn(256, 3)
    model = nn.Sequential(fastff.FFF(3, 2, depth=3, leaf_width=1))
    recipe = fastff.Recipe(model, x, steps=10, least=0.5, hard=50.0)
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


def test_data_that_can_be_read_once():
    with pytest.raises(TypeError, match="data is read again"):
        fastff.Recipe(fastff.FFF(3, 2, depth=1, leaf_width=1), (torch.randn(8, 3) for _ in range(2)), steps=4)


def test_leaves_start_alike():
    model = two_layers().float()
    frozen = model[0].leaf_in_bias.requires_grad_(False)
    before, tree = frozen.clone(), model[0].node_weight.detach().clone()
    with pytest.raises(ValueError, match="std must be positive"):
        fastff.Recipe(model, torch.randn(64, 5), steps=4, sharing=0.3, std=-1.0)
    assert not all(torch.equal(p, p[:1].expand_as(p)) for p in model[2].leaf_parameters())  # nothing has happened
    fastff.Recipe(model, torch.randn(64, 5), steps=4, sharing=0.3, fresh=False)
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


def test_temperature_rises_by_equal_ratios_and_ends_hard():
    layer = fastff.FFF(3, 2, depth=2, leaf_width=1)
    recipe = fastff.Recipe(layer, steps=2, temperature=(1.0, 16.0), hard=64.0)
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps"),
        ({"noise": -1.0}, "noise must be finite, and 0 or more; got -1"),
        ({"balance": math.nan}, "balance must be finite, and 0 or more"),
        ({"hard": math.inf}, "temperatures must be finite and positive.*hard=inf"),
        ({"transposition": 2.0}, "transposition"),
        ({"sharing": 1.5}, "sharing"),
        ({"decision": "hard"}, "decision must be 'soft' or 'straight_through'"),
        ({"temperature": (1.0, 0.0)}, "temperatures must be finite and positive"),
    ],
)
def test_bad_arguments_change_nothing(options, message):
    layer = fastff.FFF(3, 2, depth=2, leaf_width=1)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        fastff.Recipe(layer, torch.randn(8, 3), **{"steps": 5} | options)
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())
    assert not layer._forward_pre_hooks
