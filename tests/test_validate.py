"""Nothing reaches a kernel that does not fit: wrong sizes raise, in every backend and in the registered operations.

Each of these once gave a wrong number, read past a buffer or ended the process.
"""

import pytest
import torch

import fastff
from fastff import functional
from fastff.backends import available
from fastff.tensors import Leaves, Tree
from helpers import make

BACKENDS = [name for name in ("auto", *available()) if name != "triton"]  # on CPU tensors


@pytest.fixture
def layer():
    return make(16, 8, depth=3, leaf_width=4, dtype=torch.float32).eval().requires_grad_(False)


def bad_trees(tree):
    yield tree._replace(bias=tree.bias[:2]), r"tree.bias must have shape \(7,\) here; got \(2,\)"
    yield tree._replace(bias=tree.bias.double()), "several dtypes: bias is torch.float64, not torch.float32"
    yield Tree(tree.weight[:6], tree.bias[:6]), "power of two of leaves; got 7"
    yield Tree(tree.weight[:, None], tree.bias), "tree.weight must have shape"
    yield tree._replace(out_weight=tree.weight[:, :1]), "no out_bias"
    yield tree._replace(weight=tree.weight[0]), "tree.weight must have shape"
    yield tree._replace(weight=tree.weight[0, 0]), "tree.weight must have shape"
    yield tree._replace(bias=None), "tree.bias must be a tensor; got NoneType. For none, pass zeros"
    yield tree._replace(weight=tree.weight.to_sparse()), "tree.weight must be a dense tensor"


def bad_leaves(leaves):
    yield leaves._replace(in_bias=leaves.in_bias[:1]), r"leaves.in_bias must have shape \(8, 4\) here"
    yield leaves._replace(in_weight=leaves.in_weight[:1]), "must have shape"
    yield leaves._replace(in_weight=leaves.in_weight[0]), r"leaves.in_weight must have shape \(leaves, l, in\)"
    yield leaves._replace(out_weight=leaves.out_weight[:, :2]), r"leaves.out_weight must have shape \(8, 4, 8\)"
    yield leaves._replace(out_weight=leaves.out_weight.flatten()), r"leaves.out_weight must have shape \(leaves"
    yield leaves._replace(out_bias=leaves.out_bias[:, :3]), r"leaves.out_bias must have shape \(8, 8\) here"
    yield leaves._replace(out_bias=leaves.out_bias.bfloat16()), "several dtypes"
    yield leaves._replace(in_weight=None), "leaves.in_weight must be a tensor; got NoneType"
    yield leaves._replace(gate_weight=leaves.in_weight), "needs leaves with no gate_weight"
    yield leaves._replace(gate_bias=leaves.in_bias), "gate_bias needs a gate_weight"


@pytest.mark.parametrize("backend", BACKENDS)
def test_misshapen_parameters(layer, backend):
    x, leaf = torch.randn(5, 16), torch.zeros(5, dtype=torch.int64)
    tree, leaves = layer.tree, layer.leaves
    refused = pytest.raises(
        (ValueError, TypeError), match=r"x must (have|be a dense)|x is torch.float64|activation must be"
    )
    with fastff.backend(backend):
        for bad, message in bad_trees(tree):
            for run in (
                lambda bad=bad: functional.route(x, bad),
                lambda bad=bad: functional.node_logits(x, bad),
                lambda bad=bad: functional.hard(x, bad, leaves),
                lambda bad=bad: torch.ops.fastff.route(x, *bad, "relu"),
                lambda bad=bad: torch.ops.fastff.hard(x, *bad, *leaves, "relu"),
            ):
                with pytest.raises((ValueError, TypeError), match=message):
                    run()
        for bad, message in bad_leaves(leaves):
            for run in (
                lambda bad=bad: functional.visit(x, leaf, bad, "relu"),
                lambda bad=bad: functional.hard(x, tree, bad),
                lambda bad=bad: torch.ops.fastff.visit(x, leaf, *bad, "relu"),
                lambda bad=bad: torch.ops.fastff.hard(x, *tree, *bad, "relu"),
            ):
                with pytest.raises((ValueError, TypeError), match=message):
                    run()
        with pytest.raises(ValueError, match="several devices: bias on meta, not cpu"):
            functional.route(x, tree._replace(bias=tree.bias.to("meta")))
        for wrong in (x[:, :12], x[0], x[None], x.double()):
            with refused:
                torch.ops.fastff.hard(wrong, *tree, *leaves, "relu")
            with refused:
                torch.ops.fastff.route(wrong, *tree, "relu")
            with refused:
                functional.visit(wrong, leaf, leaves, "relu")
        with refused:
            torch.ops.fastff.hard(x, *tree, *leaves, "sin")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("run", ["visit", "operation"])
