"""Arguments of the Triton kernels of the hard pass: tensors, constants, and how a product or a launch is made."""

from typing import Any

import torch
from torch import Tensor

from .. import tree as heap
from ..activations import GATED, PLAIN
from ..tensors import Leaves, Tree
from .triton_choice import Launch


def launch_options(launch: Launch, warps: int) -> dict[str, Any]:
    return {"PDL": launch.pdl, "num_warps": warps} | ({"launch_pdl": True} if launch.pdl else {})


def precision(x: Tensor, leaf_width: int) -> str:
    """How tensor cores multiply float32 numbers: split in two of 11 bits, or in three of 8.

    Tensor cores cut off what they add up. Against float64, 32 columns at a time, two parts have up to 1.4 times the
    error of torch's own products where sums are long anyway; at 64 features 2.2 times, in a leaf of 130 neurons 3.1
    times. Three parts have up to 1.2 times, and take 1.1 to 1.4 times as long. (256 samples a leaf, H200.)
    """
    # The interpreter has no tensor cores, and does not know all names of precisions.
    if x.dtype != torch.float32 or x.is_cpu:
        return "ieee"
    return "tf32x3" if x.shape[1] >= 512 and leaf_width <= 64 else "bf16x6"


def stored(x: Tensor) -> Tensor:
    """The same numbers, stored as a kernel reads them: side by side, and none of them negated by a bit of the tensor.

    A gradient may be stored otherwise, and under a compiler any tensor.
    """
    return x.resolve_neg().contiguous()


def fits(x: Tensor, numbers: int, warps: int) -> bool:
    """Whether the registers of these warps have room for the numbers, and for some others."""
    return numbers * x.element_size() <= 512 * 32 * warps


def fence_options(x: Tensor, launch: Launch) -> dict[str, bool]:
    """Whether rows of weights are on their way before the first is used, and whether x is too wide to be kept besides.

    The interpreter has no assembler.
    """
    fence = launch.fence and not x.is_cpu
    return {"FENCE": fence, "LATE": fence and x.shape[1] * x.element_size() > 8192}


def depth_of(tree: Tree | None) -> int:
    return 0 if tree is None else heap.depth_of(len(tree.weight) + 1)


def node_width(tree: Tree | None) -> int:
    return 1 if tree is None or tree.out_weight is None else tree.out_weight.shape[1]


def node_tensors(x: Tensor, tree: Tree | None) -> tuple[Tensor, ...]:
    """A kernel's arguments. Absent tensors are passed as x and never read."""
    return (x,) * 4 if tree is None else tuple(x if part is None else part for part in tree)


def leaf_tensors(x: Tensor, leaves: Leaves | None) -> tuple[Tensor, ...]:
    """Weight, bias and scale of the first layer, of the gate and of the second layer."""
    if leaves is None:
        return (x,) * 9
    parts = (
        leaves.in_weight, leaves.in_bias, leaves.in_scale, leaves.gate_weight, leaves.gate_bias, leaves.gate_scale,
        leaves.out_weight, leaves.out_bias, leaves.out_scale,
    )  # fmt: skip
    return tuple(x if part is None else part for part in parts)


def leaf_options(leaves: Leaves | None, activation: str) -> dict[str, Any]:
    return {
        "ACT": function_name(activation),
        "GATED": leaves is not None and leaves.gate_weight is not None,
        "IN_BIAS": leaves is not None and leaves.in_bias is not None,
        "GATE_BIAS": leaves is not None and leaves.gate_bias is not None,
        "OUT_BIAS": leaves is not None and leaves.out_bias is not None,
        "INT8": leaves is not None and leaves.is_int8,
    }


def function_name(activation: str) -> str:
    """The ACT of the kernels."""
    return (GATED if activation in GATED else PLAIN)[activation].__name__
