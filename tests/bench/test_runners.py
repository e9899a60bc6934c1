import time

import pytest
import torch

from fastff.bench import Case, Result
from fastff.bench.models import Problem
from fastff.bench.runners import QueueRunner
from fastff.bench.workbench import Workbench


def test_a_queue_of_calls_ends_with_the_device(monkeypatch):
    """The time holds what the device still does after the last call; fast calls are queued in numbers."""
    calls = []
    waits = iter([0.0, 0.02] + [0.0] * 10)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: time.sleep(next(waits)))
    runner = QueueRunner(lambda x: calls.append(x), [torch.ones(1), torch.zeros(1)], "auto")
    assert runner.sample(1) >= 20e3  # microseconds
    assert len(calls) == 1
    for last, queued in ((1e6, 1), (50.0, 100), (1.0, 200)):  # microseconds of the last call: calls of the next sample
        calls.clear()
        runner.last_us = last
        runner.sample(1)
        assert len(calls) == queued
    assert {x.item() for x in calls} == {0.0, 1.0}


@pytest.mark.gpu
def test_eager_calls_and_graphs_have_the_same_output():
    problem = Problem(Case(64, 48, 8, 4, 65, device="cuda"))
    with torch.cuda.stream(torch.cuda.Stream()), torch.inference_mode():
        outputs = []
        for eager in (True, False):
            result = Result("FFF", "auto")
            runner = Workbench(problem, None, 1.0, eager=eager).prepare(result)
            assert result.status == "ok"
            assert isinstance(runner, QueueRunner) == eager
            assert runner.sample(8) > 0
            outputs.append(runner.output(3).clone())
    assert torch.equal(*outputs)
