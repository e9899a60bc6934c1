"""Start from a balanced tree, and keep it so: boundaries placed by the samples that reach them.

A tree drawn at random sends most samples to a few leaves, and training makes that worse, since a leaf that sees more
learns faster. Random-median initialisation keeps the random directions and puts each boundary at the median of the
projections of the samples that reach the node, so that every leaf starts with its fair share of the data. Rebalancing
moves the boundaries of a tree in training, no further than needed for every leaf to keep a part of that share; for the
layers of a model, see rebalance.py.
"""

import math
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from .. import tree as heap
from ..backends.reference import node_logit
from ..batches import StopForward, evaluation_mode, feed, read_until, watch_inputs
from ..checks import check_int, check_number
from ..interrupts import all_or_nothing
from ..layer import FFF, fff_layers
from ..tensors import at_least_float32


def initialize_tree_(model: nn.Module, data: Any, *, logit_std: float = 1.0, samples: int = 16384) -> None:
    """Give every FFF layer of `model` a balanced random-median tree for `data`, and leave its leaves unchanged.

    An error leaves everything unchanged; one is raised where weights for such data do not fit into the layer's dtype.

    Args:
        data: a batch (a tensor, a mapping, or a tuple whose first element is the input) or an iterable of batches such
            as a DataLoader. Layers are set in the order in which the data reaches them; later ones see the outputs of
            earlier ones.
        logit_std: the standard deviation of a node's logits over the samples that reach it: how decisive the tree
            starts.
        samples: how many inputs of a layer are enough; batches past that are not read.
    """
    logit_std, samples = check_number("logit_std", logit_std, 0, above=True), check_int("samples", samples, 1)
    found = fff_layers(model)

    def commit() -> None:
        for layer in found.values():
            layer.fitted_tree = True

    with all_or_nothing((p for layer in found.values() for p in layer.tree_parameters()), commit):
        place_trees(model, data, found, logit_std, samples)


def place_trees(
    model: nn.Module, data: Any, found: dict[str, FFF], logit_std: float = 1.0, samples: int = 16384
) -> None:
    """As initialize_tree_, for some layers of a model. An error leaves those placed that came before."""
    with evaluation_mode(model):
        names, kept = read_until(model, data, samples, found)
        for name in names:
            inputs = _inputs(model, name, found[name], kept)[:samples]
            check_finite(name, inputs)
            random_median_(found[name], inputs, logit_std=logit_std)
            _check_tree(name, found[name], inputs, logit_std)


def _inputs(model: nn.Module, name: str, layer: FFF, kept: list[Any]) -> Tensor:
    """What reaches one layer: (samples, in)."""
    inputs: list[Tensor] = []

    def take(_: str, layer: FFF, x: Tensor) -> None:
        inputs.append(x.to(layer.node_weight.dtype))
        raise StopForward

    with watch_inputs({name: layer}, take):
        for batch in kept:
            with suppress(StopForward):
                feed(model, batch)
    return torch.cat(inputs)


def check_finite(name: str, inputs: Tensor) -> None:
    if not inputs.isfinite().all():
        raise ValueError(f"the inputs of the FFF layer {name!r} hold NaN or infinity; clean the data.")


def _check_tree(name: str, layer: FFF, inputs: Tensor, logit_std: float) -> None:
    """Raise unless the nodes of a tree that was placed are finite, and not zero."""
    dtype = layer.node_weight.dtype
    limits = torch.finfo(dtype)
    overflow = not all(p.isfinite().all() for p in layer.tree_parameters())
    weights = [w for w in (layer.node_weight, layer.node_out_weight) if w is not None]
    if overflow or any((w == 0).all(-1).any() for w in weights):
        spread = inputs.double().std(0, correction=0).max().item()
        how = f"past {limits.max:.3g}" if overflow else f"below {limits.smallest_normal:.3g}"
        raise ValueError(
            f"the tree of the FFF layer {name!r} has no place in {dtype}: for inputs that vary by {spread:.2g} and "
            f"logit_std={logit_std:.3g}, weights or biases of its nodes are {how}. Standardise "
            "the inputs, change logit_std, or use a wider dtype."
        )


