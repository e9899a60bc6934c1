"""Which forwards LocalSGD and LocalAdam count, and how often."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastff
from fastff.optim import LocalAdam, LocalSGD
from helpers import make
from optim_helpers import NEVER, TOLERANCE, around, assert_same, data, loss_of, parameters, train


@pytest.mark.parametrize("decision", ["soft", "straight_through"])
@pytest.mark.parametrize("local", [LocalSGD, LocalAdam])
def test_gradient_accumulation(local, decision):
    """Micro-batches of 5, 1 and 7, their losses weighted to the mean over all 13, are a batch of 13."""
    layer = make(depth=2, decision=decision)
    twin = copy.deepcopy(layer)
    optimizer, whole = local(layer, 0.1, local_batch=6.1), local(twin, 0.1, local_batch=6.1)
    for x, target in data(4):
        optimizer.zero_grad()
        for part, goal in zip(x.split([5, 1, 7]), target.split([5, 1, 7]), strict=True):
            (loss_of(layer, part, goal) * len(part) / 13).backward()
        optimizer.step()
        train(twin, whole, [(x, target)])
        assert_same(parameters(layer), parameters(twin), **TOLERANCE)
    masses = [[o.state[p]["mass"] for p in m.parameters()] for o, m in ((optimizer, layer), (whole, twin))]
    torch.testing.assert_close(*masses, **TOLERANCE)
    assert any(mass.count_nonzero() for mass in masses[0]), "something is still gathering"


def test_several_dimensions_of_samples():
    """(3, 4, 5) inputs are 12 samples."""
    layer = make(depth=2)
    twin = copy.deepcopy(layer)
    x, target = torch.randn(3, 4, 5).double(), torch.randn(3, 4, 4).double()
    train(layer, LocalSGD(layer, 0.1, local_batch=2), [(x, target)])
    train(twin, LocalSGD(twin, 0.1, local_batch=2), [(x.flatten(0, 1), target.flatten(0, 1))])
    assert_same(parameters(layer), parameters(twin), **TOLERANCE)


def test_evaluation_does_not_count():
    layer = make(depth=2)
    twin = copy.deepcopy(layer)
    optimizer, quiet = LocalSGD(layer, 0.1, local_batch=8), LocalSGD(twin, 0.1, local_batch=8)
    for batch in data(3):
        layer.eval()
        layer(torch.randn(99, 5).double())
        layer.train()
        train(layer, optimizer, [batch])
        train(twin, quiet, [batch])
    assert_same(parameters(layer), parameters(twin))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_does_not_count_twice(use_reentrant):
    """The recomputation in backward is the same forward again, not another. Reentrant, it alone has a graph."""
    model = around(make(7, 3, depth=2))
    twin = copy.deepcopy(model)
    optimizer, plain = LocalAdam(model, 0.1, local_batch=7.3), LocalAdam(twin, 0.1, local_batch=7.3)

    def checkpointed(x):
        return checkpoint(model, x.requires_grad_(), use_reentrant=use_reentrant)

    for batch in data(4):
        train(model, optimizer, [batch], run=checkpointed)
        train(twin, plain, [batch])
        assert_same(parameters(model), parameters(twin), **TOLERANCE)
        for p, q in zip(model[2].parameters(), twin[2].parameters(), strict=True):
            assert torch.equal(optimizer.state[p]["mass"], plain.state[q]["mass"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "decision"), [("model", "soft"), ("compiled", "soft"), ("compiled", "straight_through")]
)
def test_a_compiled_model_is_counted(given, decision):
    """Compiled code runs no hook; the optimizer reads what it left on the layer. Built for either, it steps alike."""
    torch._dynamo.reset()
    model = around(make(7, 3, depth=2, decision=decision))
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = LocalSGD(model if given == "model" else compiled, 0.1, local_batch=7.3, momentum=0.5)
    plain = LocalSGD(twin, 0.1, local_batch=7.3, momentum=0.5)
    for batch in data(4):
        train(model, optimizer, [batch], run=compiled)
        train(twin, plain, [batch])
        assert_same(parameters(model), parameters(twin), **TOLERANCE)
    with pytest.raises(RuntimeError, match="no training forward since the last step"):
        optimizer.step()
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_zero_grad_may_come_between_forward_and_backward(compiled):
    torch._dynamo.reset()
    layer = make(depth=2)
    twin = copy.deepcopy(layer)
    run = torch.compile(layer, backend="aot_eager") if compiled else layer
    optimizer, before = LocalSGD(layer, 0.1, local_batch=4.2), LocalSGD(twin, 0.1, local_batch=4.2)
    for batch in data(3):
        loss = loss_of(run, *batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        train(twin, before, [batch])
    assert_same(parameters(layer), parameters(twin), **TOLERANCE)
    torch._dynamo.reset()


def test_a_closure_is_run_with_gradients_and_its_loss_returned():
    layer = make(depth=1)
    twin = copy.deepcopy(layer)
    (batch,) = data(1)
    optimizer = LocalSGD(layer, 0.1, local_batch=2)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(layer, *batch)
        loss.backward()
        return loss

    expected = loss_of(copy.deepcopy(layer), *batch)
    assert torch.equal(optimizer.step(closure), expected)
    train(twin, LocalSGD(twin, 0.1, local_batch=2), [batch])
    assert_same(parameters(layer), parameters(twin))


@pytest.mark.parametrize("local", [LocalSGD, LocalAdam])
def test_a_step_without_a_forward_is_an_error(local):
    """The gradients of the step before are still there; without a count they must not be gathered again."""
    model = around(make(7, 3, depth=2))
    optimizer = local(model, 0.1, local_batch=2)
    with pytest.raises(RuntimeError, match="the FFF layer '2' has had no training forward since the last step"):
        optimizer.step()
    train(model, optimizer, data(1))
    before = parameters(model)
    with pytest.raises(RuntimeError, match=r"Run the model that the optimizer was built for, in train\(\) mode"):
        optimizer.step()
    assert_same(parameters(model), before)
    train(model, optimizer, data(1))  # and a forward sets it right
    assert all(not torch.equal(before[name], p) for name, p in model[0].named_parameters(prefix="0"))


def test_a_forward_without_gradients_does_not_count():
    """In train() mode, under no_grad: to look at the loss or at the regions, between the batches or within one."""
    layer = make(depth=2)
    twin = copy.deepcopy(layer)
    optimizer, quiet = LocalSGD(layer, 0.1, local_batch=8), LocalSGD(twin, 0.1, local_batch=8)
    for batch in data(3):
        optimizer.zero_grad()
        loss_of(layer, *batch).backward()
        with torch.no_grad():
            layer(torch.randn(99, 5).double())
        optimizer.step()
        train(twin, quiet, [batch])
    assert_same(parameters(layer), parameters(twin))
    with torch.no_grad():
        layer(torch.randn(99, 5).double())
    with pytest.raises(RuntimeError, match="no training forward since the last step"):
        optimizer.step()


def test_a_forward_inside_torch_func_does_not_count():
    """Its gradients are returned, not kept on the parameters, and what it left on the layer cannot be read later."""
    model = nn.Sequential(make(5, 5), make(5, 4))
    optimizer = LocalSGD(model, 0.1, local_batch=NEVER)
    for x, target in data(2):
        train(model[1:], optimizer, [(x, target)])
        torch.func.vmap(model)(torch.randn(99, 5).double())
    with pytest.raises(RuntimeError, match="no training forward since the last step"):
        optimizer.step()
    assert optimizer.state[model[1].node_bias]["mass"][0].item() == pytest.approx(26)


def test_several_backward_passes_through_a_forward_count_once():
    """Two losses with a backward each are one batch, as is one whose first gradients were looked at and dropped."""
    layers = [make(depth=2)]
    layers += [copy.deepcopy(layers[0]) for _ in range(2)]
    ((x, target),) = data(1)
    masses = []
    for layer, parts, drop in zip(layers, [[1.0], [0.25, 0.75], [0.3, 1.0]], [False, False, True], strict=True):
        optimizer = LocalSGD(layer, 0.1, local_batch=3.3)
        loss = loss_of(layer, x, target)
        for part in parts:
            if drop:
                optimizer.zero_grad()
            (part * loss).backward(retain_graph=True)
        optimizer.step()
        masses.append([optimizer.state[p]["mass"] for p in layer.parameters()])
    for layer, mass in zip(layers[1:], masses[1:], strict=True):
        torch.testing.assert_close(mass, masses[0], rtol=0, atol=0)
        assert_same(parameters(layer), parameters(layers[0]), **TOLERANCE)


def test_a_loss_on_the_tree_alone():
    """Its gradients do not come through the output of the layer; the samples are those of the last forward."""
    layer = make(depth=2)
    optimizer = LocalSGD(layer, 0.1, local_batch=NEVER)
    layer(torch.randn(13, 5).double())
    fastff.hardening_loss(layer).backward()
    optimizer.step()
    assert optimizer.state[layer.node_bias]["mass"][0].item() == pytest.approx(13)
    with pytest.raises(RuntimeError, match="no training forward since the last step"):
        optimizer.step()


def test_transposed_samples_count_where_they_went():
    """A soft node gets its gradients through the weights that were used, which transposition has changed."""
    layer = make(depth=2, transposition=0.5, scale=5.0)
    optimizer = LocalSGD(layer, 0.1, local_batch=NEVER)
    loss_of(layer, *data(1)[0]).backward()
    optimizer.step()
    leaf = layer.last_mixture.sum(0)
    node = torch.stack([leaf.sum(), leaf[:2].sum(), leaf[2:].sum()])
    torch.testing.assert_close(optimizer.state[layer.leaf_in_bias]["mass"], leaf, **TOLERANCE)
    torch.testing.assert_close(optimizer.state[layer.node_bias]["mass"], node, **TOLERANCE)


def test_a_step_that_the_gradient_scaler_skips_is_forgotten():
    """GradScaler leaves out the step of a batch whose gradients overflow, and the next zero_grad drops them. The
    samples of that batch have then given no gradient, so they must not count: ten of them made a leaf step for which
    the next batch had one sample, with 20/11 of that sample's gradient."""
    layer = make(depth=1, decision="straight_through", dtype=torch.float32)
    with torch.no_grad():
        layer.node_weight.copy_(torch.eye(1, 5))
        layer.node_bias.zero_()  # the sign of the first input decides
    optimizer = LocalSGD(layer, 0.1, local_batch=8)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    left, right = -torch.ones(10, 5), torch.ones(1, 5)
    before = parameters(layer)
    for x, factor in ((left, float("inf")), (torch.cat([left[:1], right.expand(9, 5)]), 1.0)):
        optimizer.zero_grad()
        scaler.scale(layer(x).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.state[layer.leaf_in_weight]["mass"].tolist() == [1, 0]
    assert torch.equal(layer.leaf_out_bias[0], before["leaf_out_bias"][0])
    assert not torch.equal(layer.leaf_out_bias[1], before["leaf_out_bias"][1])
