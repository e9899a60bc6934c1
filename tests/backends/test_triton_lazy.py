"""LazyAdamW by its Triton kernel: by the interpreter where there is no GPU, and compiled ahead of time for one."""

import copy

import pytest
import torch

from fastff.backends import triton_lazy, triton_training
from fastff.optim import LazyAdamW
from helpers import make, without_interpreter
from triton_helpers import DEVICE

pytest.importorskip("triton")
pytestmark = pytest.mark.slow


def steps(layer, sparse, options):
    """Parameters and moments after steps that visit some leaves each, under a schedule."""
    torch.manual_seed(0)
    layer = copy.deepcopy(layer)
    optimizer = LazyAdamW(layer, 0.1, **options)
    for step in range(6):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        if step == 4:  # rows still have the decay of the steps that they missed
            optimizer.param_groups[0]["weight_decay"] = 0.0
        visited = torch.randperm(8, device=DEVICE)[: 8 if step == 3 else 3].sort().values
        for p in layer.leaf_parameters():
            values = torch.randn(len(visited), *p.shape[1:], device=DEVICE).to(p.dtype)
            p.grad = torch.sparse_coo_tensor(visited.unsqueeze(0), values, p.shape)
            p.grad = p.grad if sparse else p.grad.to_dense()
        optimizer.step()
    optimizer.catch_up_()
    return [t for p in layer.leaf_parameters() for t in (p.detach(), *optimizer._moments(optimizer.state[p]))]


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, {"betas": (0.0, 0.9999), "weight_decay": 0.0}, {"weight_decay": 0.5, "eps": 1e-3}]
)
def test_steps_are_those_of_torch(options, dtype, sparse, monkeypatch):
    """To rounding: torch stores a row twice where it has missed steps, after its decay and after the step."""
    layer, launched, kernel = make(300, 7, depth=3, leaf_width=5, dtype=dtype).to(DEVICE), [], triton_lazy.adamw
    monkeypatch.setattr(triton_training, "_CHOICES", ())
    expected = steps(layer, sparse, options)
    monkeypatch.setattr(triton_training, "_CHOICES", ("auto",))
    monkeypatch.setattr(triton_training, "_can_run", lambda x: True)
    monkeypatch.setattr(triton_lazy, "adamw", lambda *a: launched.append(1) or kernel(*a))
    found = steps(layer, sparse, options)
    assert len(launched) == 24  # four tensors, six steps
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 2e-2}
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **close)


AHEAD_OF_TIME = """
import torch
from fastff.backends import triton_lazy as launch, triton_lazy_kernels as kernels
from triton_build import WithoutSpills

WithoutSpills(kernels, "adamw_rows")
def empty(*size, dtype):
    return torch.empty(*size, device="meta", dtype=dtype)

for size, dtype in (((64, 32, 768), torch.bfloat16), ((64, 37), torch.float32), ((64,), torch.float16)):
    p, rows = empty(*size, dtype=dtype), empty(9, dtype=torch.int64)
    state = {"mean": p, "square": p, "last": rows, "decayed": rows.double(), "decay": rows[0].double(), "step": 3.0}
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01}
    launch.adamw(p, p[:9], rows, state, group)
print("built")
"""


def test_compiles_for_a_gpu_that_is_not_there():
    run = without_interpreter(AHEAD_OF_TIME)
    assert run.stdout.strip() == "built", run.stderr
