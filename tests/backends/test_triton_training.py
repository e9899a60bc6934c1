"""Sampled training by Triton's kernels, as a whole: where they are used, and that a step is what torch computes."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import fastff
from fastff.backends import (
    available,
    paths,
    triton,
    triton_paths,
    triton_sampled_launch,
    triton_segments,
    triton_training,
)
from fastff.tree import level_sizes
from helpers import make, relative_error
from triton_helpers import DEVICE

pytest.importorskip("triton")
X = torch.randn(3, 5)


@pytest.fixture
def everywhere(monkeypatch):
    """Let the kernels take CPU tensors, which the interpreter can run."""
    monkeypatch.setattr(triton_training, "takes", lambda *_: True)


def test_kernels_run_only_where_they_were_chosen(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with fastff.backend("aten"):
        assert not triton_training.takes("relu", X)
    assert triton_training.takes("relu", X, None, X)
    assert not triton_training.takes(torch.relu, X)
    assert not triton_training.takes("relu", X, X.double())
    assert not triton_training.takes("relu", X, X.T)
    assert not triton_training.takes("relu", X, torch._neg_view(X))
    assert not triton_training.takes("relu", X.double())
    monkeypatch.setattr(triton, "INSTALLED", False)
    assert not triton_training.takes("relu", X)


@pytest.mark.skipif("triton" in available(), reason="needs a machine without a GPU")
def test_a_cpu_has_the_torch_operations():
    assert not triton_training.takes("relu", X)
    with pytest.raises(ValueError, match="backend='triton' is not available here"):
        fastff.backend("triton")


def steps(layer, run, x):
    """Outputs, paths, shares and gradients of two steps from one seed, with both losses on the tree."""
    torch.manual_seed(1)
    layer.running_shares, found = None, []
    for _ in range(2):
        layer.zero_grad()
        x = x.detach().requires_grad_()
        y = run(x)
        (y.square().sum() + fastff.balance_loss(layer) + fastff.hardening_loss(layer)).backward()
        found += [
            y.detach(),
            layer.last_path.detach(),
            layer.running_shares,
            x.grad,
            *(p.grad for p in layer.parameters()),
        ]
    return found


OPTIONS = [  # what triton_sampled_launch.py does not take, so that parts run
    {"transposition": 0.3},
    {"transposition": 0.1, "estimator": "even", "bias": False},
    {"alternatives": 2, "activation": "swiglu", "transposition": 0.2, "dropout": 0.1},
    {"node_width": 2},
]


def check_steps(layer, run, x, monkeypatch):
    with fastff.backend("aten"):
        expected = steps(layer, layer, x)
    monkeypatch.setattr(triton_training, "_can_run", lambda x: True)
    for ours, theirs in zip(steps(layer, run, x), expected, strict=True):
        # float32 on both sides, sums of at most a few dozen terms of order one, in another order.
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
def test_a_step_is_the_one_of_torch(options, monkeypatch):
    """The same draws and decisions, and the same output and gradients."""
    layer = make(depth=3, decision="sampled", dtype=torch.float32, **options).to(DEVICE)
    check_steps(layer, layer, torch.randn(21, 5, device=DEVICE), monkeypatch)


@pytest.mark.slow
def test_compiled_equals_eager(monkeypatch):
    """A compiler sees the kernels as operations. The choice asked for a tensor's negative bit, which Dynamo refuses."""
    torch._dynamo.reset()
    launched, real = [], triton_segments._product
    monkeypatch.setattr(triton_segments, "_product", lambda *a: launched.append(1) or real(*a))
    dropout = 0.1 if DEVICE == "cpu" else 0.0  # on a GPU, a compiled dropout draws other numbers
    layer = make(depth=3, decision="sampled", transposition=0.2, dropout=dropout, dtype=torch.float32).to(DEVICE)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    check_steps(layer, compiled, torch.randn(9, 5, device=DEVICE), monkeypatch)
    assert launched


def negated(t):
    """The same numbers: others in memory, and a bit that says to negate them."""
    return torch._neg_view(-t)


