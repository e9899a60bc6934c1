"""Every backend against the oracle, in value, and against float64, in error."""

import warnings
from concurrent.futures import ThreadPoolExecutor

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
import triton.errors
from hypothesis import given, settings

import fastff
import oracle
from fastff import backends, functional
from fastff.activations import function
from fastff.backends import Request, available, choose, chosen, native, ops, torch_backend
from fastff.tree import path
from helpers import ACTIVATIONS, make, plain_hard, plain_leaf, relative_error, request, state, without_interpreter

COMPLETE = ["reference", "aten"]  # the others have the hard pass alone
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}  # float64 on both sides; sums of at most a few hundred terms of order one

sizes = st.fixed_dictionaries(
    {
        "batch": st.sampled_from([1, 2, 7]),
        "in_features": st.integers(1, 9),
        "out_features": st.integers(1, 6),
        "depth": st.integers(0, 4),
        "leaf_width": st.sampled_from([1, 2, 3, 5]),
        "node_width": st.sampled_from([1, 2, 3]),
        "activation": st.sampled_from(ACTIVATIONS),
        "bias": st.booleans(),
        "scale": st.sampled_from([0.0, 1.0, 4.0]),
        "seed": st.integers(0, 10**6),
    }
)


@pytest.mark.parametrize("backend", COMPLETE)
@settings(max_examples=60, deadline=None)
@given(size=sizes)
def test_equals_algorithm_1(backend, size):
    torch.manual_seed(size.pop("seed"))
    batch, activation = size.pop("batch"), size["activation"]
    layer = make(**size)
    layer.temperature = 1.7
    x = torch.randn(batch, layer.in_features, dtype=torch.float64)
    weights = state(layer)
    with fastff.backend(backend):
        torch.testing.assert_close(layer(x), oracle.forward_t(x, weights, activation, 1.7), **TOLERANCE)
        torch.testing.assert_close(layer.mixture(x), oracle.mixture(x, weights, activation, 1.7), **TOLERANCE)
        torch.testing.assert_close(layer.node_logits(x), oracle.node_logits(x, weights, activation), **TOLERANCE)
        assert torch.equal(layer.route(x), oracle.route(x, weights, activation))
        torch.testing.assert_close(layer.eval()(x), oracle.forward_i(x, weights, activation), **TOLERANCE)


