import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import fastff
import oracle
from fastff.training.losses import bernoulli_entropy
from helpers import make, state, two_layers

TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}
REDUCTIONS = ["mean", "sum", "path"]


def forward(layer, batch=7):
    x = torch.randn(batch, layer.in_features, dtype=torch.float64)
    layer(x)
    return x


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    depth=st.integers(0, 4),
    node_width=st.sampled_from([1, 3]),
    batch=st.sampled_from([1, 3, 8]),
    scale=st.sampled_from([0.0, 1.0, 5.0]),
    temperature=st.sampled_from([1.0, 2.5]),
    decision=st.sampled_from(["soft", "straight_through"]),
    seed=st.integers(0, 10**6),
)
def test_losses_entropies_and_usage_equal_the_loop(depth, node_width, batch, scale, temperature, decision, seed):
    torch.manual_seed(seed)
    layer = make(depth=depth, node_width=node_width, scale=scale, activation="tanh", decision=decision)
    layer.temperature = temperature
    x = forward(layer, batch)
    args = (x, state(layer), "tanh")
    for reduction in REDUCTIONS:
        expected = oracle.hardening_loss(*args, reduction, temperature)
        assert fastff.hardening_loss(layer, reduction).item() == pytest.approx(expected, rel=1e-10, abs=1e-12)
    for kind in ("node", "leaf"):
        expected = oracle.balance_loss(*args, kind, temperature)
        assert fastff.balance_loss(layer, kind).item() == pytest.approx(expected, rel=1e-10, abs=1e-12)
    torch.testing.assert_close(fastff.training.entropies(layer)[""], oracle.entropies(*args, temperature), **TOLERANCE)
    expected = oracle.usage(*args, temperature)
    for usage in (fastff.usage(layer)[""], fastff.usage(layer, x)[""]):
        assert usage.samples == batch
        for name in ("leaf_mass", "leaf_count", "node_mass", "node_count"):
            torch.testing.assert_close(getattr(usage, name).double(), expected[name].double(), **TOLERANCE)


def test_path_reduction_is_the_entropy_of_the_mixture():
    layer = make(depth=5)
    x = forward(layer, 33)
    mixture = layer.mixture(x)
    expected = -(mixture * mixture.log()).sum(-1).mean()
    torch.testing.assert_close(fastff.hardening_loss(layer, "path"), expected)


