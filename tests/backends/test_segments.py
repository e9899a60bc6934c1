"""One leaf per sample by segments, against the specification and against finite differences."""

import pytest
import torch
import torch.nn.functional as F

import fastff
from fastff.backends import ops, reference, segments
from helpers import ACTIVATIONS, make, relative_error

SIZES = [(0, 3, 1), (1, 0, 3), (63, 4, 3), (257, 2, 5)]  # batch, depth, leaf width


def problem(batch, depth, leaf_width, activation="relu", dtype=torch.float64, **options):
    torch.manual_seed(0)
    layer = make(7, 5, depth=depth, leaf_width=leaf_width, activation=activation, dtype=dtype, **options)
    x = torch.randn(batch, 7, dtype=dtype, requires_grad=True)
    leaf = torch.randint(layer.num_leaves, (batch,))
    leaf[leaf == 1] = 0  # a leaf that no sample visits
    return layer, x, leaf


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_equals_the_specification_in_value_and_gradient(size, bias):
    layer, x, leaf = problem(*size, "swiglu", bias=bias)
    found = []
    for visit in (reference.visit, segments.visit):
        layer.zero_grad()
        x.grad = None
        y = visit(x, leaf, layer.leaves, "swiglu")
        y.square().sum().backward()
        found.append([y, x.grad, *(p.grad for p in layer.leaf_parameters())])
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, torch.sin])
def test_gradcheck(activation):
    layer, x, leaf = problem(5, 2, 2, activation)
    parts = [t for t in layer.leaves if t is not None]

    def compute(x, *given):
        taken = iter(given)
        own = type(layer.leaves)._make(None if t is None else next(taken) for t in layer.leaves)
        return segments.visit(x, leaf, own, activation)

    assert torch.autograd.gradcheck(compute, (x, *parts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_is_at_most_twice_that_of_plain_torch(dtype):
    layer, x, leaf = problem(257, 3, 8, dtype=dtype)
    exact, wide = make(7, 5, depth=3, leaf_width=8), x.detach().double()
    exact.load_state_dict(layer.state_dict())
    grad = torch.randn(257, 5).to(dtype)
    wanted, plain, got = [], [], []
    for into, visit, module, rows in (
        (wanted, reference.visit, exact, wide),
        (plain, reference.visit, layer, x.detach()),
        (got, segments.visit, layer, x.detach()),
    ):
        module.zero_grad()
        rows.requires_grad_().grad = None
        visit(rows, leaf, module.leaves, "relu").backward(grad.to(rows.dtype))
        into += [rows.grad.clone(), *(p.grad for p in module.leaf_parameters())]
    for right, theirs, ours in zip(wanted, plain, got, strict=True):
        assert relative_error(ours, right) <= 2 * relative_error(theirs, right) + torch.finfo(dtype).eps


def test_sparse_gradients_equal_dense_ones_and_hold_the_visited_leaves():
    layer, x, leaf = problem(9, 5, 3)
    found = []
    for sparse in (False, True):
        layer.zero_grad()
        segments.visit(x, leaf, layer.leaves, "relu", sparse=sparse).square().sum().backward()
        found.append([p.grad for p in layer.leaf_parameters()])
    for dense, sparse in zip(*found, strict=True):
        assert sparse.is_sparse
        assert sparse._values().shape == (len(leaf.unique()), *dense.shape[1:])
        torch.testing.assert_close(sparse.to_dense(), dense)


def test_dropout_scales_and_zeroes_the_hidden_layer():
    layer, x, leaf = problem(200, 2, 8, "identity", bias=False)
    torch.manual_seed(1)
    y = segments.visit(x, leaf, layer.leaves, "identity", dropout=0.5)
    own = layer.leaves.in_weight[leaf]
    hidden = (own @ x.unsqueeze(-1)).squeeze(-1)
    order = leaf.sort(stable=True).indices
    torch.manual_seed(1)
    mask = torch.empty_like(hidden)
    mask[order] = F.dropout(torch.ones_like(hidden), 0.5)
    wanted = ((hidden * mask).unsqueeze(1) @ layer.leaves.out_weight[leaf]).squeeze(1)
    torch.testing.assert_close(y, wanted)


def test_a_second_derivative_is_refused():
    layer, x, leaf = problem(5, 2, 2)
    y = segments.visit(x, leaf, layer.leaves, "tanh")
    with pytest.raises(RuntimeError, match='decision="sampled" has no second derivative'):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_opcheck():
    layer, x, leaf = problem(11, 3, 3, dtype=torch.float32)
    leaf, rows = leaf.sort().values, x.detach()
    weight = layer.leaf_in_weight.detach()
    torch.library.opcheck(ops.segment_product, (rows, weight, leaf, True))
    torch.library.opcheck(ops.segment_product, (torch.randn(11, 3), weight, leaf, False))
    torch.library.opcheck(ops.segment_outer, (rows, torch.randn(11, 3), leaf, 8))


def test_poisoned_memory_is_filled(monkeypatch):
    """torch.empty may hold anything: every element of a result is written."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **o: empty(*a, **o).fill_(float("nan")))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda t, *s, **o: torch.empty(*s, dtype=t.dtype))
    first, second, leaf = torch.randn(6, 2), torch.randn(6, 3), torch.tensor([0, 0, 1, 3, 3, 3])
    assert segments.outer(first, second, leaf, 4).isfinite().all()
    assert segments.outer(first, second, torch.tensor([0, 1, 2, 3, 3, 3]), 4).isfinite().all()
    assert segments.product(first, torch.randn(4, 2, 3), leaf, False).isfinite().all()


def test_the_visited_leaves_alone_are_read():
    """A NaN in a leaf that nobody visits stays there."""
    layer = fastff.FFF(7, 5, depth=2, leaf_width=3, dtype=torch.float64)
    with torch.no_grad():
        layer.leaf_in_weight[3] = layer.leaf_out_bias[3] = float("nan")
    y = segments.visit(torch.randn(9, 7, dtype=torch.float64), torch.arange(9) % 3, layer.leaves, "relu")
    y.sum().backward()
    assert y.isfinite().all()
    assert layer.leaf_in_weight.grad.isfinite().all()
    assert not layer.leaf_in_weight.grad[3].any()
