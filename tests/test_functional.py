import copy
import io
import pickle
import threading
import time
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import fastff
from fastff import functional
from fastff.backends import Request, available
from helpers import make, relative_error


def test_soft_returns_what_the_losses_need():
    layer = make(depth=3)
    x = torch.randn(2, 7, 5, dtype=torch.float64)
    output, logits, mixture = functional.soft(x, layer.tree, layer.leaves, temperature=2.0)
    layer.temperature = 2.0
    torch.testing.assert_close(output, layer(x))
    torch.testing.assert_close(logits, 2 * layer.node_logits(x).reshape(14, 7))
    torch.testing.assert_close(mixture, layer.mixture(x).reshape(14, 8))


def test_arguments_that_do_not_fit():
    layer, gated = make(depth=2), make(depth=2, activation="swiglu")
    x = torch.randn(3, 5, dtype=torch.float64)
    for run in (functional.soft, functional.hard):
        with pytest.raises(ValueError, match="activation 'swiglu' needs leaves with a gate_weight"):
            run(x, layer.tree, layer.leaves, activation="swiglu")
        with pytest.raises(ValueError, match="activation 'relu' needs leaves with no gate_weight"):
            run(x, gated.tree, gated.leaves)
        with pytest.raises(ValueError, match="a tree of 3 nodes has one leaf more; got 8 leaves"):
            run(x, layer.tree, make(depth=3).leaves)
        with pytest.raises(ValueError, match="activation must be one of"):
            run(x, layer.tree, layer.leaves, activation="foo")
    with pytest.raises(ValueError, match="transposition is a probability"):
        functional.soft(x, layer.tree, layer.leaves, transposition=2.0)
    with pytest.raises(ValueError, match=r"temperature must be finite and positive; got -1.0"):
        functional.soft(x, layer.tree, layer.leaves, temperature=-1.0)


def test_parts_compose_to_the_hard_pass():
    layer = make(depth=3, activation="silu")
    x = torch.randn(9, 5, dtype=torch.float64)
    leaf = functional.route(x, layer.tree)
    expected = fastff.backends.reference.visit(x, leaf, layer.leaves, "silu")
    torch.testing.assert_close(functional.hard(x, layer.tree, layer.leaves, activation="silu"), expected)


