"""freeze_leaves_: no gradient, and no optimizer of torch moves a frozen row."""

import copy
import pickle

import pytest
import torch
from torch import nn

import fastff
from fastff.regions import edit_, freeze_leaves_, frozen_leaves, unfreeze_leaves_
from helpers import make

OPTIMIZERS = {
    "adamw": lambda layer: torch.optim.AdamW(layer.parameters(), lr=0.05, weight_decay=0.5),
    "sgd": lambda layer: torch.optim.SGD(layer.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1),
    "rmsprop": lambda layer: torch.optim.RMSprop(layer.parameters(), lr=0.05, momentum=0.5),
    "local": lambda layer: fastff.optim.LocalAdam(layer, lr=0.05, weight_decay=0.5, local_batch=1),
}


def train(layer, optimizer, steps=4):
    x = torch.randn(steps, 32, layer.in_features).to(layer.node_weight)
    for batch in x:
        optimizer.zero_grad()
        layer.train()(batch).square().sum().backward()
        optimizer.step()


def moved(layer, old, part):
    """The leaves, or nodes, of which any parameter differs."""
    count = layer.num_leaves if part == "leaf" else layer.num_nodes
    names = [name for name in dict(layer.named_parameters()) if name.startswith(part)]
    changed = [(getattr(layer, name) != getattr(old, name)).view(count, -1).any(1) for name in names]
    return torch.stack(changed).any(0).nonzero()[:, 0].tolist()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_optimizer_moves_a_frozen_region(name):
    """Momentum and decay move rows whose gradient is zero: with a running optimizer, zero gradients are not enough."""
    layer = make(depth=3, scale=3.0)
    optimizer = OPTIMIZERS[name](layer)
    train(layer, optimizer)  # momentum
    freeze_leaves_(layer, [1, 6])
    old = copy.deepcopy(layer)
    train(layer, optimizer)
    assert moved(layer, old, "leaf") == [0, 2, 3, 4, 5, 7]
    assert moved(layer, old, "node") == [4, 5]  # 0, 1, 3 lead to leaf 1; 0, 2, 6 to leaf 6
    for parameter in layer.leaf_parameters():
        assert not parameter.grad[[1, 6]].any()
    x = torch.randn(400, 5, dtype=torch.float64)
    inside = torch.isin(old.route(x), torch.tensor([1, 6]))
    assert inside.any()
    assert torch.equal(layer.eval()(x)[inside], old.eval()(x)[inside])
    unfreeze_leaves_(layer)
    train(layer, optimizer)
    assert moved(layer, old, "leaf") == list(range(8))


def test_without_nodes_only_the_leaves_stay():
    layer = freeze_leaves_(make(depth=2, node_width=2), 3, nodes=False)
    old = copy.deepcopy(layer)
    train(layer, OPTIMIZERS["adamw"](layer))
    assert moved(layer, old, "leaf") == [0, 1, 2]
    assert moved(layer, old, "node") == [0, 1, 2]


def test_freezing_adds_up_and_is_taken_back_by_leaf():
    layer = make(depth=2)
    freeze_leaves_(layer, torch.tensor([0]))
    freeze_leaves_(layer, (leaf for leaf in [3, 0]))
    assert frozen_leaves(layer) == (0, 3)
    unfreeze_leaves_(layer, 0)
    assert frozen_leaves(layer) == (3,)
    old = copy.deepcopy(layer)
    train(layer, OPTIMIZERS["adamw"](layer))
    assert moved(layer, old, "leaf") == [0, 1, 2]
    assert moved(layer, old, "node") == [1]
    unfreeze_leaves_(unfreeze_leaves_(layer, 3))
    assert frozen_leaves(layer) == ()
    assert not layer._forward_pre_hooks


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_freezes_its_own_rows(copied):
    layer = freeze_leaves_(make(depth=2), 1)
    other = copied(layer)
    unfreeze_leaves_(layer)
    old = copy.deepcopy(other)
    assert frozen_leaves(other) == (1,)
    train(other, OPTIMIZERS["adamw"](other))
    assert moved(other, old, "leaf") == [0, 2, 3]
    train(layer, OPTIMIZERS["adamw"](layer))
    assert moved(layer, old, "leaf") == [0, 1, 2, 3]


def test_new_parameters_and_later_gradients_are_frozen_too():
    layer = freeze_leaves_(make(depth=2).requires_grad_(False), 2)
    layer.requires_grad_(True)
    layer.leaf_in_weight = nn.Parameter(layer.leaf_in_weight.detach().clone())
    old = copy.deepcopy(layer)
    train(layer, OPTIMIZERS["sgd"](layer))
    assert moved(layer, old, "leaf") == [0, 1, 3]
    assert not layer.leaf_in_weight.grad[2].any()


def test_a_shared_gradient_does_not_move_a_frozen_leaf():
    layer = freeze_leaves_(make(depth=2, sharing=0.5), 0)
    old = copy.deepcopy(layer)
    train(layer, OPTIMIZERS["adamw"](layer))
    assert moved(layer, old, "leaf") == [1, 2, 3]


def test_edits_and_loading_are_kept():
    """Rows are put back to their values before the step, not to their values when they were frozen."""
    layer = freeze_leaves_(make(depth=1, scale=3.0), [0, 1])
    optimizer = OPTIMIZERS["adamw"](layer)
    train(layer, optimizer, 1)
    x = torch.randn(1, 5, dtype=torch.float64)
    edit_(layer, x, torch.ones(1, 4))
    train(layer, optimizer, 1)
    torch.testing.assert_close(layer.eval()(x).detach(), torch.ones(1, 4, dtype=torch.float64))
    other = make(depth=1)
    layer.load_state_dict(other.state_dict())
    train(layer, optimizer, 1)
    assert moved(layer, other, "leaf") == []


def test_other_layers_of_the_optimizer_train():
    model = nn.Sequential(make(5, 6, depth=1), make(6, 3, depth=1))
    freeze_leaves_(model[0], [0, 1])
    old = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    model(torch.randn(9, 5, dtype=torch.float64)).sum().backward()
    optimizer.step()
    assert moved(model[0], old[0], "leaf") == []
    assert moved(model[1], old[1], "leaf") == [0, 1]


@pytest.mark.parametrize("leaves", [4, [0, 9]])
def test_leaves_that_do_not_exist_are_named(leaves):
    with pytest.raises(IndexError, match=r"leaves must be within 0..3; got"):
        freeze_leaves_(make(depth=2), leaves)


def test_a_recipe_keeps_frozen_and_edited_layers():
    """It placed the tree anew, under the frozen leaves."""
    for prepare in (lambda layer: freeze_leaves_(layer, 0), lambda layer: edit_(layer, torch.randn(5), torch.zeros(4))):
        layer, x = fastff.FFF(5, 4, depth=3, leaf_width=3), torch.randn(100, 5)
        prepare(layer)
        before = layer.route(x)
        fastff.Recipe(layer, x, steps=10, min_share=0)
        assert torch.equal(layer.route(x), before)


def test_lazy_optimizers_are_refused():
    """Their rows catch up on weight decay later, and moved frozen leaves."""
    layer = freeze_leaves_(make(depth=2, decision="sampled").train(), [1])
    fastff.optim.LazySGD(layer, lr=0.1)
    with pytest.raises(RuntimeError, match="frozen leaves do not go with"):
        layer(torch.randn(8, 5, dtype=torch.float64))
    layer = make(depth=2, decision="sampled").train()
    fastff.optim.LazySGD(layer, lr=0.1)
    with pytest.raises(RuntimeError, match="frozen leaves do not go with"):
        freeze_leaves_(layer, [1])
