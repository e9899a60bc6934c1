"""fastfeedforward 0.2.1 and its conversion: the same function from the same numbers.

That package computes in float32 whatever its parameters are, so the comparisons are in float32. Outputs are sums of a
few dozen products of order one, which the two arrange differently: a hundred units of rounding, 1e-5, may differ.
"""

import re

import pytest
import torch
from torch import nn

import fastff
from fastff.compat import convert_state_dict, from_fastfeedforward

theirs = pytest.importorskip("fastfeedforward")

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
SIZES = {0: (5, 3, 4), 1: (2, 1, 1), 2: (13, 5, 3), 3: (7, 1, 9), 4: (10, 6, 2)}  # depth: in, leaf, out
depths = pytest.mark.parametrize("depth", SIZES)


def old(depth, **options):
    """A layer of theirs, with boundaries near the middle of the inputs, so that decisions are spread."""
    layer = theirs.FFF(*SIZES[depth], depth, **options)
    with torch.no_grad():
        layer.node_weights *= 3
        layer.node_biases *= 0.1
    return layer


def inputs(depth, *shape):
    return torch.randn(*shape, SIZES[depth][0])


@depths
@pytest.mark.parametrize("shape", [(1,), (63,), (2, 3, 5), (0,)])
def test_soft_pass_is_their_training_forward(depth, shape):
    layer = old(depth)
    x = inputs(depth, *shape)
    torch.testing.assert_close(from_fastfeedforward(layer.state_dict())(x), layer.training_forward(x), **TOLERANCE)


@depths
def test_gradients_are_theirs(depth):
    """The same numbers must not only come out but be trained alike: every parameter, and the input."""
    layer = old(depth)
    ours = from_fastfeedforward(layer.state_dict())
    x = inputs(depth, 63)
    mine, yours = x.clone().requires_grad_(), x.clone().requires_grad_()
    ours(mine).square().sum().backward()
    layer.training_forward(yours).square().sum().backward()
    torch.testing.assert_close(mine.grad, yours.grad, rtol=1e-5, atol=1e-4)
    pairs = {"node_weight": layer.node_weights, "leaf_in_bias": layer.b1s, "leaf_out_weight": layer.w2s}
    grads = {name: tensor.grad for name, tensor in pairs.items()} | {"leaf_in_weight": layer.w1s.grad.mT}
    grads |= {"leaf_out_bias": layer.b2s.grad, "node_bias": None if not depth else layer.node_biases.grad.squeeze(-1)}
    for name, grad in grads.items():
        if depth or name.startswith("leaf"):
            # Sums over 63 samples of numbers up to ten: their rounding is relative to the largest.
            scale = max(grad.abs().max().item(), 1)
            torch.testing.assert_close(
                ours.get_parameter(name).grad, grad, rtol=0, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}"
            )


@depths
def test_hard_pass_is_theirs_and_the_output_bias_it_forgets(depth):
    """Their evaluation leaves out b2s, which their training adds: it evaluates another function than it has trained.
    Ours adds the bias of the leaf that is chosen."""
    if depth == 0:
        pytest.skip("eval_forward of fastfeedforward 0.2.1 raises UnboundLocalError at depth 0")
    layer = old(depth).eval()
    ours = from_fastfeedforward(layer.state_dict()).eval()
    x = inputs(depth, 63)
    leaf = ours.route(x)
    assert len(leaf.unique()) > 1, "decisions are spread"
    torch.testing.assert_close(ours(x), layer(x) + layer.b2s[leaf], **TOLERANCE)
    assert not torch.allclose(ours(x), layer(x), **TOLERANCE), "the bias makes a difference"
    # Their training forward with rounded decisions has the bias, and is what evaluation was meant to be.
    torch.testing.assert_close(ours(x), layer.training_forward(x, use_hard_decisions=True), **TOLERANCE)


def test_depth_0_evaluates_to_what_was_trained():
    """Their evaluation does not run at depth 0, where there is one leaf and nothing to decide; ours equals training."""
    layer = old(0)
    ours = from_fastfeedforward(layer.state_dict()).eval()
    x = inputs(0, 63)
    torch.testing.assert_close(ours(x), layer.training_forward(x), **TOLERANCE)
    with pytest.raises(UnboundLocalError):
        layer.eval()(x)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_entropies_are_theirs(depth):
    """The hardening loss of their experiments averages their entropies, so its weights carry over to "mean"."""
    layer = old(depth)
    ours = from_fastfeedforward(layer.state_dict())
    x = inputs(depth, 63)
    ours(x)
    _, entropies = layer.training_forward(x, return_entropies=True)
    # They keep probabilities 1e-6 away from 0 and 1, which is worth up to 1.5e-5 of entropy there.
    torch.testing.assert_close(fastff.training.entropies(ours)[""], entropies, rtol=1e-5, atol=2.5e-5)
    torch.testing.assert_close(fastff.hardening_loss(ours), entropies.mean(), rtol=1e-5, atol=2.5e-5)