@torch.no_grad()
def random_median_(layer: FFF, x: Tensor, *, logit_std: float = 1.0) -> None:
    """Draw the directions of the nodes anew and split the samples x (batch, in) in halves at each of them.

    In a node network with a hidden layer, each hidden neuron is first brought to mean 0 and deviation 1 over the node's
    samples, so that none is stuck on the flat side of its activation.
    """
    dtype, wide = layer.node_weight.dtype, at_least_float32(x.dtype)
    peak = x.abs().max().item() if x.numel() else 1.0
    if not 2.0**-40 < peak < 2.0**40:  # a square of it might have no place in float32
        wide = torch.float64
    x = x.to(wide)
    mean = x.mean(0, keepdim=True)
    node = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    nn.init.normal_(layer.node_weight)
    scaled, shifted = layer.node_weight, layer.node_bias
    if layer.node_out_weight is not None and layer.node_out_bias is not None:
        nn.init.normal_(layer.node_out_weight)
        scaled, shifted = layer.node_out_weight, layer.node_out_bias
    shifted.zero_()

    for m in range(layer.depth):
        level, first = heap.level(m), heap.level(m).start
        here = node - first  # (batch,): the sample's node, counted from the left
        counts = torch.bincount(here, minlength=2**m)
        if layer.node_out_weight is not None:
            hidden = (x.unsqueeze(1) * layer.node_weight[node].to(wide)).sum(-1)  # (batch, n)
            center, spread = _moments_by(here, hidden, counts)
            layer.node_weight[level] = (layer.node_weight[level].to(wide) / spread.unsqueeze(-1)).to(dtype)
            layer.node_bias[level] = -(center / spread).to(dtype)

        # Scale first, then shift: what rounding does to the scaled weights is then in the median.
        logit = node_logit(x, node, layer.tree, layer.activation)
        _, spread = _moments_by(here, logit, counts)
        scaled[level] = (scaled[level].to(wide) * (logit_std / spread).unsqueeze(-1)).to(dtype)

        logit = node_logit(x, node, layer.tree, layer.activation)
        nodes = torch.arange(first, level.stop, device=x.device)
        middle = node_logit(mean.expand(len(nodes), -1), nodes, layer.tree, layer.activation)
        median = _median_by(here, logit, counts, default=middle)
        shifted[level] = -median.to(dtype)
        node = 2 * node + 1 + (node_logit(x, node, layer.tree, layer.activation) >= 0)


@torch.no_grad()
def copy_first_leaf_(layer: FFF) -> None:
    """Make all leaves of a layer as its first one is, but for what is frozen."""
    for parameter in layer.leaf_parameters():
        if parameter.requires_grad:
            parameter.copy_(parameter[:1].expand_as(parameter))


@torch.no_grad()
def shift_biases_(bias: Tensor, logits: Tensor, min_share: float) -> None:
    """As rebalance_, for trees of one shape: by the biases (trees, nodes) that move, and the logits of all samples and
    nodes (trees, batch, nodes).

    A boundary that must move leaves a sample to spare, where there are enough and it does not come to lie among equal
    ones: a sample on a boundary may be elsewhere in a pass that adds the same numbers in another order.
    """
    trees, batch, nodes = logits.shape
    depth, fair = heap.depth_of(nodes + 1), batch / (nodes + 1)
    each = min(math.ceil(min_share * fair), math.floor(fair))  # samples a leaf
    spare = min(each + 1, math.floor(fair))
    node = torch.zeros(trees, batch, dtype=torch.int64, device=logits.device)
    for m in range(depth if each else 0):
        level = heap.level(m)
        first = torch.arange(trees, device=logits.device).unsqueeze(1) << m
        here = (node - level.start + first).flatten()  # (trees * batch,): the sample's node among those of all trees
        logit = logits.gather(2, node.unsqueeze(2)).flatten()
        counts = torch.bincount(here, minlength=trees << m)
        left = torch.bincount(here[logit < 0], minlength=trees << m)
        fewest, enough = (number << (depth - m - 1) for number in (each, spare))  # on either side
        wanted = left.clamp(min=fewest).minimum(counts - fewest)
        if not torch.equal(wanted, left):
            values = _by_group(here, logit)
            below, above = _around(values, counts, wanted)
            spared = torch.where(wanted > left, enough, counts - enough).clamp(min=fewest).minimum(counts - fewest)
            lower, upper = _around(values, counts, spared)
            boundary = torch.where(lower < upper, lower / 2 + upper / 2, below / 2 + above / 2)
            shift = torch.where(wanted == left, 0, -boundary)
            before = bias[:, level].clone()
            bias[:, level] += shift.view_as(before).to(bias.dtype)
            logit += (bias[:, level] - before).flatten()[here]  # as far as the bias could move in its dtype
        node = 2 * node + 1 + (logit >= 0).view_as(node)


def _by_group(group: Tensor, value: Tensor) -> Tensor:
    """The values of the first group, then of the next, each in ascending order."""
    order = value.argsort()
    return value[order[group[order].argsort(stable=True)]]


def _around(values: Tensor, counts: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Of values by group: the last of each group's first `place`, and the one after it; the same one at either end."""
    start, last = counts.cumsum(0) - counts, len(values) - 1
    below = values[(start + (place - 1).clamp(min=0)).clamp(max=last)]
    above = values[(start + place.minimum(counts - 1).clamp(min=0)).clamp(max=last)]
    return below, above


def _moments_by(group: Tensor, value: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of the values (batch, ...) of each group; those of all values where a group shows none."""
    size = counts.to(value.dtype).view(-1, *[1] * (value.dim() - 1))
    empty = value.new_zeros(len(counts), *value.shape[1:])
    mean = torch.where(size > 0, empty.index_add(0, group, value) / size, value.mean(0))
    spread = (empty.index_add(0, group, (value - mean[group]) ** 2) / size.clamp(min=1)).sqrt()
    overall = value.std(0, correction=0)
    overall = torch.where(overall > 0, overall, torch.ones_like(overall))
    return mean, torch.where(spread > 0, spread, overall)


def _median_by(group: Tensor, value: Tensor, counts: Tensor, default: Tensor) -> Tensor:
    """A value that has half of its group on either side."""
    below, above = _around(_by_group(group, value), counts, counts // 2)
    return torch.where(counts > 0, below / 2 + above / 2, default)
