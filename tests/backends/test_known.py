"""A layer that was checked before is not checked again, unless a tensor has changed its form."""

import pytest
import torch

import fastff
from fastff import functional
from fastff.backends import known, ops
from fastff.backends.known import known_request, remember
from fastff.backends.request import Request


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch):
    monkeypatch.setattr(known, "_known", {})
    monkeypatch.setattr(ops, "_plans", {})


def layer(activation="swiglu", **options):
    return fastff.FFF(6, 5, depth=3, leaf_width=4, activation=activation, **options).eval()


def parts(layer):
    return layer.tree, layer.leaves, layer.activation


@torch.no_grad()
def test_the_same_request_without_the_checks():
    made, x = layer(), torch.randn(7, 6)
    assert known_request(x, *parts(made)) is None
    remember(Request.make("hard", x, *parts(made)))
    other = torch.randn(3, 6)
    found, expected = known_request(other, *parts(made)), Request.make("hard", other, *parts(made))
    for name in Request._fields:
        one, two = getattr(found, name), getattr(expected, name)
        if name in ("tree", "leaves", "weights"):  # tuples and lists of the same tensors
            assert [id(t) for t in one] == [id(t) for t in two]
        else:
            assert one is two or one == two


def test_a_second_call_does_not_check(monkeypatch):
    """In eager calls that no plan serves, as on a GPU, and in the compiler's operation."""
    made, x = layer(dtype=torch.float64), torch.randn(2, 7, 6, dtype=torch.float64)
    with torch.no_grad():
        expected = functional.hard(x, made.tree, made.leaves, activation="swiglu")
        ops.hard(x.view(14, 6), *made.tree, *made.leaves, "swiglu")

        def fail(*_):
            raise AssertionError("checked again")

        monkeypatch.setattr(functional, "check_fit", fail)
        monkeypatch.setattr(ops, "check_layer", fail)
        assert torch.equal(functional.hard(x, made.tree, made.leaves, activation="swiglu"), expected)
        flat = x.view(14, 6)[3:]
        y = ops.hard(flat, *made.tree, *made.leaves, "swiglu")
        torch.testing.assert_close(y, expected.view(14, 5)[3:])
    with pytest.raises(AssertionError, match="checked again"):  # with gradients every call is checked
        functional.hard(x, made.tree, made.leaves, activation="swiglu")


def changes():
    """A change of a layer, and the error it leads to; or none, and the layer still computes what the reference does."""

    def freed(made):
        made.leaf_in_bias.untyped_storage().resize_(0)

    def cut(made):
        made.node_weight.untyped_storage().resize_(8)

    def turned(made):
        made.leaf_in_weight.data = made.leaf_in_weight.data.mT.contiguous().mT

    def other_dtype(made):
        made.leaf_out_bias.data = made.leaf_out_bias.data.double()

    def no_bias(made):
        made.leaf_in_bias = None

    def biases_change_places(made):
        made.leaf_in_bias, made.leaf_gate_bias = made.leaf_gate_bias, None

    def negative(made):
        made.leaf_in_bias.data = torch.complex(torch.zeros(8, 4), torch.ones(8, 4)).conj().imag

    return [
        (freed, "its memory was freed"),
        (cut, "its memory was freed"),
        (other_dtype, "parameters of several dtypes"),
        (turned, ""),
        (no_bias, ""),
        (biases_change_places, ""),
        (negative, ""),
    ]


@pytest.mark.parametrize(("change", "said"), changes(), ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("way", ["functional", "operation"])
@torch.no_grad()
def test_a_change_is_noticed(change, said, way):
    made, x = layer(), torch.randn(7, 6)

    def run():
        if way == "functional":
            return functional.hard(x, made.tree, made.leaves, activation="swiglu")
        return ops.hard(x, *made.tree, *made.leaves, "swiglu")

    run()
    run()
    change(made)
    if said:
        with pytest.raises((RuntimeError, TypeError), match=said):
            run()
        return
    y = run()
    with fastff.backend("reference"):
        torch.testing.assert_close(y, functional.hard(x, made.tree, made.leaves, activation="swiglu"))


@torch.no_grad()
def test_a_wrong_input_is_refused_by_a_known_layer():
    made = layer()
    functional.hard(torch.randn(7, 6), *parts(made)[:2], activation="swiglu")
    for x, said in (
        (torch.randn(7, 5), "expects inputs of shape"),
        (torch.randn(2, 9), "expects inputs of shape"),
        (torch.randn(7, 6).double(), "got a torch.float64 input"),
        (torch.tensor(1.0), "Add a last dimension"),
        ([1.0] * 6, "expects a tensor"),
    ):
        with pytest.raises((ValueError, TypeError), match=said):
            functional.hard(x, *parts(made)[:2], activation="swiglu")
    nested = torch.nested.nested_tensor([torch.randn(6), torch.randn(6)])  # ended the process
    with pytest.raises(RuntimeError, match="support sizes"):
        functional.hard(nested, *parts(made)[:2], activation="swiglu")
    x = torch.randn(7, 6)
    x.untyped_storage().resize_(4)
    with pytest.raises(RuntimeError, match="its memory was freed"):
        functional.hard(x, *parts(made)[:2], activation="swiglu")


def test_gradients_and_tracers_are_seen():
    made, x = layer("relu"), torch.randn(7, 6)
    with torch.no_grad():
        expected = functional.hard(x, *parts(made)[:2])
    y = functional.hard(x, *parts(made)[:2])
    y.sum().backward()
    assert made.leaf_out_bias.grad is not None
    with torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(lambda row: functional.hard(row, *parts(made)[:2]))(x), expected)
        traced = torch.jit.trace(made, x, check_trace=False)
        torch.testing.assert_close(traced(torch.cat([x, x])), torch.cat([expected, expected]))


@torch.no_grad()
def test_the_memory_of_layers_is_bounded(monkeypatch):
    monkeypatch.setattr(known, "_MOST", 4)
    monkeypatch.setattr(ops, "_MOST_PLANS", 4)
    kept = [layer() for _ in range(9)]
    for made in kept:
        ops.hard(torch.randn(7, 6), *made.tree, *made.leaves, "swiglu")
        functional.hard(torch.randn(7, 6), *parts(made)[:2], activation="swiglu")
    assert 0 < len(known._known) <= 4
    assert len(ops._plans) <= 4
