"""Reshaping a tree: the function stays, bit for bit outside the leaves that are touched."""

import copy

import pytest
import torch
from torch import nn

import fastff
from fastff import FFF, regions
from fastff.backends import available
from fastff.regions import deepen_, drop_leaves_, export_text, merge_siblings_, prune_, split_leaf_
from helpers import make

KINDS = [
    {},
    {"node_width": 3},
    {"activation": "swiglu"},
    {"bias": False},
    {"dtype": torch.bfloat16},
    {"leaf_width": 1, "activation": "gelu"},
]
kinds = pytest.mark.parametrize("options", KINDS, ids=str)


def built(inputs=5, outputs=3, depth=3, **options):
    torch.manual_seed(0)
    options = {"dtype": torch.float32, "leaf_width": 4} | options
    layer = FFF(inputs, outputs, depth=depth, **options).eval()
    x = torch.randn(257, inputs).to(layer.node_weight.dtype)
    fastff.initialize_tree_(layer, x)  # every leaf gets inputs
    return layer, x


def hard(layer, x):
    with torch.no_grad():
        return layer(x)


def assert_fits(layer, depth):
    """The layer has the shapes of a new one of that depth, and loads and trains as such."""
    assert layer.depth == depth
    options = {name: getattr(layer, name) for name in ("leaf_width", "node_width", "activation", "bias")}
    new = FFF(layer.in_features, layer.out_features, depth=depth, dtype=layer.node_weight.dtype, **options)
    new.load_state_dict(layer.state_dict())


