"""The soft pass that sheds leaves: the specification, the walk against it, and the bounds that the docs state."""

import copy

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fastff
import oracle
from fastff import functional
from fastff.backends import shed
from fastff.tensors import SoftOptions
from helpers import ACTIVATIONS, make, relative_error, state

TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}
PLACES = ("reference", "all", "some")  # the specification, and both ways to run the leaves

trees = st.fixed_dictionaries(
    {
        "batch": st.sampled_from([1, 2, 7]),
        "depth": st.integers(0, 5),
        "leaf_width": st.sampled_from([1, 3]),
        "scale": st.sampled_from([0.0, 1.0, 4.0, 30.0]),
        "epsilon": st.sampled_from([1e-6, 0.01, 0.2, 0.5, 0.99]),
        "seed": st.integers(0, 10**6),
    }
)


def run(where, layer, x, epsilon, **options):
    """The pass by the specification, or by the walk with all or some leaves."""
    options = {"activation": layer.activation, "temperature": layer.temperature_tensor} | options
    with pytest.MonkeyPatch.context() as patch, fastff.backend("reference" if where == "reference" else "auto"):
        patch.setattr(shed, "is_dense", lambda *_: where == "all")
        return functional.shed(x, layer.tree, layer.leaves, epsilon=epsilon, **options)


def problem(batch=33, dtype=torch.float64, **options):
    torch.manual_seed(0)
    layer = make(7, 5, **{"depth": 4, "scale": 6.0, "dtype": dtype} | options)
    return layer, torch.randn(batch, 7, dtype=dtype, requires_grad=True)


def gradients(layer, x, output):
    layer.zero_grad()
    x.grad = None
    output().backward()
    return [torch.zeros_like(t) if t.grad is None else t.grad.clone() for t in (x, *layer.parameters())]


def visited(layer, found, batch):
    """Logits and reach of the nodes, 0 where there is no visit: (batch, nodes, 2)."""
    values = torch.stack([found.logits, found.reach], 1) * (found.reach > 0).unsqueeze(1)
    return values.new_zeros(batch, layer.num_nodes, 2).index_put((found.sample, found.node), values)


@settings(max_examples=60, deadline=None)
@given(size=trees, node_width=st.sampled_from([1, 2]), activation=st.sampled_from(ACTIVATIONS), bias=st.booleans())
def test_equals_the_loop(size, node_width, activation, bias):
    torch.manual_seed(size.pop("seed"))
    batch, epsilon = size.pop("batch"), size.pop("epsilon")
    layer = make(**size, node_width=node_width, activation=activation, bias=bias)
    layer.temperature = 1.7
    x = torch.randn(batch, 5, dtype=torch.float64)
    expected = oracle.forward_shed(x, state(layer), activation, epsilon, 1.7)
    for where in PLACES:
        torch.testing.assert_close(run(where, layer, x, epsilon).output, expected, **TOLERANCE)


@settings(max_examples=60, deadline=None)
@given(size=trees.filter(lambda size: size["depth"]))
def test_the_bounds_hold(size):
    """With D the mass left out and S the largest distance of two leaves' outputs: |y - y_soft| <= D S, D < epsilon, and
    for a gradient g at the output each logit's gradient differs by at most 2 D times the range of the <g, L_j>, and the
    gradients of all leaves' outputs by 2 D |g| in sum."""
    torch.manual_seed(size.pop("seed"))
    batch, epsilon = size.pop("batch"), size.pop("epsilon")
    layer = make(**size)
    x, g = torch.randn(batch, 5, dtype=torch.float64), torch.randn(batch, 4, dtype=torch.float64)
    logits = layer.node_logits(x).detach()
    tree = fastff.functional.Tree(torch.eye(layer.num_nodes, dtype=torch.float64), logits[0])
    for b in range(batch):
        # As a layer of the one sample's logits: their gradients, and the leaves' outputs', are then parameters'.
        every = torch.arange(layer.num_leaves)
        outputs = functional.visit(x[b].expand(len(every), 5), every, layer.leaves, "relu").detach()
        bias = [logits[b].clone().requires_grad_() for _ in range(2)]
        leaf = [outputs.clone().requires_grad_() for _ in range(2)]
        zero = outputs.new_zeros(layer.num_leaves, 1, layer.num_nodes), outputs.new_zeros(layer.num_leaves, 1, 4)
        leaves = [functional.Leaves(zero[0], None, zero[1], own) for own in leaf]
        at = outputs.new_zeros(1, layer.num_nodes)
        soft = functional.soft(at, tree._replace(bias=bias[0]), leaves[0])
        found = functional.shed(at, tree._replace(bias=bias[1]), leaves[1], epsilon=epsilon)
        for y in (soft.output, found.output):
            y.backward(g[b : b + 1])
        walk = shed.soft_walk(at, tree._replace(bias=bias[1]), "relu", SoftOptions(), epsilon)
        dropped = (1 - walk.reach.sum()).clamp(min=0).item()
        assert dropped < epsilon
        slack = 1e-12
        assert (soft.output - found.output).norm() <= dropped * torch.cdist(outputs, outputs).max() + slack
        values = outputs @ g[b]
        assert (bias[0].grad - bias[1].grad).abs().max() <= 2 * dropped * (values.max() - values.min()) + slack
        assert (leaf[0].grad - leaf[1].grad).norm(dim=1).sum() <= 2 * dropped * g[b].norm() + slack


