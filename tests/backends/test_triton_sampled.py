"""The kernels of a whole sampled step: each against torch, and the step against the one of torch operations."""

import warnings

import pytest
import torch

import fastff
from fastff.backends import ops, paths, triton, triton_segments, triton_training
from fastff.backends import triton_sampled_launch as launch
from helpers import make, without_interpreter
from triton_helpers import DEVICE

pytest.importorskip("triton")
# On tensor cores, gradients of float16 meet TF32; the interpreter multiplies bfloat16 as integers.
CLOSE = {torch.float32: {"rtol": 1e-4, "atol": 1e-4}, torch.float16: {"rtol": 2e-2, "atol": 3e-2}}
# Batch, features, depth, alternatives: one tile and several, trees of one product, and trees that go on by rows.
SIZES = [(1, 3, 1, 1), (40, 37, 3, 2), (150, 130, 5, 5), (33, 20, 7, 1)]
cases = pytest.mark.parametrize("size", SIZES)
dtypes = pytest.mark.parametrize("dtype", CLOSE)
estimators = pytest.mark.parametrize("mixture", [True, False])


@pytest.fixture
def torch_alone(monkeypatch):
    """What a function of these modules gives when its kernels cannot run."""

    def run(function, *arguments):
        with monkeypatch.context() as patch:
            for module in (launch, triton_segments):
                patch.setattr(module, "attempt", lambda part, kernels, by_torch, *size: by_torch())
            return function(*arguments)

    return run


def given(size, dtype):
    batch, features, depth, alternatives = size
    torch.manual_seed(0)
    x, weight = torch.randn(batch, features, device=DEVICE), torch.randn(2**depth - 1, features, device=DEVICE)
    bias, uniforms = torch.randn(2**depth - 1), torch.rand(batch, min(alternatives, 2**depth - 1), 1 + depth)
    tree = (weight / features**0.5).to(dtype), bias.to(DEVICE, dtype)
    return x.to(dtype), *tree, uniforms.to(DEVICE), torch.tensor(1.7, device=DEVICE)


def same(found, expected, dtype, **tolerance):
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        torch.testing.assert_close(ours, theirs, **(tolerance or CLOSE[dtype]))


@cases
@dtypes
@estimators
def test_walks_are_those_of_torch(size, dtype, mixture, torch_alone):
    """The same leaves, levels, shares and logits from the same numbers; these are float32 sums in any dtype."""
    arguments = (*given(size, dtype), mixture)
    expected = torch_alone(launch.walk, *arguments)
    same(launch._walk(*arguments), expected, dtype, rtol=1e-4, atol=1e-5)


def test_a_nan_walks_to_a_leaf():
    x, *rest = given((5, 4, 3, 1), torch.float32)
    x[2] = torch.nan
    found = launch.Walked(*launch._walk(x, *rest, True))
    assert found.leaf[0, 2] == 0
    assert ((found.leaf >= 0) & (found.leaf < 8)).all()


@pytest.mark.parametrize("leaves", [1, 5, 2**14])
def test_places_of_sorted_keys(leaves, torch_alone):
    key = torch.randint(2 * leaves, (300,), device=DEVICE).sort().values.to(launch._key_dtype(leaves))
    for ours, theirs in zip(launch._places(key, leaves), torch_alone(launch.places, key, leaves), strict=True):
        assert torch.equal(ours, theirs)


@cases
@dtypes
@estimators
@pytest.mark.parametrize("losses", [False, True])
def test_gradients_of_a_tree_are_those_of_torch(size, dtype, mixture, losses, torch_alone):
    x, weight, bias, uniforms, temperature = given(size, dtype)
    walked = launch.Walked(*launch._walk(x, weight, bias, uniforms, temperature, mixture))
    credit = torch.randn_like(walked.share[1:])
    own = torch.randn_like(walked.logits) if losses else None
    arguments = (walked.logits, walked.leaf, walked.share, walked.level, credit, own, temperature, mixture)
    grad = torch_alone(launch.score_gradients, *arguments)
    same([launch._score_gradients(*arguments)], [grad], dtype, rtol=1e-4, atol=1e-5)
    start = 0 if losses or not mixture else 1
    for before in (None, torch.randn_like(x)):
        arguments = (grad, walked.leaf, weight, before, start)
        same([launch._tree_inputs(*arguments)], [torch_alone(launch.tree_inputs, *arguments)], dtype)
    arguments = (x, grad, walked.leaf, weight, start)
    if len(weight) < launch.SMALL:
        same(launch._small_tree_outer(*arguments), torch_alone(launch.small_tree_outer, *arguments), dtype)


