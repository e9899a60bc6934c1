"""Walks and logits along paths by Triton kernels: by the interpreter where there is no GPU, and compiled for one."""

import pytest
import torch

from fastff.backends import ops, paths, triton, triton_paths, triton_segments
from fastff.tensors import Tree
from fastff.tree import depth_of, num_nodes
from helpers import make, relative_error, without_interpreter
from triton_helpers import DEVICE

pytestmark = pytest.mark.slow

pytest.importorskip("triton")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(0, 3, 4), (1, 1, 1), (63, 4, 21), (70, 6, 150), (257, 2, 5), (9, 17, 3)]  # batch, depth, inputs


def problem(batch, depth, features, dtype=torch.float32):
    x, leaf = torch.randn(batch, features, device=DEVICE).to(dtype), torch.randint(2**depth, (batch,), device=DEVICE)
    weight, bias = torch.randn(2**depth - 1, features, device=DEVICE), torch.randn(2**depth - 1, device=DEVICE)
    return x, leaf, Tree(weight.to(dtype), bias.to(dtype))


def poisoned(run):
    """What a function returns where fresh memory holds NaN."""
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns
    try:
        return run()
    finally:
        torch.use_deterministic_algorithms(False)


def step(logits, x, leaf, tree, grad):
    """The logits and their gradients for x, the weights and the biases."""
    own = [t.detach().requires_grad_() for t in (x, *tree[:2])]
    z = logits(own[0], leaf, Tree(*own[1:]))
    z.backward(grad)
    return [z.detach(), *(t.grad for t in own)]


def kernels(x, leaf, tree):
    return triton_paths.logits_to(x, leaf, tree, False)


def by_torch(x, leaf, tree):
    return paths.logits_to(x, leaf, tree, "relu")


def check(x, leaf, tree):
    """At most twice the error of plain torch, both against float64."""
    grad = torch.randn(len(x), depth_of(len(tree.weight) + 1), device=DEVICE)
    wide = Tree(tree.weight.double(), tree.bias.double())
    exact, plain = step(by_torch, x.double(), leaf, wide, grad.double()), step(by_torch, x, leaf, tree, grad)
    ours = poisoned(lambda: step(kernels, x, leaf, tree, grad))
    assert ours[0].dtype == torch.float32
    for found, theirs, right in zip(ours, plain, exact, strict=True):
        allowed = 2 * relative_error(theirs, right) + torch.finfo(found.dtype).eps
        assert relative_error(found, right) <= allowed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_logits_and_gradients(size, dtype):
    x, leaf, tree = problem(*size, dtype)
    check(x, leaf, tree)


@pytest.mark.parametrize("skew", ["one leaf", "the ends", "spans"])
def test_skews(skew, monkeypatch):
    """Nodes whose samples lie in one span, in two, and in more than are added up at a time."""
    monkeypatch.setattr(triton_segments, "_PROGRAMS", 10**6)
    x, leaf, tree = problem(700, 3, 5)
    if skew == "one leaf":
        leaf[:] = 5
    elif skew == "the ends":
        leaf = torch.where(leaf < 4, 0, 7)
    else:  # of 64: leaves end where spans do, and within them
        leaf = torch.tensor([0] * 64 + [1] * 128 + [3] * 30 + [4] * 34 + [6] * 400 + [7] * 44, device=DEVICE)
    check(x, leaf[torch.randperm(700, device=DEVICE)], tree)


def test_small_gradients_of_float16_survive():
    """Times 16-bit inputs, a gradient of 1e-7 was zero in float16; the sum of many is not."""
    x, leaf, tree = problem(200, 2, 8, torch.float16)
    x = x.abs() * 1000
    grad = torch.full((200, 2), 1e-7, device=DEVICE)
    found = step(kernels, x, leaf, tree, grad)[2]
    wanted = step(by_torch, x.double(), leaf, Tree(*(t.double() for t in tree[:2])), grad.double())[2]
    assert relative_error(found, wanted) < 2e-3


def test_every_run_gives_the_same_bits():
    x, leaf, tree = problem(150, 4, 9)
    grad = torch.randn(150, 4, device=DEVICE)
    for once, again in zip(*(step(kernels, x, leaf, tree, grad) for _ in range(2)), strict=True):
        assert torch.equal(once, again)


@pytest.mark.parametrize("node_width", [1, 3])
@pytest.mark.parametrize(("threshold", "swap"), [(False, False), (True, True)])
@pytest.mark.parametrize("features", [7, 150])
def test_walks(node_width, threshold, swap, features, monkeypatch):
    """From any node, and from leaves, which follow the nodes. No logit is within rounding of its threshold."""
    layer = make(features, 3, depth=4, node_width=node_width, dtype=torch.float32).to(DEVICE)
    x, start = torch.randn(37, features, device=DEVICE), torch.randint(31, (37,), device=DEVICE)
    limits = torch.randn(37, 4, device=DEVICE) if threshold else None
    swaps = torch.rand(37, 4, device=DEVICE) < 0.3 if swap else None
    wide = Tree(*(None if t is None else t.double() for t in layer.tree))
    wanted = paths.descend_by_torch(x.double(), wide, "gelu", start, limits, swaps)
    for kept in (4 * features, 4 * features - 1):  # in registers, and read again for each node
        monkeypatch.setattr(triton_paths, "_KEPT", kept)
        found = poisoned(lambda: triton_paths.descend(x, layer.tree, "gelu", start, limits, swaps))
        assert torch.equal(found, wanted)


