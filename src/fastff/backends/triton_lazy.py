"""A step of fastff.optim.LazyAdamW on a GPU: how its Triton kernel is launched."""

import math
from typing import Any

import torch
from torch import Tensor

from . import triton_training
from .choice import attempt
from .triton_launch import launch_kernel
from .triton_size import power_of_two


def steps(parameter: Tensor, grad: Tensor, rows: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> bool:
    """Step these rows, given their gradient (rows, ...); False if the kernel does not take them."""
    if not triton_training.takes("identity", parameter, grad, state["mean"], state["square"]):
        return False

    def run() -> bool:
        adamw(parameter, grad, rows, state, group)
        return True

    return attempt("optimizer", run, lambda: False, parameter, grad)


def adamw(parameter: Tensor, grad: Tensor, rows: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    """Step these rows in place. The caller notes that they have stepped."""
    from .triton_lazy_kernels import adamw_rows

    (first, second), step, size = group["betas"], int(state["step"]), parameter[:1].numel()
    if not grad.numel():
        return
    block = min(1024, power_of_two(size))
    with torch.cuda.device_of(parameter):
        launch_kernel(
            adamw_rows, (len(rows) * -(-size // block),),
            parameter, grad, state["mean"], state["square"], rows, state["last"], state["decayed"], state["decay"],
            step, group["lr"], _log2(first), _log2(second), first, second, 1 - first, 1 - second,
            1 / (1 - first ** (step + 1)), 1 / math.sqrt(1 - second ** (step + 1)), group["eps"], group["weight_decay"],
            SIZE=size, BLOCK=block, num_warps=4,
        )  # fmt: skip


def _log2(beta: float) -> float:
    return math.log2(beta) if beta else -1e9