@pytest.mark.parametrize("backend", COMPLETE)
@settings(max_examples=30, deadline=None)
@given(size=sizes, data=st.data())
def test_properties(backend, size, data):
    """Routing is a partition, mixtures sum to one, the hard output is the chosen leaf's, a permuted batch stays so."""
    torch.manual_seed(size.pop("seed"))
    batch = size.pop("batch")
    layer = make(**size).eval()
    x = torch.randn(batch, layer.in_features, dtype=torch.float64)
    with fastff.backend(backend):
        leaf = layer.route(x)
        assert leaf.dtype == torch.int64
        assert ((leaf >= 0) & (leaf < layer.num_leaves)).all()
        torch.testing.assert_close(layer.mixture(x).sum(-1), torch.ones(batch, dtype=torch.float64))
        order = torch.tensor(data.draw(st.permutations(range(batch))))
        assert torch.equal(layer.route(x[order]), leaf[order])
        torch.testing.assert_close(layer(x[order]), layer(x)[order], **TOLERANCE)
        only = fastff.FFF(
            layer.in_features,
            layer.out_features,
            depth=0,
            leaf_width=layer.leaf_width,
            activation=layer.activation,
            bias=layer.bias,
            dtype=torch.float64,
        )
        for b in range(batch):
            for name, parameter in only.named_parameters():
                if name.startswith("leaf_"):
                    parameter.data.copy_(getattr(layer, name)[leaf[b] : leaf[b] + 1])
            torch.testing.assert_close(only(x[b]), layer(x[b]), **TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "mode", "dtype"),
    [
        (backend, mode, dtype)
        for backend in ("reference", "aten", "native")
        for mode in ("train", "eval")
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        if backend in COMPLETE or (backend in available() and mode == "eval" and dtype != torch.float16)
    ],
)
@pytest.mark.parametrize(
    ("batch", "depth", "leaf_width", "options"),
    [
        (63, 0, 3, {}),
        (257, 5, 3, {}),
        (63, 7, 1, {"activation": "gelu"}),
        (1, 7, 32, {"activation": "swiglu"}),
        (63, 3, 8, {"node_width": 3, "bias": False}),
        (257, 10, 2, {}),
    ],
)
def test_error_is_that_of_plain_torch(backend, dtype, mode, batch, depth, leaf_width, options):
    """At most twice the error of plain torch in the same dtype, both against float64.

    Inputs and weights are the same rounded ones on both sides, so what is compared is the rounding of the computation.
    Plain torch is Algorithm 1 by recursion or, for the soft pass, a dense layer of the same training width, which sums
    as many products in one go, whichever is worse. Small batches are drawn several times: the error of a few numbers
    is a matter of luck.
    """
    layer = make(37, 29, depth=depth, leaf_width=leaf_width, scale=2.0, dtype=dtype, **options)
    exact = make(37, 29, depth=depth, leaf_width=leaf_width, **options)
    exact.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    layer.train(mode == "train")
    exact.train(mode == "train")
    ours, plain, expected = [], [], []
    for _ in range(max(1, 63 // batch)):
        x = torch.randn(batch, 37).to(dtype)
        with fastff.backend("reference"):
            route = exact.route(x.double())
            # A logit within rounding of zero may go either way; such a row shows nothing about the leaf.
            visited = [[node for node, _ in path(leaf, depth)] for leaf in route.tolist()]
            logits = exact.node_logits(x.double()).gather(1, torch.tensor(visited, dtype=torch.int64))
            clear = (logits.abs() > 4 * torch.finfo(dtype).eps).all(-1)
            expected.append(exact(x.double())[clear])
        with fastff.backend(backend):
            assert torch.equal(layer.route(x)[clear], route[clear])
            y = layer(x)
            assert y.dtype == dtype
            ours.append(y[clear])
        plain.append((plain_soft(layer, x) if mode == "train" else plain_hard(layer, x, route))[clear])
    expected = torch.cat(expected)
    assert len(expected) > 10
    allowed = relative_error(torch.cat(plain), expected)
    if mode == "train":
        allowed = max(allowed, dense_error(layer, batch))
    assert relative_error(torch.cat(ours), expected) <= 2 * allowed


def dense_error(layer, batch):
    """Of act(x W1) W2 with W2 laid out (width, out) as ours is: at batch 1 the layout decides the order of the sums."""
    act, dtype = function(layer.activation), layer.node_weight.dtype
    errors = []
    for _ in range(max(1, 63 // batch)):
        first = torch.empty(layer.training_width, 37).uniform_(-1, 1).to(dtype)
        second = torch.empty(layer.training_width, 29).uniform_(-1, 1).to(dtype)
        x = torch.randn(batch, 37).to(dtype)
        exact = act(x.double() @ first.double().T) @ second.double()
        errors.append(relative_error(act(x @ first.T) @ second, exact))
    return sum(errors) / len(errors)


def plain_soft(layer, x):
    """FORWARD_T by recursion, every intermediate in the dtype of the layer."""

    def below(i):
        if i >= layer.num_nodes:
            return plain_leaf(layer, x, i - layer.num_nodes)
        if layer.node_width == 1:
            p = torch.sigmoid(F.linear(x, layer.node_weight[i : i + 1], layer.node_bias[i : i + 1]))
        else:
            hidden = function(layer.activation)(F.linear(x, layer.node_weight[i], layer.node_bias[i]))
            p = torch.sigmoid(F.linear(hidden, layer.node_out_weight[i : i + 1], layer.node_out_bias[i : i + 1]))
        return p * below(2 * i + 2) + (1 - p) * below(2 * i + 1)

    return below(0)


@pytest.mark.parametrize("backend", COMPLETE)
@pytest.mark.parametrize("depth", [0, 1, 3, 9])
def test_empty_batch_and_leading_dimensions(backend, depth):
    layer = make(depth=depth)
    x = torch.randn(2, 3, 7, 5, dtype=torch.float64)
    with fastff.backend(backend):
        for mode in (layer.train(), layer.eval()):
            flat = mode(x.reshape(-1, 5))
            torch.testing.assert_close(mode(x), flat.reshape(2, 3, 7, 4))
            torch.testing.assert_close(mode(x[0, 0, 0]), flat[0])
            turned = x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
            assert not turned.is_contiguous()
            torch.testing.assert_close(mode(turned), mode(x))
            assert mode(x[:0]).shape == (0, 3, 7, 4)
            assert mode(x[:, :, :, :0].reshape(0, 5)).shape == (0, 4)
        assert layer.route(x).shape == (2, 3, 7)
        assert layer.route(x[:0]).shape == (0, 3, 7)
        assert layer.mixture(x).shape == (2, 3, 7, 2**depth)
        assert layer.node_logits(x).shape == (2, 3, 7, 2**depth - 1)


@pytest.mark.parametrize("backend", COMPLETE)
@pytest.mark.parametrize("depth", [0, 2, 11])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_bad_values_stay_in_their_row(backend, depth, bad):
    layer = make(depth=depth, leaf_width=1, scale=5.0)
    x = torch.randn(9, 5, dtype=torch.float64)
    with fastff.backend(backend):
        clean_soft, clean_hard = layer.train()(x), layer.eval()(x)
        x[4, 2] = bad
        rest = torch.arange(9) != 4
        torch.testing.assert_close(layer.train()(x)[rest], clean_soft[rest])
        torch.testing.assert_close(layer.eval()(x)[rest], clean_hard[rest])
        assert 0 <= layer.route(x)[4] < 2**depth
        if bad != bad:
            assert layer.train()(x)[4].isnan().all()
            assert layer.eval()(x)[4].isnan().all()


@pytest.mark.parametrize("depth", [1, 4])
def test_straight_through_value_is_hard_and_gradient_is_soft(depth):
    """The output is the hard pass's; the tree's gradient is that of the soft weights, given the leaves' outputs."""
    for backend in COMPLETE:
        with fastff.backend(backend):
            layer = make(depth=depth, decision="straight_through", activation="tanh")
            x = torch.randn(6, 5, dtype=torch.float64)
            y = layer(x)
            torch.testing.assert_close(y, layer.eval()(x), **TOLERANCE)
            (y * 1.3).sum().backward()
            leaf_out = torch.stack(
                [
                    torch.tanh(x @ layer.leaf_in_weight[j].T + layer.leaf_in_bias[j]) @ layer.leaf_out_weight[j]
                    + layer.leaf_out_bias[j]
                    for j in range(layer.num_leaves)
                ],
                1,
            ).detach()  # (batch, leaves, out)
            (expected,) = torch.autograd.grad(
                (layer.mixture(x).unsqueeze(-1) * leaf_out * 1.3).sum(), layer.node_weight
            )
            torch.testing.assert_close(layer.node_weight.grad, expected, **TOLERANCE)
            visited = torch.zeros(layer.num_leaves, dtype=torch.bool)
            visited[layer.route(x)] = True
            assert torch.equal(layer.leaf_in_weight.grad.flatten(1).abs().sum(1) > 0, visited)


@pytest.mark.parametrize("backend", COMPLETE)
@pytest.mark.parametrize("decision", ["soft", "straight_through"])
@pytest.mark.parametrize("size", [1e4, 1e30])
def test_no_nan_gradient_at_huge_logits(backend, decision, size):
    with fastff.backend(backend):
        layer = make(depth=4, decision=decision, dtype=torch.float32, scale=size)
        x = torch.randn(9, 5, requires_grad=True)
        (layer(x).square().sum() + fastff.hardening_loss(layer, "path") + fastff.balance_loss(layer)).backward()
        for parameter in [x, *layer.parameters()]:
            assert parameter.grad.isfinite().all()


def test_choice_of_backend():
    layer, x = make().eval(), torch.randn(3, 5, dtype=torch.float64)
    asked = request(x, layer.tree, layer.leaves)
    assert choose(asked)[1].startswith("auto")
    with fastff.backend("reference"):
        assert choose(asked)[0].__name__ == torch_backend().__name__ == "fastff.backends.reference"
        with fastff.backend("auto"):
            assert torch_backend().__name__ == "fastff.backends.aten"
        assert "reference" in choose(asked)[1]
    assert choose(asked)[1].startswith("auto")
    listed = ", ".join(available())
    with pytest.raises(ValueError, match=rf"backend='tpu' is not available here. Available: auto, {listed}"):
        fastff.backend("tpu")
    assert choose(asked)[1].startswith("auto")


def test_blocks_overlap():
    """A block that ended after a newer one had begun took its choice away, and the newer one then left its own."""
    first, second = fastff.backend("reference"), fastff.backend("aten")
    first.__enter__()
    second.__enter__()
    assert chosen() == "aten"
    first.__exit__()
    assert chosen() == "aten"
    second.__exit__()
    assert chosen() == "auto"

    fastff.backend("reference")  # no block: until the next call
    with fastff.backend("aten"):
        with fastff.backend("reference"):
            fastff.backend("auto")
            assert chosen() == "auto"  # until the end of this block
        assert chosen() == "aten"
    assert chosen() == "reference"
    for _ in range(100):
        fastff.backend("aten")
    with pytest.raises(RuntimeError, match="stop"), fastff.backend("reference"):
        raise RuntimeError("stop")
    assert chosen() == "aten"
    again = fastff.backend("reference")
    for _ in range(2):
        with again:
            assert chosen() == "reference"
        assert chosen() == "aten"
    with again:
        with again:
            pass
        assert chosen() == "reference"  # it has been entered twice, and left once
    assert chosen() == "aten"
    fastff.backend("auto")
    assert chosen() == "auto"
    assert len(fastff.backends.choice._choices) <= 2


def test_blocks_of_several_threads():
    """Whatever the order in which blocks of several threads end, nothing of them is left."""

    def use(name):
        for _ in range(300):
            with fastff.backend(name):
                assert chosen() in ("aten", "reference")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(use, ["aten", "reference", "aten", "reference"]))
    assert chosen() == "auto"


class OutOfResources(triton.errors.TritonError):
    """As Triton raises it for a tile that is larger than the shared memory."""


@pytest.fixture
def failing(monkeypatch):
    """A GPU whose kernels do not launch."""

    def fail(*_):
        raise OutOfResources("shared memory, Required: 417792, Hardware limit: 232448")

    for name in ("hard", "route", "visit"):
        monkeypatch.setattr(backends.triton, name, fail)
    monkeypatch.setattr(Request, "why_no_kernel", lambda *_: "")
    monkeypatch.setattr(backends.triton, "_failures", {})
    monkeypatch.setattr(backends.native, "library", lambda: "not built")  # a layer keeps no plan
    monkeypatch.setitem(backends.BACKENDS, "native", backends.triton)  # what auto takes on a CPU


def test_a_kernel_that_fails_gives_way_to_torch(failing):
    """`auto` raised Triton's OutOfResources for 4096 -> 4096, leaves of 512, swiglu, batch 32."""
    layer = make(dtype=torch.float32).eval()
    x = torch.randn(6, 5)
    with fastff.backend("aten"):
        expected, leaf = layer(x), layer.route(x)
    size = r"hard pass failed for torch.float32 inputs of shape \(6, 5\) with leaves of shape \(8, 3, 5\), relu"
    with pytest.warns(RuntimeWarning, match=size) as caught:
        torch.testing.assert_close(layer(x), expected)
    assert len(caught) == 1
    with pytest.warns(RuntimeWarning, match="OutOfResources: shared memory, Required: 417792"):
        assert torch.equal(layer.route(x), leaf)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(layer(x), expected)  # the failure is known
        torch.testing.assert_close(layer(x[:3]), expected[:3])  # it is new, the layer is not
        torch.testing.assert_close(functional.visit(x, leaf, layer.leaves, "relu"), expected)
        layer(x).sum().backward()
        assert layer.leaf_out_weight.grad.abs().max() > 0
    assert "could not run its kernel at this size (OutOfResources" in choose(request(x, layer.tree, layer.leaves))[1]


def test_a_kernel_that_fails_raises_where_it_was_chosen(failing, monkeypatch):
    monkeypatch.setattr(backends.choice, "available", lambda: ["triton"])
    layer = make(dtype=torch.float32).eval()
    with fastff.backend("triton"), pytest.raises(ValueError, match=r"failed for .* fastff.backend\('auto'\) would use"):
        layer(torch.randn(6, 5))


def test_other_errors_are_no_failure_of_a_kernel(failing, monkeypatch):
    def fail(*_):
        raise KeyError("a fault of ours")

    monkeypatch.setattr(backends.triton, "hard", fail)
    with pytest.raises(KeyError, match="a fault of ours"):
        make(dtype=torch.float32).eval()(torch.randn(6, 5))
    assert not backends.triton.is_failure(torch.OutOfMemoryError("CUDA out of memory"))
    assert backends.triton.is_failure(RuntimeError("Triton Error [CUDA]: invalid argument"))


@pytest.mark.skipif("native" not in available(), reason="native backend not built")
def test_a_chosen_backend_that_cannot_serve_says_so():
    layer, x = make(dtype=torch.float32).eval(), torch.randn(3, 5)
    assert choose(request(x, layer.tree, layer.leaves))[0] is native
    with fastff.backend("native"):
        layer(x)
        with pytest.raises(
            ValueError, match=r"backend='native' cannot run this hard pass: it has .* got torch.float64"
        ):
            make().eval()(x.double())
        with pytest.raises(ValueError, match="cannot run this hard pass: it has kernels for named activations only"):
            make(dtype=torch.float32, activation=torch.sin).eval()(x)
        with pytest.raises(ValueError, match=r"backend='native' cannot run this soft pass: it only has the hard pass"):
            layer.train()(x)
    layer.train()(x)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"bias": False, "node_width": 2, "activation": "swiglu"}])
