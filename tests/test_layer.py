import copy
import io
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.utils.checkpoint import checkpoint

import fastff
from helpers import ACTIVATIONS, make


def loss_of(layer, x):
    y = layer(x)
    return (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum() + y.square().sum()


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("node_width", [1, 3])
@pytest.mark.parametrize("activation", ["tanh", "swiglu"])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_gradcheck(depth, node_width, activation, mode):
    """By the input and every parameter. In eval, decisions are constant: only the leaves have gradients."""
    layer = make(3, 2, depth=depth, leaf_width=2, node_width=node_width, activation=activation, scale=2.0)
    getattr(layer, mode)()
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in layer.named_parameters() if mode == "train" or name.startswith("leaf_")]
    values = [layer.get_parameter(name).detach().clone().requires_grad_() for name in names]

    def run(x, *values):
        return functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *values))


@pytest.mark.parametrize("decision", ["soft", "straight_through"])
def test_fast_derivative_equals_autograd(decision):
    layer = make(7, 5, depth=5, leaf_width=3, decision=decision, activation="gelu", scale=3.0)
    x = torch.randn(33, 7, dtype=torch.float64, requires_grad=True)
    grads = {}
    for backend in ("aten", "reference"):
        with fastff.backend(backend):
            grads[backend] = torch.autograd.grad(loss_of(layer, x), [x, *layer.parameters()])
    for ours, expected in zip(grads["aten"], grads["reference"], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


def test_batched_gradients():
    """autograd.grad(..., is_grads_batched=True), as vectorised Jacobians use it."""
    layer = make(3, 2, depth=2, leaf_width=2, activation="tanh")
    x = torch.randn(3, dtype=torch.float64)
    expected = torch.autograd.functional.jacobian(layer, x)
    torch.testing.assert_close(torch.autograd.functional.jacobian(layer, x, vectorize=True), expected)
    torch.testing.assert_close(torch.func.jacrev(layer)(x), expected)


def test_second_derivatives():
    layer = make(3, 2, depth=2, leaf_width=2, activation="tanh")
    x = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(layer, (x,))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_zero_nodes_make_the_dense_layer(activation, bias):
    """With all node weights zero the soft pass is a dense layer of width 2**d l with output weights / 2**d."""
    layer = make(5, 4, depth=3, leaf_width=3, activation=activation, bias=bias, scale=0.0)
    dense = fastff.baselines.FF(5, 4, width=24, activation=activation, bias=bias, dtype=torch.float64)
    with torch.no_grad():
        dense.up.weight.copy_(layer.leaf_in_weight.flatten(0, 1))
        dense.down.weight.copy_(layer.leaf_out_weight.flatten(0, 1).T / 8)
        if dense.gate is not None:
            dense.gate.weight.copy_(layer.leaf_gate_weight.flatten(0, 1))
        if bias:
            dense.up.bias.copy_(layer.leaf_in_bias.flatten())
            dense.down.bias.copy_(layer.leaf_out_bias.mean(0))
            if dense.gate is not None:
                dense.gate.bias.copy_(layer.leaf_gate_bias.flatten())
    x = torch.randn(11, 5, dtype=torch.float64)
    torch.testing.assert_close(layer(x), dense(x), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("node_width", [1, 3])
def test_large_nodes_make_the_hard_pass(node_width):
    layer = make(5, 4, depth=4, leaf_width=3, node_width=node_width, activation="tanh")
    last = [layer.node_weight, layer.node_bias] if node_width == 1 else [layer.node_out_weight, layer.node_out_bias]
    with torch.no_grad():
        for parameter in last:
            parameter *= 1e4
    x = torch.randn(50, 5, dtype=torch.float64)
    x = x[layer.node_logits(x).abs().amin(-1) > 50]  # exp(-50) is below the rounding of float64
    assert len(x) > 10
    torch.testing.assert_close(layer.train()(x), layer.eval()(x), rtol=1e-12, atol=1e-12)


def test_depth_0_is_a_plain_feedforward_layer_with_the_initialisation_of_linear():
    """The same numbers from the same seed as two nn.Linear."""
    torch.manual_seed(3)
    first = nn.Linear(6, 5)
    torch.manual_seed(3)
    layer = fastff.FFF(6, 4, depth=0, leaf_width=5)
    torch.testing.assert_close(layer.leaf_in_weight[0], first.weight)
    torch.testing.assert_close(layer.leaf_in_bias[0], first.bias)
    x = torch.randn(9, 6)
    expected = torch.relu(first(x)) @ layer.leaf_out_weight[0] + layer.leaf_out_bias[0]
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer.eval()(x), expected)


@pytest.mark.parametrize(
    ("name", "fan"),
    [
        ("node_weight", 100),
        ("leaf_in_weight", 100),
        ("leaf_in_bias", 100),
        ("leaf_gate_weight", 100),
        ("leaf_out_weight", 16),
        ("leaf_out_bias", 16),
    ],
)
def test_initialisation(name, fan):
    """Uniform within 1 / sqrt(fan in), as nn.Linear's."""
    layer = fastff.FFF(100, 50, depth=6, leaf_width=16, activation="geglu")
    values = layer.get_parameter(name)
    bound = 1 / math.sqrt(fan)
    assert values.abs().max() <= bound
    assert abs(values.std() / (bound / math.sqrt(3)) - 1) < 0.05
    before = values.clone()
    layer.temperature = 7
    layer.reset_parameters()
    assert not torch.equal(values, before)
    assert layer.temperature == 1


def test_integers_of_numpy_are_integers():
    layer = fastff.FFF(np.int64(6), np.int32(5), depth=np.int64(2), leaf_width=np.uint8(3))
    assert [type(value) for value in (layer.in_features, layer.depth, layer.leaf_width)] == [int] * 3
    assert layer(torch.randn(4, 6)).shape == (4, 5)


def test_a_large_gather_is_split(monkeypatch):
    """As on a GPU, where the leaves' weights are copied for each sample: never for too many samples at a time."""
    layer = make(6, 5, depth=3, leaf_width=2).eval()
    x = torch.randn(23, 6, dtype=torch.float64)
    expected = layer(x)
    calls = []
    visit = fastff.backends.reference.visit
    monkeypatch.setattr(fastff.backends.aten, "_MASKED", 0)
    monkeypatch.setattr(fastff.backends.aten, "_COPIED", 7 * 22)
    monkeypatch.setattr(fastff.backends.reference, "visit", lambda x, *rest: calls.append(len(x)) or visit(x, *rest))
    torch.testing.assert_close(layer(x), expected)
    assert calls == [8, 8, 7]


def test_sizes():
    layer = fastff.FFF(10, 10, depth=4, leaf_width=8, node_width=2)
    assert (layer.num_leaves, layer.num_nodes) == (16, 15)
    assert (layer.training_width, layer.training_size) == (128, 158)
    assert (layer.inference_width, layer.inference_size) == (8, 16)
    assert "training width 128, size 158; inference width 8, size 16" in repr(layer)
    assert repr(fastff.FFF(2, 3, depth=1, leaf_width=4, activation=nn.PReLU())).count("PReLU") == 1


def test_temperature_scales_the_soft_pass_only():
    layer = make(depth=3, scale=0.3)
    x = torch.randn(20, 5, dtype=torch.float64)
    hard = layer.eval()(x)
    soft = []
    for value in (1.0, 10.0, 1e6):
        layer.temperature = value
        assert layer.temperature == value
        torch.testing.assert_close(layer.eval()(x), hard)
        torch.testing.assert_close(layer.mixture(x), fastff.functional.mixture(layer.node_logits(x) * value))
        soft.append((layer.train()(x) - hard).norm())
    assert soft[0] > soft[1] > soft[2]
    assert soft[2] < 1e-8
    assert torch.equal(layer.state_dict()["temperature_tensor"], torch.tensor(1e6, dtype=torch.float64))
    for bad in (0, -1, math.inf, math.nan, 1e-310):
        with pytest.raises(ValueError, match="temperature must be positive and finite"):
            layer.temperature = bad
    with pytest.raises(ValueError, match=r"finite in torch.float16; got 100000.0"):
        layer.half().temperature = 1e5


def test_soft_is_the_training_pass_without_its_noise():
    layer = make(depth=3)
    x = torch.randn(20, 5, dtype=torch.float64)
    expected = layer(x)
    noisy = make(depth=3, dropout=0.5, transposition=0.5, decision="straight_through")
    noisy.load_state_dict(layer.state_dict())
    for mode in (noisy.train(), noisy.eval()):
        torch.testing.assert_close(mode.soft(x), expected)


def test_frozen_tree():
    layer = make(depth=3).freeze_tree_()
    loss_of(layer, torch.randn(5, 5, dtype=torch.float64)).backward()
    assert layer.node_weight.grad is None
    assert layer.leaf_in_weight.grad.abs().sum() > 0
    fastff.hardening_loss(layer)  # a value without a gradient is what there is
    layer.unfreeze_tree_()
    loss_of(layer, torch.randn(5, 5, dtype=torch.float64)).backward()
    assert layer.node_weight.grad.abs().sum() > 0


def test_transposition_swaps_children_at_its_rate():
    """With decisions certain and depth 1, the share of samples at the wrong leaf is the probability."""
    layer = make(3, 2, depth=1, leaf_width=2, transposition=0.2, decision="straight_through")
    x = torch.randn(20000, 3, dtype=torch.float64)
    soft = layer.train()(x)
    moved = (soft - layer.eval()(x)).abs().amax(-1) > 1e-9
    assert abs(moved.double().mean() - 0.2) < 4 * math.sqrt(0.2 * 0.8 / 20000)
    other = layer.route(x[moved]) ^ 1
    expected = fastff.backends.reference.visit(x[moved], other, layer.leaves, "relu")
    torch.testing.assert_close(soft[moved], expected)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["eager", "compiled", "copied", "func", "members"])
