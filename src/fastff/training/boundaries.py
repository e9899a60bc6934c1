"""Place the boundaries of a tree by the samples on either side of them.

A node's bias places its boundary. shift_biases_ moves the boundaries that leave a leaf with too few samples. The other
functions are statistics by group: values[i] belongs to group[i], here the node that sample i reaches.
"""

import math

import torch
from torch import Tensor

from .. import tree as heap
from ..layer import FFF


def boundary_bias(layer: FFF) -> Tensor:
    """The biases (nodes,) that place the boundaries of a layer."""
    return layer.node_bias if layer.node_out_bias is None else layer.node_out_bias


@torch.no_grad()
def shift_biases_(bias: Tensor, logits: Tensor, min_share: float) -> None:
    """Shift the biases (trees, nodes) so that each leaf gets `min_share` of its fair share of the samples.

    `logits` (trees, batch, nodes) are the logits of all samples before the shift. In a later pass, rounding may move a
    sample across a boundary. So a boundary that moves leaves one sample more than needed, if there are enough and it
    does not fall between equal values.
    """
    trees, batch, nodes = logits.shape
    depth, fair = heap.depth_of(nodes + 1), batch / (nodes + 1)
    needed = min(math.ceil(min_share * fair), math.floor(fair))  # per leaf
    spare = min(needed + 1, math.floor(fair))
    node = torch.zeros(trees, batch, dtype=torch.int64, device=logits.device)
    for m in range(depth if needed else 0):
        level = heap.level(m)
        first = torch.arange(trees, device=logits.device).unsqueeze(1) << m
        group = (node - level.start + first).flatten()  # (trees * batch,): nodes, numbered across trees
        logit = logits.gather(2, node.unsqueeze(2)).flatten()
        counts = torch.bincount(group, minlength=trees << m)
        left = torch.bincount(group[logit < 0], minlength=trees << m)
        fewest, enough = (number << (depth - m - 1) for number in (needed, spare))  # on either side
        wanted = left.clamp(min=fewest).minimum(counts - fewest)
        if not torch.equal(wanted, left):
            values = sort_by_group(group, logit)
            below, above = neighbours(values, counts, wanted)
            spared = torch.where(wanted > left, enough, counts - enough).clamp(min=fewest).minimum(counts - fewest)
            lower, upper = neighbours(values, counts, spared)
            boundary = torch.where(lower < upper, lower / 2 + upper / 2, below / 2 + above / 2)
            shift = torch.where(wanted == left, 0, -boundary)
            before = bias[:, level].clone()
            bias[:, level] += shift.view_as(before).to(bias.dtype)
            logit += (bias[:, level] - before).flatten()[group]  # the shift after rounding to the bias's dtype
        node = 2 * node + 1 + (logit >= 0).view_as(node)


def sort_by_group(group: Tensor, value: Tensor) -> Tensor:
    """The values group by group, in ascending order within each group."""
    order = value.argsort()
    return value[order[group[order].argsort(stable=True)]]


def neighbours(values: Tensor, counts: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """The values on either side of position `place` in each sorted group; at an end, the same value twice."""
    start, last = counts.cumsum(0) - counts, len(values) - 1
    below = values[(start + (place - 1).clamp(min=0)).clamp(max=last)]
    above = values[(start + place.minimum(counts - 1).clamp(min=0)).clamp(max=last)]
    return below, above


def median_by_group(group: Tensor, value: Tensor, counts: Tensor, default: Tensor) -> Tensor:
    """The median of each group; `default` for an empty one."""
    below, above = neighbours(sort_by_group(group, value), counts, counts // 2)
    return torch.where(counts > 0, below / 2 + above / 2, default)


def moments_by_group(group: Tensor, value: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of the values (batch, ...) of each group; of all values where it has none or does not vary."""
    size = counts.to(value.dtype).view(-1, *[1] * (value.dim() - 1))
    empty = value.new_zeros(len(counts), *value.shape[1:])
    mean = torch.where(size > 0, empty.index_add(0, group, value) / size, value.mean(0))
    spread = (empty.index_add(0, group, (value - mean[group]) ** 2) / size.clamp(min=1)).sqrt()
    overall = value.std(0, correction=0)
    overall = torch.where(overall > 0, overall, torch.ones_like(overall))
    return mean, torch.where(spread > 0, spread, overall)


def check_finite(name: str, inputs: Tensor) -> None:
    """Raise if the inputs of a layer hold NaN or infinity."""
    if not inputs.isfinite().all():
        raise ValueError(f"the inputs of the FFF layer {name!r} hold NaN or infinity; clean the data.")
