import subprocess
import sys
import time

import pytest
import torch

from fastff import bench
from fastff.bench import OtherLoad, free_threads


@pytest.mark.slow
def test_other_processes_are_noticed():
    """One that never rests is seen; this one is not counted."""
    if OtherLoad().cores() is None:
        pytest.skip("the system does not say")
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.2)
        load = OtherLoad()
        end = time.perf_counter() + 1.0
        while time.perf_counter() < end:
            pass
        assert load.cores() > 0.2
    finally:
        busy.kill()
        busy.wait()
    load = OtherLoad()
    load.start = (load.start[0] - 10, load.start[1] - 12, load.start[2] - 12)
    assert load.cores() < 0.2  # 12 of 12 seconds were our own


def test_threads_that_have_no_core_are_left_out(monkeypatch):
    """A thread that waits for its core made a call of 20 us one of 18 ms."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)), raising=False)
    for busy, free in ((None, 4), (0.1, 4), (0.9, 3), (1.1, 3), (2.5, 1), (9.0, 1)):
        monkeypatch.setattr(OtherLoad, "cores", lambda _, busy=busy: busy)
        assert free_threads(0.0) == free


def test_bandwidth_is_plausible():
    assert 1e8 < bench.bandwidth("cpu", size=2**24) < 1e13