@pytest.mark.parametrize("options", [{}, {"node_width": 2, "activation": "swiglu"}, {"bias": False}])
def test_sharing_mixes_the_gradients_of_leaves(options, how):
    """(1 - s) g + s G / sqrt(L), and no other number changes: neither outputs nor the gradients of nodes and inputs."""
    torch.manual_seed(0)
    layer = make(depth=3, decision="straight_through", **options)
    x = torch.randn(11, 5, dtype=torch.float64)

    def grads(layer):
        named = dict(layer.named_parameters())
        if how == "func":
            return grad(lambda p: functional_call(layer, p, (x,)).square().sum())(named)
        if how == "members":
            stacked = {name: torch.stack([p, p]) for name, p in named.items()}
            losses = vmap(lambda p: functional_call(layer, p, (x,)).square().sum())(stacked)
            found = torch.autograd.grad(losses.sum(), list(stacked.values()))
            return {name: both[1] for name, both in zip(named, found, strict=True)}
        run = torch.compile(layer, backend="aot_eager", fullgraph=True) if how == "compiled" else layer
        return dict(zip(named, torch.autograd.grad(run(x).square().sum(), list(named.values())), strict=True))

    own, before = grads(layer), layer(x)
    layer.sharing = 0.3
    assert torch.equal(layer(x), before)
    shared = grads(copy.deepcopy(layer) if how == "copied" else layer)
    for name, g in own.items():
        total = g.sum(0, keepdim=True) / math.sqrt(8)
        torch.testing.assert_close(shared[name], 0.7 * g + 0.3 * total if name.startswith("leaf_") else g)
    with pytest.raises(ValueError, match=r"sharing must be from 0 to 1; got 1\.5"):
        make(sharing=1.5)
    with pytest.raises(TypeError, match="sharing must be a number from 0 to 1"):
        make(sharing="0.5")


