"""LazySGD and LazyAdamW against torch's optimizers, and against the closed form for rows that nothing touches."""

import copy
import io
import math

import pytest
import torch
from torch import nn

from fastff.optim import LazyAdamW, LazySGD, clip_grad_norm_
from helpers import make
from optim_helpers import TOLERANCE, around, assert_same, data, loss_of, parameters, train

SAME = {
    "sgd": (LazySGD, torch.optim.SGD, {"lr": 0.3}),
    "decay": (LazySGD, torch.optim.SGD, {"lr": 0.3, "weight_decay": 0.1}),
    "momentum": (LazySGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adam": (LazyAdamW, torch.optim.AdamW, {"lr": 0.03, "weight_decay": 0.0}),
    "adam_decay": (LazyAdamW, torch.optim.AdamW, {"lr": 0.03, "weight_decay": 0.3, "betas": (0.7, 0.9), "eps": 1e-3}),
}
same = pytest.mark.parametrize(("lazy", "plain", "options"), SAME.values(), ids=SAME)


@same
@pytest.mark.parametrize("decision", ["soft", "sampled"])
def test_where_every_row_is_touched_it_is_the_optimizer_of_torch(lazy, plain, options, decision):
    """Soft layers give dense gradients to all rows; a sampled one of depth 0 gives a sparse one to its leaf."""
    torch.manual_seed(0)
    model = around(make(7, 3, depth=2 if decision == "soft" else 0, activation="tanh", decision=decision))
    twin = copy.deepcopy(model)
    optimizer, reference = lazy(model, **options), plain(twin.parameters(), **options)
    for batch in data(7):
        train(model, optimizer, [batch])
        train(twin, reference, [batch])
        assert_same(parameters(model), parameters(twin), **TOLERANCE)


@pytest.mark.parametrize(("width", "features"), [(3, 5), (64, 65)])  # rows that are copied, and updated in place
@pytest.mark.parametrize("visited", [4, 2])
@pytest.mark.parametrize("sparse", [True, False])
def test_parameters_in_another_memory_order(sparse, visited, width, features):
    """The fused kernel of torch walks the memory: it once paired weights with the gradients of others."""
    torch.manual_seed(0)
    layer = make(features, depth=2, leaf_width=width)
    turned = copy.deepcopy(layer)
    turned.leaf_in_weight.data = turned.leaf_in_weight.data.mT.contiguous().mT
    grad = torch.randn_like(layer.leaf_in_weight)
    grad[visited:] = 0
    for model in (layer, turned):
        optimizer = LazyAdamW(model, 0.1)
        model.leaf_in_weight.grad = grad.clone()
        if sparse:
            index = torch.arange(visited).unsqueeze(0)
            model.leaf_in_weight.grad = torch.sparse_coo_tensor(index, grad[:visited], grad.shape)
        optimizer.step()
    torch.testing.assert_close(turned.leaf_in_weight, layer.leaf_in_weight, **TOLERANCE)


@pytest.mark.parametrize("lazy", [LazySGD, LazyAdamW])
def test_a_parameter_of_two_layers_steps_once(lazy):
    torch.manual_seed(0)
    model = nn.ModuleList([make(), make()])
    model[1].leaf_in_weight = model[0].leaf_in_weight
    alone = copy.deepcopy(model[0])
    for one in (model, alone):
        optimizer = lazy(one, 0.1)
        for layer in one if one is model else [one]:
            layer.leaf_in_weight.grad = torch.ones_like(layer.leaf_in_weight)
        optimizer.step()
    assert torch.equal(model[0].leaf_in_weight, alone.leaf_in_weight)


def test_sparse_gradients_of_other_layers_are_refused():
    model = nn.Sequential(nn.Embedding(9, 5, sparse=True, dtype=torch.float64), make())
    optimizer = LazyAdamW(model)
    model(torch.arange(4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"a parameter of shape \(9, 5\) has one, too.*sparse=False"):
        optimizer.step()


@pytest.mark.parametrize("lazy", [LazySGD, LazyAdamW])
def test_a_state_of_another_model_or_optimizer_is_refused(lazy):
    """It was once accepted, and rows were then updated with the moments of others."""
    layer, deeper = (make(depth=depth, decision="sampled") for depth in (3, 4))
    other = LazyAdamW if lazy is LazySGD else LazySGD
    optimizer, x = lazy(layer, 0.1), torch.randn(9, 5, dtype=torch.float64)
    for one in (lazy(deeper, 0.1), optimizer):
        model = deeper if one is not optimizer else layer
        model(x).sum().backward()
        one.step()
        before = copy.deepcopy(optimizer.state_dict())
        if one is not optimizer:
            with pytest.raises(ValueError, match="Load the state of an optimizer for this model"):
                optimizer.load_state_dict(one.state_dict())
    for wrong in (other(make(), 0.1).state_dict(), {}, None):
        with pytest.raises(ValueError, match=f"this is not the state of a {lazy.__name__}"):
            optimizer.load_state_dict(wrong)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    optimizer.load_state_dict(after)


def by_hand(weight, gradients, rates, betas=(0.9, 0.999), eps=1e-8, decay=0.1):
    """AdamW of one row in plain steps. A gradient of None: the moments and the weight decay, and nothing more."""
    mean = square = torch.zeros_like(weight)
    for t, (grad, lr) in enumerate(zip(gradients, rates, strict=True), 1):
        g = torch.zeros_like(weight) if grad is None else grad
        mean, square = betas[0] * mean + (1 - betas[0]) * g, betas[1] * square + (1 - betas[1]) * g * g
        weight = weight * (1 - lr * decay)
        if grad is not None:
            step = mean / (1 - betas[0] ** t) / ((square / (1 - betas[1] ** t)).sqrt() + eps)
            weight = weight - lr * step
    return weight, mean, square


@pytest.mark.parametrize(("width", "features"), [(3, 5), (64, 65)])  # rows that are copied, and updated in place
@pytest.mark.parametrize("sparse", [True, False])
def test_rows_catch_up_in_closed_form_under_a_schedule(sparse, width, features):
    torch.manual_seed(0)
    layer = make(features, depth=2, leaf_width=width, decision="sampled")
    optimizer = LazyAdamW(layer, 0.05, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    start, weight = layer.leaf_in_weight.detach().clone(), layer.leaf_in_weight
    touched = [[0, 1], [1], [1, 2], [], [0, 2], [1]]  # leaf 3 never
    history, rates = {j: [] for j in range(4)}, []
    for rows in touched:
        values = torch.randn(len(rows), width, features, dtype=torch.float64)
        grad = (
            torch.sparse_coo_tensor([rows], values, weight.shape, check_invariants=True)
            if rows
            else torch.zeros_like(weight)
        )
        weight.grad = grad if sparse or not grad.is_sparse else grad.to_dense()
        for j in range(4):
            history[j].append(values[rows.index(j)] if j in rows else None)
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert torch.equal(weight[3], start[3]), "nothing has touched it yet"
    optimizer.catch_up_()
    for j in range(4):
        wanted, mean, square = by_hand(start[j], history[j], rates)
        torch.testing.assert_close(weight[j], wanted, **TOLERANCE)
        torch.testing.assert_close(optimizer.state[weight]["mean"][j], mean, **TOLERANCE)
        torch.testing.assert_close(optimizer.state[weight]["square"][j], square, **TOLERANCE)
    before = parameters(layer)
    optimizer.catch_up_()
    assert_same(parameters(layer), before)


@pytest.mark.parametrize("lazy", [LazySGD, LazyAdamW])
def test_unvisited_leaves_are_not_written(lazy):
    layer = make(depth=6, decision="sampled")
    optimizer = lazy(layer, lr=0.1, weight_decay=0.1)
    x = torch.randn(9, 5, dtype=torch.float64)
    before = parameters(layer)
    loss_of(layer, x, torch.zeros(9, 4).double()).backward()
    assert all(p.grad.is_sparse for p in layer.parameters())
    optimizer.step()
    visited = torch.zeros(64, dtype=torch.bool)
    visited[layer.last_leaf[:, 0]] = True
    for name, parameter in layer.named_parameters():
        if name.startswith("leaf_"):
            assert torch.equal(parameter[~visited], before[name][~visited])
            assert not (parameter[visited] == before[name][visited]).flatten(1).all(1).any()


@pytest.mark.parametrize(
    ("lazy", "options"), [(LazySGD, {"lr": 0.1, "momentum": 0.9}), (LazyAdamW, {"lr": 0.1, "weight_decay": 0.1})]
)
def test_a_stored_state_continues_bit_for_bit(lazy, options):
    def model():
        return around(make(7, 3, depth=4, decision="sampled"))

    first = model()
    optimizer = lazy(first, **options)
    train(first, optimizer, data(4))
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    stored = torch.load(file, weights_only=True)
    twin = model()
    twin.load_state_dict(stored["model"])
    resumed = lazy(twin, **(options | {"lr": 9.0}))
    resumed.load_state_dict(stored["optimizer"])
    batches = data(5)
    for now, its in ((first, optimizer), (twin, resumed)):
        torch.manual_seed(3)
        train(now, its, batches)
    assert_same(parameters(first), parameters(twin))
    assert resumed.state[twin[2].leaf_in_weight]["last"].dtype == torch.int64


def test_gradients_accumulate_and_the_scaler_unscales_them():
    torch.manual_seed(0)
    layer, twin = (make(depth=5, decision="sampled", dtype=torch.float32) for _ in range(2))
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(12, 5)
    optimizers = LazyAdamW(layer, 0.01), LazyAdamW(twin, 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for model, scale in ((layer, lambda loss: loss), (twin, scaler.scale)):
        torch.manual_seed(1)
        for part in x.split(6):
            scale(model(part).square().mean() / 2).backward()
    optimizers[0].step()
    scaler.unscale_(optimizers[1])
    scaler.step(optimizers[1])
    for one, other in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(other, one)  # powers of two: only what underflows could differ


def test_an_infinite_gradient_skips_the_step():
    layer = make(depth=3, decision="sampled", dtype=torch.float32)
    optimizer, scaler = LazyAdamW(layer, 0.01), torch.amp.GradScaler("cpu", init_scale=2.0)
    before = parameters(layer)
    scaler.scale((layer(torch.randn(5, 5)) * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert_same(parameters(layer), before)
    assert scaler.get_scale() == 1.0


def test_clipping_equals_torch_on_the_dense_gradients():
    layer = make(depth=5, decision="sampled")
    LazyAdamW(layer)
    x = torch.randn(9, 5, dtype=torch.float64)
    for _ in range(2):  # accumulated, so that rows appear twice
        layer(x).square().sum().backward()
    dense = [nn.Parameter(torch.zeros_like(p)) for p in layer.parameters()]
    for own, parameter in zip(dense, layer.parameters(), strict=True):
        own.grad = parameter.grad.to_dense()
    for limit in (1e9, math.inf, 0.5):
        wanted, found = torch.nn.utils.clip_grad_norm_(dense, limit), clip_grad_norm_(layer.parameters(), limit)
        torch.testing.assert_close(found, wanted)
        for own, parameter in zip(dense, layer.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad.to_dense(), own.grad)


def test_clipping_takes_one_tensor_and_no_module():
    layer = make(depth=2, decision="sampled")
    layer(torch.randn(9, 5, dtype=torch.float64)).sum().backward()
    clip_grad_norm_(layer.leaf_out_bias, 0.5)
    assert layer.leaf_out_bias.grad.norm().item() == pytest.approx(0.5, rel=1e-5)
    with pytest.raises(TypeError, match=r"expects parameters; got FFF. Pass its .parameters\(\)"):
        clip_grad_norm_(layer, 0.5)


@pytest.mark.parametrize("build", [lambda m: LazySGD(m, 0.1, momentum=0.9), lambda m: LazyAdamW(m, 0.1)])
def test_a_model_converted_after_a_step_is_named(build):
    """The update used to fail in torch's kernels, which see a weight and a moment of different dtypes."""
    layer = make(depth=3, decision="sampled", dtype=torch.float32)
    optimizer = build(layer)

    def step():
        optimizer.zero_grad()
        layer(torch.randn(9, 5, dtype=layer.node_bias.dtype)).square().sum().backward()
        optimizer.step()

    step()
    layer.double()
    before = parameters(layer)
    with pytest.raises(RuntimeError, match=r"moments in torch.float32 on cpu, for parameters in torch.float64"):
        step()
    assert_same(parameters(layer), before)
    optimizer.load_state_dict(optimizer.state_dict())  # as the message says
    step()
    assert all(p.isfinite().all() for p in layer.parameters())


def test_large_rows_on_a_gpu_need_no_copy_each(monkeypatch):
    """Each had its own count, which was copied to the GPU: one copy for each leaf and parameter that a step touched."""
    layer = make(256, 256, depth=6, leaf_width=16, decision="sampled", dtype=torch.float32)
    optimizer = LazyAdamW(layer)
    layer(torch.randn(9, 256)).square().sum().backward()
    touched, copies, real = len(layer.leaf_in_weight.grad._indices()[0]), [], torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "to", lambda t, *args, **options: copies.append(t) or real(t, *args, **options))
    optimizer.step()
    assert 2 < touched < 64
    assert len(copies) < touched


def test_nodes_have_their_own_rate():
    layer = make(depth=3, decision="sampled")
    optimizer = LazyAdamW(layer, 0.01, node_lr=0.0, weight_decay=0.0)
    before = parameters(layer)
    train(layer, optimizer, data(3))
    assert torch.equal(layer.node_weight, before["node_weight"])
    assert not torch.equal(layer.leaf_in_weight, before["leaf_in_weight"])


def test_low_precision_and_an_empty_batch():
    layer = make(depth=3, decision="sampled", dtype=torch.bfloat16)
    optimizer = LazyAdamW(layer, 0.01)
    for batch in (7, 0, 5):
        optimizer.zero_grad()
        layer(torch.randn(batch, 5).bfloat16()).sum().backward()
        optimizer.step()
    assert all(p.isfinite().all() for p in layer.parameters())


def test_sharing_needs_dense_gradients_and_gets_them():
    layer = make(depth=3, decision="sampled", sharing=0.5)
    LazyAdamW(layer)
    layer(torch.randn(5, 5, dtype=torch.float64)).sum().backward()
    assert not layer.leaf_in_weight.grad.is_sparse


def test_wrong_arguments_are_named():
    layer = make(depth=3, decision="sampled")
    with pytest.raises(ValueError, match=r"momentum must be in \[0, 1\); got 1"):
        LazySGD(layer, 0.1, momentum=1)
    with pytest.raises(ValueError, match=r"betas must be in \[0, 1\)"):
        LazyAdamW(layer, betas=(0.9, 1.0))
    optimizer = LazyAdamW(layer, 2.0, weight_decay=0.5)
    layer(torch.randn(5, 5, dtype=torch.float64)).sum().backward()
    with pytest.raises(ValueError, match=r"lr \* weight_decay must be below 1; got 2.0 \* 0.5"):
        optimizer.step()
    with pytest.raises(TypeError, match="expected a model"):
        LazyAdamW(layer.parameters())


def test_a_compiled_layer_gives_dense_gradients_in_one_graph():
    """A compiler cannot trace sparse tensors."""
    layer = make(depth=2, decision="sampled").train()
    LazyAdamW(layer, lr=0.1)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    compiled(torch.randn(8, 5, dtype=torch.float64)).sum().backward()
    assert not layer.leaf_in_weight.grad.is_sparse
