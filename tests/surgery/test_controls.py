"""The models beside FFF: their sizes, what they compute, and that the original stays the same."""

import copy

import pytest
import torch
from torch import nn

import fastff
from fastff.surgery.choose import choose
from fastff.surgery.controls import METHODS, Task, build, dense_parts, first_linears, tasks
from surgery_models import LLAMA, OFF, SIZES, TEXT, TOKENS, Mlp, encoder, hf, stack


def named(model, example=None):
    model = model.eval().requires_grad_(False)
    return model, choose(model, example, None)[0]


def test_tasks_list_the_original_then_each_size_then_int8():
    _, blocks = named(stack(Mlp(), Mlp()))
    found = tasks(blocks, [(2, 6), (3, 5), (1, 20)], METHODS)
    assert [task[:2] for task in found] == [
        ("original", "48"),
        ("FFF", "2 x 6"),
        ("FFF int8", "2 x 6"),
        ("dense", "8"),
        ("dense int8", "8"),
        ("low rank", "rank 1"),
        ("pruned", "8"),
        ("FFF", "3 x 5"),  # it shares its controls with 2 x 6
        ("FFF int8", "3 x 5"),
        ("FFF", "1 x 20"),
        ("FFF int8", "1 x 20"),
        ("dense", "21"),
        ("dense int8", "21"),
        ("low rank", "rank 5"),
        ("pruned", "21"),
        ("int8", "48"),
        ("int8 weights", "48"),
    ]
    for tree in found[1:3]:
        assert (tree.neurons, tree.flops) == (8, 2 * (2 * 16 + 6 * 32))
    assert found[3].flops == 2 * 8 * 32
    assert found[0].flops == 2 * 48 * 32
    assert [task.method for task in tasks(blocks, [(2, 6)], ["dense"])] == ["original", "dense"]


FAMILIES = {
    "plain": (lambda: stack(Mlp(), Mlp()), None),
    "packed": (lambda: stack(Mlp(packed=True), Mlp(packed=True)), None),
    "gated": (lambda: hf("Llama", **LLAMA), TOKENS),
    "split": (lambda: hf("Bert", **SIZES, **TEXT, **OFF), TOKENS),
    "in-layer": (encoder, None),
    "Conv1D": (lambda: hf("GPT2", vocab_size=50, n_positions=40, n_embd=16, n_layer=2, n_head=2), TOKENS),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_parts_compute_the_blocks(family):
    """For timing, a block runs through its own linear layers; gate and up may come in either order."""
    make, example = FAMILIES[family]
    torch.manual_seed(0)
    model, blocks = named(make(), example)
    x = torch.randn(7, 16)
    for part, block in zip(dense_parts(model, model, blocks), blocks, strict=True):
        torch.testing.assert_close(part(x), block(x))
    assert [*first_linears(model, blocks)] == [block.name for block in blocks]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["FFF", "dense", "low rank", "pruned"])
@pytest.mark.parametrize("family", FAMILIES)
def test_candidates_run_and_leave_the_original_alone(family, method):
    make, example = FAMILIES[family]
    torch.manual_seed(0)
    model, blocks = named(make(), example)
    before = copy.deepcopy(model.state_dict())
    data = [{"input_ids": torch.randint(50, (4, 9))} for _ in range(3)] if example else [torch.randn(4, 9, 16)] * 3
    task = next(task for task in tasks(blocks, [(1, 11)], METHODS) if task.method == method)
    made = build(task, model, blocks, data, 64, {"filter": None, "example": example})
    assert [*made.trained] == [block.name for block in blocks]
    if method in ("dense", "pruned"):
        assert all((layer.depth, layer.leaf_width) == (0, 12) for layer in made.trained.values())
    seen = []
    for layer in made.trained.values():
        layer.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        made.model(**data[0]) if example else made.model(data[0])
    assert len(seen) == len(blocks)
    assert not any(isinstance(module, fastff.FFF) for module in model.modules())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_pruning_keeps_the_neurons_of_largest_weights_as_they_are():
    """Neurons scaled up by construction are the ones that stay, and their outputs do not change."""
    torch.manual_seed(0)
    model, blocks = named(stack(Mlp()))
    weights, large = blocks[0].weights, [3, 17, 40, 41]
    with torch.no_grad():
        for neuron in large:
            weights.up[neuron] *= 9
    task = Task("pruned", "4", 0, 4, 4, 0)
    layer = build(task, model, blocks, [torch.randn(40, 16)], 40, {}).trained[blocks[0].name]
    kept = {tuple(row) for row in layer.leaf_in_weight[0].tolist()}
    assert kept == {tuple(weights.up[neuron].tolist()) for neuron in large}


def test_a_low_rank_of_full_rank_is_the_original():
    """Its layers stand where the blocks were, and dropout after them stays."""
    torch.manual_seed(0)
    model, blocks = named(stack(Mlp(drop=0.5), Mlp()))
    x = torch.randn(40, 16)
    task = Task("low rank", "", 0, 480, 48, 0)  # FLOPs beyond its full rank
    made = build(task, model, blocks, [x], 40, {})
    assert isinstance(made.model[0].mlp, nn.Sequential)
    torch.testing.assert_close(made.model(x), model(x), rtol=1e-3, atol=1e-4)