def test_a_logit_of_zero_goes_right_and_a_nan_left():
    x, _, tree = problem(3, 3, 4)
    x[1, 2] = torch.nan
    tree.weight.zero_()
    tree.bias.zero_()
    root = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    assert triton_paths.descend(x, tree, "relu", root, None, None).tolist() == [7, 0, 7]
    assert triton_paths.descend(x[:0], tree, "relu", root[:0], None, None).shape == (0,)


def test_node_sums_and_their_gradient():
    leaf, values = torch.randint(32, (150,), device=DEVICE), torch.randn(150, 5, 2, device=DEVICE, requires_grad=True)
    found, wanted = poisoned(lambda: triton_paths.node_sums(values, leaf)), paths.node_sums(values, leaf)
    assert found.shape == (num_nodes(5), 2)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    weight = torch.randn_like(found)
    (ours,), (theirs,) = (torch.autograd.grad((t * weight).sum(), values) for t in (found, wanted))
    assert torch.equal(ours, theirs)


def test_sparse_gradients_hold_the_visited_nodes():
    x, leaf, tree = problem(9, 6, 5)
    grad = torch.randn(9, 6, device=DEVICE)
    dense = step(kernels, x, leaf, tree, grad)
    sparse = step(lambda *a: triton_paths.logits_to(*a, True), x, leaf, tree, grad)
    for one, other in zip(dense[2:], sparse[2:], strict=True):
        assert other.is_sparse
        assert len(other._values()) == len(paths.nodes(leaf, 6).unique())
        assert torch.equal(other.to_dense(), one)


def test_a_second_derivative_is_refused():
    """It was silently wrong: autograd does not see what the kernels of the backward pass compute."""
    x, leaf, tree = problem(9, 3, 5)
    for own in (x, *tree[:2]):
        own.requires_grad_()
        with pytest.raises(RuntimeError, match='decision="sampled" has no second derivative'):
            torch.autograd.grad(kernels(x, leaf, tree).square().sum(), own, create_graph=True)
        own.requires_grad_(False)


def test_opcheck():
    x, leaf, tree = problem(11, 3, 5)
    groups, grad = triton_segments.group(leaf, 8), torch.randn(11, 3, device=DEVICE)
    torch.library.opcheck(ops.path_logits, (x, groups.leaf, groups.order, tree.weight, tree.bias))
    torch.library.opcheck(ops.path_inputs, (grad, groups.leaf, groups.order, tree.weight))
    torch.library.opcheck(ops.path_outer, (x, grad, *groups, tree.weight))
    torch.library.opcheck(ops.walk_from, (x, *tree, leaf, grad, grad > 0, "relu"))


@pytest.mark.parametrize("name", ["_walk_from", "_path_logits", "_path_inputs", "_path_outer"])
def test_torch_operations_replace_a_kernel_that_fails(name, monkeypatch):
    monkeypatch.setattr(triton, "_failures", {})

    def fail(*_):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(triton_paths, name, fail)
    x, leaf, tree = problem(9, 3, 5)
    grad = torch.randn(9, 3, device=DEVICE)
    with pytest.warns(RuntimeWarning, match="kernel of sampled training.*no such instruction.*Torch operations run"):
        found = [triton_paths.descend(x, tree, "relu", leaf, None, None), *step(kernels, x, leaf, tree, grad)]
    wanted = [paths.descend_by_torch(x, tree, "relu", leaf, None, None), *step(by_torch, x, leaf, tree, grad)]
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


AHEAD_OF_TIME = """
import torch
from fastff.backends import triton_path_kernels as kernels, triton_paths as launch, triton_segment_kernels
from fastff.tensors import Tree
from triton_build import Build, WithoutSpills

Build(triton_segment_kernels, "add_parts")
built = {name: WithoutSpills(kernels, name) for name in ("walk_from", "path_logits", "path_inputs", "path_outer")}
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
WIDTHS = {BF16: (1024, 1536), F16: (1024, 1792), F32: (512, 1024)}  # inputs that stay in registers, and that do not

def empty(*size, dtype):
    return torch.empty(*size, device="meta", dtype=dtype)

sizes = [(16384, 768, 8, BF16), (16384, 768, 15, F16), (99, 37, 18, F32)]
sizes += [(16384, features, 8, dtype) for dtype, widths in WIDTHS.items() for features in widths]
for batch, features, depth, dtype in sizes:
    tree = Tree(empty(2**depth - 1, features, dtype=dtype), empty(2**depth - 1, dtype=dtype))
    x = empty(batch, features, dtype=dtype)
    leaf, order = empty(batch, dtype=torch.int32), empty(batch, dtype=torch.int64)
    z = launch._path_logits(x, leaf, order, *tree[:2])
    launch._path_inputs(z, leaf, order, tree.weight)
    launch._path_outer(x, z, leaf, order, leaf, tree.weight)
    launch._walk_from(x, tree, "relu", order, z, empty(batch, depth, dtype=torch.bool))
    wide = Tree(*(empty(2**depth - 1, *n, dtype=dtype) for n in ((2, features), (2,), (2,), ())))
    launch._walk_from(x, wide, "gelu", order, None, None)
print("built")
"""


def test_compiles_for_a_gpu_that_is_not_there():
    """No kernel spills a register. Inputs of 3072 bytes stayed in registers, and walks then had too few others."""
    run = without_interpreter(AHEAD_OF_TIME)
    assert run.stdout.strip() == "built", run.stderr
