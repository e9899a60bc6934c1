"""A balanced start: random-median trees.

A tree drawn at random sends most samples to a few leaves, and training makes that worse, since a leaf that sees more
samples learns faster. A random-median tree keeps the random directions and puts each boundary at the median of the
samples that reach the node, so that every leaf starts with its fair share of the data.
"""

import math
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from .. import tree as heap
from .._torch import is_dtensor
from ..backends.reference import node_logit
from ..batches import StopForward, evaluation_mode, feed, read_until, watch_inputs
from ..checks import check_int, check_number
from ..interrupts import all_or_nothing
from ..layer import FFF, trainable_layers
from ..ranks import alone, ranks_of
from ..tensors import at_least_float32
from .boundaries import boundary_bias, check_finite, median_by_group, moments_by_group

SAMPLES = 16384  # inputs of a layer that place its tree


def initialize_tree_(model: nn.Module, data: Any, *, logit_std: float = 1.0, samples: int = SAMPLES) -> None:
    """Give every FFF layer of `model` a balanced random-median tree for `data`. The leaves stay unchanged.

    An error changes nothing. It is an error if the weights of such a tree overflow or underflow in the layer's dtype.

    Args:
        data: a batch (a tensor, a mapping, or a tuple whose first element is the input) or an iterable of batches such
            as a DataLoader. Layers are set in the order in which the data reaches them; later layers see the outputs of
            earlier ones.
        logit_std: standard deviation of a node's logits over the samples that reach it. A larger value makes the tree
            more decisive.
        samples: stop reading once every layer has seen this many inputs.

    After `fastff.parallel.synchronize_`, all ranks call this, each with its part of the data.
    """
    logit_std, samples = check_number("logit_std", logit_std, 0, above=True), check_int("samples", samples, 1)
    layers = trainable_layers(model)

    def commit() -> None:
        for layer in layers.values():
            layer.fitted_tree = True

    with all_or_nothing((p for layer in layers.values() for p in layer.tree_parameters()), commit):
        place_trees(model, data, layers, logit_std, samples)


def place_trees(model: nn.Module, data: Any, layers: dict[str, FFF], logit_std: float, samples: int = SAMPLES) -> None:
    """initialize_tree_ for some layers of a model; an error undoes nothing."""
    ranks = ranks_of(model)
    _check_whole(layers)
    device = next(iter(layers.values())).node_weight.device
    with evaluation_mode(model):
        own = math.ceil(samples / ranks.size) if ranks else samples
        with ranks.together(device) if ranks else alone() as everywhere:
            names, read = read_until(model, data, own, layers, everywhere)
        for name in names:
            with ranks.together(device) if ranks else alone():
                inputs = _inputs(model, name, layers[name], read)
            inputs = (ranks.gather(inputs) if ranks else inputs)[:samples]
            check_finite(name, inputs)
            random_median_(layers[name], inputs, logit_std)
            if ranks:  # each rank drew its own directions
                ranks.broadcast_(layers[name].tree_parameters())
            _check_tree(name, layers[name], inputs, logit_std)


def _check_whole(layers: dict[str, FFF]) -> None:
    for name, layer in layers.items():
        if any(is_dtensor(parameter) for parameter in layer.tree_parameters()):
            raise TypeError(
                f"placing a tree needs whole parameters; the FFF layer {name!r} has DTensors, as fully_shard makes "
                "them. Call initialize_tree_, or create the Recipe, before fully_shard."
            )


def _inputs(model: nn.Module, name: str, layer: FFF, read: list[Any]) -> Tensor:
    """The inputs of one layer: (samples, in)."""
    inputs: list[Tensor] = []

    def take(_: str, layer: FFF, x: Tensor) -> None:
        inputs.append(x.to(layer.node_weight.dtype))
        raise StopForward

    with watch_inputs({name: layer}, take):
        for batch in read:
            with suppress(StopForward):
                feed(model, batch)
    return torch.cat(inputs)


@torch.no_grad()
def random_median_(layer: FFF, x: Tensor, logit_std: float) -> None:
    """Draw the nodes' directions anew, and let each node halve the samples of x (batch, in) that reach it.

    In nodes with a hidden layer, each hidden neuron is first brought to mean 0 and deviation 1 over the node's samples,
    so that none is stuck on the flat side of its activation.
    """
    dtype, wide = layer.node_weight.dtype, at_least_float32(x.dtype)
    peak = x.abs().max().item() if x.numel() else 1.0
    if not 2.0**-40 < peak < 2.0**40:  # its square may overflow or underflow in float32
        wide = torch.float64
    x = x.to(wide)
    mean = x.mean(0, keepdim=True)
    node = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    nn.init.normal_(layer.node_weight)
    direction, bias = layer.node_weight, boundary_bias(layer)
    if layer.node_out_weight is not None:
        direction = layer.node_out_weight
        nn.init.normal_(direction)
    bias.zero_()

    for m in range(layer.depth):
        level = heap.level(m)
        group = node - level.start  # (batch,): the sample's node, counted from the left
        counts = torch.bincount(group, minlength=2**m)
        if layer.node_out_weight is not None:
            hidden = (x.unsqueeze(1) * layer.node_weight[node].to(wide)).sum(-1)  # (batch, n)
            center, spread = moments_by_group(group, hidden, counts)
            layer.node_weight[level] = (layer.node_weight[level].to(wide) / spread.unsqueeze(-1)).to(dtype)
            layer.node_bias[level] = -(center / spread).to(dtype)

        # Scale first, then shift: the median then includes the rounding of the scaled weights.
        logit = node_logit(x, node, layer.tree, layer.activation)
        _, spread = moments_by_group(group, logit, counts)
        direction[level] = (direction[level].to(wide) * (logit_std / spread).unsqueeze(-1)).to(dtype)

        logit = node_logit(x, node, layer.tree, layer.activation)
        nodes = torch.arange(level.start, level.stop, device=x.device)
        middle = node_logit(mean.expand(len(nodes), -1), nodes, layer.tree, layer.activation)
        bias[level] = -median_by_group(group, logit, counts, default=middle).to(dtype)
        node = 2 * node + 1 + (node_logit(x, node, layer.tree, layer.activation) >= 0)


def _check_tree(name: str, layer: FFF, inputs: Tensor, logit_std: float) -> None:
    """Raise if a node of a new tree has overflowed, or has zero weights."""
    limits = torch.finfo(layer.node_weight.dtype)
    overflow = not all(p.isfinite().all() for p in layer.tree_parameters())
    weights = [w for w in (layer.node_weight, layer.node_out_weight) if w is not None]
    if overflow or any((w == 0).all(-1).any() for w in weights):
        spread = inputs.double().std(0, correction=0).max().item()
        size = f"past {limits.max:.3g}" if overflow else f"below {limits.smallest_normal:.3g}"
        raise ValueError(
            f"the tree of the FFF layer {name!r} does not fit into {layer.node_weight.dtype}: for inputs that vary by "
            f"{spread:.2g} and logit_std={logit_std:.3g}, node weights or biases are {size}. Standardise the inputs, "
            "change logit_std, or use a wider dtype."
        )


@torch.no_grad()
def copy_first_leaf_(layer: FFF) -> None:
    """Copy the first leaf of a layer into all others, except for frozen parameters."""
    for parameter in layer.leaf_parameters():
        if parameter.requires_grad:
            parameter.copy_(parameter[:1].expand_as(parameter))
