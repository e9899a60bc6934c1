import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fastff
from helpers import make


def counts(model, data):
    return {name: usage.leaf_count for name, usage in fastff.usage(model, data).items()}


@pytest.mark.parametrize("node_width", [1, 3])
@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_leaf_gets_its_share(node_width, depth, dtype):
    """Also when the data lies far from the origin and has very different scales."""
    x = (torch.randn(1000, 5) * torch.tensor([1, 10, 0.1, 1, 3]) + torch.tensor([100.0, 0, 5, -7, 1])).to(dtype)
    layer = make(depth=depth, node_width=node_width, activation="tanh" if node_width == 1 else "gelu", dtype=dtype)
    fastff.initialize_tree_(layer, x)
    share = counts(layer, x)[""]
    assert share.sum() == 1000
    # Halving an odd number leaves one over: a node is at most one sample off a level.
    assert share.max() - share.min() <= depth + 2


def test_std_is_that_of_the_logits():
    layer = make(depth=3)
    x = torch.randn(2000, 5, dtype=torch.float64)
    for std in (1.0, 3.0):
        fastff.initialize_tree_(layer, x, logit_std=std)
        logits = layer.node_logits(x)
        assert logits[:, 0].std().item() == pytest.approx(std, rel=1e-2)
        left = layer.node_logits(x[logits[:, 0] < 0])[:, 1]
        assert left.std().item() == pytest.approx(std, rel=1e-2)
        assert left.median().abs() < 0.05 * std


def test_leaves_and_mode_are_left_alone():
    model = nn.Sequential(nn.BatchNorm1d(5), make(depth=2, dtype=torch.float32), nn.Dropout(0.5))
    model[2].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fastff.initialize_tree_(model, torch.randn(64, 5))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) != name.startswith("1.node_")
    assert [module.training for module in model] == [True, True, False]
    assert not model[1]._forward_pre_hooks


class Branching(nn.Module):
    """Runs its layers in another order than it declares them, and takes keywords."""

    def __init__(self):
        super().__init__()
        self.last = fastff.FFF(6, 2, depth=3, leaf_width=2)
        self.first = fastff.FFF(4, 6, depth=2, leaf_width=2, activation="tanh")  # relu would make ties

    def forward(self, pixels, scale=1.0):
        return self.last(torch.tanh(self.first(pixels * scale)))


@pytest.mark.parametrize(
    "data",
    [
        lambda x: x,
        lambda x: {"pixels": x},
        lambda x: (x, torch.zeros(len(x))),
        lambda x: DataLoader(TensorDataset(x, torch.zeros(len(x))), batch_size=100, shuffle=True),
        lambda x: (part for part in x.split(77)),
    ],
    ids=["tensor", "mapping", "tuple", "loader", "generator"],
)
def test_later_layers_see_earlier_ones(data):
    model = Branching()
    x = torch.randn(800, 4) + 3
    fastff.initialize_tree_(model, data(x))
    share = counts(model, x)
    assert share["first"].max() - share["first"].min() <= 4
    # The hard pass of the first layer feeds the second in evaluation, as it did when its tree was placed.
    assert share["last"].min() > 0.8 * 100


def test_reads_no_more_batches_than_it_needs():
    read = []

    def loader():
        for part in torch.randn(1000, 5, dtype=torch.float64).split(100):
            read.append(part)
            yield part

    fastff.initialize_tree_(make(depth=2), loader(), samples=250)
    assert len(read) == 3


def test_few_samples_and_constant_inputs():
    """Fewer samples than leaves, or all alike: the tree is finite, and no error."""
    layer = make(depth=5)
    for x in (torch.randn(3, 5, dtype=torch.float64), torch.ones(50, 5, dtype=torch.float64)):
        fastff.initialize_tree_(layer, x)
        assert all(parameter.isfinite().all() for parameter in layer.parameters())
        assert layer.eval()(x).isfinite().all()


def test_frozen_and_compiled():
    layer = make(depth=2).freeze_tree_()
    x = torch.randn(40, 5, dtype=torch.float64)
    fastff.initialize_tree_(torch.compile(layer, backend="eager"), x)
    assert counts(layer, x)[""].tolist() == [10] * 4
    assert not layer.node_weight.requires_grad


class Poison(nn.Module):
    def forward(self, x):
        return x * torch.inf


class ByKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.ff = make(depth=2)

    def forward(self, x):
        return self.ff(x=x)


def test_layers_called_by_keyword():
    model = ByKeyword()
    x = torch.randn(40, 5, dtype=torch.float64)
    fastff.initialize_tree_(model, x)
    assert counts(model, x)["ff"].tolist() == [10] * 4


def test_errors_change_nothing():
    """Also when the second layer fails after the first has been set."""
    model = nn.Sequential(make(5, 5, depth=2), make(5, 5, depth=2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(8, 5, dtype=torch.float64)
    x_bad = x.clone()
    x_bad[3, 1] = torch.nan
    for arguments, error, message in [
        ((model, x[:0]), ValueError, "no sample in data reaches the layers \\['0', '1'\\]"),
        ((model, x_bad), ValueError, "layer '0' hold NaN or infinity"),
        ((nn.Sequential(model[0], Poison(), model[1]), x), ValueError, "layer '2' hold NaN or infinity"),
        ((model, 3), TypeError, "data must be a tensor, a batch or an iterable of batches; got int"),
        ((nn.Linear(5, 5), x), ValueError, "Linear has no FFF layer"),
    ]:
        with pytest.raises(error, match=message):
            fastff.initialize_tree_(*arguments)
    for options in ({"logit_std": 0.0}, {"samples": 0}):
        with pytest.raises(ValueError, match="must be"):
            fastff.initialize_tree_(model, x, **options)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    exponent=st.integers(-45, 38),
    std=st.sampled_from([1e-30, 1e-3, 1.0, 1e3, 1e30]),
    node_width=st.sampled_from([1, 2]),
    seed=st.integers(0, 9),
)
def test_trees_are_finite_and_balanced_or_refused(dtype, exponent, std, node_width, seed):
    """Data of 3e38 or 1e-40, or of 1e-5 in float16, gave weights that were infinite or NaN, without a word."""
    torch.manual_seed(seed)
    layer = make(5, 2, depth=2, node_width=node_width, activation="tanh", dtype=dtype)
    x = (torch.randn(64, 5, dtype=torch.float64).clamp(-3, 3) * 10.0**exponent).to(dtype)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    refused = ""
    try:
        fastff.initialize_tree_(layer, x, logit_std=std)
    except ValueError as error:
        refused = str(error)
    if refused:
        assert "hold NaN or infinity" in refused or f"does not fit into {dtype}" in refused
        assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())
        return
    assert all(parameter.isfinite().all() for parameter in layer.parameters())
    if len(x.unique(dim=0)) == 64 and dtype in (torch.float32, torch.float64):
        assert counts(layer, x)[""].min() >= 8


@pytest.mark.parametrize(
    ("scale", "dtype"), [(3e38, torch.float32), (1e-30, torch.float32), (1e-5, torch.float16), (1e150, torch.float64)]
)
def test_data_of_any_scale_whose_tree_fits(scale, dtype):
    torch.manual_seed(0)
    layer = fastff.FFF(256, 2, depth=3, leaf_width=1, dtype=dtype)
    x = (torch.randn(512, 256, dtype=torch.float64).clamp(-1, 1) * scale).to(dtype)
    fastff.initialize_tree_(layer, x, logit_std=0.5)
    assert counts(layer, x)[""].min() >= 48
    assert layer.node_logits(x)[:, 0].std().item() == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize(("scale", "dtype"), [(1e-40, torch.float32), (1e-6, torch.float16), (1e300, torch.float64)])
def test_a_tree_that_does_not_fit_is_named(scale, dtype):
    layer = fastff.FFF(8, 2, depth=3, leaf_width=1, dtype=dtype)
    x = (torch.randn(512, 8, dtype=torch.float64) * scale).to(dtype)
    with pytest.raises(ValueError, match=rf"tree of the FFF layer '' does not fit into {dtype}.*Standardise"):
        fastff.initialize_tree_(layer, x)


@pytest.mark.parametrize("std", [float("inf"), float("nan"), -1.0, 0.0])
def test_deviations_that_are_none(std):
    with pytest.raises(ValueError, match="logit_std must be finite and positive"):
        fastff.initialize_tree_(make(), torch.randn(8, 5, dtype=torch.float64), logit_std=std)
