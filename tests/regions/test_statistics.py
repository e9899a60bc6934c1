"""Statistics against a loop over all inputs, in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastff
from fastff import tree
from fastff.regions import margin, statistics
from fastff.regions.collect import POOL, Collector, read_batch
from fastff.training.losses import bernoulli_entropy
from helpers import make, two_layers


def losses(output, target):
    return F.cross_entropy(output, target, reduction="none")


def data(layer, samples=61, classes=3):
    x = torch.randn(samples, layer.in_features, dtype=torch.float64)
    return x, torch.randint(classes, (samples,))


def members(layer, x):
    """The rows that reach each node and leaf, in heap order."""
    leaf = layer.route(x).tolist()
    paths = [[*(node for node, _ in tree.path(j, layer.depth)), layer.num_nodes + j] for j in leaf]
    return [[row for row, path in enumerate(paths) if group in path] for group in range(2 * layer.num_leaves - 1)]


def own_margins(layer, x):
    """The distance of every input to the boundary of every node, and to the nearest boundary of its own region."""
    at_nodes = layer.node_logits(x).abs() / layer.node_weight.norm(dim=-1)  # (batch, nodes)
    nearest = margin(layer, x).distance.unsqueeze(1).expand(-1, layer.num_leaves)
    return torch.cat([at_nodes, nearest], 1).detach()


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("batch", [1, 7, 61])
def test_all_numbers_agree_with_a_loop(depth, batch):
    torch.manual_seed(depth)
    layer = make(5, 3, depth=depth)
    layer.temperature = 2.0
    x, y = data(layer)
    found = statistics(layer, list(zip(x.split(batch), y.split(batch), strict=True)), loss=losses, examples=3)
    loss = losses(layer.eval()(x), y).detach()
    margins = own_margins(layer, x)
    entropy = bernoulli_entropy(2 * layer.node_logits(x)).detach()
    assert (found.samples, found.batch_size) == (61, round(61 / -(-61 // batch)))
    for group, rows in enumerate(members(layer, x)):
        is_leaf = group >= layer.num_nodes
        region = found.leaf(group - layer.num_nodes) if is_leaf else found.node(group)
        assert region.count == len(rows) == found.count[group]
        if not rows:
            assert (region.purity, region.loss, region.entropy, region.margin) == (None,) * 4
            assert region.accuracy is None
            assert region.labels == {}
            assert region.examples == {kind: [] for kind in ("typical", "boundary", "random", "hardest")}
            continue
        counts = torch.bincount(y[rows], minlength=3)
        assert region.labels == {label: n for label, n in enumerate(counts.tolist()) if n}
        assert region.purity == counts.max() / len(rows)
        assert region.accuracy == (layer(x[rows]).argmax(-1) == y[rows]).double().mean()
        assert region.loss == pytest.approx(loss[rows].mean().item(), rel=1e-12)
        assert region.margin == pytest.approx(margins[rows, group].mean().item(), rel=1e-9)
        path = [node for node, _ in tree.path(group - layer.num_nodes, depth)] if is_leaf else [group]
        expected = entropy[rows][:, path].mean().item() if path else 0.0
        assert region.entropy == pytest.approx(expected, rel=1e-9)
        torch.testing.assert_close(found.centre[group], x[rows].mean(0), rtol=1e-6, atol=1e-7)
        kinds = {kind: [one.index for one in examples] for kind, examples in region.examples.items()}
        assert kinds["boundary"] == sorted(rows, key=lambda row: (margins[row, group].item(), row))[:3]
        assert kinds["hardest"] == sorted(rows, key=lambda row: (-loss[row].item(), row))[:3]
        assert len(set(kinds["random"])) == min(3, len(rows))
        assert set(kinds["random"]) <= set(rows)
        distance = (x - x[rows].mean(0)).norm(dim=1)
        assert kinds["typical"] == sorted(rows, key=lambda row: distance[row].item())[:3]  # 61 fit into the pool


def test_an_example_knows_its_input():
    layer = make(5, 3, depth=3)
    x, y = data(layer)
    found = statistics(layer, (x, y), loss=losses)
    output = layer.eval()(x)
    for examples in found.examples["boundary"]:
        for one in examples:
            assert torch.equal(one.content, x[one.index])
            assert one.leaf == layer.route(x[one.index])
            assert one.label == y[one.index]
            assert one.prediction == output[one.index].argmax()
            assert one.loss == pytest.approx(losses(output, y)[one.index].item())
            assert one.margin == pytest.approx(margin(layer, x[one.index]).distance.item())
            path = [node for node, _ in tree.path(one.leaf, 3)]
            torch.testing.assert_close(one.margins, own_margins(layer, x)[one.index, path])


def test_random_examples_are_uniform_and_depend_on_the_seed():
    layer = make(5, 3, depth=0)
    x, _ = data(layer, 40)
    drawn = torch.zeros(40)
    for seed in range(100):
        for one in statistics(layer, list(x.split(9)), examples=4, seed=seed).leaf(0).examples["random"]:
            drawn[one.index] += 1
    assert drawn.sum() == 400
    assert ((drawn - 10) ** 2 / 9).sum() < 75  # chi-squared, 39 degrees of freedom: 99.9 %
    again = [statistics(layer, x, seed=5).leaf(0).examples["random"] for _ in range(2)]
    assert [one.index for one in again[0]] == [one.index for one in again[1]]


def test_dead_and_overloaded_leaves():
    layer = make(2, 3, depth=3, scale=0.0)
    with torch.no_grad():
        layer.node_weight[0, 0] = 1.0  # the root decides by the first feature; below it, all go left
        layer.node_bias[1:] = -1.0
    x = torch.randn(50, 2, dtype=torch.float64)
    x[:, 0] = torch.where(torch.arange(50) < 45, -1.0, 1.0)
    found = statistics(layer, x)
    assert found.leaf_count.tolist() == [45, 0, 0, 0, 5, 0, 0, 0]
    assert found.dead_leaves() == [1, 2, 3, 5, 6, 7]
    assert found.overloaded_leaves() == [0]
    assert found.overloaded_leaves(0.5) == [0, 4]
    share = torch.tensor([0.9, 0.1], dtype=torch.float64)
    assert found.effective_leaves == pytest.approx((-(share * share.log()).sum()).exp().item())
    assert (found.leaves_used, found.smallest_share) == (2, 0.0)
    assert found.margin[4] != found.margin[4]  # nothing reaches node 4
    assert found.leaf(0).margin == 1.0  # nodes without weights have no boundary
    assert repr(found).startswith("Statistics(50 inputs, 2 of 8 leaves used, 1.4 effective, smallest share 0.00")


class Tiny(nn.Module):
    """A language model: tokens to hidden states to one FFF layer to scores."""

    def __init__(self, vocabulary=11):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 6, dtype=torch.float64)
        self.mlp = make(6, vocabulary, depth=2)

    def forward(self, input_ids, attention_mask=None):
        return self.mlp(self.embed(input_ids).cumsum(1))


def test_tokens_with_context_and_without_padding():
    torch.manual_seed(1)
    model = Tiny()
    tokens = torch.randint(11, (5, 9))
    mask = torch.ones(5, 9, dtype=torch.int64)
    mask[2, 4:] = 0
    batch = {"input_ids": tokens, "attention_mask": mask}
    found = statistics(model, [batch, batch], context=2, examples=50)
    leaf = model.mlp.route(model.embed(tokens).cumsum(1))
    assert found.samples == 2 * mask.sum()
    for j in range(4):
        mine = (leaf == j) & (mask == 1)
        counts = torch.bincount(tokens[mine], minlength=11)
        assert found.leaf(j).tokens == {token: 2 * n for token, n in enumerate(counts.tolist()) if n}
        places = {(one.index % 5, one.position) for one in found.leaf(j).examples["boundary"]}
        assert places == {tuple(place) for place in mine.nonzero().tolist()}
        for one in found.leaf(j).examples["boundary"]:
            row, start = tokens[one.index % 5], max(0, one.position - 2)
            assert one.content.tolist() == row[start : one.position + 3].tolist()
            assert one.content[one.offset] == row[one.position]


def test_labels_of_samples_hold_for_all_their_positions_and_negative_ones_are_left_out():
    model = Tiny()
    tokens, labels = torch.randint(11, (4, 3)), torch.tensor([0, 1, -100, 1])
    found = statistics(model, (tokens, labels))
    assert found.node(0).labels == {1: 6, 0: 3}
    assert found.node(0).purity == 2 / 3
    assert {one.label for one in found.node(0).examples["random"]} <= {0, 1, None}


def test_real_targets_are_averaged():
    layer = make(5, 1, depth=1)
    x = torch.randn(20, 5, dtype=torch.float64)
    target = torch.randn(20, 1, dtype=torch.float64)
    found = statistics(layer, (x, target), loss=lambda output, y: (output - y).square().mean(1))
    leaf = layer.route(x)
    assert found.labels is None
    assert found.purity is None
    for j in leaf.unique().tolist():
        assert found.leaf(j).target == pytest.approx(target[leaf == j].mean().item())


def test_memory_bounds_the_examples():
    layer = make(100, 3, depth=3)
    x = torch.randn(500, 100, dtype=torch.float64)
    size = 100 * 8 + 100 * 4
    few = statistics(layer, x, examples=9, memory=2 * 15 * 2 * size)
    assert max(len(one) for one in few.examples["boundary"]) == 2
    none = statistics(layer, x, memory=10)
    assert none.leaf_count.sum() == 500
    assert all(not one for kind in none.examples.values() for one in kind)


def test_what_is_kept_does_not_grow_with_the_data():
    """The inputs that are held: at most a pool for each leaf, and the examples of each node and leaf."""
    layer = make(4, 3, depth=2)
    collector = Collector(layer, loss=None, examples=2, context=0, memory=2**20, seed=0)
    bound = POOL * 4 + 2 * 7
    for batch in torch.randn(40, 100, 4, dtype=torch.float64):
        collector.add([batch], read_batch(batch), layer(batch))
        assert len(collector._kept) <= bound
    assert collector.samples == 4000


def test_inputs_that_autocast_made_smaller():
    layer = make(5, 3, depth=2, dtype=torch.float32)
    model = torch.nn.Sequential(torch.nn.Linear(5, 5), layer)
    x = torch.randn(20, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = statistics(model, x)
        leaf = layer.route(model[0](x))
    assert torch.equal(found.leaf_count, torch.bincount(leaf, minlength=4))


def test_one_layer_of_several_and_the_modes_are_restored():
    model = two_layers().train()
    model[0].eval()
    x = torch.randn(30, 5, dtype=torch.float64)
    with pytest.raises(ValueError, match="Pass layer=, one of 0, 2"):
        statistics(model, x)
    with pytest.raises(ValueError, match="must be one of '0', '2'; got '1'"):
        statistics(model, x, "1")
    found = statistics(model, x, "2")
    model.eval()
    assert torch.equal(found.leaf_count, torch.bincount(model[2].route(model[1](model[0](x))), minlength=8))
    assert found.layer == "2"


def test_wide_nodes_have_logits_for_margins():
    layer = make(5, 3, depth=2, node_width=3)
    x = torch.randn(30, 5, dtype=torch.float64)
    found = statistics(layer, x)
    assert not found.margin_is_distance
    assert found.node(0).margin == pytest.approx(layer.node_logits(x)[:, 0].abs().mean().item())


def test_errors_name_the_remedy():
    layer = make(5, 3, depth=2)
    x, y = data(layer)
    with pytest.raises(ValueError, match=r'each of 61 samples.*reduction="none"'):
        statistics(layer, (x, y), loss=F.cross_entropy)
    with pytest.raises(ValueError, match="a loss needs targets"):
        statistics(layer, x, loss=losses)
    with pytest.raises(ValueError, match="leaves 0 to 3; got 4"):
        statistics(layer, x).leaf(4)
    with pytest.raises(ValueError, match="has 3 nodes, from 0; got 3"):
        statistics(layer, x).node(3)
    with pytest.raises(ValueError, match="examples must be at least 0"):
        statistics(layer, x, examples=-1)
    with pytest.raises(ValueError, match="no sample in data"):
        statistics(layer, iter([]))
    assert fastff.regions.Statistics is type(statistics(layer, x))


@pytest.mark.parametrize("number", [5, 7, 299, 301, 600])
def test_one_target_for_each_sample(number):
    """Five labels were stretched over 300 inputs, and others were dropped."""
    layer, x = fastff.FFF(6, 4, depth=2, leaf_width=3).eval(), torch.randn(300, 6)
    with pytest.raises(ValueError, match=f"{number} targets for 300 samples"):
        statistics(layer, (x, torch.zeros(number, dtype=torch.int64)), progress=False)


def test_labels_are_not_negative():
    layer, x = fastff.FFF(6, 4, depth=2, leaf_width=3).eval(), torch.randn(4, 6)
    with pytest.raises(ValueError, match="got -1"):
        statistics(layer, (x, torch.tensor([1, -1, 1, -1])), progress=False)
    found = statistics(layer, (x, torch.tensor([1, -100, 1, 0])), progress=False)
    assert found.node(0).labels == {1: 2, 0: 1}
