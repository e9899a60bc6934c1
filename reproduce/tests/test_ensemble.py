import copy

import pytest
import torch
import torch.nn.functional as F

import fastff
from fastff_reproduce.ensemble import Ensemble, Optimizer
from helpers import make

MEMBERS, BATCH = 3, 16


def members(**options):
    torch.manual_seed(0)
    return [make(5, 4, scale=2.0, **options) for _ in range(MEMBERS)]


def loss(model, output, target):
    value = F.cross_entropy(output, target)
    if isinstance(model, fastff.FFF):
        value = value + 0.3 * fastff.balance_loss(model) + 0.2 * fastff.hardening_loss(model, "path")
    return value


@pytest.mark.parametrize("decision", ["soft", "straight_through"])
def test_losses_and_gradients_are_those_of_each_member_alone(decision):
    models = members(decision=decision)
    x, y = torch.randn(MEMBERS, BATCH, 5, dtype=torch.float64), torch.randint(4, (MEMBERS, BATCH))
    ensemble = Ensemble(models)
    losses = ensemble.losses(loss, x, y)
    grads = torch.autograd.grad(losses.sum(), list(ensemble.trained.values()))
    for i, model in enumerate(models):
        alone = loss(model.train(), model(x[i]), y[i])
        torch.testing.assert_close(losses[i], alone)
        alone.backward()
        for (name, grad), stacked in zip(model.named_parameters(), grads, strict=True):
            torch.testing.assert_close(stacked[i], grad.grad, msg=name)


@pytest.mark.parametrize(("kind", "weight_decay"), [("sgd", 0.0), ("adam", 0.0), ("adam", 0.2)])
def test_optimizer_is_that_of_torch_at_each_rate(kind, weight_decay):
    models = members()
    ensemble = Ensemble(models)
    optimizer = Optimizer(ensemble, kind, weight_decay=weight_decay)
    rates = [0.1, 0.03, 0.01]
    optimizer.rate.copy_(torch.tensor(rates, dtype=torch.float64))
    make_torch = {"sgd": torch.optim.SGD, "adam": torch.optim.AdamW}[kind]
    theirs = [make_torch(m.parameters(), lr=r, weight_decay=weight_decay) for m, r in zip(models, rates, strict=True)]
    for step in range(4):
        x = torch.randn(MEMBERS, BATCH, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        y = torch.arange(BATCH).remainder(4).expand(MEMBERS, -1)
        grads = torch.autograd.grad(ensemble.losses(loss, x, y).sum(), optimizer.parameters)
        optimizer.step(grads)
        for model, torchs, inputs, target in zip(models, theirs, x, y, strict=True):
            torchs.zero_grad()
            loss(model.train(), model(inputs), target).backward()
            torchs.step()
    for i, model in enumerate(models):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(ensemble.parameters[name][i], parameter, rtol=1e-9, atol=1e-12, msg=name)


def test_a_member_is_a_model_in_evaluation():
    models = members()
    ensemble = Ensemble(models)
    x = torch.randn(9, 5, dtype=torch.float64)
    for i, model in enumerate(models):
        assert torch.equal(ensemble.member(i)(x), model.eval()(x))
    others = {name: tensor + 1 for name, tensor in ensemble.state_dict().items()}
    changed = copy.deepcopy(models[1])
    changed.load_state_dict({name: tensor[1] for name, tensor in others.items()})
    assert torch.equal(ensemble.member(1, others)(x), changed.eval()(x))
    assert torch.equal(ensemble.member(1)(x), models[1](x))


@pytest.mark.parametrize("large", [False, True])
def test_map_gives_each_member_its_part_or_all_the_same(large):
    models = members()
    ensemble = Ensemble(models, large=large)
    x = torch.randn(MEMBERS, 9, 5, dtype=torch.float64)

    def function(model, x):
        assert not model.training
        return [model.node_logits(x), model.mixture(x).sum(0)]

    for own, inputs in ((True, x), (False, x[0].expand_as(x))):
        found = ensemble.map(function, x if own else x[0], own=own)
        for i, model in enumerate(models):
            for ours, theirs in zip(found, function(model.eval(), inputs[i]), strict=True):
                torch.testing.assert_close(ours[i], theirs, rtol=1e-12, atol=1e-12)
    assert not torch.equal(found[0][0], found[0][1])


def test_frozen_parameters_do_not_train():
    models = members()
    for model in models:
        model.freeze_tree_()
    ensemble = Ensemble(models)
    assert set(ensemble.trained) == {name for name, p in models[0].named_parameters() if p.requires_grad}
    assert "node_weight" in ensemble.parameters


def test_an_unknown_optimizer():
    with pytest.raises(ValueError, match="'sgd' or 'adam'; got 'lion'"):
        Optimizer(Ensemble(members()), "lion")
