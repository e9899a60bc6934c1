"""A model on its inputs, ready to be timed.

A layer that is called again and again with one input reads its weights from a cache that a real model would have filled
with other data. So inputs rotate. On a GPU one CUDA graph holds the calls on all inputs, and the cache is overwritten
before the graph runs.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..backends import backend

# A queue of calls: so long that waiting for the last one does not matter.
_QUEUE_US, _MOST_QUEUED = 5000.0, 200


class Runner(Protocol):
    """A model on given inputs."""

    def output(self, i: int) -> Tensor:
        """The output for input i."""

    def sample(self, calls: int) -> float:
        """The microseconds of one call: the mean of `calls` calls on the next inputs."""

    def __len__(self) -> int:
        """The number of inputs."""


class EagerRunner:
    """Calls from Python, as users make them, each of which ends before the next: for the CPU."""

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


class QueueRunner(EagerRunner):
    """Calls from Python on a GPU, as users make them: the host queues calls and waits for the last one.

    The time of a call is the host's or the device's, whichever is longer.
    """

    last_us = math.inf

    def sample(self, calls: int) -> float:
        calls = max(calls, 1 if self.last_us == math.inf else min(_MOST_QUEUED, int(_QUEUE_US / self.last_us)))
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        super().sample(calls)
        torch.cuda.synchronize()
        self.last_us = (time.perf_counter_ns() - start) / calls / 1e3
        return self.last_us


class GraphRunner:
    """Calls on all inputs as one CUDA graph: device time alone. Make it and use it on a stream other than the default.

    `scratch` is overwritten before every sample: it empties the cache, and keeps the GPU busy while launches queue up.
    """

    def __init__(self, call: Callable[[Tensor], Tensor], inputs: Sequence[Tensor], name: str, scratch: Tensor) -> None:
        self.scratch = scratch
        self.call = call  # and so its weights: the graph reads them in place
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
        self.outputs[i].fill_(math.nan)  # values that the graph does not write are not left over from another model
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
