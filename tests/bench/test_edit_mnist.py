"""benchmarks/edit_mnist.py: what its rows say, on random digits and an untrained layer."""

from types import SimpleNamespace

import edit_mnist
import pytest
import torch

import fastff
from fastff.regions import edit_class_

ROW = {"part": "table", "model": "fff", "rate": 1e-2, "edits": 6, "steps": 0, "seed": 0}


def random_data():
    def part(count):
        return torch.randn(count, 784), torch.randint(10, (count,))

    return SimpleNamespace(train=part(300), held_out=part(50), test=part(200), background=-0.4)


def layer_of(depth=3):
    layer = fastff.FFF(784, 10, depth=depth, leaf_width=8).eval()
    fastff.initialize_tree_(layer, torch.randn(300, 784))
    return layer


@pytest.mark.parametrize("method", ["closed", "keep", "hold", "fine-tuning"])
def test_rows_agree_with_the_regions(method):
    layer, data = layer_of(), random_data()
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    row = edit_mnist.measure(layer, ROW | {"method": method}, data)
    assert all(torch.equal(value, state[name]) for name, value in layer.state_dict().items())  # it edits a copy
    assert (row["digits"], row["after"]) == (6, 100.0)
    assert row["undone"] == ("" if method == "fine-tuning" else "yes")
    # By its definition: the digits of the touched leaves move, all others keep their bits.
    x, y = data.test
    draw = torch.Generator().manual_seed(0)
    torch.randperm(300, generator=draw)
    wrong = (layer(x).argmax(1) != y).nonzero()[:, 0]
    edited = wrong[torch.randperm(len(wrong), generator=draw)[:6]]
    other = torch.ones(200, dtype=torch.bool).index_fill_(0, edited, False)
    leaf = layer.route(x)
    untouched = ~torch.isin(leaf, leaf[edited])
    assert row["same_end"] == pytest.approx(100 * float(untouched[other].double().mean()), abs=1e-3)
    assert row["same_each"] > row["same_end"]
    if method == "hold":
        assert row["end"] == 100.0


def test_a_dense_layer_moves_everywhere():
    row = edit_mnist.measure(layer_of(depth=0), ROW | {"model": "dense", "method": "closed"}, random_data())
    assert (row["after"], row["same_each"], row["same_end"], row["undone"]) == (100.0, 0.0, 0.0, "yes")


def test_a_parameter_that_is_not_restored_is_found():
    layer, x = layer_of(), torch.randn(2, 784)
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    records = [edit_class_(layer, x[i], 3) for i in range(2)]
    layer.node_bias.data[0] += 1e-6
    assert edit_mnist.undone(layer, records, state) == "no"


def test_copies_are_the_digit_moved():
    image = torch.full((1, 28, 28), -0.4)
    image[0, 12:16, 12:16] = 2.0
    copies = edit_mnist.copies_of(image.view(1, 784), -0.4, seed=0)
    assert copies.shape == (1, 5, 784)
    ink = (copies + 0.4).sum(-1)
    torch.testing.assert_close(ink, ink.new_full((1, 5), 16 * 2.4), rtol=0.05, atol=0)
    grid = torch.arange(28.0)
    weight = (copies[0] + 0.4).view(5, 28, 28) / ink[0, 0]
    centre = torch.stack([(weight.sum(2) * grid).sum(1), (weight.sum(1) * grid).sum(1)], 1)
    assert (centre - 13.5).abs().max() < 2.2
    assert len(centre.round(decimals=3).unique(dim=0)) == 5
