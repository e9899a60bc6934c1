"""LocalSGD and LocalAdam: copies, stored states and low precision."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

import fastff
from fastff.optim import LocalAdam, LocalSGD
from helpers import make
from optim_helpers import NEVER, around, assert_same, data, parameters, train


@pytest.mark.parametrize(
    ("local", "options"), [(LocalSGD, {"lr": 0.1, "momentum": 0.9}), (LocalAdam, {"lr": 0.1, "weight_decay": 0.1})]
)
def test_a_stored_state_continues_bit_for_bit(local, options):
    """Stored while blocks are half-way to their next step, through a file, into a new model and a new optimizer."""
    model = around(make(7, 3, depth=2))
    optimizer = local(model, local_batch=9.2, **options)
    train(model, optimizer, data(4))
    masses = [optimizer.state[p]["mass"] for p in model[2].parameters()]
    assert any(mass.count_nonzero() for mass in masses), "blocks are gathering"
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    stored = torch.load(file, weights_only=True)
    twin = around(make(7, 3, depth=2))
    twin.load_state_dict(stored["model"])
    resumed = local(twin, local_batch=1, **(options | {"lr": 9.0}))
    resumed.load_state_dict(stored["optimizer"])
    batches = data(5)
    before = parameters(model)
    train(model, optimizer, batches)
    train(twin, resumed, batches)
    assert_same(parameters(model), parameters(twin))
    assert all(not torch.equal(before[name], p) for name, p in model.named_parameters())


def test_a_copy_of_model_and_state_goes_its_own_way():
    """The copy has gathered the same and continues from there; the two share no memory."""
    model = around(make(7, 3, depth=2))
    optimizer = LocalAdam(model, 0.1, local_batch=9.2)
    train(model, optimizer, data(3))
    twin, stored = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    before = parameters(twin)
    resumed = LocalAdam(twin, 0.1, local_batch=9.2)
    resumed.load_state_dict(stored)
    batches = data(4)
    train(model, optimizer, batches)
    assert_same(parameters(twin), before)
    train(twin, resumed, batches)
    assert_same(parameters(model), parameters(twin))


def test_a_stored_state_fits_the_model_however_it_is_wrapped():
    """torch.compile and DistributedDataParallel prefix the names of the modules. A run that resumes with or without
    them loads the same state, as it can with torch's optimizers; looking up the stored names was a KeyError."""
    model = around(make(7, 3, depth=2))
    optimizer = LocalSGD(model, 0.1, local_batch=9.2, momentum=0.9)
    train(model, optimizer, data(3))
    wrapped = nn.ModuleDict({"module": copy.deepcopy(model)})
    resumed = LocalSGD(wrapped, 0.1, local_batch=9.2, momentum=0.9)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    batches = data(3)
    train(model, optimizer, batches)
    train(wrapped, resumed, batches, run=wrapped["module"])
    assert_same(parameters(model), parameters(wrapped["module"]))


copies = pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda what: pickle.loads(pickle.dumps(what))], ids=["copy", "pickle"]
)


@copies
def test_a_copied_model_has_no_optimizer(how):
    """The optimizer watches its model through hooks, which a copy takes along: they must not report to the first
    optimizer, nor carry it."""
    model = around(make(7, 3, depth=2))
    optimizer = LocalSGD(model, 0.1, local_batch=7)
    train(model, optimizer, data(2))
    twin = how(model)
    assert_same(parameters(twin), parameters(model))
    twin(torch.randn(99, 5).double())
    with pytest.raises(RuntimeError, match="no training forward since the last step"):
        optimizer.step()
    batches = data(3)
    train(twin, LocalSGD(twin, 0.1, local_batch=7), batches)
    train(model, LocalSGD(model, 0.1, local_batch=7), batches)
    assert_same(parameters(twin), parameters(model))


@copies
def test_copying_model_and_optimizer_together(how):
    """copy.deepcopy((model, optimizer)) keeps them together, as it does with torch's optimizers."""
    model = around(make(7, 3, depth=2))
    optimizer = LocalSGD(model, 0.1, local_batch=9.2, momentum=0.9)
    train(model, optimizer, data(2))
    twin, resumed = how((model, optimizer))
    batches = data(3)
    train(model, optimizer, batches)
    train(twin, resumed, batches)
    assert_same(parameters(model), parameters(twin))


@pytest.mark.slow
def test_a_model_does_not_keep_its_optimizer_alive():
    model = around(make(7, 3, depth=2))
    optimizer = LocalSGD(model, 0.1)
    train(model, optimizer, data(1))
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert model(torch.randn(3, 5).double()).shape == (3, 4)


