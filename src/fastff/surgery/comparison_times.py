"""Time a candidate of `compare` and the original in turn: the blocks, and the whole model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..batches import batches, evaluation_mode, feed, watch_inputs
from .controls import Candidate

_SAMPLES, _INPUTS = 30, 4  # timing samples of each; inputs that rotate
_LEAST_CALLS = 10  # of a slow model and its original together, even beyond the budget


class Taken(NamedTuple):
    """Median microseconds of a block (the mean over the model's blocks) and of the model; None if not measured.

    The original's times are from the same loop: only times taken in turn can be compared. other_load: the cores that
    other processes kept busy meanwhile.
    """

    block_us: float | None
    block_us_original: float | None
    model_us: float | None
    model_us_original: float | None
    other_load: float | None
    note: str = ""


def timed_batches(data: Any) -> list[Any]:
    """A few batches to rotate: among the first ones, those with the first one's shape."""
    found = [batch for batch, _ in zip(batches(data), range(4 * _INPUTS), strict=False)]
    if not found:
        raise ValueError("there is no batch to time. Pass timed=, a batch for the model, or more of held_out.")
    return [batch for batch in found if _shape(batch) == _shape(found[0])][:_INPUTS]


def _shape(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.shape
    if isinstance(batch, Mapping):
        return {name: _shape(value) for name, value in batch.items()}
    return _shape(batch[0]) if isinstance(batch, tuple | list) and len(batch) else None


def take_times(original: Candidate, candidate: Candidate, timed: Sequence[Any], budget: float) -> Taken:
    """Time both: about `budget` seconds for the blocks, as many for the models, and longer where a call is slow.

    If both are the original, it is timed once.
    """
    from ..bench.hardware import OtherLoad

    first = next(original.model.parameters())
    timed = [_moved(batch, first.device) for batch in timed]
    both = {"candidate": candidate, "original": original}
    if candidate.model is original.model:
        del both["candidate"]
    load = OtherLoad()
    with evaluation_mode(original.model), evaluation_mode(candidate.model), torch.inference_mode():
        blocks, block_note = _beside(*_block_calls(both, timed), budget, first.is_cuda)
        calls = {name: _forward(one.model) for name, one in both.items()}
        models, model_note = _beside(calls, timed, budget, first.is_cuda)
    count = len(candidate.parts)
    each = [None if t is None else t / count for t in blocks]
    notes = [f"{what} not timed: {note}" for what, note in (("blocks", block_note), ("model", model_note)) if note]
    return Taken(each[0], each[1], models[0], models[1], load.cores(), "; ".join(notes))


def _moved(batch: Any, device: torch.device) -> Any:
    """A batch on the model's device, so that no copy is timed."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: _moved(value, device) for name, value in batch.items()}
    return [_moved(batch[0], device)] if isinstance(batch, tuple | list) else batch


def _forward(model: nn.Module) -> Callable[[Any], Any]:
    return lambda batch: feed(model, batch)


def _block_calls(
    both: Mapping[str, Candidate], timed: Sequence[Any]
) -> tuple[dict[str, Callable[[Any], Any]], list[list[Tensor]]]:
    """Functions that run all blocks, and the inputs that reach the first candidate's blocks: its leaves are visited as
    in real use."""
    inputs, candidate = [], next(iter(both.values()))
    for batch in timed:
        seen: dict[str, Tensor] = {}
        with watch_inputs(candidate.inputs, lambda name, _, x, seen=seen: seen.setdefault(name, x)):  # type: ignore[misc]
            feed(candidate.model, batch)
        inputs.append([seen[name] for name in candidate.inputs])

    def through(parts: Sequence[Callable[[Tensor], Tensor]]) -> Callable[[list[Tensor]], None]:
        def run(each: list[Tensor]) -> None:
            for part, x in zip(parts, each, strict=True):
                part(x)

        return run

    return {name: through(one.parts) for name, one in both.items()}, inputs


def _beside(
    calls: dict[str, Callable[[Any], Any]], inputs: Sequence[Any], budget: float, cuda: bool
) -> tuple[tuple[float | None, float | None], str]:
    """The medians of the first and of the original, timed in turn, and why one is missing."""
    from ..bench.runners import EagerRunner, QueueRunner, Runner
    from ..bench.timing import interleave

    kind = QueueRunner if cuda else EagerRunner
    runners: dict[str, Runner] = {name: kind(call, inputs, "auto") for name, call in calls.items()}
    for runner in runners.values():
        runner.sample(1)
    once = max(runner.sample(1) for runner in runners.values()) / 1e6
    for patience in (1, 20):  # on a busy machine, a quick call sometimes seems slow
        least = patience * max(_LEAST_CALLS * once, 0.01)
        found, skipped = interleave(runners, budget=max(budget, least), samples=_SAMPLES)
        if not skipped:
            break
    ours, theirs = (found[name].median if name in found else None for name in (next(iter(calls)), "original"))
    return (ours, theirs), "; ".join(skipped.values())
