"""Time several models in turn, in one loop.

On a noisy machine only numbers taken side by side can be compared: a busy moment then slows all models alike.
"""

import random
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

from .runners import Runner

_LEAST_SAMPLES = 5
_SAMPLE_US = 500.0  # a sample of fast calls lasts this long, so that the resolution of the clock does not matter


class Times(NamedTuple):
    """Microseconds of a call."""

    median: float
    p20: float
    p80: float
    samples: int


def fastest(runners: Sequence[Runner], seconds: float = 0.5) -> Runner:
    """The runner with the shortest sample, among runners of the same model; about `seconds` are spent on each."""
    if len(runners) == 1:
        return runners[0]
    best = {}
    for i, runner in enumerate(runners):
        once = max(runner.sample(1), 1e-3)
        calls = max(1, min(len(runner), int(_SAMPLE_US / once)))
        tries = max(1, min(10, int(1e6 * seconds / (once * calls))))
        best[i] = min(runner.sample(calls) for _ in range(tries))
    return runners[min(best, key=best.__getitem__)]


def interleave(
    runners: dict[str, Runner], *, budget: float, samples: int, sample_us: float = _SAMPLE_US
) -> tuple[dict[str, Times], dict[str, str]]:
    """Time the runners in turn, within about `budget` seconds in all: their times, and why others were skipped.

    A turn of a fast runner holds several samples, so that a slow one does not leave it with few. A sample of fast calls
    takes about `sample_us`: in a short sample, fewer calls share the pause of a busy machine.
    """
    cost, skipped = {}, {}
    for name, runner in runners.items():
        runner.sample(1)
        once = _once(runner, budget)
        slow = too_slow(once, budget)
        if slow:
            skipped[name] = slow
        else:
            cost[name] = once
    calls = {name: max(1, min(len(runners[name]), int(sample_us / max(once, 1e-3)))) for name, once in cost.items()}
    slowest = max((cost[name] * calls[name] for name in cost), default=0.0)
    turn = {name: max(1, min(8, int(slowest / (cost[name] * calls[name])))) for name in cost}
    found: dict[str, list[float]] = {name: [] for name in cost}
    end = time.perf_counter() + budget
    order = list(cost)
    shuffle = random.Random(0).shuffle
    while found and min(len(times) for times in found.values()) < samples:
        shuffle(order)  # a model that follows one that fills the caches is slower for it
        for name in order:
            if cost[name] < _SAMPLE_US:
                runners[name].sample(1)  # wakes threads that slept while another ran: on a busy machine 20 ms
            found[name] += [runners[name].sample(calls[name]) for _ in range(turn[name])]
        if time.perf_counter() > end and all(len(times) >= _LEAST_SAMPLES for times in found.values()):
            break
    return {name: summary(times) for name, times in found.items()}, skipped


def _once(runner: Runner, budget: float) -> float:
    """The microseconds of a call, the shortest of a few: the machine may pause during one of them."""
    found = [runner.sample(1)]
    if too_slow(found[0], budget):
        found.append(runner.sample(1))  # before it is skipped
    while len(found) < 5 and sum(found) < 0.05e6 * budget:
        found.append(runner.sample(1))
    return min(found)


def too_slow(call_us: float, budget: float) -> str:
    """Why calls of `call_us` microseconds cannot be timed within `budget` seconds; empty if they can."""
    if _LEAST_SAMPLES * call_us <= budget * 1e6:
        return ""
    return f"{call_us / 1e6:.3g} s a call: {_LEAST_SAMPLES} calls exceed the budget of {budget:g} s"


def summary(times: list[float]) -> Times:
    low, _, _, high = statistics.quantiles(times, n=5)
    return Times(statistics.median(times), low, high, len(times))
