"""What must hold on a CUDA device; run with `make test-gpu` on a machine that has one."""

import copy
import itertools
import warnings

import pytest
import torch

import fastff
from fastff.backends import available, reference, triton, triton_hard
from fastff.backends.triton_choice import Launch, launches
from fastff.backends.triton_size import size_of
from fastff.tensors import Leaves, dequantize
from fastff.tree import path
from helpers import ACTIVATIONS, make, plain_leaf, relative_error, without_interpreter

pytestmark = pytest.mark.gpu


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("backend", [name for name in available() if name != "native"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize(
    ("batch", "depth", "leaf_width", "options"),
    [
        (0, 3, 3, {}),
        (1, 7, 32, {"activation": "swiglu"}),
        (257, 0, 3, {}),
        (257, 5, 3, {"node_width": 3}),
        (63, 11, 2, {}),
    ],
)
def test_agrees_with_float64(backend, dtype, mode, batch, depth, leaf_width, options):
    """Within twice the error of a dense layer of the same training width in that dtype, both against float64."""
    layer = make(37, 29, depth=depth, leaf_width=leaf_width, dtype=dtype, device="cuda", **options).train(
        mode == "train"
    )
    exact = make(37, 29, depth=depth, leaf_width=leaf_width, **options).train(mode == "train")
    exact.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    x = torch.randn(batch, 37).to(dtype)
    with fastff.backend("reference"):
        expected, route = exact(x.double()), exact.route(x.double())
    # The soft pass of triton does not cover every case here; "auto" uses it where it does.
    with fastff.backend("auto" if (backend, mode) == ("triton", "train") else backend):
        y, ours = layer(x.cuda()), layer.route(x.cuda()).cpu()
    assert y.dtype == dtype
    same = ours == route  # a logit within rounding of zero may go either way
    assert same.double().mean() > 0.95 if batch > 1 else True
    if not same.any():
        return
    activation, width = options.get("activation", "relu"), layer.training_width
    dense = fastff.baselines.FF(37, 29, width=width, activation=activation, dtype=dtype, device="cuda")
    wide = copy.deepcopy(dense).cpu().double()
    probe = torch.randn(257, 37).to(dtype)
    allowed = relative_error(dense(probe.cuda()).cpu(), wide(probe.double()))
    keep = same if mode == "eval" else torch.ones_like(same)
    assert relative_error(y.cpu()[keep], expected[keep]) <= 4 * allowed


def test_a_training_step_does_not_wait_for_the_device():
    layer = fastff.FFF(64, 64, depth=4, leaf_width=8, transposition=0.1, device="cuda")
    x = torch.randn(128, 64, device="cuda")

    def step():
        loss = layer(x).square().mean() + fastff.hardening_loss(layer) + 0.1 * fastff.balance_loss(layer)
        (loss + fastff.balance_loss(layer, "leaf")).backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        layer.eval()(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_captured_in_a_cuda_graph(mode):
    layer = getattr(fastff.FFF(64, 48, depth=5, leaf_width=8, device="cuda"), mode)()
    x = torch.randn(33, 64, device="cuda")
    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        x.copy_(torch.randn(33, 64))
        graph.replay()
        torch.testing.assert_close(y, layer(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_inductor(dtype, mode):
    torch._dynamo.reset()
    layer = getattr(fastff.FFF(64, 48, depth=5, leaf_width=8, device="cuda", dtype=dtype), mode)()
    compiled = torch.compile(layer, fullgraph=True)
    for batch in (33, 65, 127):
        x = torch.randn(batch, 64, device="cuda", dtype=dtype, requires_grad=True)
        y, expected = compiled(x), layer(x)
        rounding = 8 * torch.finfo(dtype).eps
        assert (y - expected).norm() <= rounding * expected.norm()
        (ours,) = torch.autograd.grad(compiled(x).square().sum(), x)
        (wanted,) = torch.autograd.grad(layer(x).square().sum(), x)
        assert (ours - wanted).norm() <= 4 * rounding * wanted.norm()


def test_autocast_and_data_on_the_cpu():
    model = torch.nn.Sequential(
        fastff.FFF(16, 16, depth=3, leaf_width=4), fastff.FFF(16, 8, depth=2, leaf_width=4)
    ).cuda()
    x = torch.randn(500, 16)
    fastff.initialize_tree_(model, torch.utils.data.DataLoader(x, batch_size=64))
    counts = fastff.usage(model, x)["0"].leaf_count
    assert counts.is_cuda
    assert counts.max() - counts.min() <= 5
    with torch.autocast("cuda", torch.bfloat16):
        for mode in (model.train(), model.eval()):
            assert mode(x.cuda()).dtype == torch.bfloat16


def test_too_large_for_the_device():
    with pytest.raises(MemoryError, match="on cuda:0, which cannot be allocated: cuda:0 can hold"):
        fastff.FFF(768, 768, depth=25, leaf_width=32, device="cuda")


def test_triton_is_there():
    assert "triton" in available()
    layer = fastff.FFF(64, 48, depth=5, leaf_width=8, device="cuda").eval()
    x = torch.randn(33, 64, device="cuda")
    with torch.no_grad():
        found = fastff.explain(layer, x)
        assert (found.mode, found.backend, found.reason) == ("hard", "triton", "auto: the fastest on cuda")
        assert "us predicted (H200)" in str(found)
        assert list(found.others) == ["native"]
        large = fastff.FFF(768, 768, depth=8, leaf_width=32, device="cuda", dtype=torch.bfloat16).eval()
        many = fastff.explain(large, torch.empty(2**14, 768, device="cuda", dtype=torch.bfloat16))
        assert "go through both products of the leaf" in many.how
        assert "us for all leaves" in many.how
        assert fastff.explain(layer.double(), x.double()).backend == "aten"
    assert fastff.explain(layer.float().train(), x).backend == "triton"


ALONE = Launch()
GROUPED = Launch(True, k=32, n=64)
WAYS = {
    "alone": ALONE,
    "spread": Launch(spread=True, block=4, n=64, out_k=16),
    "tiles": GROUPED,
    "sorted": GROUPED,
    "spread tiles": Launch(True, True, block=32, k=32, n=64, out_k=32),
    "dense": Launch(True, dense=True),
    "top": Launch(True, tile=32, top=8, leaf_tile=64, k=64, n=64, stages=4),
    "parts": Launch(True, True, top=8, splits=2, product_k=32, leaf_tile=32, block=16, k=64, n=64, out_k=64),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", [*WAYS, "whole", "split whole", "chosen"])
@pytest.mark.parametrize(
    ("batch", "sizes", "depth", "leaf_width", "options"),
    [
        (257, (37, 29), 5, 3, {}),
        (257, (37, 29), 5, 3, {"node_width": 3, "activation": "gelu"}),
        (257, (37, 29), 5, 3, {"activation": "swiglu", "bias": False}),
        (2048, (64, 48), 5, 8, {"activation": "gelu_tanh"}),
        (2048, (64, 48), 10, 8, {"activation": "geglu"}),
        (1, (768, 768), 8, 32, {"activation": "silu"}),
        (5, (37, 29), 0, 130, {"activation": "tanh"}),
        (63, (100, 1100), 1, 130, {"activation": "swiglu"}),
        (2048, (768, 768), 8, 32, {}),
        (33, (3000, 20), 3, 40, {"activation": "identity"}),
    ],
)
def test_hard_pass_agrees_with_float64(dtype, way, batch, sizes, depth, leaf_width, options, monkeypatch):
    """Every way: the leaves of float64 where its logits are clear, and at most twice the error of plain torch."""
    launch = WAYS.get(way)
    if launch is not None and launch.top:
        if dtype == torch.float32 or depth == 0 or "node_width" in options:
            pytest.skip("not a way that is ever taken")
        launch = launch._replace(top=min(depth, launch.top))
    if leaf_width > 128 and launch is not None and not (launch.spread or launch.dense):
        pytest.skip("not a way that is ever taken")
    if way == "dense" and dtype == torch.float32:
        pytest.skip("not a way that is ever taken: a library's products have other errors")
    if batch == 1 and launch is not None and launch.grouped:
        pytest.skip("not a way that is ever taken; plain torch adds up one sample in another order, and closer")
    if way == "sorted":
        monkeypatch.setattr(triton_hard, "_MOST_LISTED", 0)
    shape = {"depth": depth, "leaf_width": leaf_width} | options
    layer = make(*sizes, scale=2.0, dtype=dtype, **shape).requires_grad_(False).eval()
    exact = make(*sizes, **shape).requires_grad_(False).eval()
    exact.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    x = torch.randn(batch, sizes[0]).to(dtype)
    activation = layer.activation
    route = reference.route(x.double(), exact.tree, activation)
    logits = reference.node_logits(x.double(), exact.tree, activation)
    visited = torch.tensor([[node for node, _ in path(leaf, depth)] for leaf in route.tolist()], dtype=torch.int64)
    clear = (logits.gather(1, visited).abs() > 1e-5).all(-1)  # sums are float32 ones in every dtype
    assert clear.sum() > 0.9 * batch
    on_gpu = copy.deepcopy(layer).cuda()
    if "whole" in way:
        launch = launches(size_of(x, on_gpu.tree, on_gpu.leaves)).get(way)
        if launch is None:
            pytest.skip("not a way that is ever taken")
    launch = launch and launch._replace(pdl=torch.cuda.get_device_capability()[0] >= 9)
    y, leaf = triton.hard(x.cuda(), on_gpu.tree, on_gpu.leaves, activation, launch)
    assert y.dtype == dtype
    assert torch.equal(leaf.cpu()[clear], route[clear])
    assert torch.equal(on_gpu.route(x.cuda()).cpu()[clear], route[clear])
    assert y.isfinite().all()
    leaf = leaf.cpu()
    expected = reference.visit(x.double(), leaf, exact.leaves, activation)
    # Plain torch on the same device, leaf by leaf, as one would write it.
    plain = torch.empty_like(y)
    for j in leaf.unique().tolist():
        plain[leaf == j] = plain_leaf(on_gpu, x.cuda()[leaf == j], j)
    allowed = 2 * relative_error(plain.cpu(), expected)
    assert relative_error(y.cpu(), expected) <= allowed
    again = triton.visit(x.cuda(), leaf.cuda(), on_gpu.leaves, activation)
    assert relative_error(again.cpu(), expected) <= allowed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("way", ["alone", "spread", "tiles", "spread tiles", "chosen"])
@pytest.mark.parametrize(("batch", "activation"), [(3, "swiglu"), (257, "relu")])
def test_int8_leaves_agree_with_float64(dtype, way, batch, activation):
    """At most twice the error of plain torch with the weights that int8 stands for."""
    layer = make(256, 200, depth=3, leaf_width=40, scale=2.0, dtype=dtype, activation=activation, device="cuda")
    fastff.quantize_(layer.eval().requires_grad_(False))
    x = torch.randn(batch, 256, device="cuda").to(dtype)
    y, leaf = triton.hard(x, layer.tree, layer.leaves, activation, WAYS.get(way))
    wide = Leaves._make(None if t is None else t.double() for t in dequantize(layer.leaves))
    expected = reference.visit(x.double(), leaf, wide, activation)
    narrow = Leaves._make(None if t is None else t.to(dtype) for t in dequantize(layer.leaves))
    plain = reference.visit(x, leaf, narrow, activation)
    assert relative_error(y, expected) <= 2 * relative_error(plain, expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("way", [ALONE, GROUPED])
def test_activations(activation, way):
    """Where they are steep, flat and saturated."""
    layer = make(1, 1, depth=0, leaf_width=1, bias=False, dtype=torch.float32, activation=activation)
    layer = layer.requires_grad_(False)
    for name in ("in", "out", "gate"):
        if (weight := getattr(layer, f"leaf_{name}_weight")) is not None:
            weight.fill_(1.0)
    x = torch.cat([torch.linspace(-12, 12, 999), torch.linspace(-100, 100, 99)])[:, None]
    exact = reference.hard(x.double(), layer.double().tree, layer.leaves, activation)[0]
    layer = layer.float().cuda()
    y = triton.hard(x.cuda(), layer.tree, layer.leaves, activation, way)[0].cpu()
    # A few roundings of numbers up to x, or to its square behind a gate.
    size = x.abs().clamp(min=1) ** (2 if layer.leaf_gate_weight is not None else 1)
    assert ((y - exact).abs() <= 8 * torch.finfo(torch.float32).eps * size).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "depth"), [(1, 8), (300, 3), (4096, 5), (4096, 10), (20000, 10)])
@pytest.mark.parametrize("listed", [True, False])
def test_the_hard_pass_gives_the_same_numbers_at_every_run(dtype, batch, depth, listed, monkeypatch):
    """Bit by bit, although the order within a list differs; and a row does not depend on the rows beside it."""
    if not listed:
        monkeypatch.setattr(triton_hard, "_MOST_LISTED", 0)
    layer = fastff.FFF(256, 200, depth=depth, leaf_width=32, device="cuda", dtype=dtype).eval()
    x = torch.randn(batch, 256, device="cuda", dtype=dtype)
    with torch.no_grad():
        y = layer(x)
        for _ in range(5):
            assert torch.equal(layer(x), y)
        order = torch.randperm(batch, device="cuda")
        assert torch.equal(layer(x[order]), y[order])


@pytest.mark.parametrize("way", ["alone", "grouped", "sorted"])
def test_the_hard_pass_in_a_cuda_graph(way, monkeypatch):
    """Recorded once, it is right for other inputs, which go to other leaves; and it does not wait for the device."""
    monkeypatch.setattr(triton_hard, "choose_launch", lambda *_: ALONE if way == "alone" else GROUPED)
    if way == "sorted":
        monkeypatch.setattr(triton_hard, "_MOST_LISTED", 0)
    layer = fastff.FFF(64, 48, depth=5, leaf_width=8, device="cuda").eval()
    x = torch.randn(333, 64, device="cuda")
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            layer(x), layer.route(x)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            layer(x), layer.route(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, leaf = layer(x), layer.route(x)
        for seed in range(3):
            torch.manual_seed(seed)
            x.copy_(torch.randn(333, 64))
            graph.replay()
            assert torch.equal(y, layer(x))
            assert torch.equal(leaf, layer.route(x))
            with fastff.backend("reference"):
                assert torch.equal(leaf, layer.route(x))
                torch.testing.assert_close(y, layer(x), rtol=1e-4, atol=1e-5)


def test_dependent_launches_in_a_chain():
    """Every way directly after every other, each pass reading what the one before it wrote."""
    layer = fastff.FFF(64, 64, depth=3, leaf_width=8, device="cuda", dtype=torch.bfloat16).eval().requires_grad_(False)
    start = torch.randn(256, 64, device="cuda", dtype=torch.bfloat16)
    ways = [Launch(tiny=True), *(WAYS[name] for name in ("alone", "spread", "tiles", "spread tiles"))]

    def chain(pdl):
        x = start
        for one, two in itertools.product(ways, ways):
            for launch in (one, two):
                x = triton.hard(x, layer.tree, layer.leaves, "relu", launch._replace(pdl=pdl))[0]
                if not pdl:
                    torch.cuda.synchronize()
        return x

    expected = chain(False)
    assert expected.isfinite().all()
    for _ in range(5):
        assert torch.equal(chain(torch.cuda.get_device_capability()[0] >= 9), expected)


@pytest.mark.parametrize("batch", [1, 40, 700])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("sizes", "depth", "leaf_width", "options"),
    [
        ((64, 48), 3, 4, {}),
        ((512, 300), 5, 40, {"activation": "swiglu"}),
        ((2048, 520), 6, 200, {"bias": False}),
        ((100, 30), 2, 9, {"node_width": 2}),
        ((128, 128), 0, 32, {}),
    ],
)
@torch.no_grad()
def test_recorded_launches(batch, dtype, sizes, depth, leaf_width, options):
    """The second call of a layer repeats the launches of the first. They read the inputs and weights of this call."""
    layer = make(*sizes, depth=depth, leaf_width=leaf_width, dtype=dtype, device="cuda", **options).eval()

    def direct(x):
        return triton.hard(x, layer.tree, layer.leaves, layer.activation)[0]

    inputs = [torch.randn(batch, sizes[0], device="cuda").to(dtype) for _ in range(3)]
    unaligned = torch.randn(batch * sizes[0] + 1, device="cuda").to(dtype)[1:].view(batch, sizes[0])
    for x in [*inputs, unaligned, unaligned.clone(), inputs[0][:0], inputs[1]]:
        assert torch.equal(layer(x), direct(x))
        assert torch.equal(layer(x.view(1, *x.shape)), direct(x)[None])
    plan = layer._plans.plan
    assert plan is not None
    assert len(plan._replays) == 2  # aligned or not
    before = layer(inputs[0])
    layer.leaf_out_weight.mul_(2)  # in place
    assert not torch.equal(layer(inputs[0]), before)
    assert torch.equal(layer(inputs[0]), direct(inputs[0]))
    layer.leaf_in_weight.data = layer.leaf_in_weight.data * 3  # elsewhere
    assert torch.equal(layer(inputs[0]), direct(inputs[0]))
    assert layer._plans.plan is not plan
    with torch.cuda.stream(torch.cuda.Stream()):
        y = layer(inputs[2])
        torch.cuda.current_stream().synchronize()
    assert torch.equal(y, direct(inputs[2]))
    graph = torch.cuda.CUDAGraph()
    x = inputs[0].clone()
    with torch.cuda.graph(graph):
        y = layer(x)
    x.copy_(inputs[1])
    graph.replay()
    assert torch.equal(y, direct(inputs[1]))


@torch.no_grad()
def test_recorded_launches_and_profilers():
    from triton import knobs

    layer, x = make(64, 48, depth=3, leaf_width=4, dtype=torch.float32, device="cuda").eval(), None
    x = torch.randn(9, 64, device="cuda")
    expected, heard = layer(x), []
    knobs.runtime.launch_enter_hook.add(heard.append)
    try:
        assert torch.equal(layer(x), expected)
    finally:
        knobs.runtime.launch_enter_hook.remove(heard.append)
    assert heard
    assert torch.equal(layer(x), expected)


@torch.no_grad()
def test_the_weights_as_input():
    """Their address stands for the weights in what is recorded, and not for the next input."""
    layer = make(64, 48, depth=3, leaf_width=4, dtype=torch.float32, device="cuda").eval()
    own, x = layer.leaf_in_weight.data[0], torch.randn(4, 64, device="cuda")
    for _ in range(2):
        for each in (own, x):
            assert torch.equal(layer(each), triton.hard(each, layer.tree, layer.leaves, "relu")[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_hard_pass_by_inductor_without_gradients(dtype):
    torch._dynamo.reset()
    layer = fastff.FFF(64, 48, depth=5, leaf_width=8, device="cuda", dtype=dtype).eval()
    compiled = torch.compile(lambda x: layer(x).relu(), fullgraph=True)
    with torch.no_grad():
        for batch in (33, 65, 4096):
            x = torch.randn(batch, 64, device="cuda", dtype=dtype)
            assert torch.equal(compiled(x), layer(x).relu())  # the same kernels


def test_hard_pass_has_derivatives():
    layer = fastff.FFF(64, 48, depth=5, leaf_width=8, activation="tanh", device="cuda").eval()
    x = torch.randn(333, 64, device="cuda", requires_grad=True)
    wanted = [x, *layer.leaf_parameters()]
    grads = {}
    for name in ("auto", "reference"):
        with fastff.backend(name):
            first = torch.autograd.grad(layer(x).square().sum(), wanted, create_graph=True)
            second = torch.autograd.grad(first[0].square().sum(), wanted)
            grads[name] = [*first, *second]
    for ours, expected in zip(grads["auto"], grads["reference"], strict=True):
        assert relative_error(ours, expected.double()) < 1e-5


def test_a_kernel_that_does_not_fit(monkeypatch):
    """`auto` raised Triton's OutOfResources once. It warns, once for a layer of this size, and torch takes over."""
    too_large = Launch(True, True, block=128, k=1024, n=1024, out_k=1024, stages=4)
    monkeypatch.setattr(triton_hard, "choose_launch", lambda *_: too_large)
    options = {"depth": 5, "leaf_width": 512, "activation": "swiglu", "device": "cuda", "dtype": torch.bfloat16}
    layer = fastff.FFF(4096, 4096, **options).eval().requires_grad_(False)
    x = torch.randn(32, 4096, device="cuda", dtype=torch.bfloat16)
    leaf = layer.route(x)
    wide = reference.Leaves(*(None if t is None else t.float() for t in layer.leaves))
    exact = reference.visit(x.float(), leaf, wide, "swiglu")
    triton._failures.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            y = layer(x)
            assert relative_error(y.float(), exact.double()) < 2**-7
    assert len(caught) == 1
    assert "inputs of shape (32, 4096) with leaves of shape (32, 512, 4096)" in str(caught[0].message)
    assert "could not run its kernel" in str(fastff.explain(layer, x))
    with fastff.backend("triton"), pytest.raises(ValueError, match="cannot run this hard pass"):
        layer(x)
    triton._failures.clear()


def test_views_and_freed_memory():
    """Kernels read memory: what it means, and whether it is still there, is asked first."""
    layer = make(16, 16, depth=3, leaf_width=16, dtype=torch.float32, device="cuda").eval().requires_grad_(False)
    x = torch.randn(9, 16, device="cuda")
    for view in (torch._neg_view, lambda t: t.mT, lambda t: t[:1].expand_as(t)):
        layer.leaf_in_weight.data = view(layer.leaf_in_weight.data)
        with fastff.backend("reference"):
            expected = layer(x), layer(torch._neg_view(x))
        torch.testing.assert_close((layer(x), layer(torch._neg_view(x))), expected)
    layer.leaf_in_weight.data = layer.leaf_in_weight.data.resolve_neg().contiguous()
    layer.leaf_in_weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="its memory was freed"):
        layer(x)


def test_leaves_that_do_not_exist():
    """The device stops, as it does for an index out of range in torch; so this runs in a process of its own."""
    script = """
import torch, fastff
layer = fastff.FFF(16, 8, depth=3, leaf_width=4, device="cuda").eval().requires_grad_(False)
x, leaf = torch.randn(5, 16, device="cuda"), torch.tensor([0, 1, 7, 7, 3], device="cuda")
fastff.functional.visit(x, leaf, layer.leaves, "relu").sum().item()
print("good")
fastff.functional.visit(x, leaf + 1, layer.leaves, "relu").sum().item()
print("bad")
"""
    result = without_interpreter(script)
    assert "good" in result.stdout
    assert "bad" not in result.stdout
    assert "assert" in result.stderr


@pytest.mark.parametrize(("depth", "leaf_width"), [(13, 1), (12, 2), (1, 4096), (2, 1025), (7, 64)])
@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_the_soft_pass_at_its_largest(depth, leaf_width, activation):
    """Forward and backward, without a warning that torch had to take over."""
    layer = fastff.FFF(32, 16, depth=depth, leaf_width=leaf_width, activation=activation, device="cuda")
    x = torch.randn(5, 32, device="cuda", requires_grad=True)
    triton._failures.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        (ours,) = torch.autograd.grad(layer(x).square().sum(), x)
    with fastff.backend("aten"):
        (wanted,) = torch.autograd.grad(layer(x).square().sum(), x)
    assert (ours - wanted).norm() <= 1e-2 * wanted.norm()
