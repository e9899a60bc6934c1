"""The right answers of a case, in float64, and how far an output may be from them.

A time counts only if the output is right: its error against float64 is at most twice the error of plain torch in the
same dtype, on the same rounded weights and inputs. A sample with a decision within rounding of a tie may go either way
and is left out. Only visited leaves are converted to float64: a layer of gigabytes has no second copy.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .. import tree as heap
from ..activations import apply
from ..backends import reference
from ..tensors import Leaves, Tree

_GATHERED = 2**26  # weights converted at a time
_DENSE_ROWS = 16  # samples at which a dense layer is checked: each of them needs all its weights in float64


class Answer(NamedTuple):
    """The right output of a model."""

    rows: Tensor  # (checked,) int64: the samples that are compared
    output: Tensor  # (checked, out) float64
    allowed: float  # the largest relative error that is still right


class Verdict(NamedTuple):
    """Whether an output is right."""

    right: bool
    error: float
    allowed: float


def judge(y: Tensor, answer: Answer) -> Verdict:
    """The relative error of an output (batch, out), in norm over the samples compared."""
    error = _relative(y[answer.rows], answer.output)
    return Verdict(error <= answer.allowed, error, answer.allowed)  # NaN is wrong


def tree_answer(
    x: Tensor, tree: Tree, leaves: Leaves, activation: str, most: int | None = None
) -> tuple[Answer, Tensor]:
    """The answer of a hard pass, and the leaf of every sample (batch,). `most`: compare up to this many samples."""
    leaf, clear = _descend(x, tree, activation)
    return _visited(x, leaf, clear, leaves, activation, most), leaf


def gate_answer(x: Tensor, gate: Tensor, leaves: Leaves, activation: str) -> Answer:
    """The answer of a mixture of experts with k = 1: the expert with the largest gate."""
    wide, narrow = torch.finfo(torch.float32).eps, torch.finfo(x.dtype).eps
    parts = []
    for rows in x.split(_GATHERED // len(gate) + 1):
        logits = rows.double() @ gate.double().T  # (rows, experts)
        (best, second), chosen = logits.topk(min(2, len(gate)), -1).values.T.expand(2, -1), logits.argmax(-1)
        size = rows.double().norm(dim=-1) * gate.double().norm(dim=-1).max()  # no sum of |products| is larger
        doubt = 2 * (math.sqrt(x.shape[-1]) * wide * size + narrow * best.abs())
        parts.append((chosen, (best - second > doubt) if len(gate) > 1 else torch.ones_like(chosen, dtype=torch.bool)))
    leaf, clear = (torch.cat(part) for part in zip(*parts, strict=True))
    return _visited(x, leaf, clear, leaves, activation)


def dense_answer(x: Tensor, leaves: Leaves, activation: str, out_bias: Tensor) -> Answer:
    """The answer of the dense layer that holds the neurons of all leaves.

    Here plain torch is not one number: a library may sum a million products in any order, and its kernels differ a lot.
    Summing them one by one errs by about sqrt(width) * eps: this much is allowed too.
    """
    rows = torch.arange(0, len(x), max(1, len(x) // _DENSE_ROWS), device=x.device)[:_DENSE_ROWS]
    step = _GATHERED // (leaves.in_weight[0].numel() + leaves.out_weight[0].numel()) + 1
    exact, plain = out_bias.double().expand(len(rows), -1).clone(), out_bias.expand(len(rows), -1).clone()
    for start in range(0, len(leaves.in_weight), step):
        part = Leaves._make(None if t is None else t[start : start + step] for t in leaves)
        wide = Leaves._make(None if t is None else t.double() for t in part)
        hidden = reference.leaf_hidden(x[rows].double(), wide, activation).flatten(1)
        exact += hidden @ wide.out_weight.flatten(0, 1)
        plain += reference.leaf_hidden(x[rows], part, activation).flatten(1) @ part.out_weight.flatten(0, 1)
    width = leaves.in_weight.shape[0] * leaves.in_weight.shape[1]
    one_by_one = math.sqrt(width) * torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    return Answer(rows, exact, max(2 * _relative(plain, exact), one_by_one))


def _visited(
    x: Tensor, leaf: Tensor, clear: Tensor, leaves: Leaves, activation: str, most: int | None = None
) -> Answer:
    rows = clear.nonzero().squeeze(-1)
    if most is not None:
        rows = rows[:: max(1, -(-len(rows) // most))]
    x, leaf = x[rows], leaf[rows]
    exact = _visit(x, leaf, leaves, activation, torch.float64)
    plain = _relative(_visit(x, leaf, leaves, activation, x.dtype), exact)
    # In float64, plain torch may be the exact answer itself.
    return Answer(rows, exact, max(2 * plain, torch.finfo(torch.float64).eps))


def _visit(x: Tensor, leaf: Tensor, leaves: Leaves, activation: str, dtype: torch.dtype) -> Tensor:
    """The given leaf of each sample, by the reference, in any dtype: (batch, out)."""
    step = _GATHERED // (leaves.in_weight[0].numel() + leaves.out_weight[0].numel()) + 1
    y = []
    for rows, at in zip(x.split(step), leaf.split(step), strict=True):
        own = Leaves._make(None if t is None else t[at].to(dtype) for t in leaves)
        y.append(reference.visit(rows.to(dtype), torch.arange(len(rows), device=x.device), own, activation))
    return torch.cat(y)


def _descend(x: Tensor, tree: Tree, activation: str) -> tuple[Tensor, Tensor]:
    """The leaf of every sample in float64, and whether all decisions on the way are above rounding: (batch,) each."""
    parts = (
        [_descend_some(rows, tree, activation) for rows in x.split(_GATHERED // tree.weight[:1].numel() + 1)]
        if len(tree.weight)
        else [(x.new_zeros(len(x), dtype=torch.int64), x.new_ones(len(x), dtype=torch.bool))]
    )
    leaf, clear = (torch.cat(part) for part in zip(*parts, strict=True))
    return leaf, clear


def _descend_some(x: Tensor, tree: Tree, activation: str) -> tuple[Tensor, Tensor]:
    depth = heap.depth_of(len(tree.weight) + 1)
    # Sums of `in` products err by about sqrt(in) * eps of float32 times their size. A backend may also round the sum to
    # the dtype of the layer before it adds the bias.
    wide = math.sqrt(x.shape[-1]) * torch.finfo(torch.float32).eps
    narrow = torch.finfo(x.dtype).eps
    x = x.double()
    node = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    clear = torch.ones(len(x), dtype=torch.bool, device=x.device)
    for _ in range(depth):
        weight, bias = tree.weight[node].double(), tree.bias[node].double()
        products = x * weight if tree.out_weight is None else x.unsqueeze(1) * weight
        z = products.sum(-1) + bias
        doubt = wide * (products.abs().sum(-1) + bias.abs()) + narrow * bias.abs()
        if tree.out_weight is not None and tree.out_bias is not None:
            # Hidden neurons are rounded too; no activation has a slope above 1.2.
            out = tree.out_weight[node].double()
            doubt = ((1.2 * doubt + 2 * narrow * z.abs()) * out.abs()).sum(-1)
            z = (apply(activation, z) * out).sum(-1) + tree.out_bias[node].double()
        clear &= z.abs() > doubt
        node = 2 * node + 1 + (z >= 0)
    return node - heap.num_nodes(depth), clear


def _relative(value: Tensor, exact: Tensor) -> float:
    return ((value.double() - exact).norm() / exact.norm().clamp(min=1e-300)).item()