@pytest.mark.parametrize("options", [{}, {"node_width": 2}, {"activation": "geglu", "bias": False}, {"depth": 9}])
@pytest.mark.parametrize("straight_through", [False, True])
def test_the_walk_equals_the_specification_with_all_gradients(options, straight_through):
    """Also depth 9, where the lower levels take one row of weights for each visit."""
    layer, x = problem(**options)
    found = []
    for where in PLACES:
        given = {"straight_through": straight_through, "temperature": 2.0}

        def total(where=where, given=given):
            got = run(where, layer, x, 0.3, **given)
            seen = visited(layer, got, 33)
            found[-1] += [got.output.detach(), seen.detach(), got.leaf]
            return got.output.square().sum() + (seen[..., 0].sin() * seen[..., 1]).sum()

        found.append([])
        found[-1] += gradients(layer, x, total)
    for other in found[1:]:
        for got, wanted in zip(other, found[0], strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("activation", ["tanh", "swiglu"])
def test_gradcheck(activation):
    layer, x = problem(batch=4, depth=2, activation=activation, leaf_width=2)
    names = [name for name, _ in layer.named_parameters()]

    def compute(x, *parameters):
        own = dict(zip(names, parameters, strict=True))
        tree = layer.tree._make(own.get(f"node_{name}") for name in layer.tree._fields)
        leaves = layer.leaves._make(own.get(f"leaf_{name}") for name in layer.leaves._fields)
        found = functional.shed(x, tree, leaves, epsilon=0.2, activation=activation)
        return found.output, found.logits, found.reach

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shed, "is_dense", lambda *_: False)
        assert torch.autograd.gradcheck(compute, (x, *layer.parameters()))