def test_balance_of_an_even_and_of_a_collapsed_tree():
    even = make(depth=3, scale=0.0)
    forward(even)
    assert fastff.balance_loss(even).item() == pytest.approx(3 * math.log(2))
    collapsed = make(depth=3, scale=0.0)
    with torch.no_grad():
        collapsed.node_bias.fill_(1e4)
    forward(collapsed)
    loss = fastff.balance_loss(collapsed)
    loss.backward()
    assert loss > 1000
    assert (collapsed.node_bias.grad > 0).all()  # descent lowers every bias, towards an even split
    assert collapsed.node_bias.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_entropy_is_accurate_everywhere(dtype):
    """softplus(z) - z sigmoid(z) cancels: in float32 at z = 20 it gives 0 or 1e-6 for a true 4.3e-8."""
    z = torch.tensor([0.0, 1e-3, -1.0, 5.0, -20.0, 20.0, 80.0, -1e4, 1e4], dtype=dtype)
    exact = []
    for value in z.double().abs().tolist():
        e = math.exp(-value)
        exact.append(math.log1p(e) + value * e / (1 + e))
    torch.testing.assert_close(
        bernoulli_entropy(z).double(),
        torch.tensor(exact, dtype=torch.float64),
        rtol=8 * torch.finfo(dtype).eps,
        atol=1e-300,
    )
    assert torch.autograd.gradcheck(bernoulli_entropy, torch.randn(9, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("loss", [fastff.hardening_loss, fastff.balance_loss])
def test_gradients_of_the_losses(loss):
    layer = make(depth=3)
    x = torch.randn(6, 5, dtype=torch.float64)

    def run(weight):
        torch.func.functional_call(layer, {"node_weight": weight}, (x,))
        return loss(layer)

    assert torch.autograd.gradcheck(run, layer.node_weight.detach().clone().requires_grad_())


def test_sums_over_the_layers_of_a_model():
    model = two_layers()
    model(torch.randn(9, 5, dtype=torch.float64))
    for loss in (fastff.hardening_loss, fastff.balance_loss):
        torch.testing.assert_close(loss(model), loss(model[0]) + loss(model[2]))
    assert list(fastff.training.entropies(model)) == ["0", "2"]
    assert [len(value) for value in fastff.training.entropies(model).values()] == [3, 7]


def test_accumulation_equals_one_large_batch():
    """Means over equal micro-batches average to the mean over all."""
    layer = make(depth=3)
    x = torch.randn(12, 5, dtype=torch.float64)
    for part in x.split(4):
        layer(part)
        (fastff.hardening_loss(layer) / 3).backward()
    ours = layer.node_weight.grad.clone()
    layer.zero_grad()
    layer(x)
    fastff.hardening_loss(layer).backward()
    torch.testing.assert_close(ours, layer.node_weight.grad)


@pytest.mark.slow
@pytest.mark.parametrize("whole_step", [False, True])
def test_losses_under_compile(whole_step):
    torch._dynamo.reset()
    model = two_layers()

    def step(x):
        y = model(x)
        return y.square().mean() + fastff.hardening_loss(model) + fastff.balance_loss(model) + losses_of_leaves(model)

    def losses_of_leaves(model):
        return fastff.balance_loss(model, "leaf") + fastff.hardening_loss(model, "path")

    forward = torch.compile(step if whole_step else model, backend="aot_eager", fullgraph=True)
    for batch in (4, 9, 13):
        x = torch.randn(batch, 5, dtype=torch.float64)
        model.zero_grad()
        step(x).backward()
        expected = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        if whole_step:
            forward(x).backward()
        else:
            loss = forward(x).square().mean() + fastff.hardening_loss(model) + fastff.balance_loss(model)
            (loss + losses_of_leaves(model)).backward()
            assert all(layer.last_logits.grad_fn is None for layer in (model[0], model[2]))
        for parameter, value in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, value)


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.0, 1e-3])
def test_new_batch_sizes_compile_once_more(epsilon):
    """The second size makes sizes symbols. The balance loss took the logarithm of a size, and compiled for each."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = fastff.FFF(5, 3, depth=2, leaf_width=4, epsilon=epsilon)
    loss = torch.compile(lambda x: model(x).sum() + fastff.balance_loss(model), backend=counter)
    for batch in (4, 9, 13, 21, 32):
        loss(torch.randn(batch, 5)).backward()
    assert 1 <= counter.frame_count <= 2


def test_losses_inside_an_ensemble():
    layers = [make(depth=2) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(layers)
    x = torch.randn(7, 5, dtype=torch.float64)

    def loss(parameters, buffers):
        torch.func.functional_call(layers[0], (parameters, buffers), (x,))
        return all_losses(layers[0])

    def all_losses(layer):
        return fastff.hardening_loss(layer) + fastff.balance_loss(layer) + fastff.balance_loss(layer, "leaf")

    grads = torch.func.vmap(torch.func.grad(loss))(parameters, buffers)
    for i, layer in enumerate(layers):
        layer(x)
        (expected,) = torch.autograd.grad(all_losses(layer), layer.node_weight)
        torch.testing.assert_close(grads["node_weight"][i], expected)


@pytest.mark.slow
def test_names_are_those_of_the_model_compiled_or_not():
    model = two_layers()
    compiled = torch.compile(model, backend="eager")
    compiled(torch.randn(9, 5, dtype=torch.float64))
    assert list(fastff.training.entropies(compiled)) == list(fastff.training.entropies(model)) == ["0", "2"]
    x = torch.randn(9, 5, dtype=torch.float64)
    assert list(fastff.usage(compiled, x)) == list(fastff.usage(compiled)) == ["0", "2"]


def test_errors():
    plain = nn.Linear(3, 3)
    for wrong in (None, plain.parameters()):
        with pytest.raises(TypeError, match=r"expected a model, an nn.Module; got .* Pass the model itself"):
            fastff.hardening_loss(wrong)
    for function in (fastff.hardening_loss, fastff.balance_loss, fastff.training.entropies, fastff.usage):
        with pytest.raises(ValueError, match="Linear has no FFF layer"):
            function(plain)
        model = two_layers()
        model[0](torch.randn(3, 5, dtype=torch.float64))
        with pytest.raises(RuntimeError, match="the FFF layer '2' has had no training forward"):
            function(model)
    layer = make(depth=1)
    layer.eval()(torch.randn(3, 5, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="no training forward"):
        fastff.hardening_loss(layer)
    with pytest.raises(ValueError, match="reduction must be 'mean', 'sum' or 'path'; got 'max'"):
        fastff.hardening_loss(layer, "max")
    with pytest.raises(ValueError, match="kind must be 'node' or 'leaf'; got 'tree'"):
        fastff.balance_loss(layer, "tree")


@pytest.mark.parametrize("depth", [0, 2])
def test_empty_batch_gives_zero_losses(depth):
    layer = make(depth=depth)
    layer(torch.randn(0, 5, dtype=torch.float64))
    for reduction in REDUCTIONS:
        assert fastff.hardening_loss(layer, reduction) == 0
    assert fastff.balance_loss(layer) == 0
    assert not fastff.training.entropies(layer)[""].any()