def test_dropout_acts_on_the_hidden_layer_in_training_only():
    layer = make(6, 200, depth=0, leaf_width=1, activation="identity", bias=False, dropout=0.4)
    x = torch.randn(4000, 6, dtype=torch.float64)
    dropped, kept = layer.train()(x), layer.eval()(x)
    zero = (dropped == 0).all(-1)
    assert abs(zero.double().mean() - 0.4) < 4 * math.sqrt(0.24 / 4000)
    torch.testing.assert_close(dropped[~zero], kept[~zero] / 0.6)


def test_callable_activation():
    layer = make(depth=2, activation=lambda h: h**3)
    x = torch.randn(7, 5, dtype=torch.float64)
    cube = make(depth=2, activation="identity")
    cube.load_state_dict(layer.state_dict())
    cube.activation = torch.nn.Identity()
    leaf = layer.route(x)
    hidden = torch.einsum("bli,bi->bl", layer.leaf_in_weight[leaf], x) + layer.leaf_in_bias[leaf]
    expected = torch.einsum("bl,blo->bo", hidden**3, layer.leaf_out_weight[leaf]) + layer.leaf_out_bias[leaf]
    torch.testing.assert_close(layer.eval()(x), expected)
    learned = make(depth=2, activation=nn.PReLU(dtype=torch.float64))
    loss_of(learned, x).backward()
    assert learned.activation.weight.grad.abs() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_autocast(dtype, mode):
    """float32 parameters and input: the output has the dtype of autocast, gradients are float32 and right."""
    layer = getattr(make(37, 29, depth=4, leaf_width=8, dtype=torch.float32, activation="gelu"), mode)()
    x = torch.randn(63, 37, requires_grad=True)
    exact = torch.autograd.grad(layer(x).square().sum(), [x, layer.leaf_in_weight])
    with torch.autocast("cpu", dtype):
        y = layer(x)
    assert y.dtype == dtype
    ours = torch.autograd.grad(y.float().square().sum(), [x, layer.leaf_in_weight])
    for value, expected in zip(ours, exact, strict=True):
        assert value.dtype == torch.float32
        assert (value - expected).norm() < 2 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize(
    "options", [{}, {"node_width": 2, "activation": "swiglu", "transposition": 0.1, "dropout": 0.1}]
)
def test_compile_without_breaks_or_recompilation(mode, options):
    """One graph for a first size, one for all others."""
    torch._dynamo.reset()
    layer = getattr(fastff.FFF(6, 5, depth=3, leaf_width=4, **options), mode)()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for batch in (7, 9, 33, 12, 5):
        x = torch.randn(batch, 6, requires_grad=True)
        torch.manual_seed(batch)
        expected = layer(x)
        wanted = torch.autograd.grad(loss_of(layer, x), x) if not options else None
        torch.manual_seed(batch)
        y = compiled(x)
        torch.testing.assert_close(y, expected)
        if wanted:
            torch.testing.assert_close(torch.autograd.grad(loss_of(compiled, x), x), wanted)
        layer.temperature = batch / 10  # annealing must not compile anew
    assert counter.frame_count <= 2