@kinds
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_deepening_changes_no_output(options, depth):
    layer, x = built(depth=depth, **options)
    before, soft, leaf = hard(layer, x), layer.soft(x), layer.route(x)
    found = deepen_(layer)
    assert_fits(layer, depth + 1)
    assert torch.equal(hard(layer, x), before)
    assert torch.equal(found.origin[layer.route(x)], leaf)
    if layer.node_weight.dtype == torch.float32:  # bfloat16 rounds sums in another order
        torch.testing.assert_close(layer.soft(x), soft, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", [name for name in available() if name != "triton"])
def test_a_split_changes_no_output(backend):
    """Bit-identical on native and reference; aten may run a deeper tree in another way, within rounding."""
    layer, x = built(7, 5, leaf_width=3)
    soft = layer.soft(x)
    with fastff.backend(backend):
        before = hard(layer, x)
        leaf = layer.route(x)
        target = int(leaf.mode().values)
        found = split_leaf_(layer, target, x)
        after = hard(layer, x)
    assert found.depth == layer.depth == 4
    assert backend == "aten" or torch.equal(after, before)
    assert (after - before).abs().max() <= 1e-6
    torch.testing.assert_close(layer.soft(x), soft, rtol=1e-6, atol=1e-6)
    halves = (found.origin == target).nonzero()[:, 0].tolist()
    count = torch.bincount(layer.route(x), minlength=16)
    own = int((leaf == target).sum())
    assert sorted(count[halves].tolist()) == [own // 2, own - own // 2]
    assert torch.equal(found.origin[layer.route(x)], leaf)


def test_a_second_split_uses_the_spare_copy():
    """The first split deepens the tree and leaves a copy beside each other leaf, which the second one takes."""
    layer, x = built(6)
    before, leaf = hard(layer, x), layer.route(x)
    first = split_leaf_(layer, 2, weight=torch.ones(6))
    now = int(layer.route(x)[leaf == 5][0])
    second = split_leaf_(layer, now, weight=-torch.ones(6), bias=0.5)
    assert first.depth == second.depth == 4
    assert torch.equal(hard(layer, x), before)
    assert (second.origin == now).nonzero()[:, 0].tolist() == [now - now % 2, now - now % 2 + 1]
    route = layer.route(x)
    assert torch.equal(first.origin[second.origin[route]], leaf)
    assert torch.equal(route[leaf == 2] % 2, (x[leaf == 2].sum(1) >= 0).long())
    assert torch.equal(route[leaf == 5] % 2, (0.5 - x[leaf == 5].sum(1) >= 0).long())
    assert split_leaf_(layer, 0, weight=torch.ones(6)).depth == 4  # a copy that no input reached serves as well
    assert torch.equal(hard(layer, x), before)


def test_leaves_that_only_the_soft_pass_reaches_are_no_spare_copies():
    """A converted dense layer has a tree without weights and different leaves, whose mixture is the dense layer."""
    layer, x = built()
    with torch.no_grad():
        layer.node_weight.zero_()
        layer.node_bias.zero_()
    soft = layer.soft(x)
    assert prune_(layer).depth == 3
    assert split_leaf_(layer, 7, x).depth == 4
    torch.testing.assert_close(layer.soft(x), soft, rtol=1e-6, atol=1e-6)


def test_the_halves_of_a_split_learn_apart():
    layer, x = built(4)
    target = int(layer.route(x).mode().values)
    found = split_leaf_(layer, target, x)
    left, right = (found.origin == target).nonzero()[:, 0].tolist()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer.train()(x).square().sum().backward()
    optimizer.step()
    assert not torch.equal(layer.leaf_out_weight[left], layer.leaf_out_weight[right])
    for spare in {*range(16)} - {left, right}:  # behind a node without weights, copies stay equal
        torch.testing.assert_close(layer.leaf_out_weight[spare], layer.leaf_out_weight[spare ^ 1])


def test_a_recipe_keeps_a_split_tree():
    """A recipe draws new trees for layers that nothing has fitted, which would lose the split."""
    torch.manual_seed(0)
    layer, x = FFF(5, 3, depth=1, leaf_width=2), torch.randn(64, 5)
    split_leaf_(layer, int(layer.route(x[0])), x)
    weight = layer.node_weight.detach().clone()
    fastff.Recipe(layer, x, steps=10)
    assert torch.equal(layer.node_weight, weight)


def test_merging_undoes_a_split():
    layer, x = built()
    before, text = hard(layer, x), export_text(layer, digits=None)
    state = copy.deepcopy(layer.state_dict())
    found = split_leaf_(layer, 3, x)
    left, right = (found.origin == 3).nonzero()[:, 0].tolist()
    merged = merge_siblings_(layer, right)
    assert torch.equal(hard(layer, x), before)
    assert merged.origin[left] == merged.origin[right] == right
    assert prune_(layer).depth == 3
    assert layer.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in layer.state_dict().items())
    assert export_text(layer, digits=None) == text


@kinds
def test_dropped_leaves_give_their_regions_to_the_other_side(options):
    """Leaf 1 goes to leaf 0; leaves 6 and 7 go to 4 and 5; nothing else changes."""
    layer, x = built(**options)
    before, leaf, old = hard(layer, x), layer.route(x), copy.deepcopy(layer)
    found = drop_leaves_(layer, torch.tensor([1, 6, 7]))
    assert_fits(layer, 3)
    assert found.origin.tolist() == [0, 0, 2, 3, 4, 5, 4, 5]
    kept = ~torch.isin(leaf, torch.tensor([1, 6, 7]))
    assert 0 < kept.sum() < len(x)
    assert torch.equal(hard(layer, x)[kept], before[kept])
    reached = found.origin[layer.route(x)]
    assert torch.equal(reached[kept], leaf[kept])
    assert (reached[leaf == 1] == 0).all()
    assert torch.isin(reached[leaf >= 6], torch.tensor([4, 5])).all()
    # What took a region answers there as it did before.
    expected = fastff.functional.visit(x, reached, old.leaves, old.activation)
    torch.testing.assert_close(hard(layer, x), expected.detach())


@kinds
def test_pruning_removes_the_levels_that_decide_nothing(options):
    """With one leaf of each pair dropped the last level goes; of 3 leaves in a row, the tree is still 2 deep."""
    layer, x = built(**options)
    dropped = drop_leaves_(layer, [0, 3, 4, 7])
    before = hard(layer, x)
    assert dropped.origin[prune_(layer).origin].tolist() == [1, 2, 5, 6]
    assert_fits(layer, 2)
    assert torch.equal(hard(layer, x), before)
    before = layer.soft(x)
    deepen_(layer)
    prune_(layer)
    assert torch.equal(layer.soft(x), before)
    layer, x = built(**options)
    dropped = drop_leaves_(layer, [1, 4, 5, 6, 7])
    before = hard(layer, x)
    assert dropped.origin[prune_(layer).origin].tolist() == [0, 0, 2, 3]
    assert torch.equal(hard(layer, x), before)
    dropped = drop_leaves_(layer, [0, 1, 3])
    assert dropped.origin[prune_(layer).origin].tolist() == [2]
    assert_fits(layer, 0)
    assert prune_(layer).depth == 0


def test_a_tree_without_superfluous_levels_is_not_pruned():
    layer, _ = built()
    state = copy.deepcopy(layer.state_dict())
    assert prune_(layer).origin.tolist() == list(range(8))
    assert all(torch.equal(value, state[name]) for name, value in layer.state_dict().items())


def test_parameters_stay_the_same_objects_and_new_optimizers_train():
    """An old optimizer's state no longer fits after a change of depth, and says so; without state it goes on."""
    layer, x = built()
    parameters = dict(layer.named_parameters())
    adam = torch.optim.Adam(layer.parameters())
    layer.leaf_in_weight.requires_grad_(False)
    layer.train()(x).sum().backward()
    adam.step()
    deepen_(layer)
    assert all(parameters[name] is value for name, value in layer.named_parameters())
    assert all(value.grad is None for value in layer.parameters())
    assert layer.last_logits is None
    assert not layer.leaf_in_weight.requires_grad
    layer(x).sum().backward()
    assert layer.leaf_out_weight.grad.shape == (16, 4, 3)
    with pytest.raises(RuntimeError, match="size"):
        adam.step()
    fresh = torch.optim.Adam(layer.parameters())
    before = layer.leaf_out_weight.detach().clone()
    fresh.step()
    assert not torch.equal(layer.leaf_out_weight, before)


def test_int8_leaves_are_reshaped_too():
    layer, x = built()
    fastff.quantize_(layer)
    before = hard(layer, x)
    split_leaf_(layer, 2, weight=torch.ones(5))
    assert layer.leaf_in_weight.dtype == torch.int8
    assert torch.equal(hard(layer, x), before)


def test_a_reshaped_layer_of_a_converted_model_is_saved_and_loaded(tmp_path):
    """The save holds the depth that the layer has now, not the one that replace_ gave it."""
    pytest.importorskip("safetensors")

    def dense():
        torch.manual_seed(0)
        return nn.Sequential(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6)), nn.Linear(6, 2))

    model, x = dense(), torch.randn(20, 6)
    fastff.replace_(model, depth=2, leaf_width=3)
    layer = model[0]
    fastff.initialize_tree_(layer, x)
    assert split_leaf_(layer, 1, x).depth == 3
    fastff.save(model, tmp_path)
    loaded = dense()
    fastff.load_(loaded, tmp_path)
    assert loaded[0].depth == 3
    assert torch.equal(hard(loaded.eval(), x), hard(model.eval(), x))


