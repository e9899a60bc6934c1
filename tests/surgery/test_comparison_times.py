"""Times of a candidate beside the original."""

import pytest
import torch

from fastff.surgery import comparison_times
from fastff.surgery.choose import choose
from fastff.surgery.comparison_times import take_times, timed_batches
from fastff.surgery.controls import METHODS, build, int8_of, tasks
from surgery_models import Mlp, stack

X = torch.randn(63, 16, generator=torch.Generator().manual_seed(1))


def candidates(*methods):
    torch.manual_seed(0)
    model = stack(Mlp(), Mlp(), Mlp()).eval()
    blocks, _ = choose(model, None, None)

    def made(task):
        base = task._replace(method=task.method.removesuffix(" int8"))
        trained = build(base, model, blocks, [X], 63, {})
        return trained if base == task else int8_of(trained, lambda _: None)

    return [made(task) for task in tasks(blocks, [(2, 6)], METHODS) if task.method in methods]


def test_timed_batches_have_one_shape():
    assert [len(x) for x in timed_batches([X[:9], X[9:18], X[18:20], X[20:29]])] == [9, 9, 9]
    assert len(timed_batches(list(X[:60].split(5)))) == 4
    words = [{"ids": X[:2]}, {"ids": X[:3]}, {"ids": X[2:4]}]
    assert [batch["ids"].shape[0] for batch in timed_batches(words)] == [2, 2]
    assert len(timed_batches(X)) == 1
    with pytest.raises(ValueError, match="there is no batch to time"):
        timed_batches(iter([]))


def test_a_block_is_the_mean_over_the_blocks(monkeypatch):
    """The clock is replaced: all three blocks of the original take 30 µs, the candidate's 15 µs."""
    given = iter([((15.0, 30.0), ""), ((40.0, 80.0), "")])
    monkeypatch.setattr(comparison_times, "_beside", lambda *_: next(given))
    taken = take_times(*candidates("original", "FFF"), [X], 1.0)
    assert (taken.block_us, taken.block_us_original) == (5.0, 10.0)
    assert (taken.model_us, taken.model_us_original) == (40.0, 80.0)
    assert taken.note == ""


@pytest.mark.parametrize(
    "method", ["original", "FFF", "FFF int8", "dense", "dense int8", "low rank", "int8", "int8 weights"]
)
def test_every_method_can_be_timed(method):
    original, *_ = candidates("original")
    one = original if method == "original" else candidates(method)[0]
    taken = take_times(original, one, [X, X.flip(0)], 0.02)
    assert min(taken[:4]) > 0
    if method == "original":
        assert taken.block_us == taken.block_us_original
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in one.model.modules())


def test_a_slow_model_is_timed_beyond_the_budget():
    """On a busy machine a call of MiniLM took a second, and rows without a time came out of a budget of 5 s."""
    taken = take_times(*candidates("original", "FFF"), [X], 1e-9)
    assert min(taken[:4]) > 0
    assert taken.note == ""


def test_what_is_not_timed_says_why(monkeypatch):
    monkeypatch.setattr("fastff.bench.timing.interleave", lambda runners, **_: ({}, {"candidate": "9 s a call"}))
    taken = take_times(*candidates("original", "FFF"), [X], 1.0)
    assert taken[:4] == (None, None, None, None)
    assert taken.note == "blocks not timed: 9 s a call; model not timed: 9 s a call"