@pytest.mark.slow
def test_inductor_agrees():
    torch._dynamo.reset()
    layer = fastff.FFF(6, 5, depth=3, leaf_width=4)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for mode in ("train", "eval"):
        getattr(layer, mode)()
        x = torch.randn(13, 6, requires_grad=True)
        torch.testing.assert_close(compiled(x), layer(x))
        ours = torch.autograd.grad(loss_of(compiled, x), [x, layer.leaf_out_weight])
        torch.testing.assert_close(ours, torch.autograd.grad(loss_of(layer, x), [x, layer.leaf_out_weight]))


def compiled_graph(layer, x):
    """The compiled layer's output at x, and the names of the operations in its graph."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    y = torch.compile(layer, backend=counter, fullgraph=True)(x)
    return y, {str(node.target) for graph in counter.graphs for node in graph.graph.nodes}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"node_width": 2, "activation": "swiglu", "bias": False}])
def test_compile_sees_one_operation_where_no_derivative_is_needed(options):
    layer = fastff.FFF(6, 5, depth=3, leaf_width=4, **options).eval()
    x = torch.randn(2, 7, 6)
    with torch.no_grad():
        y, names = compiled_graph(layer, x)
        assert "fastff.hard.default" in names
        torch.testing.assert_close(y, layer(x))
        leaf, names = compiled_graph(lambda x: layer.route(x), x)
        assert "fastff.route.default" in names
        assert torch.equal(leaf, layer.route(x))
        experts = fastff.baselines.MoE(6, 5, num_experts=4, expert_width=3, k=2).eval()
        y, names = compiled_graph(experts, x)
        assert "fastff.visit.default" in names
        torch.testing.assert_close(y, experts(x))
    y, names = compiled_graph(layer, x)
    assert not any("fastff" in name for name in names)
    ours = torch.autograd.grad(y.square().sum(), layer.leaf_parameters())
    expected = torch.autograd.grad(layer(x).square().sum(), layer.leaf_parameters())
    torch.testing.assert_close(ours, expected)


@pytest.mark.slow
@pytest.mark.parametrize("transform", ["vmap", "jvp", "grad"])
def test_compiled_transforms(transform):
    """A registered operation has no derivative, and would take a tangent for zero."""
    torch._dynamo.reset()
    layer = fastff.FFF(6, 5, depth=3, leaf_width=4, activation="tanh").eval().requires_grad_(False)
    x, v = torch.randn(7, 6), torch.randn(7, 6)
    run = {
        "vmap": lambda: vmap(layer)(x),
        "jvp": lambda: torch.func.jvp(layer, (x,), (v,))[1],
        "grad": lambda: grad(lambda x: layer(x).square().sum())(x),
    }[transform]
    with torch.no_grad():
        y = torch.compile(run, backend="aot_eager", fullgraph=True)()
        with fastff.backend("reference"):
            expected = run()
    assert expected.abs().min() > 0
    torch.testing.assert_close(y, expected)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 3, 11])
def test_export_with_dynamic_batch(depth):
    """A program of plain aten that runs on other batch sizes, saved and loaded."""
    layer = fastff.FFF(6, 5, depth=depth, leaf_width=2).eval()
    program = torch.export.export(layer, (torch.randn(4, 6),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    assert all(str(node.target).startswith("aten.") for node in program.graph.nodes if node.op == "call_function")
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for batch in (2, 63):
        x = torch.randn(batch, 6)
        torch.testing.assert_close(loaded(x), layer(x))


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_ensembles_by_vmap(mode):
    layers = [getattr(make(depth=3, node_width=2), mode)() for _ in range(3)]
    parameters, buffers = stack_module_state(layers)
    x = torch.randn(11, 5, dtype=torch.float64)

    def loss(parameters, buffers):
        return loss_of(lambda x: functional_call(layers[0], (parameters, buffers), (x,)), x)

    grads = vmap(grad(loss))(parameters, buffers)
    values = vmap(loss)(parameters, buffers)
    for i, layer in enumerate(layers):
        torch.testing.assert_close(values[i], loss_of(layer, x))
        expected = torch.autograd.grad(loss_of(layer, x), list(layer.parameters()), allow_unused=True)
        for (name, parameter), value in zip(layer.named_parameters(), expected, strict=True):
            torch.testing.assert_close(grads[name][i], torch.zeros_like(parameter) if value is None else value)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant):
    layer = make(depth=3, transposition=0.3, dropout=0.3)
    x = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(5)
    expected = torch.autograd.grad(loss_of(layer, x), x)
    torch.manual_seed(5)
    ours = loss_of(lambda x: checkpoint(layer, x, use_reentrant=reentrant), x)
    ours.backward()
    torch.testing.assert_close(x.grad, expected[0])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_and_pickles_after_a_training_forward(copied):
    layer = make(depth=3, node_width=2, activation="swiglu")
    x = torch.randn(7, 5, dtype=torch.float64)
    y = layer(x)
    twin = copied(layer)
    assert torch.equal(twin(x), y)
    assert torch.equal(twin.eval()(x), layer.eval()(x))
    twin.leaf_in_weight.data.zero_()
    assert not torch.equal(twin.eval()(x), layer.eval()(x))


def test_state_dict_round_trip():
    layer, other = make(depth=3), make(depth=3)
    layer.temperature = 4
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    x = torch.randn(7, 5, dtype=torch.float64)
    assert torch.equal(other(x), layer(x))


def test_meta_device():
    layer = fastff.FFF(768, 768, depth=15, leaf_width=32, device="meta")
    assert layer.leaf_in_weight.shape == (2**15, 32, 768)
    small = fastff.FFF(6, 5, depth=2, leaf_width=3, device="meta", dtype=torch.bfloat16).to_empty(device="cpu")
    small.reset_parameters()
    assert small.temperature == 1
    ghost = fastff.FFF(6, 5, depth=2, leaf_width=3, device="meta")
    x = torch.empty(4, 6, device="meta")
    assert ghost.train()(x).shape == ghost.eval()(x).shape == (4, 5)
    assert ghost.route(x).shape == (4,)
    learned = fastff.FFF(6, 5, depth=2, leaf_width=3, activation=nn.PReLU(device="meta"), device="meta")
    learned = learned.to_empty(device="cpu")
    learned.reset_parameters()
    assert learned.activation.weight.item() == 0.25
    assert small(torch.randn(4, 6).bfloat16()).isfinite().all()
    with torch.device("meta"):
        assert fastff.FFF(6, 5, depth=2, leaf_width=3).leaf_in_weight.is_meta


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"depth": -1}, ValueError, "depth must be at least 0; got -1"),
        ({"depth": 1.0}, TypeError, "depth must be an integer; got 1.0"),
        ({"depth": True}, TypeError, "depth must be an integer"),
        ({"leaf_width": 0}, ValueError, "leaf_width must be at least 1; got 0"),
        ({"node_width": 0}, ValueError, "node_width must be at least 1; got 0"),
        ({"in_features": 0}, ValueError, "in_features must be at least 1; got 0"),
        ({"transposition": 1.0}, ValueError, r"transposition is a probability and must be in \[0, 1\); got 1.0"),
        ({"transposition": -0.1}, ValueError, "transposition is a probability"),
        ({"transposition": math.nan}, ValueError, "transposition is a probability"),
        ({"dropout": 1.5}, ValueError, "dropout is a probability"),
        (
            {"activation": "rellu"},
            ValueError,
            "activation must be one of relu, gelu, .*geglu_tanh, or a callable; got 'rellu'",
        ),
        ({"activation": 3}, TypeError, "activation must be a name or a callable; got 3"),
        ({"activation": nn.ReLU}, TypeError, "got the class ReLU; pass an instance"),
        ({"dropout": "0.1"}, TypeError, "dropout is a probability, a number; got '0.1' of type str"),
        ({"dtype": torch.float8_e4m3fn}, TypeError, "needs float64, float32, float16 or bfloat16"),
        ({"decision": "hard"}, ValueError, "decision must be 'soft', 'straight_through' or 'sampled'; got 'hard'"),
        ({"dtype": torch.int32}, TypeError, "floating-point dtype; got torch.int32"),
        ({"depth": 30}, MemoryError, r"depth=30, leaf_width=8\) takes .* TiB \(\d+ bytes\) .* Choose a smaller depth"),
        ({"depth": 64}, MemoryError, r"takes .* EiB \(\d+ bytes\)"),
        ({"depth": 64, "device": "meta"}, MemoryError, r"takes .* EiB \(\d+ bytes\)"),
    ],
)
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=message):
        fastff.FFF(**({"in_features": 64, "out_features": 64, "depth": 2, "leaf_width": 8} | options))


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("decision", "hard", ValueError, "decision must be 'soft', .* got 'hard'"),
        ("sharing", 2, ValueError, "sharing must be from 0 to 1; got 2"),
        ("sharing", "half", TypeError, "sharing must be a number from 0 to 1; got 'half'"),
    ],
)
def test_bad_settings_after_construction(name, value, error, message):
    layer = fastff.FFF(6, 5, depth=2, leaf_width=3)
    setattr(layer, name, value)
    with pytest.raises(error, match=message):
        layer(torch.randn(4, 6))


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_bad_inputs(mode):
    layer = getattr(fastff.FFF(6, 5, depth=2, leaf_width=3), mode)()
    for call in (layer, layer.route, layer.mixture, layer.node_logits):
        with pytest.raises(TypeError, match=r"FFF expects a tensor; got ndarray. Convert it with torch.as_tensor"):
            call(np.zeros((4, 6)))
        with pytest.raises(ValueError, match=r"expects inputs of shape \(..., 6\); got \(4, 7\). Pass in_features=7"):
            call(torch.randn(4, 7))
        with pytest.raises(ValueError, match=r"expects inputs of shape \(..., 6\); got \(\)"):
            call(torch.tensor(1.0))
        with pytest.raises(TypeError, match=r"has torch.float32 parameters; got a torch.float64 input"):
            call(torch.randn(4, 6).double())
        with pytest.raises(TypeError, match=r"got a torch.int64 input"):
            call(torch.zeros(4, 6, dtype=torch.int64))
        with pytest.raises(ValueError, match="parameters on cpu; got an input on meta"):
            call(torch.randn(4, 6, device="meta"))


@pytest.mark.slow
def test_import_costs_torch_and_no_more():
    """No optional package, no CUDA context, no compiler, nothing of the environment changed."""
    code = (
        "import os, sys, torch; before = set(sys.modules); environment = dict(os.environ)\n"
        "import fastff\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "assert new <= {'fastff'} | set(sys.stdlib_module_names), new\n"
        "assert not torch.cuda.is_initialized() and dict(os.environ) == environment\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_public_names_exist():
    assert set(fastff.__all__) <= set(dir(fastff))
    assert len(set(fastff.__all__)) == len(fastff.__all__)


@pytest.mark.parametrize("decision", ["soft", "straight_through", "sampled"])
def test_an_output_may_be_changed_in_place(decision):
    """As by nn.ReLU(inplace=True) behind the layer: the sampled pass gave a view, on which torch raised."""
    layer, x = make(decision=decision), torch.randn(9, 5, dtype=torch.float64)
    torch.manual_seed(1)
    torch.relu(layer(x)).sum().backward()
    expected = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    torch.manual_seed(1)
    torch.relu_(layer(x)).sum().backward()
    for parameter, wanted in zip(layer.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, wanted)
