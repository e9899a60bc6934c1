"""Regions: how samples spread over the leaves of a tree, each of which owns one region of the input space."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..batches import batches, check_reached, evaluation_mode, feed, watch_inputs
from ..functional import mixture, walk
from ..layer import FFF, fff_layers
from ..training.losses import last_logits, sees_paths
from ..tree import one_hot, sum_below
from ..visits import is_shed, leaf_mass, visits


@dataclass(frozen=True, repr=False)
class Usage:
    """How samples spread over one FFF layer: soft mass and hard visits of its leaves and nodes."""

    samples: int
    leaf_mass: Tensor  # (leaves,): the sum of the soft weights
    leaf_count: Tensor  # (leaves,): the number of samples that the hard pass sends there
    node_mass: Tensor  # (nodes,)
    node_count: Tensor  # (nodes,)

    @property
    def leaves_used(self) -> int:
        """The number of leaves that the hard pass visits."""
        return leaves_used(self.leaf_count)

    @property
    def smallest_share(self) -> float:
        """The samples of the least used leaf, over its fair share, samples / leaves."""
        return smallest_share(self.leaf_count)

    def __repr__(self) -> str:
        leaves = len(self.leaf_count)
        return (
            f"Usage({self.samples} samples, {self.leaves_used} of {leaves} leaves used, "
            f"smallest share {self.smallest_share:.2f})"
        )

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


def usage(model: nn.Module, data: Any = None) -> dict[str, Usage]:
    """How the tree of every FFF layer is used, by layer name.

    With `data` (a batch or an iterable of batches, as in initialize_tree_), the model runs on it in evaluation mode.
    Without data, the last training forward is read. With `decision="sampled"` and many nodes, it has no soft mass: the
    mass is then the number of visits. With `epsilon` > 0, it is the mass of the visited nodes and their children.
    """
    if data is None:
        with torch.no_grad():
            return {name: _last_usage(layer, logits) for name, layer, logits in last_logits(model)}
    total: dict[str, Usage] = {}

    def see(name: str, layer: FFF, x: Tensor) -> None:
        part = _usage(layer.node_logits(x) * layer.temperature_tensor)
        total[name] = total[name] + part if name in total else part

    layers = fff_layers(model)
    with evaluation_mode(model), watch_inputs(layers, see):
        for batch in batches(data):
            feed(model, batch)
    check_reached(layers, {name: part.samples for name, part in total.items()})
    return {name: total[name] for name in layers}


def _last_usage(layer: FFF, logits: Tensor) -> Usage:
    if is_shed(layer) and layer.last_leaf is not None:
        logits, reach, node = visits(layer, logits)
        batch, count = len(layer.last_leaf), layer.last_leaf[:, 0].bincount(minlength=layer.num_leaves)
        node_mass = reach.new_zeros(layer.num_nodes, dtype=torch.float64).index_add_(0, node, reach.double())
        mass = leaf_mass(logits.double(), reach.double(), node, batch, layer.depth)
        return Usage(batch, mass, count, node_mass, sum_below(count))
    if not sees_paths(layer) or layer.last_leaf is None:
        return _usage(logits)
    count = layer.last_leaf[:, 0].bincount(minlength=layer.num_leaves)
    mass, nodes = count.double(), sum_below(count)
    return Usage(len(logits), mass, count, nodes.double(), nodes)


def _usage(logits: Tensor) -> Usage:
    mass = mixture(logits).double().sum(0)  # (leaves,)
    count = one_hot(walk(logits), len(mass), torch.float64).sum(0)
    return Usage(len(logits), mass, count.long(), sum_below(mass), sum_below(count).long())


def leaves_used(leaf_count: Tensor) -> int:
    """The number of leaves with a visit; leaf_count (leaves,) has the visits."""
    return int((leaf_count > 0).sum())


def smallest_share(leaf_count: Tensor) -> float:
    """The visits of the least visited leaf, over its fair share of samples / leaves."""
    return float(leaf_count.min()) * len(leaf_count) / max(int(leaf_count.sum()), 1)
