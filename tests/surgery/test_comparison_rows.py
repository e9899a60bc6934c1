"""One row of a comparison."""

import copy

import pytest
import torch
from torch import nn

from fastff.surgery.choose import choose
from fastff.surgery.closeness import drift
from fastff.surgery.comparison_rows import Rows, match
from fastff.surgery.controls import METHODS, tasks
from surgery_models import Mlp, stack

X = torch.randn(300, 16, generator=torch.Generator().manual_seed(1))


def test_match_is_one_minus_the_drift():
    torch.manual_seed(0)
    original = stack(Mlp()).eval()
    other = copy.deepcopy(original)
    nn.init.zeros_(other[0].mlp.fc2.weight)
    batches = list(X.split(150))
    expected = sum(1 - drift(other(x), original(x)).item() for x in batches) / 2
    assert match(original)(other, batches) == pytest.approx(expected)
    assert match(original)(original, batches) == 1.0
    assert match(original).__name__ == "match"


def rows(rate, quality=None, samples=240):
    torch.manual_seed(0)
    original = stack(Mlp(), Mlp()).eval().requires_grad_(False)
    blocks, _ = choose(original, None, None)
    train, held = list(X[:240].split(20)), [X[240:]]
    made = Rows(original, blocks, train, held, held, quality or match(original), 6, rate, None, samples, 0.02, {})
    return made, {task.method: task for task in tasks(blocks, [(2, 6)], METHODS)}


@pytest.mark.parametrize("method", ["FFF", "dense", "low rank"])
def test_distillation_that_diverges_is_undone_and_noted(method):
    """The row then holds the fitted model."""
    made, wanted = rows(rate=1e30)
    row = made.row(wanted[method], lambda *_: None)
    assert row.note.startswith("distillation was undone: ")
    assert row.quality == row.fitted_quality


def test_progress_counts_every_step():
    """A bar that ends below or above its total would be wrong about the time left."""
    made, wanted = rows(rate=1e-3)
    for task in wanted.values():
        done = []
        made.row(task, lambda steps=1, text="", total=None, done=done: done.append(steps))
        assert sum(done) == 7


def test_an_int8_tree_is_the_tree_of_the_row_before():
    """It is trained once. Without that row, as after an interrupt, it is trained again, to the same numbers."""
    made, wanted = rows(rate=1e-3, samples=24)
    calls, made_again = [], rows(rate=1e-3, samples=24)[0]

    def row(maker, method):
        torch.manual_seed(0)
        calls.clear()
        return maker.row(wanted[method], lambda steps=1, text="", total=None: calls.append(steps))

    tree, kept = row(made, "FFF"), made.kept["FFF", "2 x 6"].seconds
    assert max(calls) == 1  # step by step
    small = row(made, "FFF int8")
    assert max(calls) == 6  # all at once
    alone = row(made_again, "FFF int8")
    assert max(calls) == 1
    assert small.quality == alone.quality != tree.quality
    assert small.quality == pytest.approx(tree.quality, abs=0.02)
    assert (small.parameters, small.fitted_quality) == (tree.parameters, None)
    assert small.seconds > kept > 0
    assert tree.quality > tree.fitted_quality
    assert (tree.note, small.note) == ("", "by fastff")  # no linear layers are left
    row(made, "FFF")
    row(made, "dense")
    assert [*made.kept] == [("dense", "8")]
    row(made, "low rank")
    assert made.kept == {}


def test_a_tensor_of_one_number_is_a_quality():
    made, wanted = rows(1e-3, quality=lambda model, held_out: torch.tensor([0.5]))
    assert made.row(wanted["original"], lambda *_: None).quality == 0.5
