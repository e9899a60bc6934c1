"""The Triton kernels for tiny layers: by the interpreter where there is no GPU, and compiled ahead of time for one."""

import pytest
import torch

from fastff.backends import reference, triton_tile
from fastff.backends.triton_size import size_of
from fastff.backends.triton_tile import TileLaunch
from fastff.tree import path
from helpers import ACTIVATIONS, make, plain_leaf, relative_error, without_interpreter
from triton_helpers import DEVICE, check, check_error, check_ties, in_float64, layer_of, run

pytestmark = pytest.mark.slow

pytest.importorskip("triton")
ROWS = TileLaunch("rows", top=2, round=1, loads=8)
LEAF = TileLaunch("leaf", 32, 8, 4, top=1, round=2)
WAYS = {"rows": ROWS, "leaf": LEAF}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_equals_the_reference(way, activation, bias):
    layer = layer_of(7, 5, depth=3, leaf_width=3, activation=activation, bias=bias)
    check(triton_tile.hard, layer, torch.randn(17, 7, device=DEVICE), WAYS[way])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("depth", [0, 1, 6])
@pytest.mark.parametrize("batch", [0, 1, 33])
def test_depths_and_batches(way, depth, batch):
    check(triton_tile.hard, layer_of(5, 3, depth=depth, leaf_width=2), torch.randn(batch, 5, device=DEVICE), WAYS[way])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("activation", ["relu", "swiglu"])
@pytest.mark.parametrize(("sizes", "leaf_width"), [((1, 1), 1), ((150, 1), 33), ((9, 130), 2), ((130, 40), 17)])
def test_sizes(way, activation, sizes, leaf_width):
    """Beyond one block in each direction: features, outputs, and groups of neurons."""
    layer = layer_of(*sizes, depth=2, leaf_width=leaf_width, activation=activation)
    check(triton_tile.hard, layer, torch.randn(5, sizes[0], device=DEVICE), WAYS[way])


@pytest.mark.parametrize("samples", [8, 32])
@pytest.mark.parametrize("lanes", [4, 32])
@pytest.mark.parametrize(("top", "levels"), [(1, 1), (3, 3), (5, 2)])
def test_rounds_and_tiles(samples, lanes, top, levels):
    layer = layer_of(40, 5, depth=5, leaf_width=3)
    way = TileLaunch("rows", samples, lanes, 8, top, levels)
    check(triton_tile.hard, layer, torch.randn(40, 40, device=DEVICE), way)


@pytest.mark.parametrize("way", WAYS)
def test_one_leaf_takes_all(way):
    layer = layer_of(7, 5, depth=3, leaf_width=3)
    layer.node_weight.zero_()
    check(triton_tile.hard, layer, torch.randn(33, 7, device=DEVICE), WAYS[way])


@pytest.mark.parametrize("way", WAYS)
def test_a_logit_of_zero_goes_right_and_nan_left(way):
    check_ties(triton_tile.hard, 17, WAYS[way])