def test_mixture_of_given_logits():
    logits = torch.tensor([0.0, torch.inf, -torch.inf])  # undecided at the root, then right, or left
    assert functional.mixture(logits).tolist() == [0.0, 0.5, 0.5, 0.0]
    assert functional.mixture(torch.zeros(2, 3, 0)).shape == (2, 3, 1)
    with pytest.raises(ValueError, match=r"2\*\*depth - 1 nodes \(0, 1, 3, 7, ...\); got \(2, 4\)"):
        functional.mixture(torch.zeros(2, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_no_leaf_in_the_hard_pass(dtype):
    """Casting the weights would touch every leaf: the output is the float32 one, rounded once."""
    layer = make(depth=4, dtype=torch.float32).eval()
    x = torch.randn(9, 5)
    expected = layer(x)
    with torch.autocast("cpu", dtype):
        y = layer(x)
        assert layer.node_logits(x).dtype == torch.float32
    assert torch.equal(y, expected.to(dtype))


def test_float64_is_exempt_from_autocast_as_in_torch():
    layer = make(depth=2)
    x = torch.randn(9, 5, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.train()(x).dtype == torch.float64
        assert layer.eval()(x).dtype == torch.float64


CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # float32 on both sides, sums of a few dozen terms of order one
needs_native = pytest.mark.skipif("native" not in available(), reason="native backend not built")


def gradients(layer, x, twice):
    """Of the output by x and all parameters; or of the squared length of those gradients, by all of them again."""
    inputs = [x, *layer.parameters()]
    y = layer(x)
    found = torch.autograd.grad(y.square().sum(), inputs, create_graph=twice, allow_unused=True)
    if not twice:
        return y, found
    length = sum(g.square().sum() for g in found if g is not None)
    return y, torch.autograd.grad(length, inputs, allow_unused=True)


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize(
    "build",
    [
        lambda: make(dtype=torch.float32, activation="tanh", depth=3),
        lambda: make(dtype=torch.float32, activation="swiglu", depth=2, bias=False, node_width=2),
        lambda: make(300, 60, dtype=torch.float32, activation="tanh", depth=3, leaf_width=64),  # leaf by leaf
        lambda: fastff.baselines.MoE(5, 4, num_experts=6, expert_width=3, k=2, activation="tanh"),
        lambda: torch.nn.Sequential(*[make(5, 5, dtype=torch.float32, activation="tanh")] * 2),  # the same one twice
    ],
)
def test_the_hard_pass_has_derivatives(build, twice):
    """Of the visited leaves, once and twice, whatever kernels computed the output; decisions are constants."""
    layer = build().eval()
    x = torch.randn(7, 300 if getattr(layer, "in_features", 5) == 300 else 5, requires_grad=True)
    y, ours = gradients(layer, x, twice)
    with fastff.backend("reference"):
        expected_y, expected = gradients(layer, x, twice)
    torch.testing.assert_close(y, expected_y, **CLOSE)
    for value, wanted, name in zip(ours, expected, ["x", *dict(layer.named_parameters())], strict=True):
        assert (value is None) == (wanted is None), name
        if value is not None:
            assert relative_error(value, wanted.double()) < 1e-5, name  # float32 on both sides


def test_only_the_visited_leaf_and_only_leaves_get_a_gradient():
    layer = make(dtype=torch.float32, depth=3).eval()
    x = torch.randn(1, 5)
    layer(x).sum().backward()
    assert all(parameter.grad is None for parameter in layer.tree_parameters())
    touched = layer.leaf_out_bias.grad.abs().sum(-1).nonzero().flatten()
    assert touched.tolist() == layer.route(x).tolist()
    assert not layer.requires_grad_(False)(x).requires_grad
    layer.leaf_out_bias.requires_grad_(True)  # alone
    layer(x).sum().backward()
    assert layer(x).requires_grad


def follows(layer, x):
    """The layer, called twice and by the direct way the second time, equals what torch alone makes of it."""
    with torch.no_grad():
        first, second = layer(x), layer(x)
        with fastff.backend("aten"):
            expected = layer(x)
    assert first.dtype == second.dtype == expected.dtype
    assert first.shape == second.shape == expected.shape
    assert torch.equal(first, second)
    rounding = {torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}.get(x.dtype, CLOSE)
    torch.testing.assert_close(second, expected, **rounding)


@pytest.fixture
def ready():
    """A layer whose direct way is prepared."""
    layer = make(dtype=torch.float32, depth=3, activation="gelu").eval()
    follows(layer, torch.randn(3, 5))
    assert (layer._plans.plan is not None) == ("native" in available())
    return layer


@pytest.mark.skipif("native" not in available(), reason="needs the native backend")
def test_direct_is_there_again_after_a_conversion(ready):
    """The plan of the old dtype used to stay and to answer no call: a layer made bfloat16 was slow for good."""
    follows(ready.bfloat16(), torch.randn(3, 5, dtype=torch.bfloat16))
    assert ready._plans.plan.dtype == torch.bfloat16
    plan = ready._plans.plan
    with pytest.raises(TypeError, match=r"got a torch.float64 input"), torch.no_grad():
        ready(torch.randn(3, 5).double())
    assert ready._plans.plan is plan  # it was the input that did not fit


def test_direct_shapes(ready):
    x = torch.randn(4, 6, 5)
    for part in (x[0, 0], x[0], x, x[:, 0], x[:0], x[:, :0], x.transpose(0, 1), x[::2], x[0].T.contiguous().T):
        follows(ready, part)
    with pytest.raises(ValueError, match=r"expects inputs of shape \(..., 5\); got \(4, 6\)"), torch.no_grad():
        ready(x[..., 0])
    with pytest.raises(TypeError, match=r"got a torch.float64 input"), torch.no_grad():
        ready(x.double())
    with pytest.raises(ValueError, match=r"got \(\)"), torch.no_grad():
        ready(x[0, 0, 0])


def test_direct_follows_the_layer(ready):
    """Whatever happens to the parameters between two calls."""
    x = torch.randn(6, 5)
    with torch.no_grad():
        before = ready(x)

    def changed(layer, x=x):
        follows(layer, x)
        with torch.no_grad():
            assert not torch.equal(layer(x).float(), before.float())

    other = make(dtype=torch.float32, depth=3, activation="gelu").eval()
    for assign in (False, True):
        ready.load_state_dict({k: (v * (2 - assign)).clone() for k, v in other.state_dict().items()}, assign=assign)
        changed(ready)
    ready.leaf_out_weight.data = torch.randn_like(ready.leaf_out_weight)
    changed(ready)
    with torch.no_grad():
        ready.leaf_out_bias.add_(1)
    changed(ready)
    ready.node_weight = torch.nn.Parameter(-ready.node_weight.detach())
    changed(ready)
    for layer in (copy.deepcopy(ready), copy.copy(ready), pickle.loads(pickle.dumps(ready))):
        changed(layer)
    file = io.BytesIO()
    torch.save(ready, file)
    file.seek(0)
    changed(torch.load(file, weights_only=False))
    twin = copy.deepcopy(ready)
    twin.leaf_out_bias.data.add_(1)
    changed(twin)
    follows(ready, x)
    with torch.no_grad():
        assert not torch.equal(twin(x), ready(x))
    ready.activation = "tanh"
    changed(ready)
    follows(ready.to(torch.bfloat16), x.bfloat16())
    follows(ready.double(), x.double())
    follows(ready.float(), x)
    ready.requires_grad_(False)
    follows(ready, x)
    torch.nn.utils.parametrize.register_parametrization(ready, "leaf_out_weight", torch.nn.Tanh())
    changed(ready)
    with torch.no_grad():
        ready.parametrizations.leaf_out_weight.original.zero_()
    changed(ready)


def test_direct_leaves_gradients_alone(ready):
    """Two evaluations without gradients, as in a validation, and the layer gave none in training after that."""
    x = torch.randn(6, 5)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            ready(x), ready(x), ready(x)
        ready.zero_grad()
        y = ready(x)
        assert y.requires_grad
        y.sum().backward()
        assert ready.leaf_in_weight.grad.abs().max() > 0
        ready.requires_grad_(False)
        with mode():
            ready(x), ready(x)
        ready.requires_grad_(True)
        assert ready(x).requires_grad


def test_direct_keeps_no_memory_between_calls(ready):
    """Weights that were moved elsewhere, as when a model is put aside, stayed in memory until the next call."""
    with torch.no_grad():
        ready(torch.randn(3, 5)), ready(torch.randn(3, 5))
    freed = []
    for parameter in ready.parameters():
        weakref.finalize(parameter.untyped_storage(), freed.append, True)
        assert not freed
        parameter.data = torch.empty(0)
        assert freed.pop()


def test_a_parametrised_layer_is_copied(ready):
    """Its class is torch's then, which copies all attributes: the plan, and what the last training forward left."""
    torch.nn.utils.parametrize.register_parametrization(ready, "leaf_out_weight", torch.nn.Tanh())
    x = torch.randn(3, 5)
    ready.train()(x)
    with torch.no_grad():
        y = ready.eval()(x)
        twin = copy.deepcopy(ready)
        assert torch.equal(twin(x), y)
        ready.parametrizations.leaf_out_weight.original.zero_()
        assert torch.equal(twin(x), y)


def test_direct_with_weights_given_for_one_call(ready):
    x = torch.randn(6, 5)
    with torch.no_grad():
        y = ready(x)
        given = {"leaf_out_bias": ready.leaf_out_bias + 1}
        torch.testing.assert_close(torch.func.functional_call(ready, given, (x,)), y + 1, **CLOSE)
        assert torch.equal(ready(x), y)


@pytest.mark.slow
def test_direct_steps_back(ready):
    """Autocast, transforms, tracers, dual numbers: what torch alone makes of them."""
    x, v, other = torch.randn(6, 5), torch.randn(6, 5), torch.randn(3, 5)

    def dual():
        with forward_ad.dual_level():
            value, tangent = forward_ad.unpack_dual(ready(forward_ad.make_dual(x, v)))
            return torch.stack([value, tangent])

    def autocast():
        with torch.autocast("cpu", torch.bfloat16):
            return ready(x)

    def inference():
        with torch.inference_mode():
            return ready(x).clone()

    runs = {
        "autocast": autocast,
        "vmap": lambda: torch.func.vmap(ready)(x),
        "vmap of weights": lambda: torch.func.vmap(lambda b: torch.func.functional_call(ready, b, (x,)))(
            {"leaf_out_bias": torch.stack([ready.leaf_out_bias, 2 * ready.leaf_out_bias])}
        ),
        "jvp": lambda: torch.stack(torch.func.jvp(ready, (x,), (v,))),
        "dual": dual,
        "jit": lambda: torch.jit.trace(ready, x)(other),
        "make_fx": lambda: make_fx(ready, tracing_mode="real")(x)(x + 1),
        "inference": inference,
        "flops": lambda: watched(ready, x),
    }
    with torch.no_grad():
        for name, run in runs.items():
            y = run()
            with fastff.backend("aten"):
                expected = run()
            assert y.dtype == expected.dtype, name
            torch.testing.assert_close(y, expected, **CLOSE, msg=lambda m, name=name: f"{name}: {m}")
        plain = ready(x)
        assert torch.equal(runs["inference"](), plain)
        torch.testing.assert_close(runs["make_fx"](), ready(x + 1), **CLOSE)
        torch.testing.assert_close(runs["jit"](), ready(other), **CLOSE)
        torch.testing.assert_close(runs["jvp"]()[0], plain, **CLOSE)
        assert runs["jvp"]()[1].abs().max() > 0.01
        torch.testing.assert_close(runs["dual"](), runs["jvp"](), **CLOSE)
    with FakeTensorMode() as mode:
        ghost = fastff.FFF(5, 4, depth=3, leaf_width=3).eval()
        with torch.no_grad():
            for _ in range(2):
                y = ghost(mode.from_tensor(x))
                assert y.shape == (6, 4)
                assert type(y).__name__ == "FakeTensor"


def watched(layer, x):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        y = layer(x)
    assert counter.get_total_flops() > 0
    return y


@pytest.mark.slow
def test_tracers_do_not_group_samples_by_leaf():
    """Leaves so large that samples go leaf by leaf: a program recorded for some samples must hold for others."""
    layer = make(300, 60, dtype=torch.float32, depth=3, leaf_width=64).eval()
    x, other = torch.randn(9, 300), torch.randn(5, 300)
    assert "leaf by leaf" in fastff.backends.aten.describe(Request.make("hard", x, layer.tree, layer.leaves, "relu"))
    with torch.no_grad():
        torch.testing.assert_close(torch.jit.trace(layer, x)(other), layer(other), **CLOSE)
        torch.testing.assert_close(make_fx(layer)(x)(x + 1), layer(x + 1), **CLOSE)


@needs_native
def test_an_explicit_choice_is_kept(ready):
    x = torch.randn(6, 5)
    with torch.no_grad():
        plain = ready(x)
        with fastff.backend("native"):
            assert torch.equal(ready(x), plain)
        calls = []
        ready._plans.plan.run = lambda x: calls.append(x)
        for name in ("reference", "aten"):
            with fastff.backend(name):
                torch.testing.assert_close(ready(x), plain, **CLOSE)
        assert not calls


@pytest.mark.slow
def test_aotinductor(tmp_path):
    """An exported layer becomes a package that runs without Python, with any batch."""
    layer = make(16, 8, depth=3, leaf_width=4, dtype=torch.float32).eval().requires_grad_(False)
    batch = torch.export.Dim("batch", min=2, max=1024)
    program = torch.export.export(layer, (torch.randn(5, 16),), dynamic_shapes=({0: batch},))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
    run = torch._inductor.aoti_load_package(package)
    for size in (2, 33):
        x = torch.randn(size, 16)
        torch.testing.assert_close(run(x), layer(x))


@pytest.mark.parametrize("shape", [(8, 8, 4), (8, 3, 16), (8, 8, 1)])
def test_a_parameter_of_another_shape_is_refused(shape):
    """Kernels that trust the sizes once read beside a parameter that had been replaced by one of another shape."""
    layer = make(16, 12, depth=3, leaf_width=8, dtype=torch.float32).eval()
    experts = fastff.baselines.MoE(16, 12, num_experts=8, expert_width=8, k=1).eval()
    x = torch.randn(40, 16)
    with torch.no_grad():
        layer(x), experts(x)
        layer.leaf_in_weight = torch.nn.Parameter(torch.randn(shape))
        experts.expert_in_weight = torch.nn.Parameter(torch.randn(shape))
        for model in (layer, experts):
            with pytest.raises(ValueError, match="must have shape"):
                model(x)
        layer.leaf_in_weight = torch.nn.Parameter(torch.randn(8, 8, 16, dtype=torch.float64))
        with pytest.raises(TypeError, match="dtypes"):
            layer(x)


def test_a_sparse_input_is_refused():
    layer = make(16, 12, depth=3, leaf_width=8, dtype=torch.float32).eval()
    x = torch.randn(4, 16)
    with torch.no_grad():
        layer(x)
        for call in (layer, lambda x: fastff.explain(layer, x)):
            with pytest.raises(TypeError, match="dense tensor; got the layout"):
                call(x.to_sparse())


@pytest.mark.parametrize("name", ["hard", "route", "visit"])
def test_a_symbolic_trace_holds_for_any_batch(name):
    """A comparison of the batch size fixed it: a route traced at 5 samples gave 5 leaves for 9."""
    layer = make(16, 8, dtype=torch.float32).eval().requires_grad_(False)

    def run(x):
        if name == "hard":
            return functional.hard(x, layer.tree, layer.leaves)
        if name == "route":
            return functional.route(x, layer.tree)
        return functional.visit(x, (x[:, 0] > 0).long(), layer.leaves, "relu")

    trace, x = make_fx(run, tracing_mode="symbolic", _allow_non_fake_inputs=True), torch.randn(9, 16)
    traced = trace(torch.randn(5, 16))
    torch.testing.assert_close(traced(x), run(x), **CLOSE)


def test_a_subclass_may_compute_its_leaves():
    """The plan of the parameters was used, and the subclass's own leaves ignored, in evaluation without gradients."""

    class Doubled(fastff.FFF):
        @property
        def leaves(self):
            return super().leaves._replace(out_bias=2 * self.leaf_out_bias)

    layer, x = Doubled(5, 4, depth=2, leaf_width=3).eval(), torch.randn(6, 5)
    with torch.no_grad():
        layer(x)
        quick = layer(x)
    torch.testing.assert_close(quick, layer(x).detach(), **CLOSE)


@needs_native
def test_threads_that_take_a_bias_away_and_give_it_back():
    """The names of the parameters were kept apart from the plan: a call mixed the old plan with the new names."""
    layer, x = make(dtype=torch.float32).eval().requires_grad_(False), torch.randn(1, 5)
    bias, end, errors = layer.leaf_in_bias, time.monotonic() + 1, []

    def swap():
        while time.monotonic() < end:
            layer.leaf_in_bias = None
            layer.leaf_in_bias = bias

    def call():
        with torch.no_grad():
            while time.monotonic() < end:
                try:
                    layer(x)
                except Exception as error:
                    errors.append(error)

    threads = [threading.Thread(target=one, daemon=True) for one in (swap, call, call)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
