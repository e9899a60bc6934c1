"""The kernels of the Triton hard pass, in every way to launch them: by the interpreter where there is no GPU.

Launches have small blocks here, so that small layers go beyond one block in each direction.
"""

import pytest
import torch

import fastff
from fastff.backends import reference, triton, triton_hard
from fastff.backends.triton_choice import Launch
from fastff.tensors import Leaves
from helpers import ACTIVATIONS
from triton_helpers import DEVICE, check, check_error, check_ties, in_float64, layer_of, run

pytestmark = pytest.mark.slow

pytest.importorskip("triton")
WAYS = {
    "alone": Launch(round=2, warps=4),
    "spread": Launch(spread=True, round=2, warps=4, block=8, n=32, out_k=2),
    "tiles": Launch(True, k=16, n=16),
    "spread tiles": Launch(True, True, k=16, n=16, block=16, out_k=16, span=32),
}
GROUPED = ["tiles", "spread tiles"]
PARTS = {"product_tile": 16, "product_nodes": 16, "product_k": 16}


def few(way):
    """A batch for a way: the interpreter takes 0.03 s a program, and these take one or more a sample."""
    return 17 if way in GROUPED else 3


@pytest.fixture(params=["listed", "sorted"])
def listing(request, monkeypatch):
    """Samples are in a list for each leaf; or sorted, as where lists would take too much memory."""
    if request.param == "sorted":
        monkeypatch.setattr(triton_hard, "_MOST_LISTED", 0)
    return request.param


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("node_width", "bias"), [(1, True), (2, False)])
def test_equals_the_reference(way, activation, node_width, bias):
    layer = layer_of(7, 5, depth=2, leaf_width=3, node_width=node_width, activation=activation, bias=bias)
    check(triton.hard, layer, torch.randn(few(way), 7, device=DEVICE), WAYS[way])


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize(("grouped", "bias"), [(False, True), (True, False)])
@pytest.mark.parametrize("depth", [0, 3])
def test_dense_with_a_mask(activation, grouped, bias, depth):
    layer = layer_of(7, 5, depth=depth, leaf_width=3, activation=activation, bias=bias, dtype=torch.float16)
    x = torch.randn(9, 7, device=DEVICE).half()
    check_error(triton.hard, layer, x, Launch(grouped, dense=True, round=2, warps=4))


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("depth", "leaf_width", "splits"), [(1, 9, 0), (2, 3, 0), (6, 1, 0), (1, 9, 1), (6, 1, 2)])
def test_all_leaves_at_a_tile_of_samples(activation, bias, depth, leaf_width, splits):
    layer = layer_of(37, 71, depth=depth, leaf_width=leaf_width, activation=activation, bias=bias, dtype=torch.float16)
    launch = Launch(whole=True, leaf_tile=16, block=64, k=16, n=16, span=32, splits=splits)
    check_error(triton.hard, layer, torch.randn(35, 37, device=DEVICE).half(), launch)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("depth", [0, 1, 5])
@pytest.mark.parametrize("batch", [0, 1, 33])
def test_depths_and_batches(way, depth, batch):
    check(triton.hard, layer_of(5, 3, depth=depth, leaf_width=2), torch.randn(batch, 5, device=DEVICE), WAYS[way])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("activation", ["relu", "swiglu"])
@pytest.mark.parametrize(
    ("sizes", "leaf_width"),
    [((1, 1), 1), ((150, 1), 33), ((9, 1030), 2), ((20, 19), 130), ((130, 40), 32), ((64, 32), 16), ((33, 20), 300)],
)
def test_sizes(way, activation, sizes, leaf_width):
    """Beyond one block in each direction: features, outputs and neurons; and whole blocks only."""
    if way in ("alone", "tiles") and leaf_width > 128:
        pytest.skip("not a way that is ever taken: one program holds the hidden layer")
    layer = layer_of(*sizes, depth=1, leaf_width=leaf_width, activation=activation)
    check(triton.hard, layer, torch.randn(2, sizes[0], device=DEVICE), WAYS[way])


@pytest.mark.parametrize("span", [16, 32])
def test_columns_pass_a_leaf_that_stays(span):
    """The second product of a narrow leaf: some output columns for a program, a block of them at a time."""
    layer = layer_of(20, 75, depth=1, leaf_width=7)
    check(triton.hard, layer, torch.randn(9, 20, device=DEVICE), WAYS["spread tiles"]._replace(out_k=16, span=span))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("node_width", [1, 2])
def test_inputs_that_do_not_fit_into_registers(way, node_width, monkeypatch):
    monkeypatch.setattr(triton_hard, "fits", lambda *_: False)
    layer = layer_of(150, 6, depth=4, leaf_width=5, node_width=node_width, activation="geglu")
    check(triton.hard, layer, torch.randn(few(way), 150, device=DEVICE), WAYS[way])


