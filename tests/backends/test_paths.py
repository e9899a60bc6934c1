"""Paths through the tree: where walks go, and the logits on the way."""

import pytest
import torch

import fastff
from fastff.backends import paths
from fastff.tree import path
from helpers import make


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_nodes_and_turns_are_the_path_to_each_leaf(depth):
    leaf = torch.arange(2**depth)
    nodes, turns = paths.nodes(leaf, depth), paths.turns(leaf, depth)
    assert nodes.shape == turns.shape == (2**depth, depth)
    for j in leaf.tolist():
        assert path(j, depth) == list(zip(nodes[j].tolist(), turns[j].tolist(), strict=True))


@pytest.mark.parametrize("options", [{}, {"node_width": 3}, {"depth": 0}])
def test_descend_from_the_root_is_the_route(options):
    layer = make(depth=options.pop("depth", 4), **options)
    x = torch.randn(63, 5, dtype=torch.float64)
    root = torch.zeros(63, dtype=torch.int64)
    assert torch.equal(paths.descend(x, layer.tree, "relu", root), layer.route(x))


def test_descend_from_a_node_stays_below_it_and_waits_for_its_level():
    layer = make(depth=3)
    x = torch.randn(64, 5, dtype=torch.float64)
    start = torch.randint(15, (64,))  # nodes, and leaves after them
    leaf = paths.descend(x, layer.tree, "relu", start)
    logits = layer.node_logits(x)
    for b, node in enumerate(start.tolist()):
        while node < 7:
            node = 2 * node + 1 + int(logits[b, node] >= 0)
        assert leaf[b] == node - 7


def test_thresholds_and_swaps_steer_a_walk():
    layer = make(depth=3)
    x, root = torch.randn(31, 5, dtype=torch.float64), torch.zeros(31, dtype=torch.int64)
    low, swap = torch.full((31, 3), -1e9, dtype=torch.float64), torch.ones(31, 3, dtype=torch.bool)
    assert (paths.descend(x, layer.tree, "relu", root, low) == 7).all()
    assert (paths.descend(x, layer.tree, "relu", root, -low) == 0).all()
    with torch.no_grad():
        mirrored = make(depth=3)
        mirrored.load_state_dict(layer.state_dict())
        mirrored.node_weight.neg_(), mirrored.node_bias.neg_()
    assert torch.equal(paths.descend(x, layer.tree, "relu", root, swap=swap), mirrored.route(x))


@pytest.mark.parametrize("node_width", [1, 2])
def test_logits_are_those_of_the_given_nodes_with_their_gradient(node_width):
    torch.manual_seed(0)
    layer = make(depth=3, node_width=node_width)
    x, node = torch.randn(7, 5, dtype=torch.float64, requires_grad=True), torch.randint(7, (7, 4))
    torch.testing.assert_close(paths.logits(x, node, layer.tree, "relu"), layer.node_logits(x).gather(1, node))
    tree = [t for t in layer.tree if t is not None]

    def compute(x, *parts):
        return paths.logits(x, node, type(layer.tree)(*parts), "tanh")

    assert torch.autograd.gradcheck(compute, (x, *tree))


def test_sparse_gradients_of_the_nodes_equal_dense_ones():
    layer, x, node = make(depth=4), torch.randn(9, 5, dtype=torch.float64), torch.randint(15, (9, 3))
    found = []
    for sparse in (False, True):
        layer.zero_grad()
        paths.logits(x, node, layer.tree, "relu", sparse).square().sum().backward()
        found.append([layer.node_weight.grad, layer.node_bias.grad])
    for dense, sparse in zip(*found, strict=True):
        assert sparse.is_sparse
        assert len(sparse._values()) == len(node.unique())
        torch.testing.assert_close(sparse.to_dense(), dense)


def test_a_second_derivative_is_recorded():
    """The derivative by hand is made of operations that autograd sees."""
    layer, node = make(depth=3), torch.randint(7, (4, 2))
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)

    def compute(x, weight, bias):
        return paths.logits(x, node, type(layer.tree)(weight, bias), "relu")

    assert torch.autograd.gradgradcheck(compute, (x, layer.node_weight, layer.node_bias))


def test_no_path_has_no_logits():
    layer = fastff.FFF(5, 4, depth=0, leaf_width=3)
    assert paths.logits(torch.randn(3, 5), torch.zeros(3, 0, dtype=torch.int64), layer.tree, "relu").shape == (3, 0)