@dtypes
@pytest.mark.parametrize("width", [6, 70, 130])
@pytest.mark.parametrize("has_bias", [False, True])
def test_credit_is_the_product_with_the_output(dtype, width, has_bias):
    """Of the gradient with what the leaf gives, for paths of a batch one after the other; in float64."""
    batch, leaves = 21, 5
    key, order = torch.randint(leaves, (3 * batch,), device=DEVICE).sort()
    grad, hidden = (torch.randn(n, k, device=DEVICE).to(dtype) for n, k in ((batch, 19), (3 * batch, width)))
    weight = torch.randn(leaves, width, 19, device=DEVICE).to(dtype)
    bias = torch.randn(leaves, 19, device=DEVICE).to(dtype) if has_bias else None
    found, dots = triton_segments._credit(grad, weight, bias, hidden, key, order)
    output = torch.einsum("el,elo->eo", hidden.double(), weight.double()[key])
    output += 0 if bias is None else bias.double()[key]
    rows = grad.double()[order % batch]
    torch.testing.assert_close(dots[order].double(), (output * rows).sum(1), rtol=1e-4, atol=1e-3)
    same([found], [torch.einsum("eo,elo->el", rows, weight.double()[key]).to(dtype)], dtype)


class Draws:
    """Stands for torch.rand in a step: the kernels draw all numbers at once, torch operations one part at a time."""

    def __init__(self, numbers):
        self.numbers, self.at = numbers, 0

    def __call__(self, *size, **_):
        size = size[0] if isinstance(size[0], torch.Size) else size
        if len(size) == 3:
            return self.numbers
        self.at += 1
        return self.numbers[:, :, 0] if self.at == 1 else self.numbers[:, self.at - 2, 1:]


@pytest.mark.slow
@pytest.mark.parametrize("losses", [False, True])
@pytest.mark.parametrize(
    ("depth", "options"),
    [
        (1, {}),
        (3, {"bias": False}),
        (3, {"alternatives": 2, "activation": "swiglu"}),
        (3, {"estimator": "even", "alternatives": 3}),
        (6, {"estimator": "even"}),
        (6, {"alternatives": 3}),
    ],
)
def test_a_step_is_the_one_of_torch(depth, options, losses, monkeypatch):
    """Output, paths and all gradients, with the same draws."""
    layer = make(depth=depth, decision="sampled", dtype=torch.float32, **options).to(DEVICE)
    layer.temperature = 1.3
    x, found = torch.randn(23, 5, device=DEVICE), []
    numbers = torch.rand(23, layer.alternatives, 1 + depth, device=DEVICE)
    target = torch.randn(23, layer.out_features, device=DEVICE)
    monkeypatch.setattr(paths, "are_few", lambda *_: False)  # torch would know all logits
    monkeypatch.setattr(triton_training, "_can_run", lambda x: True)
    for choices in ((), ("auto", "triton")):
        monkeypatch.setattr(triton_training, "_CHOICES", choices)
        monkeypatch.setattr(torch, "rand", Draws(numbers))
        layer.zero_grad()
        layer.running_shares, x = None, x.detach().requires_grad_()
        y = layer(x)
        loss = (y * target).sum()
        ((loss + fastff.balance_loss(layer) + fastff.hardening_loss(layer)) if losses else loss).backward()
        found.append([y.detach(), layer.last_path.detach(), layer.last_leaf, layer.last_weight, x.grad])
        found[-1] += [p.grad for p in layer.parameters()]
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.fixture
def everywhere(monkeypatch):
    """Let the kernels take CPU tensors, which the interpreter can run."""
    monkeypatch.setattr(triton_training, "_can_run", lambda x: True)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [3, 6])