@pytest.mark.parametrize("rounds", [1, 3, 4])
@pytest.mark.parametrize("warps", [2, 8])
def test_rounds(rounds, warps):
    layer = layer_of(7, 5, depth=5, leaf_width=3)
    check(triton.hard, layer, torch.randn(6, 7, device=DEVICE), Launch(round=rounds, warps=warps))


@pytest.mark.parametrize("way", ["alone", "spread", "tiles"])
def test_levels_that_are_not_unrolled(way):
    """Wide inputs, down a tree that is deep for them."""
    layer = layer_of(1100, 5, depth=5, leaf_width=3)
    check(triton.hard, layer, torch.randn(2, 1100, device=DEVICE), WAYS[way]._replace(round=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("depth", "top"), [(1, 1), (3, 3), (5, 3), (6, 6), (8, 6), (8, 8)])
@pytest.mark.parametrize("splits", [0, 1, 3])
def test_the_top_of_the_tree_by_products(dtype, depth, top, splits):
    """Within `group`, or in parts by `node_products`; with 40 features in steps of 16, the last of 3 parts is short."""
    launch = Launch(True, tile=32, top=top, group_k=16, splits=splits, **PARTS)
    layer = layer_of(40, 3, depth=depth, leaf_width=1, dtype=dtype)
    x = torch.randn(35, 40, device=DEVICE).to(dtype)
    expected = reference.route(x.double(), in_float64(layer).tree, "relu")
    assert torch.equal(triton.route(x, layer.tree, "relu", launch), expected)


@pytest.mark.parametrize("way", GROUPED)
@pytest.mark.parametrize(("features", "splits"), [(48, 1), (20, 4)])
def test_products_clear_the_counters(way, features, splits, listing):
    """`node_products` does what `clear` does elsewhere. Of 4 parts of 20 features, 2 are empty."""
    layer = layer_of(features, 5, depth=3, leaf_width=3)
    launch = WAYS[way]._replace(top=2, splits=splits, **PARTS)
    check(triton.hard, layer, torch.randn(33, features, device=DEVICE), launch)


def skewed(kind, depth=3):
    """A layer that sends all samples to its last leaf, or three of four to the right at every node."""
    layer = layer_of(7, 5, depth=depth, leaf_width=3)
    layer.node_bias.fill_(1.0)
    layer.node_weight.mul_(0.0 if kind == "one leaf" else 1.5 / layer.node_weight.norm(dim=-1, keepdim=True))
    return layer


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["one leaf", "many to few"])
@pytest.mark.parametrize("per", [1, 2])
def test_skew(way, kind, per, listing):
    """Leaves with more samples than their tiles hold: the others are extra tiles."""
    if way not in GROUPED and (listing == "sorted" or per == 2):
        pytest.skip("no lists")
    layer, x = skewed(kind), torch.randn(70 if way in GROUPED else 9, 7, device=DEVICE)
    check(triton.hard, layer, x, WAYS[way]._replace(per=per))


@pytest.mark.parametrize("kind", ["even", "one leaf", "many to few"])
@pytest.mark.parametrize("per", [1, 2])
def test_lists(kind, per, listing):
    """Every sample is in the list of its leaf, once; and every tile beyond a leaf's own is noted, once."""
    layer = layer_of(7, 5, depth=3, leaf_width=3) if kind == "even" else skewed(kind)
    x, launch = torch.randn(150, 7, device=DEVICE), Launch(True, per=per)
    leaf = torch.empty(150, dtype=torch.int64, device=DEVICE)
    work = triton_hard._list_samples(x, leaf, layer.tree, 8, "relu", launch)
    assert torch.equal(leaf, reference.route(x, layer.tree, "relu"))
    count, expected = leaf.bincount(minlength=8), []
    for j in range(8):
        begin = int(work.counts[j]) if work.is_sorted else 150 * j
        listed = work.listed[begin : begin + count[j]].sort().values
        assert torch.equal(listed.long(), (leaf == j).nonzero()[:, 0])
        expected += [(j, place) for place in range(16 * per, int(count[j]), 16)]
    assert kind == "even" or expected
    assert sorted(zip(*work.extra[:, : int(work.number)].tolist(), strict=True)) == expected
    assert work.most_tiles(launch) >= 8 * per + len(expected)


@pytest.mark.parametrize("way", WAYS)
def test_a_logit_of_zero_goes_right_and_nan_left(way):
    check_ties(triton.hard, few(way), WAYS[way])


@pytest.mark.parametrize("splits", [0, 2])
def test_zero_and_nan_at_the_top(splits):
    """As above, where the top of the tree goes by products, and two rounds of rows follow."""
    launch = Launch(True, top=3, splits=splits, **PARTS)
    layer, x = layer_of(7, 5, depth=5, leaf_width=1), torch.randn(7, 7, device=DEVICE)
    x[4, 2] = torch.nan
    leaf = triton.route(x, layer.tree, "relu", launch)
    assert leaf[4] == 0
    rest = torch.arange(7, device=DEVICE) != 4
    assert torch.equal(leaf[rest], reference.route(x[rest], layer.tree, "relu"))
    layer.node_weight.zero_()
    layer.node_bias.zero_()
    assert (triton.route(x[rest], layer.tree, "relu", launch) == 31).all()