def test_leaves_that_do_not_exist(layer, backend, run):
    """A negative leaf was taken for one from the end, or for none at all with an output of zero."""
    x = torch.randn(5, 16)

    def visit(leaf):
        if run == "visit":
            return functional.visit(x, leaf, layer.leaves, "relu")
        return torch.ops.fastff.visit(x, leaf, *layer.leaves, "relu")

    good = torch.tensor([0, 7, 3, 3, 1])
    with fastff.backend(backend):
        expected = torch.stack([visit(leaf.expand(5))[i] for i, leaf in enumerate(good)])
        torch.testing.assert_close(visit(good), expected)
        for bad in (-1, 8, 2**40, -(2**63)):
            leaf = good.clone()
            leaf[2] = bad
            with pytest.raises(IndexError, match=rf"leaf must be within 0..7; got .*{bad}"):
                visit(leaf)
        with pytest.raises(TypeError, match=r"leaf must be int64; got torch.int32. Convert it with leaf.long"):
            visit(good.int())
        for bad in (good[:4], good[:, None], good.repeat(2), good[0]):
            with pytest.raises(ValueError, match=r"leaf must have shape \(5,\), one for each row of x"):
                visit(bad)
        torch.testing.assert_close(visit(torch.stack([good, good], 1)[:, 0]), expected)  # strided


@pytest.mark.parametrize("backend", ["auto", *(["native"] if "native" in available() else [])])
@pytest.mark.parametrize("size", [0, 8])
def test_memory_that_was_freed(layer, backend, size):
    """FSDP frees parameters by resizing their storage: the kernels read address 0, or past the end."""
    x = torch.randn(5, 16)
    with fastff.backend(backend):
        y = layer(x)
        for tensor in (*layer.tree[:2], *layer.leaves[:4], x):
            kept, storage = tensor.clone(), tensor.untyped_storage()
            storage.resize_(size)
            for _ in range(2):
                with pytest.raises(RuntimeError, match=r"storage|not allocated"):
                    layer(x)
            if tensor is not x:
                with pytest.raises(RuntimeError, match=r"storage|not allocated"):
                    functional.hard(x, layer.tree, layer.leaves)
            storage.resize_(kept.nbytes)
            tensor.copy_(kept)
            assert torch.equal(layer(x), y)


def test_gated_leaves_need_their_gate():
    gated = make(activation="swiglu", dtype=torch.float32)
    x, leaf = torch.randn(2, 5), torch.zeros(2, dtype=torch.int64)
    for bad in (Leaves(*gated.leaves[:4]), gated.leaves._replace(gate_weight=gated.leaves.gate_weight[:, :1])):
        with pytest.raises(ValueError, match="gate_weight"):
            functional.visit(x, leaf, bad, "swiglu")


def test_a_meta_tensor_among_real_ones(layer):
    """The operations gave uninitialised memory for an output."""
    x, leaf = torch.randn(5, 16), torch.zeros(5, dtype=torch.int64)
    tree, leaves = layer.tree, layer.leaves
    for bad in (
        leaves._replace(out_bias=leaves.out_bias.to("meta")),
        leaves._replace(in_weight=leaves.in_weight.to("meta")),
    ):
        with pytest.raises(ValueError, match="x is on cpu, another tensor on meta"):
            torch.ops.fastff.hard(x, *tree, *bad, "relu")
    with pytest.raises(ValueError, match="x is on cpu, another tensor on meta"):
        torch.ops.fastff.route(x, tree.weight.to("meta"), *tree[1:], "relu")
    with pytest.raises(ValueError, match="x is on cpu, another tensor on meta"):
        torch.ops.fastff.visit(x, leaf.to("meta"), *leaves, "relu")