def test_compiled_equals_eager(depth, everywhere, monkeypatch):
    """A compiler sees the kernels as operations."""
    torch._dynamo.reset()
    launched, real = [], launch._walk
    monkeypatch.setattr(launch, "_walk", lambda *a: launched.append(1) or real(*a))
    layer = make(depth=depth, decision="sampled", alternatives=2, dtype=torch.float32).to(DEVICE)
    x, found = torch.randn(9, 5, device=DEVICE), []
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(1)
        layer.zero_grad()
        x = x.detach().requires_grad_()
        y = run(x)
        (y.square().sum() + fastff.hardening_loss(layer)).backward()
        found.append([y.detach(), layer.last_path.detach(), x.grad, *(p.grad for p in layer.parameters())])
    assert len(launched) == 2
    for compiled, eager in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)


def test_backward_lets_go_of_the_graph(everywhere):
    """The layer keeps the paths for losses, whose graph held all of the step's tensors until the next forward."""
    layer = make(depth=3, decision="sampled", dtype=torch.float32).to(DEVICE)
    layer(torch.randn(9, 5, device=DEVICE)).sum().backward()
    assert not layer.last_path.requires_grad


def test_few_nodes_are_all_seen(everywhere):
    """The losses read all logits, as on a CPU: kernels once left them the paths alone."""
    layer = make(64, 3, depth=3, decision="sampled", dtype=torch.float32).to(DEVICE)
    layer(torch.randn(9, 64, device=DEVICE)).sum().backward()
    assert layer.last_logits.shape == (9, 7)


@pytest.mark.parametrize("learns", ["leaves", "tree", "x"])
def test_parts_may_be_frozen(learns, everywhere):
    """What learns has its full gradient, and nothing else has one."""
    layer = make(depth=3, decision="sampled", dtype=torch.float32).to(DEVICE)
    x, found = torch.randn(9, 5, device=DEVICE), []
    for frozen in (False, True):
        layer.zero_grad()
        x = x.detach().requires_grad_(not frozen or learns == "x")
        for p in layer.parameters():
            own = "leaves" if any(p is leaf for leaf in layer.leaf_parameters()) else "tree"
            p.requires_grad_(not frozen or own == learns)
        torch.manual_seed(1)
        layer(x).square().sum().backward()
        found.append([p.grad for p in (x, *layer.parameters())])
    for part, whole in zip(*reversed(found), strict=True):
        assert part is None or torch.equal(part, whole)
    kept = {"x": 1, "tree": len(layer.tree_parameters()), "leaves": len(layer.leaf_parameters())}[learns]
    assert sum(part is not None for part in found[1]) == kept