def test_epsilon_zero_is_the_soft_pass_bit_for_bit():
    layer, x = problem(transposition=0.1, dropout=0.2)
    plain = copy.deepcopy(layer)
    del plain.epsilon  # a layer from before the option
    found = []
    for one in (layer, plain):
        torch.manual_seed(1)
        found.append(gradients(one, x, lambda one=one: one(x).square().sum() + fastff.hardening_loss(one)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert layer.last_mixture.shape == (33, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_is_at_most_twice_that_of_the_specification(dtype):
    """In the same dtype, both against float64, for the output and every gradient. Leaves within rounding of the
    threshold may go either way, and both ways move such an output by their weight, epsilon / 16: such rows are left
    out."""
    layer, x = problem(batch=257, dtype=dtype, leaf_width=8, scale=3.0)
    exact = make(7, 5, depth=4, leaf_width=8)
    exact.load_state_dict(layer.state_dict())
    exact.temperature = layer.temperature = 2.0
    with torch.no_grad():
        near = (exact.mixture(x.detach().double()) / (0.2 / 16) - 1).abs().amin(1) < 32 * torch.finfo(dtype).eps
    clear = x.detach()[~near].requires_grad_()
    assert len(clear) > 50
    wide, g = clear.detach().double().requires_grad_(), torch.randn(len(clear), 5).to(dtype)
    found = []
    for where, module, rows in (("reference", exact, wide), ("reference", layer, clear), ("some", layer, clear)):
        y = run(where, module, rows, 0.2).output
        found.append([y, *gradients(module, rows, lambda y=y, rows=rows: (y * g.to(rows.dtype)).sum())])
    for right, theirs, ours in zip(*found, strict=True):
        assert relative_error(ours, right) <= 2 * relative_error(theirs, right) + torch.finfo(dtype).eps


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("depth", [0, 1, 8])
def test_odd_sizes(where, depth):
    layer, _ = problem(depth=depth)
    x = torch.randn(2, 3, 7, dtype=torch.float64).transpose(0, 1)
    y = run(where, layer, x, 0.5).output
    torch.testing.assert_close(y.flatten(0, 1), run(where, layer, x.reshape(-1, 7), 0.5).output, **TOLERANCE)
    empty = run(where, layer, x[:0], 0.5)
    assert empty.output.shape == (0, 2, 5)
    assert len(empty.logits) == len(empty.leaf) == 0
    empty.output.sum().backward()
    assert all(p.grad is not None for p in layer.leaf_parameters())


@pytest.mark.parametrize("where", PLACES)
def test_a_nan_stays_in_its_row_and_is_seen(where):
    layer, x = problem()
    clean, bad = run(where, layer, x, 0.5).output, x.detach().clone()
    bad[4, 2] = float("nan")
    y = run(where, layer, bad, 0.5).output
    rest = torch.arange(33) != 4
    torch.testing.assert_close(y[rest], clean[rest], **TOLERANCE)
    assert y[4].isnan().all()


def test_the_leaf_of_the_hard_pass_is_never_shed():
    layer, x = problem(scale=1.0, depth=6)
    found = run("some", layer, x, 0.999)
    assert torch.equal(found.leaf, layer.route(x))
    hard = run("some", layer, x, 0.999, straight_through=True).output
    torch.testing.assert_close(hard, layer.eval()(x), **TOLERANCE)


def test_a_leaf_that_every_sample_sheds_is_not_read():
    layer, x = problem(depth=2)
    with torch.no_grad():
        layer.node_bias[0] -= 1e4  # all go left
        layer.leaf_in_weight[3] = layer.leaf_out_bias[3] = layer.node_weight[2] = float("nan")
    seen = run("some", layer, x, 0.1)
    seen.output.sum().backward()
    assert seen.output.isfinite().all()
    assert not (seen.node == 2).any()
    assert layer.leaf_in_weight.grad.isfinite().all()


def test_swapped_children_decide_what_is_shed(monkeypatch):
    layer, x = problem()
    swapped = copy.deepcopy(layer)
    with torch.no_grad():
        swapped.node_weight.neg_()
        swapped.node_bias.neg_()
    wanted = run("some", swapped, x, 0.1)
    monkeypatch.setattr(shed.reference, "transpose", lambda logits, _: -logits)
    for where in PLACES:
        found = run(where, layer, x, 0.1, transposition=0.5)
        torch.testing.assert_close(found.output, wanted.output, **TOLERANCE)
        assert torch.equal(found.leaf, wanted.leaf)
        torch.testing.assert_close(  # the losses read the logits from before the swap
            visited(layer, found, 33) * torch.tensor([-1, 1]), visited(layer, wanted, 33), **TOLERANCE
        )


def test_dropout_scales_and_zeroes_the_hidden_layer():
    layer, x = problem(batch=400, activation="identity", leaf_width=8)
    clean = run("some", layer, x, 0.1).output
    torch.manual_seed(0)
    noisy = torch.stack([run("some", layer, x, 0.1, dropout=0.5).output for _ in range(200)])
    assert not torch.equal(noisy[0], clean)
    error = (noisy.mean(0) - clean) / (noisy.std(0) / 200**0.5).clamp(min=1e-9)
    assert error.square().mean().item() == pytest.approx(1, abs=0.2)


def test_a_second_derivative_is_refused():
    layer, x = problem()
    y = run("some", layer, x, 0.1).output
    with pytest.raises(RuntimeError, match="epsilon > 0 has no second derivative"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


class Largest(TorchDispatchMode):
    """Remembers the most elements of a tensor that an operation makes, besides gradients of parameters."""

    def __init__(self, layer):
        super().__init__()
        self.counts, self.elements = {layer.num_nodes, *(2**m for m in range(7, layer.depth + 1))}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for t in found if isinstance(found, tuple | list) else (found,):
            if isinstance(t, torch.Tensor) and not {*t.shape[:1]} & self.counts:
                self.elements = max(self.elements, t.numel())
        return found


def test_no_tensor_grows_with_the_number_of_leaves(monkeypatch):
    """A step makes no tensor as large as (batch, leaves) or (batch, nodes) if each sample keeps one or two leaves."""
    batch = 96
    monkeypatch.setattr("fastff.functional.is_watched", lambda: False)  # a dispatch mode watches
    for depth in (8, 12):
        layer = fastff.FFF(9, 7, depth=depth, leaf_width=2, epsilon=0.5)
        layer.temperature = 1e4
        x = torch.randn(batch, 9, requires_grad=True)
        with Largest(layer) as largest:
            (layer(x).square().sum() + fastff.hardening_loss(layer, "path")).backward()
        # The first 127 nodes of all samples, or rows of visits by inputs.
        rows = len(layer.last_visits)
        assert rows < 2 * batch * depth
        assert largest.elements <= max(batch * 127, 2 * batch * 64, rows * 9)


@pytest.mark.parametrize("options", [{}, {"decision": "straight_through"}, {"transposition": 0.2, "dropout": 0.1}])
def test_checkpointing_walks_the_same_way_again(options):
    layer, x = problem(epsilon=0.1, **options)
    found = []
    for call in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        torch.manual_seed(1)
        total = lambda call=call: call(x).square().sum() + fastff.balance_loss(layer)  # noqa: E731
        found.append(gradients(layer, x, total))
    for plain, again in zip(*found, strict=True):
        assert torch.equal(plain, again)


@pytest.mark.slow
def test_compiled_it_runs_all_leaves_with_the_same_result():
    """What remains depends on the numbers, which no tracer knows."""
    torch._dynamo.reset()
    layer, x = problem(epsilon=0.1)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    found = [
        gradients(layer, x, lambda call=call: call(x).square().sum() + fastff.balance_loss(layer))
        for call in (layer, compiled)
    ]
    for eager, other in zip(*found, strict=True):
        torch.testing.assert_close(other, eager, **TOLERANCE)


def test_in_a_transform_it_runs_all_leaves_with_the_same_result():
    layer, x = problem(epsilon=0.1)
    mapped = torch.func.vmap(lambda row: layer(row.unsqueeze(0)).squeeze(0))(x)
    torch.testing.assert_close(mapped, layer(x), **TOLERANCE)


def test_autocast_and_sharing():
    layer, x = problem(epsilon=0.1, dtype=torch.float32, sharing=0.5)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16
    assert layer.leaf_in_weight.grad.dtype == torch.float32
    plain = copy.deepcopy(layer)
    plain.epsilon = 0.0
    assert relative_error(y, plain.double()(x.double())) < 0.1 + 0.02  # the mass left out, and bfloat16


def test_a_gradient_scaler_skips_the_step_with_an_overflow():
    layer, x = problem(epsilon=0.1, dtype=torch.float32)
    optimizer, scaler = torch.optim.SGD(layer.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    before = layer.leaf_in_weight.detach().clone()
    for bad in (True, False):
        rows = x.detach().clone()
        rows[3] *= float("nan") if bad else 1
        optimizer.zero_grad()
        scaler.scale(layer(rows).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(layer.leaf_in_weight, before) is bad
    assert scaler.get_scale() == 2.0**15


@pytest.mark.parametrize("frozen", ["node", "leaf"])
def test_frozen_parts_get_no_gradient_and_the_others_the_same(frozen):
    layer, x = problem(epsilon=0.1)
    wanted = gradients(layer, x, lambda: layer(x).square().sum())
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    found = gradients(layer, x, lambda: layer(x).square().sum())
    for (name, _), got, right in zip([("x", x), *layer.named_parameters()], found, wanted, strict=True):
        torch.testing.assert_close(got, torch.zeros_like(got) if name.startswith(frozen) else right, **TOLERANCE)


def test_tensors_without_numbers_run_all_leaves():
    layer = fastff.FFF(5, 4, depth=3, leaf_width=2, epsilon=0.1, device="meta")
    assert layer(torch.zeros(6, 5, device="meta")).shape == (6, 4)


def test_lazy_optimizers_take_its_dense_gradients():
    layer, x = problem(epsilon=0.1, dtype=torch.float32)
    optimizer = fastff.optim.LazyAdamW(layer, lr=1e-2)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        losses.append(layer(x.detach()).square().mean())
        losses[-1].backward()
        assert not layer.leaf_in_weight.grad.is_sparse
        optimizer.step()
    assert losses[-1] < losses[0]