def test_opcheck(options):
    layer = make(dtype=torch.float32, **options).requires_grad_(False)
    x, leaf, name = torch.randn(6, 5), torch.randint(8, (6,)), options.get("activation", "relu")
    torch.library.opcheck(ops.hard, (x, *layer.tree, *layer.leaves, name))
    torch.library.opcheck(ops.route, (x, *layer.tree, name))
    torch.library.opcheck(ops.visit, (x, leaf, *layer.leaves, name))


def test_operations_refuse_gradients():
    """They have no derivative, and torch would warn and give None or zero."""
    layer, x = make(dtype=torch.float32).eval(), torch.randn(3, 5)
    for call in (
        lambda: ops.hard(x, *layer.tree, *layer.leaves, "relu"),
        lambda: ops.visit(x, torch.zeros(3, dtype=torch.int64), *layer.leaves, "relu"),
        lambda: torch.compile(lambda x: ops.hard(x, *layer.tree, *layer.leaves, "relu"), backend="aot_eager")(x),
    ):
        with pytest.raises(Exception, match="have no derivative"):
            call()
    assert not ops.route(x, *layer.tree, "relu").requires_grad


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiled_with_a_tree_that_trains_and_leaves_that_do_not(compiler):
    layer, x = make(dtype=torch.float32).eval(), torch.randn(3, 5)
    for parameter in layer.leaf_parameters():
        parameter.requires_grad_(False)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = torch.compile(layer, backend=compiler, fullgraph=True)(x)
    assert not y.requires_grad
    torch.testing.assert_close(y, layer(x))


def test_operations_survive_a_reload():
    script = """
import importlib, torch, fastff
from fastff.backends import ops
importlib.reload(ops)
layer, x = fastff.FFF(5, 4, depth=2, leaf_width=3).eval().requires_grad_(False), torch.randn(3, 5)
assert torch.allclose(ops.hard(x, *layer.tree, *layer.leaves, "relu"), layer(x))
print("good")
"""
    result = without_interpreter(script)
    assert result.stdout.strip() == "good", result.stderr
