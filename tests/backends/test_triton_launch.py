"""Recorded launches, repeated for other inputs. Kernels are stand-ins here; test_gpu.py repeats real ones."""

import threading

import pytest
import torch

from fastff.backends import triton_launch
from fastff.backends.triton_launch import Replay, launch_kernel, record


class Compiled:
    """What Triton returns for a launch: remembers how it is run."""

    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.runs = []

    def run(self, *arguments):
        self.runs.append(arguments)


class Kernel:
    arg_names = ("x", "weight", "scratch", "part", "empty", "y", "batch", "BLOCK", "PDL")

    def __init__(self):
        self.compiled = Compiled()

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.compiled


@pytest.fixture
def tensors():
    return {
        "x": torch.randn(3, 4),
        "y": torch.empty(3, 5),
        "weight": torch.randn(7),
        "a": torch.empty(9),
        "b": torch.empty(300),
    }


def test_addresses_of_a_replay(tensors):
    x, y, weight, a, b = tensors.values()
    kernel = Kernel()
    with record() as launches:
        launch_kernel(kernel, (3,), x, weight, a, b[4:], torch.empty(0), y, 3, BLOCK=16, PDL=True, num_warps=4)
        launch_kernel(kernel, (2, 5), x, weight, b, a, x, y, 3, BLOCK=32, PDL=True, num_warps=4)
    replay = Replay(launches, x, y, [weight])
    assert replay.scratch_bytes == 256 + 1280  # 36 and 1200 bytes, in steps of 256
    replay(10_000, 20_000, 30_000, stream=7)
    one, two = kernel.compiled.runs
    common = ("function", "metadata", None, None, None)
    assert one[:9] == (3, 1, 1, 7, *common)
    assert one[9:] == (10_000, weight.data_ptr(), 30_000, 30_256 + 16, 0, 20_000, 3, 16, True)
    assert two[:9] == (2, 5, 1, 7, *common)
    assert two[9:] == (10_000, weight.data_ptr(), 30_256, 30_000, 10_000, 20_000, 3, 32, True)
    replay(1, 2, 3, stream=8)
    assert kernel.compiled.runs[2][9:12] == (1, weight.data_ptr(), 3)


def test_a_thread_records_its_own_launches(tensors):
    x, y = tensors["x"], tensors["y"]
    given = (x, x, x, x, x, y, 3)

    def elsewhere():
        launch_kernel(Kernel(), (1,), *given, BLOCK=1, PDL=False)

    with record() as launches:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert not launches
        launch_kernel(Kernel(), (1,), *given, BLOCK=1, PDL=False)
    launch_kernel(Kernel(), (1,), *given, BLOCK=1, PDL=False)
    assert len(launches) == 1


def test_a_launch_like_an_earlier_one_does_not_ask_triton(tensors, monkeypatch):
    """Other alignments, dtypes, options and special numbers are other kernels to Triton."""
    asked = []

    class Asked(Kernel):
        def __getitem__(self, grid):
            asked.append(grid)
            return super().__getitem__(grid)

    monkeypatch.setattr(triton_launch, "_jit_function", lambda: Asked)
    monkeypatch.setattr(triton_launch, "current_gpu", lambda: 0)
    monkeypatch.setattr(triton_launch, "current_stream", lambda index: 7 + index)
    monkeypatch.setattr(triton_launch, "_compiled", {})
    kernel, (x, y, weight, a, b) = Asked(), tensors.values()

    def launch(x=x, batch=3, block=16):
        launch_kernel(kernel, (batch, 2), x, weight, a, b, b, y, batch, BLOCK=block, PDL=True, num_warps=4)

    launch()
    assert not kernel.compiled.runs
    launch()
    launch(batch=5)
    assert asked == [(3, 2)]
    expected = (5, 2, 1, 7, "function", "metadata", None, None, None, x, weight, a, b, b, y, 5, 16, True)
    assert all(
        found is wanted or found == wanted for found, wanted in zip(kernel.compiled.runs[1], expected, strict=True)
    )
    for other in ({"batch": 1}, {"batch": 16}, {"batch": 2**31}, {"block": 32}, {"x": x.double()}, {"x": b[1:]}):
        launch(**other)
    assert len(asked) == 7
    monkeypatch.setattr(triton_launch, "has_hooks", lambda: True)  # a profiler hears of launches by Triton alone
    launch()
    assert len(asked) == 8