def apart(t):
    """The same numbers, with gaps between them."""
    return torch.stack([t, torch.zeros_like(t)], -1)[..., 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["leaf_product", "leaf_outer", "walk_from", "path_logits", "path_inputs", "path_outer"]
)
def test_operations_read_numbers_however_they_are_stored(name):
    """A compiler may pass views. The kernels of paths took what lay in memory, gaps and all."""
    node = torch.randint(15, (11,), device=DEVICE)
    leaf, order, end = groups = triton_segments.group(torch.randint(8, (11,), device=DEVICE), 8)
    x, grad, tree = torch.randn(11, 5), torch.randn(11, 3), (torch.randn(7, 5), torch.randn(7))
    x, grad, *tree = (t.to(DEVICE) for t in (x, grad, *tree))
    given = {
        "leaf_product": (x, torch.randn(8, 4, 5, device=DEVICE), torch.randn(8, 4, device=DEVICE), leaf, order, True),
        "leaf_outer": (grad, x, leaf, order, end, 8, "first"),
        "walk_from": (x, *tree, None, None, node, grad, None, "relu"),
        "path_logits": (x, leaf, order, *tree),
        "path_inputs": (grad, leaf, order, tree[0]),
        "path_outer": (x, grad, *groups, tree[0]),
    }[name]
    run = getattr(torch.ops.fastff, name)
    for view in (negated, apart):
        views = [view(t) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in given]
        torch.testing.assert_close(run(*views), run(*given), rtol=0, atol=0)


@pytest.mark.slow
def test_a_gradient_that_a_bit_negates(everywhere):
    """The kernels of the backward pass read the opposite numbers."""
    layer = make(depth=2, decision="sampled", dtype=torch.float32).to(DEVICE).freeze_tree_()
    x, grad = torch.randn(9, 5, device=DEVICE), torch.randn(9, layer.out_features, device=DEVICE)
    layer(x).backward(grad)
    wanted = layer.leaf_in_weight.grad.clone()
    layer.zero_grad()
    layer(x).backward(negated(grad))
    assert torch.equal(layer.leaf_in_weight.grad, wanted)


class Sizes(TorchDispatchMode):
    """Remembers the largest tensor that an operation makes, besides those with a row for each node or leaf."""

    def __init__(self, layer):
        super().__init__()
        self.counts, self.largest, self.shape = {layer.num_nodes, layer.num_leaves}, 0, ()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for t in found if isinstance(found, tuple | list) else (found,):
            if isinstance(t, torch.Tensor) and t.numel() > self.largest and not {*t.shape[:1]} & self.counts:
                self.largest, self.shape = t.numel(), tuple(t.shape)
        return found


def unseen(launch):
    """A launch without the modes that watch operations: the interpreter copies what a kernel reads."""

    def run(*args, **options):
        with _disable_current_modes():
            launch(*args, **options)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("depth", [3, 8])
def test_no_tensor_grows_with_the_number_of_leaves(everywhere, depth, monkeypatch):
    """The parts of sums over spans, too: their room depends on the batch and on the width alone."""
    for module in (triton_segments, triton_paths, triton_sampled_launch):
        monkeypatch.setattr(module, "launch_kernel", unseen(module.launch_kernel))
    layer = fastff.FFF(9, 7, depth=depth, leaf_width=2, decision="sampled").to(DEVICE)
    with Sizes(layer) as sizes:
        (layer(torch.randn(40, 9, device=DEVICE)).square().sum() + fastff.balance_loss(layer)).backward()
    # Two numbers for each level of two paths; or the room of two spans, two slots of 16 levels by 32 numbers each.
    assert sizes.largest <= max(40 * 4 * depth, 2 * 2 * 16 * 32), sizes.shape


gpu = pytest.mark.gpu


def in_float64(layer):
    wide = fastff.FFF(
        layer.in_features, layer.out_features, depth=layer.depth, leaf_width=layer.leaf_width, decision="sampled"
    ).to("cuda", torch.float64)
    wide.load_state_dict({name: t.double() for name, t in layer.state_dict().items()})
    return wide.train()


