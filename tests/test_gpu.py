"""What must hold on a CUDA device; run with `make test-gpu` on a machine that has one."""

import copy

import pytest
import torch

import fastff
from fastff.backends import available
from helpers import make, relative_error

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", available())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
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
    with fastff.backend(backend):
        y, ours = layer(x.cuda()), layer.route(x.cuda()).cpu()
    assert y.dtype == dtype
    same = ours == route  # a logit within rounding of zero may go either way
    assert same.double().mean() > 0.95 if batch > 1 else True
    if not same.any():
        return
    activation, width = options.get("activation", "relu"), layer.training_width
    dense = fastff.FF(37, 29, width=width, activation=activation, dtype=dtype, device="cuda")
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