def test_options_are_ours():
    """A state dict holds no activation: it must be named again, and any option of FFF with it."""
    layer = old(2, activation=nn.GELU())
    x = inputs(2, 7)
    ours = from_fastfeedforward(layer.state_dict(), activation="gelu", transposition=0.25, dropout=0.5)
    assert (ours.activation, ours.transposition, ours.dropout) == ("gelu", 0.25, 0.5)
    torch.testing.assert_close(ours.eval()(x), layer.training_forward(x, use_hard_decisions=True), **TOLERANCE)
    assert (ours.in_features, ours.leaf_width, ours.out_features, ours.depth) == (*SIZES[2], 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtype_is_that_of_the_state_unless_told(dtype):
    layer = old(2)
    cast = {n: t.to(dtype) if t.is_floating_point() else t for n, t in layer.state_dict().items()}
    ours, converted = from_fastfeedforward(cast), convert_state_dict(cast)
    assert {p.dtype for p in ours.parameters()} == {dtype}
    assert all(converted[name].dtype == tensor.dtype for name, tensor in ours.state_dict().items())
    ours = from_fastfeedforward(layer.state_dict(), dtype=dtype)
    assert {p.dtype for p in ours.parameters()} == {dtype}
    assert torch.equal(ours.leaf_in_weight, layer.w1s.mT.to(dtype))


@pytest.mark.parametrize("usage_mode", ["none", "hard", "soft"])
def test_counters_and_depth_are_dropped(usage_mode):
    """Their state holds the depth as a parameter and, when usage is tracked, two counters; ours has neither."""
    layer = old(3, usage_mode=usage_mode)
    state = layer.state_dict()
    assert "depth" in state
    assert ("leaf_usage" in state) == ("node_usage" in state) == (usage_mode != "none")
    names = dict(fastff.FFF(7, 9, depth=3, leaf_width=1).state_dict())
    assert convert_state_dict(state).keys() == names.keys()
    x = inputs(3, 5)
    assert torch.equal(from_fastfeedforward(state)(x), from_fastfeedforward(old_without(state))(x))


def old_without(state):
    return {name: tensor for name, tensor in state.items() if name not in ("depth", "node_usage", "leaf_usage")}


class Model(nn.Module):
    """Two fast feedforward layers of either package among other modules, with entries that look like theirs."""

    def __init__(self, first, second):
        super().__init__()
        self.ff = first
        self.norm = nn.BatchNorm1d(13)
        self.ff2 = nn.ModuleList([nn.Linear(3, 13), second])
        self.register_buffer("depth", torch.tensor(7))  # not a fast feedforward layer's

    def forward(self, x):
        return self.ff2[1](self.ff2[0](self.ff(self.norm(x))))


def test_a_whole_model():
    """Every layer of theirs becomes one of ours; everything else, a like-named entry elsewhere too, passes as it is."""
    model = Model(old(2, usage_mode="soft"), old(2))
    state = model.state_dict()
    before = {name: tensor.clone() for name, tensor in state.items()}
    converted = convert_state_dict(state)
    assert state.keys() == before.keys()
    assert all(torch.equal(state[name], before[name]) for name in state), "the argument is left as it was"
    others = [name for name in state if not name.startswith(("ff.", "ff2.1."))]
    assert "depth" in others
    assert "ff2.0.weight" in others
    assert all(converted[name] is state[name] for name in others)

    ours = Model(fastff.FFF(13, 3, depth=2, leaf_width=5), fastff.FFF(13, 3, depth=2, leaf_width=5))
    ours.load_state_dict(converted)  # strict: nothing missing, nothing left over
    x = torch.randn(63, 13)
    torch.testing.assert_close(ours(x), model(x), **TOLERANCE)


def test_converted_tensors_are_copies():
    """Training on after the conversion must not change the tensors that were converted, nor keep their layout."""
    layer = old(2)
    state = layer.state_dict()
    converted = convert_state_dict(state)
    storages = {tensor.untyped_storage().data_ptr() for tensor in state.values()}
    assert all(tensor.untyped_storage().data_ptr() not in storages for tensor in converted.values())
    assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in converted.values())
    assert convert_state_dict(dict(layer.named_parameters())).keys() == converted.keys()
    assert not any(tensor.requires_grad for tensor in convert_state_dict(dict(layer.named_parameters())).values())


