import copy
import math
import pickle

import numpy as np
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
    recipe = fastff.Recipe(twin, steps=1, reset_trees=False)
    assert not torch.equal(twin.train()(x), twin(x)), "a copy may have a recipe of its own"
    recipe.step()
    assert torch.equal(twin(x), twin(x))


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


def test_data_that_can_be_read_once():
    with pytest.raises(TypeError, match="data is read again"):
        fastff.Recipe(fastff.FFF(3, 2, depth=1, leaf_width=1), (torch.randn(8, 3) for _ in range(2)), steps=4)


def test_leaves_start_alike():
    model = two_layers().float()
    frozen = model[0].leaf_in_bias.requires_grad_(False)
    before, tree = frozen.clone(), model[0].node_weight.detach().clone()
    with pytest.raises(ValueError, match="std must be finite and positive"):
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
    ({"hard": math.inf}, "hard must be finite and positive; got inf"),
    ({"final_temperature": 1e39}, "final_temperature must be positive and finite in torch.float32; got 1e.39"),
    ({"transposition": 2.0}, "transposition"),
    ({"sharing": 1.5}, "sharing"),
    ({"decision": "hard"}, "decision must be 'soft' or 'straight_through'"),
    ({"reduction": "x"}, "reduction must be 'mean', 'sum' or 'path'; got 'x'"),
    ({"temperature": (1.0, 0.0)}, "temperature must be finite and positive; got 0"),
    ({"temperature": (1e-60, 1.0)}, "temperature must be positive and finite in torch.float32; got 1e-60"),
    ({"std": math.inf}, "std must be finite and positive; got inf"),
    ({"std": 0.0}, "std must be finite and positive; got 0"),
    ({"min_share": -0.1}, "min_share must be from 0 to 1"),
    ({"rebalance_every": -1}, "rebalance_every must be at least 0"),
]
NUMBERS = ("noise", "balance", "hardening", "hard", "std", "least", "sharing", "transposition")
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
    """Passes its inputs on, for so many forwards; then it raises."""

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
    assert recipe.kept == ["0"]
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
        assert recipe.kept == []
        assert fastff.usage(one, x)["0"].smallest_share > 0.9
        assert all(torch.equal(leaves[name], p) for name, p in one.named_parameters() if name in leaves)


def test_what_counts_as_fitted(tmp_path):
    x = torch.randn(64, 3)

    def kept(layer):
        return fastff.Recipe(copy.deepcopy(layer), x, steps=4).kept == [""]

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
    assert fastff.Recipe(loaded, inputs, steps=4).kept == ["0"]


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
    assert recipe.kept == ["0"]
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
    assert fastff.Recipe(layer, x, steps=3).kept == [""]
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
    x, _ = data()
    recipe = fastff.Recipe(fastff.FFF(2, 2, depth=2, leaf_width=2), x, steps=5)
    before = recipe.state_dict()
    with pytest.raises(error, match=message):
        recipe.load_state_dict(state)
    assert recipe.state_dict() == before


def test_a_state_of_another_length_is_told():
    """A tree became hard at once, where the state of 50 steps of 100 was loaded into a recipe of 7."""
    x = torch.randn(64, 5)
    recipe = fastff.Recipe(make(dtype=torch.float32), x, steps=100)
    state = recipe.state_dict() | {"count": 50}
    with pytest.warns(UserWarning, match="made for steps=7; the state comes from one with steps=100"):
        fastff.Recipe(make(dtype=torch.float32), x, steps=7).load_state_dict(state)
