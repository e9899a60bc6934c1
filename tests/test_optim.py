"""LocalSGD and LocalAdam against the optimizers of torch on a plain layer, and their arguments."""

import copy
import itertools
import warnings

import pytest
import torch
from torch import nn

import fastff
from fastff.optim import LocalAdam, LocalSGD
from helpers import make
from optim_helpers import NEVER, TOLERANCE, around, assert_same, data, parameters, same, train


@same
@pytest.mark.parametrize("local_batch", [13, 4.5])
def test_depth_0_is_the_optimizer_of_torch(local, plain, options, local_batch):
    model = around(make(7, 3, depth=0))
    twin = copy.deepcopy(model)
    optimizer, reference = local(model, local_batch=local_batch, **options), plain(twin.parameters(), **options)
    for batch in data(7):
        train(model, optimizer, [batch])
        train(twin, reference, [batch])
        assert_same(parameters(model), parameters(twin), **TOLERANCE)


def test_the_defaults_are_those_of_adam_without_decay():
    model = around(make(7, 3, depth=0))
    twin = copy.deepcopy(model)
    batches = data(5, size=32)
    train(model, LocalAdam(model), batches)
    train(twin, torch.optim.Adam(twin.parameters()), batches)
    assert_same(parameters(model), parameters(twin), **TOLERANCE)


@same
def test_other_parameters_step_every_time(local, plain, options):
    """No block of the tree has seen enough and none moves; the linear layers around it move as under torch."""
    model = around(make(7, 3, depth=2))
    twin = copy.deepcopy(model)
    optimizer = local(model, local_batch=NEVER, **options)
    reference = plain([p for i in (0, 3) for p in twin[i].parameters()], **options)
    batches, before = data(6), parameters(model[2])
    for batch in batches:
        previous = parameters(model[0])
        train(model, optimizer, [batch])
        assert all(not torch.equal(previous[name], p) for name, p in model[0].named_parameters())
    train(twin, reference, batches)
    assert_same(parameters(model), parameters(twin), **TOLERANCE)
    assert_same(parameters(model[2]), before)


@same
def test_learning_rate_schedules(local, plain, options):
    """OneCycleLR changes the learning rate and the momentum (or the betas) of every group, and warns of lost steps."""
    model = around(make(7, 3, depth=0))
    twin = copy.deepcopy(model)
    optimizer, reference = local(model, local_batch=13, **options), plain(twin.parameters(), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedules = [torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=9) for o in (optimizer, reference)]
        for batch in data(8):
            train(model, optimizer, [batch])
            train(twin, reference, [batch])
            for schedule in schedules:
                schedule.step()
            assert_same(parameters(model), parameters(twin), **TOLERANCE)


def test_a_block_steps_with_the_learning_rate_of_that_moment():
    """Gathered over two batches at 1 and 1/2, the gradients are applied with 1/2: the rate is that of the step."""
    layer = make(depth=1)
    twin = copy.deepcopy(layer)
    before = parameters(layer)
    optimizer, fixed = LocalSGD(layer, 1.0, local_batch=14), LocalSGD(twin, 0.5, local_batch=14)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    for batch in data(2):
        assert_same(parameters(layer), before)  # 13 samples are not enough
        train(layer, optimizer, [batch])
        train(twin, fixed, [batch])
        schedule.step()
    assert_same(parameters(layer), parameters(twin))
    assert not torch.equal(layer.node_weight, before["node_weight"])


@pytest.mark.parametrize(
    ("local", "options", "message"),
    [
        (LocalSGD, {"lr": -0.1}, "lr must be finite, and 0 or more; got -0.1"),
        (LocalSGD, {"lr": float("nan")}, "lr must be finite, and 0 or more; got nan"),
        (LocalSGD, {"lr": 0.1, "local_batch": 0}, "local_batch must be finite and positive; got 0"),
        (LocalSGD, {"lr": 0.1, "local_batch": float("nan")}, "local_batch must be finite and positive; got nan"),
        (LocalSGD, {"lr": 0.1, "momentum": 1.0}, r"momentum must be in \[0, 1\); got 1.0"),
        (LocalSGD, {"lr": 0.1, "momentum": -0.5}, r"momentum must be in \[0, 1\); got -0.5"),
        (LocalSGD, {"lr": 0.1, "weight_decay": -1}, "weight_decay must be finite, and 0 or more; got -1"),
        (LocalAdam, {"lr": -1e-3}, "lr must be finite, and 0 or more; got -0.001"),
        (LocalAdam, {"local_batch": -2}, "local_batch must be finite and positive; got -2"),
        (LocalAdam, {"betas": (0.9, 1.0)}, r"betas must be in \[0, 1\); got \(0.9, 1.0\)"),
        (LocalAdam, {"eps": -1e-8}, "eps must be finite, and 0 or more; got -1e-08"),
        (LocalAdam, {"weight_decay": -0.1}, "weight_decay must be finite, and 0 or more; got -0.1"),
    ],
)
def test_bad_arguments(local, options, message):
    layer = make()
    with pytest.raises(ValueError, match=message):
        local(layer, **options)
    assert not layer._forward_hooks, "a failed construction leaves the model as it was"


@pytest.mark.parametrize("name", ["lr", "local_batch", "eps", "weight_decay", "betas"])
@pytest.mark.parametrize("value", ["1", None, True])
def test_arguments_that_are_no_numbers(name, value):
    layer = make()
    with pytest.raises(TypeError, match=f"{name} must be"):
        LocalAdam(layer, **{name: value})
    assert not layer._forward_hooks


def test_a_model_without_an_fff_is_an_error():
    with pytest.raises(ValueError, match="Linear has no FFF layer"):
        LocalSGD(nn.Linear(3, 2), 0.1)


def test_every_parameter_is_in_one_group():
    model = nn.Sequential(around(make(7, 3, depth=2)), around(make(5, 4, depth=0)), fastff.baselines.FF(4, 4, width=3))
    grouped = [id(p) for group in LocalSGD(model, 0.1).param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    assert all(a != b for a, b in itertools.pairwise(sorted(grouped)))


def test_a_group_that_is_added_steps_every_time():
    layer, head = make(depth=2), nn.Linear(4, 4).double()
    optimizer = LocalSGD(layer, 0.1, local_batch=NEVER)
    optimizer.add_param_group({"params": head.parameters(), "lr": 0.5})
    before = parameters(head)
    train(layer, optimizer, data(1), run=nn.Sequential(layer, head))
    for name, p in head.named_parameters():
        torch.testing.assert_close(p, before[name] - 0.5 * p.grad, **TOLERANCE)


def test_an_optimizer_that_is_gone_leaves_no_hook():
    layer = make(depth=2)
    for _ in range(3):
        optimizer = LocalSGD(layer, 0.1)
    assert len(layer._forward_hooks) == 1
    del optimizer
    assert not layer._forward_hooks
