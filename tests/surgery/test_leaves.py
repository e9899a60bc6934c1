"""Trees from principal directions, leaves from a dense layer's neurons."""

import itertools

import pytest
import torch

import fastff
from fastff.surgery.closeness import missed
from fastff.surgery.distill_layer import distill_leaves_
from fastff.surgery.leaves import fit_leaves_, principal_tree_
from helpers import make


def clusters(samples=2000, features=6, seed=0):
    """Inputs that vary most along one direction."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, features, generator=generator)
    return x * torch.tensor([5.0, 2.0, 1.0, 0.5, 0.5, 0.5][:features])


def dense_layer(width=24, activation="gelu", bias=True, features=6, out=4):
    torch.manual_seed(1)
    return fastff.FFF(features, out, depth=0, leaf_width=width, activation=activation, bias=bias).eval()


def test_nodes_split_in_halves_where_inputs_vary_most():
    x = clusters()
    layer = fastff.FFF(6, 4, depth=3, leaf_width=2)
    principal_tree_(layer, x, logit_std=2.0)
    root = layer.node_weight[0] / layer.node_weight[0].norm()
    assert root.abs()[0] > 0.99
    assert layer.node_logits(x)[:, 0].std().item() == pytest.approx(2.0, rel=0.05)
    assert torch.bincount(layer.route(x), minlength=8).tolist() == [250] * 8


def test_samples_that_are_all_alike_do_no_harm():
    layer = fastff.FFF(6, 4, depth=3, leaf_width=2)
    principal_tree_(layer, torch.ones(5, 6))
    assert all(parameter.isfinite().all() for parameter in layer.parameters())


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
@pytest.mark.parametrize("bias", [True, False])
def test_leaves_as_wide_as_the_dense_layer_answer_the_same(activation, bias):
    x, dense = clusters(), dense_layer(activation=activation, bias=bias)
    layer = fastff.FFF(6, 4, depth=2, leaf_width=24, activation=activation, bias=bias).eval()
    principal_tree_(layer, x)
    fit_leaves_(layer, dense, x)
    torch.testing.assert_close(layer(x), dense(x), rtol=1e-4, atol=1e-4)
    assert missed(layer, dense, x) < 1e-9


def test_a_leaf_gets_the_neurons_of_its_region_and_the_best_outputs_for_them():
    """In float64, against least-squares problems solved apart for every choice of two of four neurons."""
    x = clusters(400, 3).double()
    dense = make(3, 2, depth=0, leaf_width=4, activation="relu").eval()
    layer = make(3, 2, depth=1, leaf_width=2, activation="relu").eval()
    principal_tree_(layer, x)
    fit_leaves_(layer, dense, x, ridge=0.0)
    for j in range(2):
        part = x[layer.route(x) == j]
        hidden = torch.relu(part @ dense.leaf_in_weight[0].T + dense.leaf_in_bias[0])
        found = {}
        for pair in itertools.combinations(range(4), 2):
            design = torch.cat([hidden[:, pair], torch.ones(len(part), 1)], 1)
            best = design @ torch.linalg.lstsq(design, dense(part)).solution
            found[pair] = (best - dense(part)).square().sum(), best
        pair = min(found, key=lambda pair: found[pair][0])
        assert {*map(tuple, layer.leaf_in_weight[j].tolist())} == {
            *map(tuple, dense.leaf_in_weight[0, list(pair)].tolist())
        }
        torch.testing.assert_close(layer(part), found[pair][1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_a_leaf_keeps_no_two_neurons_that_say_the_same(bias):
    """The two loudest neurons are copies: a leaf of two needs one of them, and the neuron that nothing replaces."""
    x, dense = clusters(), dense_layer(8, bias=bias)
    with torch.no_grad():
        dense.leaf_out_weight[0] *= 1e-4
        for parameter in (dense.leaf_in_weight, dense.leaf_in_bias):
            if parameter is not None:
                parameter[0, 1] = parameter[0, 0]
        dense.leaf_out_weight[0, :2] = torch.tensor([3.0, 1.0, 0.0, 2.0])
        dense.leaf_out_weight[0, 2] = torch.tensor([0.0, 0.1, 1.0, 0.0])
    layer = fastff.FFF(6, 4, depth=0, leaf_width=2, activation="gelu", bias=bias).eval()
    fit_leaves_(layer, dense, x, ridge=0.0)
    assert missed(layer, dense, x) < 1e-6


def test_more_leaves_and_wider_ones_miss_less():
    x, dense = clusters(4000), dense_layer(64)
    error = {}
    for depth, width in ((0, 8), (3, 8), (3, 24)):
        layer = fastff.FFF(6, 4, depth=depth, leaf_width=width, activation="gelu").eval()
        principal_tree_(layer, x)
        fit_leaves_(layer, dense, x)
        error[depth, width] = missed(layer, dense, clusters(1000, seed=5))
    assert error[0, 8] > error[3, 8] > error[3, 24]
    assert error[3, 24] < 0.05


def test_distillation_misses_less_and_changes_the_leaves_alone():
    x, dense = clusters(), dense_layer(64)
    layer = fastff.FFF(6, 4, depth=2, leaf_width=4, activation="gelu").train()
    principal_tree_(layer, x)
    fit_leaves_(layer, dense, x)
    layer.train()
    tree = [parameter.clone() for parameter in layer.tree_parameters()]
    before = missed(layer, dense, x)
    layer.train()
    losses = list(distill_leaves_(layer, dense, x, steps=200, batch=256, rate=5e-3))
    assert layer.training
    assert len(losses) == 200
    assert missed(layer, dense, x) < 0.8 * before
    assert all(torch.equal(a, b) for a, b in zip(tree, layer.tree_parameters(), strict=True))
    assert all(parameter.grad is None for parameter in layer.parameters())


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"depth": 1, "leaf_width": 99}, "cannot have more neurons than the dense layer; got leaf_width=99 for 24"),
        ({"depth": 1, "leaf_width": 2, "activation": "relu"}, "activation is 'relu' in the layer and 'gelu'"),
    ],
)
def test_pairs_that_do_not_fit(layer, message):
    with pytest.raises(ValueError, match=message):
        fit_leaves_(fastff.FFF(6, 4, **{"activation": "gelu"} | layer), dense_layer(), clusters())


def test_the_dense_layer_has_no_tree():
    with pytest.raises(ValueError, match="depth 0; got depth 1"):
        fit_leaves_(make(6, 4, depth=1), make(6, 4, depth=1), clusters().double())


def test_nodes_with_a_hidden_layer_have_no_principal_direction():
    with pytest.raises(ValueError, match="node_width=3"):
        principal_tree_(fastff.FFF(6, 4, depth=1, leaf_width=1, node_width=3), clusters())


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float32, 1e-40), (torch.float16, 1e-5), (torch.bfloat16, 1e-40), (torch.float32, 3e38)]
)
def test_a_tree_that_has_no_place_in_its_dtype(dtype, scale):
    """Surgery wrote infinite weights into the tree, or raised an error of the eigenvalues."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(fastff.baselines.FF(8, 8, width=64, dtype=dtype))
    data = (torch.randn(600, 8).clamp(-1, 1) * scale).to(dtype)
    with pytest.raises(ValueError, match=r"inputs of 0 exceed the range of|contain NaN or infinity"):
        fastff.replace_(model, depth=2, leaf_width=16, init="data", data=data)
    assert isinstance(model[0], fastff.baselines.FF)
