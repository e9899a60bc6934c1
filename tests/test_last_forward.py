"""What a training forward leaves behind lasts until backward, and no longer."""

import gc

import pytest
import torch

import fastff
from helpers import make, two_layers


def test_no_graph_is_kept_after_backward():
    """Neither when the losses were used, nor when they were not; the values stay, for logging."""
    model = two_layers()
    x = torch.randn(9, 5, dtype=torch.float64)
    for use in (True, False):
        y = model(x)
        loss = y.square().sum() + (fastff.hardening_loss(model) if use else 0)
        loss.backward()
        assert all(layer.last_logits.grad_fn is None for layer in (model[0], model[2]))
        assert len(fastff.training.entropies(model)) == 2
        with torch.no_grad():
            assert fastff.hardening_loss(model) > 0
        with pytest.raises(RuntimeError, match="the FFF layer '0' has no gradient: backward has passed it"):
            fastff.hardening_loss(model)


@pytest.mark.slow
def test_the_graph_is_freed_with_its_output():
    """The layer must not keep the activations of other layers alive once backward is done: no tensor is left over."""

    def tensors():
        gc.collect()
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())

    model = two_layers()
    x = torch.randn(9, 5, dtype=torch.float64)

    def step():
        (model(x).sum() + fastff.hardening_loss(model)).backward()

    step()
    before = tensors()
    for _ in range(3):
        step()
    assert tensors() <= before


def test_earlier_forwards_do_not_release_later_ones():
    """Two micro-batches in flight: backward through the first leaves the second's losses alone."""
    layer = make(depth=2)
    first = layer(torch.randn(4, 5, dtype=torch.float64)).sum()
    layer(torch.randn(4, 5, dtype=torch.float64))
    first.backward()
    fastff.hardening_loss(layer).backward()


def test_create_graph_keeps_the_losses_usable():
    """A gradient penalty runs autograd through the layer before the losses are read."""
    layer = make(depth=2)
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    (slope.square().sum() + fastff.hardening_loss(layer)).backward()
    assert layer.node_weight.grad.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_checkpointing(compiled):
    """The losses through a checkpointed forward have the same gradient, and the recomputation leaves nothing behind."""
    torch._dynamo.reset()
    model = two_layers()
    x = torch.randn(9, 5, dtype=torch.float64)
    (model(x).square().sum() + fastff.hardening_loss(model)).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()

    def run(x):
        return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)

    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        y = torch.compile(run, backend="aot_eager", fullgraph=True)(x) if compiled else run(x)
        (y.square().sum() + fastff.hardening_loss(model)).backward()
    for parameter, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, value)
    assert all(layer.last_logits.grad_fn is None for layer in (model[0], model[2]))


def test_reentrant_checkpointing_is_refused_by_the_losses():
    """Its forward has no graph, so a loss would silently have no gradient."""
    layer = make(depth=2)
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        fastff.hardening_loss(layer)


def test_ensembles_without_an_inner_gradient():
    """Inside a bare vmap requires_grad reads False although autograd outside records: that is no missing gradient."""
    layers = [make(depth=2) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(layers)
    x = torch.randn(7, 5, dtype=torch.float64)

    def loss(parameters, buffers):
        torch.func.functional_call(layers[0], (parameters, buffers), (x,))
        return fastff.hardening_loss(layers[0])

    torch.func.vmap(loss)(parameters, buffers).sum().backward()
    layers[1](x)
    (expected,) = torch.autograd.grad(fastff.hardening_loss(layers[1]), layers[1].node_weight)
    torch.testing.assert_close(parameters["node_weight"].grad[1], expected)
    for read in (fastff.hardening_loss, fastff.training.entropies, fastff.usage):
        with pytest.raises(RuntimeError, match=r"ran inside torch.func \(vmap, grad\), which has ended"):
            read(layers[0])
