"""Any view, stride, swap or thread: a layer gives what the reference gives for the numbers that its tensors show.

The native backend keeps a plan of pointers from call to call. It once compared pointers alone, and read a view of the
same storage in the layout of the old one: wrong numbers, and no error. FASTFF_FUZZ=20000 tries as many cases.
"""

import itertools
import os
import sys
import threading

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from fastff.backends import available, reference
from helpers import ACTIVATIONS, make

CASES = int(os.environ.get("FASTFF_FUZZ", "300"))


def offset(t):
    """The same numbers, further into a storage."""
    return torch.cat([t.new_full((3,), torch.nan), t.flatten()])[3:].view(t.shape)


# Views and copies of the shape of a tensor; most of them lie in its storage.
SAME_SHAPE = {
    "itself": lambda t: t,
    "copy": lambda t: t.clone(),
    "turned around": lambda t: t.flatten().flip(0).view(t.shape),
    "negative": torch._neg_view,
    "strided": lambda t: torch.stack([t, -t], -1)[..., 0],
    "offset": offset,
    "first row for all": lambda t: t[:1].expand_as(t),
    "one number for all": lambda t: t.flatten()[0].expand(t.shape) if t.numel() else t,
    "other order of memory": lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
    "transposed": lambda t: t.mT if t.dim() > 1 and t.shape[-1] == t.shape[-2] else t,
}
OTHER_SHAPE = {
    "cut": lambda t: t[..., :-1],
    "short": lambda t: t[:-1],
    "flat": lambda t: t.flatten(),
    "deep": lambda t: t.unsqueeze(-1),
    "repeated": lambda t: torch.cat([t, t]),
    "transposed": lambda t: t.mT if t.dim() > 1 else t[None],
    "double": lambda t: t.double(),
    "half": lambda t: t.half(),
}
INPUTS = SAME_SHAPE | {
    "row": lambda x: x[0],
    "none": lambda x: x[:0],
    "three": lambda x: x.view(-1, 1, x.shape[-1]),
    "every other": lambda x: x[::2],
}

sizes = st.fixed_dictionaries(
    {
        "in_features": st.sampled_from([1, 4, 5, 8]),
        "out_features": st.sampled_from([1, 4, 6]),
        "depth": st.integers(0, 3),
        "leaf_width": st.sampled_from([1, 3, 4, 5]),
        "node_width": st.sampled_from([1, 1, 2]),
        "activation": st.sampled_from(ACTIVATIONS),
        "bias": st.booleans(),
    }
)
steps = st.lists(
    st.tuples(
        st.integers(0, 9),
        st.sampled_from([*SAME_SHAPE, *SAME_SHAPE, *OTHER_SHAPE]),
        st.sampled_from(sorted(INPUTS)),
        st.booleans(),
        st.sampled_from([torch.no_grad, torch.inference_mode, torch.enable_grad]),
    ),
    min_size=1,
    max_size=5,
)


def expected(layer, x):
    """What the reference makes of the numbers that the tensors show, in float64, and the leaves that it visits."""

    def plain(tensors):
        return type(tensors)(*(None if t is None else t.detach().clone().double() for t in tensors))

    tree, leaves = plain(layer.tree), plain(layer.leaves)
    flat = x.detach().clone().double().reshape(-1, layer.in_features)
    leaf = reference.route(flat, tree, layer.activation)
    y = reference.visit(flat, leaf, leaves, layer.activation)
    return y.reshape(*x.shape[:-1], y.shape[-1])


@pytest.mark.slow
@settings(max_examples=CASES, deadline=None)
@given(size=sizes, steps=steps, batch=st.sampled_from([1, 2, 7]), seed=st.integers(0, 10**6))
def test_any_view(size, steps, batch, seed):
    """Each step replaces the data of one parameter, then calls the layer twice, the second time with its plan."""
    torch.manual_seed(seed)
    layer = make(dtype=torch.float32, scale=3.0, **size).eval()
    whole = {name: p.detach().clone() for name, p in layer.named_parameters()}
    for which, change, view, is_new_parameter, mode in steps:
        names = sorted(whole)
        name = names[which % len(names)]
        fits = change in SAME_SHAPE
        parameter = getattr(layer, name)
        new = (SAME_SHAPE if fits else OTHER_SHAPE)[change](parameter.detach())
        fits = fits or (new.shape == parameter.shape and new.dtype == parameter.dtype)
        x = INPUTS[view](torch.randn(batch, layer.in_features))
        if is_new_parameter:
            setattr(layer, name, nn.Parameter(new))
        else:
            parameter.data = new
        with mode():
            for _ in range(2):
                try:
                    y = layer(x)
                except (ValueError, TypeError):
                    assert not fits, (name, change, view)
                    continue
                exact = expected(layer, x)
                assert y.shape == exact.shape
                bound = 1e-4 * max(1.0, exact.abs().amax().item()) if exact.numel() else 0
                assert not y.numel() or (y - exact).abs().max() <= bound, (name, change, view)
        if not fits:
            setattr(layer, name, nn.Parameter(whole[name].clone()))


@pytest.mark.skipif("native" not in available(), reason="native backend not built")
@pytest.mark.parametrize("batch", [1, 5])
def test_data_is_replaced_while_others_evaluate(batch):
    """Each output is of the old or of the new weights, and no memory is read after it was freed.

    Of 90,313 outputs 3,059 were neither, and one run ended with a segmentation fault.
    """
    interval = sys.getswitchinterval()
    layer = make(24, 16, depth=3, leaf_width=8, dtype=torch.float32).eval().requires_grad_(False)
    x = torch.randn(batch, 24)
    versions = {name: [p.clone(), -p, p * 2] for name, p in layer.named_parameters() if name.startswith("leaf_")}
    # A call reads one parameter after the other, as nn.Linear does: an old one may stand beside a new one.
    right, names = [], list(versions)
    for name, following in zip(names, names[1:] + names[:1], strict=True):
        for value, other in itertools.product(versions[name], versions[following]):
            getattr(layer, name).data, getattr(layer, following).data = value.clone(), other.clone()
            right.append(layer(x))
        getattr(layer, name).data, getattr(layer, following).data = (
            versions[name][0].clone(),
            versions[following][0].clone(),
        )
    done, wrong, count = threading.Event(), [], [0] * 3

    def evaluate(i):
        with torch.no_grad():
            while not done.is_set():
                y = layer(x)
                count[i] += 1
                if not any(torch.equal(y, one) for one in right):
                    wrong.append(y)

    threads = [threading.Thread(target=evaluate, args=(i,)) for i in range(len(count))]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for _ in range(max(400, CASES)):
            for name, values in versions.items():
                for value in (*values[1:], values[0]):
                    getattr(layer, name).data = value.clone()  # what was there is freed
    finally:
        done.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert sum(count) > 100
    assert not wrong, f"{len(wrong)} of {sum(count)}"