def test_the_layer_of_a_compiled_plan_answers_anew():
    """The plan of the native backend is kept between calls; the second one must see the new tensors."""
    layer, x = built()
    first = hard(layer, x[:1])
    leaf = int(layer.route(x[:1]))
    drop_leaves_(layer, [leaf])
    assert not torch.equal(hard(layer, x[:1]), first)
    deepen_(layer)
    expected = fastff.functional.hard(x[:1], layer.tree, layer.leaves, activation=layer.activation)
    torch.testing.assert_close(hard(layer, x[:1]), expected.detach())


def test_errors_change_nothing():
    layer, x = built()
    state = copy.deepcopy(layer.state_dict())
    with pytest.raises(ValueError, match="all 8 leaves would be dropped"):
        drop_leaves_(layer, range(8))
    with pytest.raises(ValueError, match=r"leaf must be within 0..7; got 8"):
        drop_leaves_(layer, [1, 8])
    with pytest.raises(ValueError, match="pass one of them"):
        split_leaf_(layer, 1)
    with pytest.raises(ValueError, match="pass one of them"):
        split_leaf_(layer, 1, x, weight=torch.ones(5))
    with pytest.raises(ValueError, match=r"shape \(5,\), be finite and not all 0; got \(4,\)"):
        split_leaf_(layer, 1, weight=torch.ones(4))
    with pytest.raises(ValueError, match="not all 0"):
        split_leaf_(layer, 1, weight=torch.zeros(5))
    with pytest.raises(ValueError, match="bias must be finite"):
        split_leaf_(layer, 1, weight=torch.ones(5), bias=float("nan"))
    with pytest.raises(ValueError, match="needs two of them in it; got 0 of 0"):
        split_leaf_(layer, 1, x[:0])
    leaf = int(layer.route(x[0]))
    with pytest.raises(ValueError, match=f"the 9 inputs in leaf {leaf} are equal up to rounding"):
        split_leaf_(layer, leaf, x[:1].expand(9, 5))
    with torch.inference_mode(), pytest.raises(ValueError, match=r"never train. Call it outside"):
        deepen_(layer)
    with pytest.raises(ValueError, match="no sibling"):
        merge_siblings_(make(depth=0), 0)
    with pytest.raises(ValueError, match="node_width=1"):
        split_leaf_(built(node_width=2)[0], 1, x)
    with pytest.raises(TypeError, match="is a meta tensor"):
        deepen_(FFF(3, 3, depth=1, leaf_width=1, device="meta"))
    torch.nn.utils.parametrize.register_parametrization(parametrized := built()[0], "leaf_in_weight", torch.nn.Tanh())
    with pytest.raises(ValueError, match="computes its tree or leaves"):
        deepen_(parametrized)
    assert layer.depth == 3
    assert all(torch.equal(value, state[name]) for name, value in layer.state_dict().items())


@pytest.mark.parametrize("reshape", [regions.deepen_, regions.prune_, lambda layer: regions.merge_siblings_(layer, 0)])
def test_edits_and_frozen_leaves_count_on_the_numbers_of_leaves(reshape):
    layer = fastff.FFF(5, 4, depth=2, leaf_width=3).eval().requires_grad_(False)
    x = torch.randn(3, 5)
    regions.edit_(layer, x, torch.zeros(3, 4))
    edited = layer(x)
    with pytest.raises(ValueError, match="1 edits on record"):
        reshape(layer)
    regions.forget_edits_(layer)
    assert regions.edits(layer) == []
    assert torch.equal(layer(x), edited)
    regions.freeze_leaves_(layer, [1])
    with pytest.raises(ValueError, match="some are frozen"):
        reshape(layer)
    regions.unfreeze_leaves_(layer)
    reshape(layer)
