import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fastff
from fastff.batches import batches, evaluation_mode, feed, watch_inputs
from helpers import make, two_layers


class Echo(nn.Module):
    def forward(self, *args, **kwargs):
        self.seen = (args, kwargs)


@pytest.mark.parametrize(
    ("batch", "seen"),
    [
        (torch.tensor(1), ((1,), {})),
        ((torch.tensor(1), torch.tensor(2)), ((1,), {})),
        ([torch.tensor(1), torch.tensor(2)], ((1,), {})),
        ({"pixels": torch.tensor(1), "scale": 2}, ((), {"pixels": 1, "scale": 2})),
    ],
)
def test_what_a_model_is_fed(batch, seen):
    model = Echo()
    feed(model, batch)
    assert model.seen == seen


def test_a_loader_yields_batches_and_a_batch_is_one():
    assert [len(batch) for batch in batches(DataLoader(torch.zeros(5, 2), batch_size=2))] == [2, 2, 1]
    assert len(list(batches((torch.zeros(5, 2), torch.zeros(5))))) == 1
    with pytest.raises(TypeError, match="got float"):
        batches(1.0)


def test_a_list_of_batches_is_read_whole():
    """It was taken for one batch [input, target], and all but its first element left out without a word."""
    x, y = torch.randn(6, 2), torch.zeros(6, dtype=torch.int64)
    assert len(list(batches(list(x.split(2))))) == 3
    assert len(list(batches([(x, y), (x, y)]))) == 2
    assert len(list(batches([{"x": x}, {"x": x}]))) == 2
    assert len(list(batches([x, y]))) == 1  # what next(iter(loader)) gives
    assert len(list(batches([y, y]))) == 1  # such as token numbers and a mask
    with pytest.raises(ValueError, match="data is an empty list"):
        batches([])


def test_modes_come_back_after_an_error():
    model = two_layers()
    model[0].eval()
    seen = []
    with pytest.raises(KeyError), evaluation_mode(model):
        seen.append(model[2].training) or {}["missing"]
    assert seen == [False]
    assert [module.training for module in model] == [False, True, True]


@pytest.mark.slow
def test_watching_a_compiled_model():
    """Compiled code runs no hook, so the model is run eagerly while it is watched."""
    model = make(depth=2)
    compiled = torch.compile(model, backend="eager")
    x = torch.randn(3, 2, 5, dtype=torch.float64)
    compiled(x)
    compiled.eval()(x)
    seen = []
    with evaluation_mode(compiled), watch_inputs({"": model}, lambda name, layer, inputs: seen.append(inputs)):
        compiled(x)
    assert torch.equal(seen[0], x.reshape(6, 5))
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("shape", [(10, 7), (10,), ()])
def test_data_of_another_width_is_named(shape):
    layer = fastff.FFF(8, 4, depth=2, leaf_width=2)
    for call in (fastff.initialize_tree_, fastff.rebalance_, fastff.usage, lambda m, x: fastff.Recipe(m, x, steps=2)):
        with pytest.raises(ValueError, match=r"in_features=8; data reaches it as"):
            call(layer, torch.randn(shape))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.zeros((4, 8)), "got ndarray. Pass torch.from_numpy"),
        ([np.zeros((4, 8))] * 2, "got a list of ndarray. Pass torch.from_numpy"),
        ((np.zeros((4, 8)), np.zeros(4)), "got a list of ndarray. Pass torch.from_numpy"),
        ("a text", "got str. Pass tokenised batches"),
        (["a text", "another"], "got a list of str. Pass tokenised batches"),
        ([(np.zeros((4, 8)), 1)], "got a list of ndarray. Pass torch.from_numpy"),
        ([["a text"], ["another"]], "got a list of str. Pass tokenised batches"),
    ],
)
def test_arrays_and_texts_are_no_data(data, message):
    """They got as far as the model, which raised what only its author could read."""
    layer = fastff.FFF(8, 4, depth=2, leaf_width=2)
    dense = nn.Sequential(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)))
    operated = copy.deepcopy(dense)
    report = fastff.replace_(operated, depth=2)
    before = copy.deepcopy(layer.state_dict())
    for call in (
        lambda: fastff.initialize_tree_(layer, data),
        lambda: fastff.rebalance_(layer, data),
        lambda: fastff.usage(layer, data),
        lambda: fastff.Recipe(layer, data, steps=2),
        lambda: fastff.replace_(dense, depth=2, init="data", data=data),
        lambda: fastff.distill_(operated, report, data, steps=1, progress=False),
    ):
        with pytest.raises(TypeError, match=message):
            call()
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())
    assert not hasattr(dense[0], "route")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.ones((8, 5), dtype=np.float32), "must be a tensor; got ndarray"),
        ([[1, 2], [3, 4]], 'Pass return_tensors="pt"'),
        (["a", "b"], "must be a tensor; got list of str"),
    ],
)
def test_arrays_lists_and_texts_in_a_batch_by_name(value, message):
    """They were refused by themselves, and reached the model in a dict."""
    for call in (fastff.initialize_tree_, fastff.usage):
        with pytest.raises(TypeError, match=rf"data\['x'\] .*{message}|{message}"):
            call(make(dtype=torch.float32), {"x": value})