@pytest.mark.slow
@pytest.mark.parametrize("depth", [3, 6])
def test_sparse_gradients_are_the_dense_ones(depth, everywhere):
    layer = make(depth=depth, decision="sampled", dtype=torch.float32).to(DEVICE)
    x, found = torch.randn(9, 5, device=DEVICE), []
    for sparse in (False, True):
        layer.zero_grad()
        layer.sparse_gradients = sparse
        torch.manual_seed(1)
        layer(x).square().sum().backward()
        found.append([p.grad.to_dense() for p in layer.parameters()])
        assert layer.leaf_in_weight.grad.is_sparse == sparse
    for dense, again in zip(*found, strict=True):
        torch.testing.assert_close(again, dense, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch", [0, 1])
def test_small_batches(batch, everywhere):
    layer = make(depth=3, decision="sampled", dtype=torch.float32).to(DEVICE)
    y = layer(torch.randn(batch, 5, device=DEVICE))
    y.sum().backward()
    assert y.shape == (batch, layer.out_features)
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def operations(mixture):
    """Each registered operation with its arguments."""
    x, weight, bias, uniforms, temperature = given((9, 6, 3, 2), torch.float32)
    walked = launch.Walked(*launch._walk(x, weight, bias, uniforms, temperature, mixture))
    key, order = walked.key.flatten().sort(stable=True)
    leaf, _ = launch._places(key, 8)
    credit, losses = torch.randn_like(walked.share[1:]), torch.randn_like(walked.logits)
    out, hidden = torch.randn(8, 4, 6, device=DEVICE), torch.randn(27, 4, device=DEVICE)
    return {
        "sampled_walk": (x, weight, bias, uniforms, temperature, mixture),
        "sampled_places": (key, 8),
        "score_gradients": (*walked[:1], *walked[2:], credit, losses, temperature, mixture),
        "tree_inputs": (losses, walked.leaf, weight, x, 0),
        "small_tree_outer": (x, losses, walked.leaf, weight, 0),
        "leaf_credit": (x, out, torch.randn(8, 6, device=DEVICE), hidden, leaf, order),
    }


@pytest.mark.slow
@estimators
def test_opcheck(mixture):
    for name, arguments in operations(mixture).items():
        torch.library.opcheck(getattr(ops, name), arguments)


@pytest.mark.slow
def test_operations_read_numbers_however_they_are_stored():
    """A compiler may pass views: with gaps, or with a bit that negates them."""
    for name, arguments in operations(True).items():
        run = getattr(ops, name)
        for view in (lambda t: torch._neg_view(-t), lambda t: torch.stack([t, torch.zeros_like(t)], -1)[..., 0]):
            floats = [isinstance(t, torch.Tensor) and t.is_floating_point() for t in arguments]
            views = [view(t) if is_float else t for t, is_float in zip(arguments, floats, strict=True)]
            torch.testing.assert_close(run(*views), run(*arguments), rtol=0, atol=0)


@pytest.mark.slow
def test_torch_operations_replace_a_kernel_that_fails(everywhere, monkeypatch):
    """One warning for each part, and the same step."""
    layer = make(depth=3, decision="sampled", dtype=torch.float32).to(DEVICE)
    x, found = torch.randn(9, 5, device=DEVICE), []
    monkeypatch.setattr(triton, "_failures", {})
    for fails in (False, True):
        for module in (launch, triton_segments) if fails else ():
            monkeypatch.setattr(module, "launch_kernel", broken)
        torch.manual_seed(1)
        layer.zero_grad()
        x = x.detach().requires_grad_()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            y = layer(x)
            y.square().sum().backward()
        found.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
    parts = {str(w.message).split("(")[1].split(")")[0] for w in warned if "Torch operations run" in str(w.message)}
    assert parts >= {"paths", "places", "scores", "credit", "product", "outer", "input gradient", "node gradient"}
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def broken(*_, **__):
    raise RuntimeError("Triton Error [CUDA]: out of resource")


AHEAD_OF_TIME = """
import torch
from fastff.backends import triton_sampled_kernels as kernels, triton_sampled_launch as launch
from fastff.backends import triton_segment_kernels, triton_segments
from triton_build import WithoutSpills

for name in ("sample_paths", "sorted_places", "score_gradients", "tree_inputs", "top_outer", "add_chunks"):
    WithoutSpills(kernels, name)
for name in ("leaf_product", "leaf_output"):
    WithoutSpills(triton_segment_kernels, name)
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

def empty(*size, dtype):
    return torch.empty(*size, device="meta", dtype=dtype)

SIZES = [(768, 5, 1, BF16), (768, 8, 1, BF16), (768, 7, 14, BF16), (1024, 3, 2, F16), (37, 15, 1, F32), (5, 1, 1, F32)]
for features, depth, alternatives, dtype in SIZES:
    x, weight = empty(16384, features, dtype=dtype), empty(2**depth - 1, features, dtype=dtype)
    uniforms, temperature = empty(16384, alternatives, 1 + depth, dtype=F32), empty(1, dtype=F32)
    for mixture in (True, False):
        logits, key, leaf, share, level = launch._walk(x, weight, weight[:, 0], uniforms, temperature, mixture)
        launch._places(key.flatten(), 2**depth)
        for losses in (None, logits):
            grad = launch._score_gradients(logits, leaf, share, level, share[1:], losses, temperature, mixture)
        for given, start in ((None, 0), (x, 1 if mixture else 0)):
            launch._tree_inputs(grad, leaf, weight, given, start)
        if depth <= 5:
            launch._small_tree_outer(x, grad, leaf, weight, 0)
    out = empty(2**depth, 32, features, dtype=dtype)
    entries = 16384 * (1 + alternatives)
    order, hidden = empty(entries, dtype=torch.int64), empty(entries, 32, dtype=dtype)
    triton_segments._credit(x, out, out[:, 0], hidden, order.int(), order)
    triton_segments._product(hidden[:16384], out, out[:, 0], order[:16384].int(), order[:16384], False)
print("built")
"""


@pytest.mark.slow
def test_compiles_for_a_gpu_that_is_not_there():
    run = without_interpreter(AHEAD_OF_TIME)
    assert run.stdout.strip() == "built", run.stderr