@pytest.mark.parametrize(("prefix", "name"), [("ff", "ff"), ("ff.", "ff"), ("ff2.1", "ff2.1"), ("ff2.1.", "ff2.1")])
def test_a_prefix_picks_one_layer(prefix, name):
    """With or without its dot; and "ff" is not a prefix of "ff2.1"."""
    model = Model(old(2), old(2))
    ours = from_fastfeedforward(model.state_dict(), prefix)
    assert torch.equal(ours.leaf_out_weight, model.get_submodule(name).w2s)
    assert torch.equal(ours.node_bias, model.get_submodule(name).node_biases.squeeze(-1))


def test_a_state_without_the_layer():
    state = Model(old(2), old(2)).state_dict()
    with pytest.raises(
        ValueError, match=r"no layer of fastfeedforward 0.2.1 at 'norm'; it has depth, ff.depth, .*\.\.\."
    ):
        from_fastfeedforward(state, "norm")
    with pytest.raises(ValueError, match=r"no layer of fastfeedforward 0.2.1 at ''"):
        from_fastfeedforward(state)
    with pytest.raises(ValueError, match=r"no entry named node_weights.*it has weight, bias"):
        convert_state_dict(nn.Linear(3, 2).state_dict())
    with pytest.raises(ValueError, match="it has no entries"):
        convert_state_dict({})
    with pytest.raises(ValueError, match=r"no layer of fastfeedforward 0.2.1 at ''"):
        from_fastfeedforward(fastff.FFF(3, 2, depth=1, leaf_width=1).state_dict())  # has been converted already


@pytest.mark.parametrize("name", ["node_biases", "w1s", "b1s", "w2s", "b2s"])
def test_a_missing_tensor_is_named(name):
    state = Model(old(2), old(2)).state_dict()
    del state[f"ff2.1.{name}"]
    with pytest.raises(ValueError, match=rf"'ff2.1.' of fastfeedforward 0.2.1 lacks ff2.1.{name}\."):
        convert_state_dict(state)
    with pytest.raises(ValueError, match=f"lacks {name}"):
        from_fastfeedforward(state, "ff2.1")


def test_without_node_weights_the_layer_is_not_seen():
    """A layer is known by its node_weights; asked for one that lacks them, there is nothing to convert."""
    state = old(2).state_dict()
    del state["node_weights"]
    with pytest.raises(ValueError, match="node_weights"):
        from_fastfeedforward(state)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("node_weights", (3, 12)),
        ("node_weights", (4, 13)),
        ("node_biases", (3,)),
        ("node_biases", (2, 1)),
        ("w1s", (4, 13)),
        ("w1s", (4, 13, 6)),
        ("w1s", ()),
        ("w1s", (0, 13, 5)),
        ("b1s", (4, 6)),
        ("w2s", (4, 4, 3)),
        ("w2s", (3, 5, 3)),
        ("b2s", (4, 2)),
        ("b2s", (3,)),
        ("b2s", ()),
        ("w2s", ()),
    ],
)
def test_a_wrong_shape_is_named(name, shape):
    state = old(2).state_dict()
    state[name] = torch.zeros(shape)
    with pytest.raises(ValueError, match=r"should have the shape .*; got ") as error:
        from_fastfeedforward(state)
    # The others are compared with w1s: one that could be right shows in the first that does not fit it.
    assert str(error.value).startswith(name) or (name == "w1s" and "given w1s of" in str(error.value))
    assert str(tuple(shape)) in str(error.value)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [("w1s", (4, 13), "(leaves, in_features, leaf_width)"), ("w2s", (), "(leaves, leaf_width, out_features)")],
)
def test_the_tensors_that_give_the_sizes_are_checked_first(name, shape, expected):
    """A w1s of two dimensions was reported as a fault of node_weights; a w2s of none was an IndexError."""
    state = Model(old(2), old(2)).state_dict()
    state[f"ff2.1.{name}"] = torch.zeros(shape)
    with pytest.raises(ValueError, match=re.escape(f"ff2.1.{name} should have the shape {expected}; got {shape}.")):
        convert_state_dict(state)


def test_leaves_that_make_no_tree():
    """Three leaves and two nodes fit each other, but no perfect binary tree."""
    state = {"node_weights": torch.zeros(2, 4), "node_biases": torch.zeros(2, 1), "w1s": torch.zeros(3, 4, 5)}
    state |= {"b1s": torch.zeros(3, 5), "w2s": torch.zeros(3, 5, 2), "b2s": torch.zeros(3, 2)}
    with pytest.raises(ValueError, match="a power of two of leaves; got 3"):
        from_fastfeedforward(state)