@pytest.mark.parametrize("way", WAYS)
def test_infinite_numbers(way):
    """What torch makes of them: relu(-inf) is 0; and the weights of a leaf that is not visited do not count."""
    layer = layer_of(7, 5, depth=1, leaf_width=3)
    layer.node_weight.zero_()
    layer.node_bias.fill_(-1.0)
    layer.leaf_in_weight[:, :, 2] = layer.leaf_in_weight[:, :, 2].abs()
    layer.leaf_out_weight[1] = torch.inf
    x = torch.randn(3, 7, device=DEVICE)
    x[1, 2] = -torch.inf
    expected = reference.visit(x, torch.zeros(3, dtype=torch.int64, device=DEVICE), layer.leaves, "relu")
    assert expected.isfinite().all()
    torch.testing.assert_close(run(triton_tile.hard, layer, x, WAYS[way])[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_half_precision(dtype, way, activation):
    if way == "leaf" and dtype == torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("the interpreter multiplies the bits of bfloat16 matrices as integers")
    layer = layer_of(37, 29, depth=4, leaf_width=8, activation=activation, dtype=dtype)
    check_error(triton_tile.hard, layer, torch.randn(33, 37, device=DEVICE).to(dtype), WAYS[way])


def test_input_that_is_not_contiguous():
    layer = layer_of(7, 5, depth=3, leaf_width=3)
    check(triton_tile.hard, layer, torch.randn(7, 23, device=DEVICE).T)
    x = torch._neg_view(torch.randn(23, 7, device=DEVICE))
    check(triton_tile.hard, layer, x)


def test_why_not():
    def reason(fan_in, fan_out, depth, leaf_width, dtype=torch.float32, **options):
        layer = make(fan_in, fan_out, depth=depth, leaf_width=leaf_width, device="meta", dtype=dtype, **options)
        x = torch.empty(2048, fan_in, device="meta", dtype=dtype)
        return triton_tile.why_not(size_of(x, layer.tree, layer.leaves))

    for leaf_width, depth in ((32, 2), (16, 3), (8, 4), (4, 5), (2, 6), (1, 7)):
        assert not reason(128, 128, depth, leaf_width)
        assert not reason(784, 10, depth, min(leaf_width, 8))
    assert "nodes of width 1" in reason(128, 128, 2, 8, node_width=2)
    assert "depth 8 at most" in reason(128, 128, 9, 1)
    assert "fit into registers" in reason(4096, 10, 2, 1)
    assert "leaves of 128 blocks" in reason(768, 64, 2, 32)
    assert "leaves of 128 blocks" in reason(64, 536, 8, 17, torch.bfloat16)  # 5 kB of spilled registers, 88 us


def test_choice_of_the_way():
    def choose(depth, leaf_width, dtype, features=128, out=128):
        layer = make(features, out, depth=depth, leaf_width=leaf_width, device="meta", dtype=dtype)
        x = torch.empty(2048, features, device="meta", dtype=dtype)
        return triton_tile.choose(size_of(x, layer.tree, layer.leaves), True)

    assert choose(2, 32, torch.bfloat16).way == "leaf"
    assert choose(7, 1, torch.bfloat16).way == "rows"
    assert choose(2, 32, torch.float32).way == "rows"  # float32 has no exact product on tensor cores
    assert choose(7, 1, torch.float32, 784, 10).round == 1
    assert choose(7, 1, torch.float32).samples == 8
    layer = make(128, 128, depth=2, leaf_width=32, device="meta", dtype=torch.bfloat16)
    for dtype, words in ((torch.bfloat16, "each leaf runs tiles of 32"), (torch.float32, "tiles of 16 samples walk")):
        size = size_of(torch.empty(9, 128, device="meta", dtype=dtype), layer.tree, layer.leaves)
        assert words in triton_tile.describe(size._replace(weight_bytes=size.bytes))


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["rows", "leaf", "chosen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("batch", "sizes", "depth", "leaf_width", "options"),
    [
        (2048, (128, 128), 2, 32, {}),
        (2048, (128, 128), 7, 1, {}),
        (2048, (784, 10), 4, 8, {}),
        (257, (37, 29), 5, 3, {"activation": "swiglu", "bias": False}),
        (5, (37, 29), 0, 20, {"activation": "gelu"}),
    ],
)
def test_agrees_with_float64(way, dtype, batch, sizes, depth, leaf_width, options):
    """The leaves of float64 where its logits are clear, and at most twice the error of plain torch; every time."""
    if way == "leaf" and (sizes[0] > 512 or dtype == torch.float32):
        pytest.skip("not a way that is ever taken")
    layer = layer_of(*sizes, depth=depth, leaf_width=leaf_width, dtype=dtype, **options)
    x = torch.randn(batch, sizes[0], device=DEVICE).to(dtype)
    exact = in_float64(layer)
    route = reference.route(x.double(), exact.tree, layer.activation)
    logits = reference.node_logits(x.double(), exact.tree, layer.activation)
    visited = torch.tensor([[node for node, _ in path(leaf, depth)] for leaf in route.tolist()], dtype=torch.int64)
    clear = (logits.gather(1, visited.to(DEVICE)).abs() > 1e-5).all(-1)  # sums are float32 ones in every dtype
    assert clear.sum() > 0.9 * batch
    pdl = TileLaunch("rows", pdl=torch.cuda.get_device_capability()[0] >= 9)
    launch = {"rows": pdl._replace(top=2, round=1), "leaf": LEAF._replace(pdl=pdl.pdl), "chosen": None}[way]
    y, leaf = run(triton_tile.hard, layer, x, launch)
    assert torch.equal(leaf[clear], route[clear])
    expected = reference.visit(x.double(), leaf, exact.leaves, layer.activation)
    plain = torch.empty_like(y)
    for j in leaf.unique().tolist():
        plain[leaf == j] = plain_leaf(layer, x[leaf == j], j)
    assert relative_error(y, expected) <= 2 * relative_error(plain, expected)
    for _ in range(5):
        assert torch.equal(run(triton_tile.hard, layer, x, launch)[0], y)


@pytest.mark.gpu
@pytest.mark.parametrize("prefetch", [True, False])
def test_waits_for_the_kernel_before(prefetch):
    """Dependent launches, in a graph: pairs that follow each other directly, each reading what the one before it wrote;
    and between pairs, weights that an update has just changed."""
    layer = layer_of(128, 128, depth=4, leaf_width=2)
    launch = TileLaunch("rows", pdl=torch.cuda.get_device_capability()[0] >= 9, prefetch=prefetch)
    start = torch.randn(2048, 128, device=DEVICE)

    def chain(x):
        for _ in range(10):
            for _ in range(2):
                x = triton_tile.hard(x, layer.tree, layer.leaves, "relu", launch)[0]
            layer.leaf_out_weight.mul_(1.01)
        return x

    weight = layer.leaf_out_weight.clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        chain(start)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(start)
    layer.leaf_out_weight.copy_(weight)
    graph.replay()
    torch.cuda.synchronize()
    layer.leaf_out_weight.copy_(weight)
    x = start
    for _ in range(10):
        for _ in range(2):
            x = triton_tile.hard(x, layer.tree, layer.leaves, "relu", launch._replace(pdl=False))[0]
            torch.cuda.synchronize()
        layer.leaf_out_weight.mul_(1.01)
        torch.cuda.synchronize()
    assert torch.equal(y, x)


AHEAD_OF_TIME = """
import torch
import fastff
from fastff.backends import triton_tile, triton_tile_kernels as kernels
from fastff.backends.triton_size import size_of
from triton_build import WithoutSpills

rows, leaf = WithoutSpills(kernels, "tile_rows"), WithoutSpills(kernels, "tile_leaf")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
for fan_in, fan_out, depth, width, activation, dtype in [
    (128, 128, 2, 32, "relu", F32), (784, 10, 4, 8, "relu", F32), (1000, 4, 8, 1, "swiglu", F32),
    (128, 128, 2, 32, "relu", BF16), (450, 1216, 6, 4, "identity", F16),
]:
    layer = fastff.FFF(
        fan_in, fan_out, depth=depth, leaf_width=width, activation=activation, device="meta", dtype=dtype
    )
    x = torch.empty(2048, fan_in, device="meta", dtype=dtype)
    size = size_of(x, layer.tree, layer.leaves)
    assert not triton_tile.why_not(size)
    triton_tile.hard(x, layer.tree, layer.leaves, activation, triton_tile.choose(size, True))
assert len(rows.built) == 4 and leaf.built, (len(rows.built), len(leaf.built))
print("built")
"""


def test_compiles_for_a_gpu_that_is_not_there():
    """With the launch parameters that are chosen: shared memory and registers suffice."""
    run = without_interpreter(AHEAD_OF_TIME)
    assert run.stdout.strip() == "built", run.stderr