def test_two_optimizers_count_for_themselves():
    layer = make(depth=1)
    first, second = LocalSGD(layer, 0.0, local_batch=NEVER), LocalSGD(layer, 0.0, local_batch=NEVER)
    for size, optimizers in ((3, [first]), (4, [first, second])):
        layer(torch.randn(size, 5).double()).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    seen = [optimizer.state[layer.node_bias]["mass"].item() for optimizer in (first, second)]
    assert seen == pytest.approx([7, 7])  # the second has not stepped in between, and gathers both


@pytest.mark.parametrize("local", [LocalSGD, LocalAdam])
def test_bfloat16_parameters(local):
    """One step, against the same in float64 from the same gradients. LocalSGD may round the sample count, the sum, the
    mass, the quotient and the step (5 roundings of the step) and the new parameter (1 of it), each by at most 2**-8.
    LocalAdam's first step is lr in the direction of the gradient's sign, and not more roundings."""
    layer = make(depth=2, decision="straight_through", dtype=torch.bfloat16)
    before, lr = parameters(layer), 0.125
    optimizer = local(layer, lr, local_batch=63)
    x = torch.randn(257, 5).bfloat16()
    layer(x).float().square().mean().backward()
    count = torch.bincount(layer.route(x), minlength=4).double()  # (leaves,)
    reach = fastff.usage(layer)[""].node_mass
    optimizer.step()
    assert 0 < (count >= 63).sum() < 4
    mass = {"leaf": count, "node": reach}
    for name, p in layer.named_parameters():
        own = mass[name.partition("_")[0]]
        for b in range(len(p)):
            if own[b] < 63:
                assert torch.equal(p[b], before[name][b])
                continue
            grad = p.grad[b].double() * 257 / own[b]
            step = lr * (grad if local is LocalSGD else grad / (grad.abs() + 1e-8))
            exact = before[name][b].double() - step
            assert (p[b].double() - exact).abs().le(2**-8 * (exact.abs() + 5.1 * step.abs())).all(), name
            assert p.dtype == torch.bfloat16


@pytest.mark.slow
def test_bfloat16_gathers_a_thousand_batches():
    """In bfloat16, 256 + 1 is 256: gathered in it, a thousand gradients of 1 had a mean of 0.256. The sum of many must
    be kept wider than the parameter."""
    layer = make(depth=0, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.leaf_out_bias.fill_(2)
    optimizer = LocalSGD(layer, 1.0, local_batch=1000)
    x = torch.randn(1, 5).bfloat16()
    for _ in range(1000):
        optimizer.zero_grad()
        layer(x).sum().backward()  # the gradient of the output bias is 1
        optimizer.step()
    assert layer.leaf_out_bias.tolist() == [[1.0] * 4]


@pytest.mark.parametrize("local", [LocalSGD, LocalAdam])
def test_bfloat16_state_is_stored_as_it_is(local):
    """Optimizer.load_state_dict casts every floating-point state to the dtype of its parameter; rounded to bfloat16, a
    mass of 17.17 came back as 17.125, and one of 256 could never grow by single samples."""
    layer = make(depth=2, dtype=torch.bfloat16)
    optimizer = local(layer, 0.1, local_batch=29.3)
    batches = [(x.bfloat16(), target.bfloat16()) for x, target in data(9, size=33)]
    train(layer, optimizer, batches[:2])
    twin = copy.deepcopy(layer)
    resumed = local(twin, 0.1, local_batch=29.3)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, q in zip(layer.parameters(), twin.parameters(), strict=True):
        for key, value in optimizer.state[p].items():
            torch.testing.assert_close(resumed.state[q][key], value, rtol=0, atol=0)
    train(layer, optimizer, batches[2:])
    train(twin, resumed, batches[2:])
    assert_same(parameters(layer), parameters(twin))


def test_float16_batches_past_its_range():
    """float16 ends at 65504: a batch of 70001 samples, counted in it, was infinite and made every parameter NaN."""
    layer = make(2, 1, depth=1, leaf_width=1, dtype=torch.float16, decision="straight_through")
    before = parameters(layer)
    x = torch.randn(70001, 2).half()
    optimizer = LocalSGD(layer, 0.125, local_batch=10)
    (layer(x).float().mean() * 64).backward()  # every sample's gradient of its leaf's output bias is 64
    optimizer.step()
    assert all(p.isfinite().all() for p in layer.parameters())
    torch.testing.assert_close(layer.leaf_out_bias, before["leaf_out_bias"] - 8, rtol=4 * 2**-11, atol=0)
