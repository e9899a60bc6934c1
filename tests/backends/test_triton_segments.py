"""Visited leaves by Triton kernels: by the interpreter where there is no GPU, and compiled ahead of time for one."""

import copy

import pytest
import torch

from fastff.backends import ops, reference, segments, triton, triton_segments
from helpers import make, relative_error, without_interpreter
from triton_helpers import DEVICE

pytestmark = pytest.mark.slow

pytest.importorskip("triton")
# The interpreter multiplies the bits of bfloat16 matrices as integers.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
SIZES = [
    (0, 3, 1, 7, 5),
    (1, 0, 3, 7, 5),
    (63, 4, 3, 5, 1),
    (257, 2, 33, 21, 70),
    (130, 5, 2, 150, 9),
    (17, 11, 2, 8, 8),
]
SKEWS = ["even", "one leaf", "half in one leaf"]


def visited(batch, depth, skew="even"):
    """The leaf of each sample. Leaf 1 of an even tree has none."""
    leaf = torch.randint(2**depth, (batch,))
    leaf[leaf == 1] = 0
    if skew != "even":
        leaf[: batch if skew == "one leaf" else batch // 2] = 2**depth - 1
    return leaf.to(DEVICE)


def poisoned(run):
    """What a function returns where fresh memory holds NaN."""
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns
    try:
        return run()
    finally:
        torch.use_deterministic_algorithms(False)


def step(visit, layer, x, leaf, grad):
    """Output and gradients."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = visit(x, leaf, layer.leaves, layer.activation)
    y.backward(grad)
    return [y.detach(), x.grad, *(p.grad for p in layer.leaf_parameters())]


def kernels(x, leaf, leaves, activation):
    return triton_segments.visit(x, leaf, leaves, activation, 0.0, False)


def check(layer, x, leaf):
    """Output and gradients have at most twice the error of plain torch, both against float64."""
    grad = torch.randn(len(x), layer.out_features, device=DEVICE).to(x.dtype)
    exact = step(reference.visit, copy.deepcopy(layer).double(), x.double(), leaf, grad.double())
    plain = step(segments.visit, layer, x, leaf, grad)
    ours = poisoned(lambda: step(kernels, layer, x, leaf, grad))
    for found, theirs, right in zip(ours, plain, exact, strict=True):
        assert found.dtype == x.dtype
        # Where torch happens to be exact, an operation may still round once.
        allowed = 2 * relative_error(theirs, right) + torch.finfo(x.dtype).eps
        assert relative_error(found, right) <= allowed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_values_and_gradients(size, dtype):
    batch, depth, leaf_width, features, out = size
    layer = make(features, out, depth=depth, leaf_width=leaf_width, activation="gelu", dtype=dtype).to(DEVICE)
    check(layer, torch.randn(batch, features, device=DEVICE).to(dtype), visited(batch, depth))


@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.parametrize(("activation", "bias"), [("relu", False), ("swiglu", True)])
def test_skews(skew, activation, bias):
    """The rows of one leaf lie in several spans, and many leaves in one."""
    layer = make(11, 6, depth=3, leaf_width=3, activation=activation, bias=bias, dtype=torch.float32).to(DEVICE)
    check(layer, torch.randn(150, 11, device=DEVICE), visited(150, 3, skew))


def test_many_spans_of_one_leaf(monkeypatch):
    """More spans than are added up at a time; and leaves that begin and end where spans do."""
    monkeypatch.setattr(triton_segments, "_PROGRAMS", 10**6)
    layer = make(5, 4, depth=3, leaf_width=2, dtype=torch.float32).to(DEVICE)
    leaf = torch.tensor([0] * 64 + [2] * 128 + [3] * 1088 + [4] * 65 + [6] * 63).to(DEVICE)
    check(layer, torch.randn(len(leaf), 5, device=DEVICE), leaf[torch.randperm(len(leaf), device=DEVICE)])


def test_every_run_gives_the_same_bits():
    layer = make(9, 7, depth=2, leaf_width=5, dtype=torch.float32).to(DEVICE)
    x, leaf, grad = torch.randn(200, 9, device=DEVICE), visited(200, 2), torch.randn(200, 7, device=DEVICE)
    for once, again in zip(*(step(kernels, layer, x, leaf, grad) for _ in range(2)), strict=True):
        assert torch.equal(once, again)


def test_a_sum_in_one_span_needs_no_room_for_parts():
    """It had room for two, which nothing wrote or read."""
    for batch, numbers in ((64, 0), (65, 2 * 2 * 10)):
        assert triton_segments.spans(batch, 1, 10, torch.zeros(1, device=DEVICE))[2].numel() == numbers


def test_a_nan_stays_in_its_leaf_and_its_sample():
    layer = make(7, 5, depth=2, leaf_width=3, dtype=torch.float32).to(DEVICE)
    with torch.no_grad():
        layer.leaf_in_weight[3] = layer.leaf_out_weight[2] = torch.nan
    x, leaf = torch.randn(20, 7, device=DEVICE), torch.arange(20, device=DEVICE) % 3
    x[0] = torch.inf
    y, d_x, d_in, *_ = step(kernels, layer, x, leaf, torch.ones(20, 5, device=DEVICE))
    bad = (leaf == 2) | (torch.arange(20, device=DEVICE) == 0)
    assert y[~bad].isfinite().all()
    assert d_x[~bad].isfinite().all()
    assert d_in[1].isfinite().all()
    assert not d_in[3].any()


def test_sparse_gradients_hold_the_visited_leaves():
    layer = make(7, 5, depth=5, leaf_width=3, dtype=torch.float32).to(DEVICE)
    x, leaf, grad = torch.randn(9, 7, device=DEVICE), visited(9, 5), torch.randn(9, 5, device=DEVICE)
    dense = step(kernels, layer, x, leaf, grad)
    sparse = step(lambda *a: triton_segments.visit(*a, 0.0, True), layer, x, leaf, grad)
    for one, other in zip(dense[2:], sparse[2:], strict=True):
        assert other.is_sparse
        assert len(other._values()) == len(leaf.unique())
        assert torch.equal(other.to_dense(), one)


def test_a_second_derivative_is_refused():
    layer = make(7, 5, depth=2, leaf_width=3, dtype=torch.float32).to(DEVICE)
    x = torch.randn(5, 7, device=DEVICE, requires_grad=True)
    y = kernels(x, visited(5, 2), layer.leaves, "tanh")
    with pytest.raises(RuntimeError, match='decision="sampled" has no second derivative'):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_freed_memory_is_not_read():
    layer = make(7, 5, depth=2, leaf_width=3, dtype=torch.float32).to(DEVICE)
    layer.leaf_out_weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="its memory was freed"):
        kernels(torch.randn(5, 7, device=DEVICE), visited(5, 2), layer.leaves, "tanh")


@pytest.mark.parametrize("ordered", [True, False])
def test_opcheck(ordered):
    groups = triton_segments.group(visited(11, 3), 8)
    order, rows = groups.order if ordered else None, torch.randn(11, 7, device=DEVICE)
    weight, bias = torch.randn(8, 3, 7, device=DEVICE), torch.randn(8, 3, device=DEVICE)
    torch.library.opcheck(ops.leaf_product, (rows, weight, bias, groups.leaf, order, True))
    torch.library.opcheck(ops.leaf_product, (rows[:, :3], weight, None, groups.leaf, order, False))
    sums = "first" if ordered else "second"
    torch.library.opcheck(ops.leaf_outer, (rows[:, :3], rows, groups.leaf, order, groups.end, 8, sums))


def test_the_older_operations_have_the_kernels(monkeypatch):
    """`segment_product` and `segment_outer`: what they give on a CPU, from the kernels."""
    leaf = visited(40, 3).sort().values
    rows, weight = torch.randn(40, 7, device=DEVICE), torch.randn(8, 3, 7, device=DEVICE)
    wanted = segments.product(rows, weight, leaf, True), segments.outer(rows, rows[:, :3], leaf, 8)
    launched = []
    for name in ("_product", "_outer"):
        real = getattr(triton_segments, name)
        monkeypatch.setattr(triton_segments, name, lambda *a, real=real: launched.append(real) or real(*a))
    monkeypatch.setattr(ops.triton_training, "takes", lambda *_: True)
    found = ops.segment_product(rows, weight, leaf, True), ops.segment_outer(rows, rows[:, :3], leaf, 8)
    assert len(launched) == 2
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["_product", "_outer"])
def test_torch_operations_replace_a_kernel_that_fails(name, monkeypatch):
    """They give the same numbers, with one warning for a layer of this shape."""
    monkeypatch.setattr(triton, "_failures", {})

    def fail(*_):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(triton_segments, name, fail)
    layer = make(7, 5, depth=2, leaf_width=3, activation="swiglu", dtype=torch.float32).to(DEVICE)
    x, leaf, grad = torch.randn(9, 7, device=DEVICE), visited(9, 2), torch.randn(9, 5, device=DEVICE)
    with pytest.warns(RuntimeWarning, match="kernel of sampled training.*no such instruction.*Torch operations run"):
        found = step(kernels, layer, x, leaf, grad)
    for ours, theirs in zip(found, step(segments.visit, layer, x, leaf, grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


AHEAD_OF_TIME = """
import torch
from fastff.backends import triton_segment_kernels as kernels, triton_segments as launch
from triton_build import WithoutSpills

names = "leaf_product", "leaf_output", "leaf_outer", "clear_unvisited", "add_parts"
built = {name: WithoutSpills(kernels, name) for name in names}
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

def empty(*size, dtype):
    return torch.empty(*size, device="meta", dtype=dtype)

def build(batch, features, out, leaf_width, depth, dtype):
    leaves, leaf, order = 2**depth, empty(batch, dtype=torch.int32), empty(batch, dtype=torch.int64)
    x, b_in = empty(batch, features, dtype=dtype), empty(leaves, leaf_width, dtype=dtype)
    w_in = empty(leaves, leaf_width, features, dtype=dtype)
    w_out, b_out = empty(leaves, leaf_width, out, dtype=dtype), empty(leaves, out, dtype=dtype)
    hidden = launch._product(x, w_in, b_in, leaf, order, True)
    y = launch._product(hidden, w_out, b_out, leaf, order, False)
    d_hidden = launch._product(y, w_out, None, leaf, order, True)
    launch._product(d_hidden, w_in, None, leaf, order, False)
    launch._outer(hidden, y, leaf, order, leaf, leaves, "second")
    launch._outer(d_hidden, x, leaf, order, leaf, leaves, "first")

build(16384, 768, 768, 32, 15, F16)
build(16384, 4096, 4096, 64, 5, F32)
build(300, 37, 29, 3, 3, BF16)
print("built")
"""


def test_compiles_for_a_gpu_that_is_not_there():
    """No kernel spills a register. At depth 15, offsets do not fit into 32 bits."""
    run = without_interpreter(AHEAD_OF_TIME)
    assert run.stdout.strip() == "built", run.stderr