@pytest.mark.parametrize("way", WAYS)
def test_infinite_numbers(way):
    """What torch makes of them: relu(-inf) is 0; and the weights of a leaf that is not visited do not count."""
    layer = layer_of(7, 5, depth=1, leaf_width=33)
    layer.node_weight.zero_()
    layer.node_bias.fill_(-1.0)
    layer.leaf_in_weight[:, :, 2] = layer.leaf_in_weight[:, :, 2].abs()
    layer.leaf_in_weight[1], layer.leaf_out_weight[1] = torch.inf, torch.inf
    x = torch.randn(3, 7, device=DEVICE)
    x[1, 2] = -torch.inf
    y = run(triton.hard, layer, x, WAYS[way])[0]
    expected = reference.hard(x, layer.tree, layer.leaves, "relu")[0]
    assert expected.isfinite().all()
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_visit_and_route(way, listing, monkeypatch):
    """Alone, as MoE and `layer.route` use them; also with inputs and leaves that are not contiguous."""
    if way not in GROUPED and listing == "sorted":
        pytest.skip("no lists")
    monkeypatch.setattr(triton_hard, "choose_launch", lambda *_: WAYS[way])
    layer = layer_of(7, 5, depth=3, leaf_width=3, activation="tanh")
    x = torch.randn(7, 2 * few(way), device=DEVICE).T
    assert torch.equal(triton.route(x, layer.tree, "tanh", WAYS[way]), reference.route(x, layer.tree, "tanh"))
    assert triton.route(x[:0], layer.tree, "tanh").shape == (0,)
    leaf = torch.randint(8, (len(x), 2), device=DEVICE)[:, 0]
    before = leaf.clone()
    expected = reference.visit(x, leaf, layer.leaves, "tanh")
    torch.testing.assert_close(triton.visit(x, leaf, layer.leaves, "tanh"), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(leaf, before)
    assert triton.visit(x[:0], leaf[:0], layer.leaves, "tanh").shape == (0, 5)


def test_experts_of_any_number():
    """A mixture of experts has leaves without a tree, and six of them raised an error."""
    leaves = Leaves._make(None if t is None else t[:6] for t in layer_of(7, 5, depth=3, leaf_width=3).leaves)
    x, leaf = torch.randn(4, 7, device=DEVICE), torch.tensor([5, 0, 3, 3], device=DEVICE)
    expected = reference.visit(x, leaf, leaves, "relu")
    torch.testing.assert_close(triton.visit(x, leaf, leaves, "relu"), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, activation, way):
    if way in GROUPED and dtype == torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("the interpreter multiplies the bits of bfloat16 matrices as integers")
    layer = layer_of(37, 29, depth=2, leaf_width=9, activation=activation, dtype=dtype)
    x = torch.randn(2 * few(way), 37, device=DEVICE).to(dtype)
    check_error(triton.hard, layer, x, WAYS[way]._replace(top=2))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("activation", "bias"), [("gelu", True), ("swiglu", True), ("geglu", False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_int8(dtype, activation, bias, way):
    layer = layer_of(37, 29, depth=1, leaf_width=9 if bias else 20, activation=activation, bias=bias, dtype=dtype)
    fastff.quantize_(layer)
    check_error(triton.hard, layer, torch.randn(2 * few(way), 37, device=DEVICE).to(dtype), WAYS[way])


@pytest.mark.parametrize("way", WAYS)
def test_int8_keeps_the_bits_of_float16(way):
    """With small weights, hidden * scale was below float16's normal numbers: 2.3 times plain torch's error."""
    layer = layer_of(37, 29, depth=1, leaf_width=20, bias=False, dtype=torch.float16)
    layer.leaf_out_weight.mul_(0.02)
    fastff.quantize_(layer)
    check_error(triton.hard, layer, torch.randn(2 * few(way), 37, device=DEVICE).half(), WAYS[way])


@pytest.mark.parametrize("way", WAYS)
def test_the_same_numbers_at_every_run(way, listing):
    """Bit by bit. test_gpu.py says that a row does not depend on the rows beside it; numpy's products do."""
    if way not in GROUPED and listing == "sorted":
        pytest.skip("no lists")
    layer, x = skewed("many to few"), torch.randn(35 if way in GROUPED else 4, 7, device=DEVICE)
    y, leaf = run(triton.hard, layer, x, WAYS[way])
    again = run(triton.hard, layer, x, WAYS[way])
    assert torch.equal(again[0], y)
    assert torch.equal(again[1], leaf)


@pytest.mark.parametrize("batch", [1, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_way_that_is_chosen(dtype, batch):
    layer = layer_of(37, 29, depth=2, leaf_width=9, dtype=dtype)
    x = torch.randn(37, batch, device=DEVICE).to(dtype).T
    check_error(triton.hard, layer, torch._neg_view(x), None)