def test_arguments_of_other_kinds(layer):
    x = torch.randn(5, 16)
    with pytest.raises(TypeError, match="leaf must be a tensor; got list"):
        functional.visit(x, [0] * 5, layer.leaves, "relu")
    with pytest.raises(TypeError, match=r"tree.weight must be a tensor; got list"):
        functional.route(x, Tree([[1.0]], layer.node_bias))
    with pytest.raises(ValueError, match="mixture expects logits of shape"):
        functional.mixture(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"temperature must be one number; got a tensor of shape \(3,\)"):
        functional.soft(x, layer.tree, layer.leaves, temperature=torch.ones(3))
    with pytest.raises(TypeError, match="Pass its real and imaginary parts as features"):
        layer(x.to(torch.complex64))
    with (
        torch.autocast("cpu"),
        pytest.raises(TypeError, match=r"Convert it with x.to\(torch.float32\), or convert the layer"),
    ):
        layer(x.double())
    for value in ("a", None):
        with pytest.raises(TypeError, match="temperature must be a number"):
            layer.temperature = value
    layer.node_bias = None
    with pytest.raises(TypeError, match=r"tree.bias must be a tensor; got NoneType. For none, pass zeros."):
        layer(x)
    with pytest.raises(MemoryError, match=r"takes 2\*\*\d+ B of"):
        fastff.FFF(16, 16, depth=100_000, leaf_width=1, device="meta")
    with pytest.raises(TypeError, match="bias must be True or False; got 'no'"):
        fastff.FFF(16, 16, depth=1, leaf_width=1, bias="no")


@pytest.mark.parametrize("backend", BACKENDS)
def test_freed_memory_is_read_by_no_backend(layer, backend):
    """torch itself ends the process where it copies memory that was freed."""
    x = torch.randn(5, 16)
    x.untyped_storage().resize_(0)
    with fastff.backend(backend), pytest.raises(RuntimeError, match=r"x of shape .* its memory was freed"):
        layer(x)
    layer.node_bias.untyped_storage().resize_(0)
    data = torch.randn(200, 16)
    for call in (fastff.initialize_tree_, fastff.rebalance_, lambda *a: fastff.Recipe(*a, steps=9)):
        with fastff.backend(backend), pytest.raises(RuntimeError, match="its memory was freed"):
            call(layer, data)


def test_the_activation_of_a_walk(layer):
    for run in (functional.route, functional.node_logits):
        with pytest.raises(ValueError, match="activation must be one of"):
            run(torch.randn(5, 16), layer.tree, activation="zzz")


def test_tuples_of_another_kind_are_named():
    """Swapped or missing tuples ended in errors about `_make` and `_fields`."""
    layer, x = make(dtype=torch.float32), torch.randn(3, 5)
    for call in (
        lambda: functional.route(layer.tree, x),
        lambda: functional.hard(x, layer.leaves, layer.tree),
        lambda: functional.hard(x, None, layer.leaves),
        lambda: functional.soft(x, layer.leaves, layer.leaves),
    ):
        with pytest.raises(TypeError, match=r"tree must be a fastff.functional.Tree, such as layer.tree; got"):
            call()
    with pytest.raises(TypeError, match=r"leaves must be a fastff.functional.Leaves, such as layer.leaves; got tuple"):
        functional.visit(x, torch.zeros(3, dtype=torch.int64), tuple(layer.leaves), "relu")


@pytest.mark.parametrize("function", [functional.mixture, functional.walk])
def test_logits_of_no_tree(function):
    with pytest.raises(ValueError, match=r"2\*\*depth - 1 nodes \(0, 1, 3, 7, ...\); got \(5, 4\)"):
        function(torch.randn(5, 4))


@pytest.mark.parametrize("value", [-2.0, 0.0, float("inf"), float("nan")])
def test_a_state_with_a_bad_temperature_is_refused(value):
    layer = make()
    state = layer.state_dict() | {"temperature_tensor": torch.tensor(value, dtype=torch.float64)}
    with pytest.raises(RuntimeError, match="temperature_tensor must be positive and finite"):
        layer.load_state_dict(state)
    assert layer.temperature == 1.0
