"""Times: all that are compared run in turn in one loop, on inputs that differ from call to call.

On a noisy machine only numbers taken side by side can be compared, and a layer that is called again and again with one
input reads its weights from a cache that a real model would have filled with other things. So inputs rotate. On a GPU
one CUDA graph holds the calls on all inputs, one after the other, and the cache is overwritten before it runs.
"""

import math
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..backends import backend

_LEAST_SAMPLES = 5
_SAMPLE_US = 500.0  # a sample of fast calls holds so many of them that the clock does not matter


class Runner(Protocol):
    """A model on given inputs, ready to run."""

    def output(self, i: int) -> Tensor:
        """Of input i."""

    def sample(self, calls: int) -> float:
        """The microseconds of a call, over so many calls on the next inputs."""

    def __len__(self) -> int: ...


class EagerRunner:
    """Calls from Python, as a user makes them: for the CPU."""

    def __init__(self, call: Callable[[Tensor], Tensor], inputs: Sequence[Tensor], name: str) -> None:
        self.call, self.inputs, self.name, self.next = call, inputs, name, 0

    def __len__(self) -> int:
        return len(self.inputs)

    def output(self, i: int) -> Tensor:
        with backend(self.name):
            return self.call(self.inputs[i])

    def sample(self, calls: int) -> float:
        chosen = [self.inputs[(self.next + i) % len(self.inputs)] for i in range(calls)]
        self.next += calls
        call = self.call
        with backend(self.name):
            start = time.perf_counter_ns()
            for x in chosen:
                call(x)
            end = time.perf_counter_ns()
        return (end - start) / calls / 1e3


class GraphRunner:
    """Calls on all inputs as one CUDA graph: the time of the device alone. Made and used on a stream of its own."""

    def __init__(self, call: Callable[[Tensor], Tensor], inputs: Sequence[Tensor], name: str, scratch: Tensor) -> None:
        # `scratch` is written over before every sample: it empties the cache, and keeps the GPU busy while launches
        # queue up.
        self.scratch = scratch
        self.call = call  # and so its weights: the graph reads them where they are
        self.graph = torch.cuda.CUDAGraph()
        self.outputs: list[Tensor] = []
        with backend(name):
            for _ in range(2):  # compile, and let libraries take their workspaces
                call(inputs[0])
            torch.cuda.synchronize()
            self.graph.capture_begin()
            try:
                self.outputs += [call(x) for x in inputs]
            finally:
                self.graph.capture_end()

    def __len__(self) -> int:
        return len(self.outputs)

    def output(self, i: int) -> Tensor:
        self.outputs[i].fill_(math.nan)  # what the graph does not write is not left over from another model
        self.graph.replay()
        torch.cuda.synchronize()
        return self.outputs[i]

    def sample(self, calls: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        replays = max(1, round(calls / len(self)))
        self.scratch.zero_()
        start.record()
        for _ in range(replays):
            self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / (replays * len(self)) * 1e3


class Times(NamedTuple):
    """Microseconds of a call."""

    median: float
    p20: float
    p80: float
    samples: int


def fastest(runners: Sequence[Runner], seconds: float = 0.5) -> Runner:
    """Of runners that do the same, the one with the shortest sample; about so many seconds are spent on each."""
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
    """The times of each, taken in turn, within about `budget` seconds in all; and of those left out, why.

    A turn of a fast one holds several samples, so that a slow one does not leave it with few. A sample of fast calls
    takes about `sample_us`: in a short one, fewer calls share the pause of a busy machine.
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
        shuffle(order)  # whoever follows a model that fills the caches is slower for it
        for name in order:
            if cost[name] < _SAMPLE_US:
                runners[name].sample(1)  # wakes threads that slept while another ran: on a busy machine 20 ms
            found[name] += [runners[name].sample(calls[name]) for _ in range(turn[name])]
        if time.perf_counter() > end and all(len(times) >= _LEAST_SAMPLES for times in found.values()):
            break
    return {name: summary(times) for name, times in found.items()}, skipped


def _once(runner: Runner, budget: float) -> float:
    """The microseconds of a call, the shortest of a few: the machine may pause in one."""
    found = [runner.sample(1)]
    if too_slow(found[0], budget):
        found.append(runner.sample(1))  # before it is left out
    while len(found) < 5 and sum(found) < 0.05e6 * budget:
        found.append(runner.sample(1))
    return min(found)


def too_slow(call_us: float, budget: float) -> str:
    """Why calls of so many microseconds cannot be timed within the budget of seconds, or nothing if they can."""
    if _LEAST_SAMPLES * call_us <= budget * 1e6:
        return ""
    return f"{call_us / 1e6:.3g} s a call: {_LEAST_SAMPLES} calls pass the budget of {budget:g} s"


def summary(times: list[float]) -> Times:
    low, _, _, high = statistics.quantiles(times, n=5)
    return Times(statistics.median(times), low, high, len(times))


class OtherLoad:
    """How many cores other processes keep busy from here on. Threads that wait for each other suffer most from them."""

    def __init__(self) -> None:
        self.start = self._read()

    def cores(self) -> float | None:
        """None where the system does not say."""
        now = self._read()
        if now is None or self.start is None:
            return None
        wall, busy, own = (b - a for a, b in zip(self.start, now, strict=True))
        return max(0.0, (busy - own) / wall)

    @staticmethod
    def _read() -> tuple[float, float, float] | None:
        """Seconds: of the clock, of all busy cores, of this process."""
        stat = Path("/proc/stat")
        if not stat.exists():
            return None
        user, nice, system, _, _, irq, soft, steal = map(int, stat.read_text().split()[1:9])
        busy = (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), busy, time.process_time()


def free_threads(seconds: float = 0.2) -> int:
    """How many of torch's threads have a core of their own now: one that waits for its turn holds up all others."""
    load = OtherLoad()
    time.sleep(seconds)
    busy = load.cores() or 0.0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(torch.get_num_threads(), cores - math.ceil(busy - 0.2)))


def bandwidth(device: str, size: int = 2**29) -> float:
    """The bytes per second that this machine moves, best of several: a large read on a CPU, a copy on a GPU.

    On a CPU by all threads, as a matrix times a vector: the access of a layer at batch 1.
    """
    best = 0.0
    if device == "cuda":
        source, target = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
        for _ in range(10):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            best = max(best, 2 * size / (start.elapsed_time(end) / 1e3))
        return best
    matrix, vector = torch.ones(size // 2**14, 2**12), torch.ones(2**12)  # size // 4 values
    for _ in range(30):
        begin = time.perf_counter()
        torch.mv(matrix, vector)
        best = max(best, 4 * matrix.numel() / (time.perf_counter() - begin))
    return best