def on_gpu(depth=6, dtype=torch.bfloat16, features=96, **options):
    layer = fastff.FFF(features, features, depth=depth, leaf_width=8, decision="sampled", **options).to("cuda", dtype)
    x = torch.randn(1000, features, device="cuda", dtype=dtype)
    torch.nn.init.zeros_(layer.node_bias)  # about as many samples to the left as to the right
    return layer.train(), x


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("depth", "features"), [(1, 37), (6, 96), (15, 40)])
def test_gradients_on_a_gpu_against_float64(dtype, depth, features):
    """The leaves' are at most twice as far off as torch's. The tests of the parts run there, too, and have the rest."""
    layer, x = on_gpu(depth, dtype, features)
    exact = in_float64(layer)
    z = paths.logits(x.double(), paths.nodes(exact.route(x.double()), depth), exact.tree, "relu")
    x = x[z.abs().amin(1) > 1e-4]  # no decision within rounding of a boundary
    grad = torch.randn_like(x)
    found = []
    for backend, module, rows in (("triton", layer, x), ("aten", layer, x), ("aten", exact, x.double())):
        module.freeze_tree_().zero_grad()
        with fastff.backend(backend):
            y = module(rows)
            y.backward(grad.to(rows.dtype))
        found.append([y.detach(), *(p.grad for p in module.leaf_parameters())])
    for ours, plain, right in zip(*found, strict=True):
        assert relative_error(ours, right) <= 2 * relative_error(plain, right) + torch.finfo(dtype).eps


@gpu
def test_a_step_on_a_gpu_waits_for_nothing_and_repeats_its_bits():
    layer, x = on_gpu()
    with fastff.backend("triton"):
        found = []
        for _ in range(3):
            torch.manual_seed(1)
            layer.zero_grad()
            layer.running_shares = None  # the loss reads them, and each step moves them
            torch.cuda.set_sync_debug_mode("error" if found else "default")  # kernels are compiled by now
            try:
                (layer(x).square().sum() + fastff.balance_loss(layer)).backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            found.append([p.grad for p in layer.parameters()])
    for once, again in zip(*found[1:], strict=True):
        assert torch.equal(once, again)


@gpu
@pytest.mark.parametrize("depth", [4, 15])
def test_a_step_in_a_cuda_graph_trains(depth):
    """Forward, losses, backward and fused AdamW: a graph's runs draw anew, and move the running shares."""
    layer, x = on_gpu(depth)
    target, static = torch.randn_like(x) / 10, torch.empty_like(x)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3, fused=True, capturable=True)
    losses = []

    def step():
        optimizer.zero_grad()
        loss = (layer(static) - target).square().mean() + 0.01 * fastff.balance_loss(layer)
        loss.backward()
        optimizer.step()
        return loss.detach()

    static.copy_(x)
    with fastff.backend("triton"):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad()
        with torch.cuda.graph(graph):
            loss = step()
        shares = layer.running_shares.clone()
        for _ in range(50):
            graph.replay()
            losses.append(loss.clone())
    assert losses[-1] < 0.9 * losses[0]
    assert all(p.isfinite().all() for p in layer.parameters())
    assert not torch.equal(layer.running_shares, shares)
    # Three steps and 50 runs. Each replaces the shares of the upper levels, and 16 / n of those of a level of n nodes.
    sizes = level_sizes(depth)
    sums = torch.stack([level.sum() for level in layer.running_shares.cpu().split(sizes)])
    wanted = torch.tensor([1 - max(0.0, 1 - 16 / n) ** 53 for n in sizes])
    torch.testing.assert_close(sums, wanted, rtol=1e-3, atol=0)  # 1 at the root, 0.05 at depth 15


@gpu
@pytest.mark.parametrize("skew", [False, True])
def test_inductor_on_a_gpu(skew):
    torch._dynamo.reset()
    layer, x = on_gpu(dtype=torch.float32)
    if skew:
        with torch.no_grad():
            layer.node_weight.zero_()
            layer.node_bias.fill_(1)
    layer.freeze_tree_()
    with fastff.backend("triton"):
        found = []
        for run in (layer, torch.compile(layer, fullgraph=True)):
            layer.zero_grad()
            run(x).square().sum().backward()
            found.append([p.grad for p in layer.leaf_parameters()])
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-4)


@gpu
def test_auto_runs_the_kernels_on_a_gpu(monkeypatch):
    launched, real = [], triton_sampled_launch._walk
    monkeypatch.setattr(triton_sampled_launch, "_walk", lambda *a: launched.append(1) or real(*a))
    layer, x = on_gpu()
    layer(x).sum().backward()
    assert launched
