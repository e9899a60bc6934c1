"""Soft training that sheds leaves: the tensors that a layer keeps, and the losses on the tree computed from them.

A sample visits the nodes that it reaches with enough probability (`functional.shed`). The other nodes' logits are
unknown, so they do not count. Each visit has a logit z, and the probability `reach` with which the sample reaches the
node. Rows with a reach of 0 are not visits. A `layer` is an FFF.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import functional
from . import tree as heap
from .checks import check_probability
from .last_forward import remember
from .tensors import Leaves


def check_epsilon(epsilon: float, decision: str) -> float:
    """The value as a float; an error if this decision cannot shed leaves."""
    epsilon = check_probability("epsilon", epsilon)
    if epsilon and decision == "sampled":
        raise ValueError(
            f'epsilon sheds leaves, and decision="sampled" runs few leaves anyway; got epsilon={epsilon}. '
            'Set epsilon=0, or decision to "soft" or "straight_through".'
        )
    return epsilon


def shed(layer: Any, x: Tensor, leaves: Leaves, options: dict[str, Any]) -> Tensor:
    """A layer's training pass with epsilon > 0. Keeps the tensors that losses read."""
    epsilon = check_epsilon(layer.epsilon, layer.decision)
    straight_through = layer.decision == "straight_through"
    found = functional.shed(x, layer.tree, leaves, epsilon=epsilon, straight_through=straight_through, **options)
    kept = {"last_visits": found.logits, "last_reach": found.reach, "last_node": found.node}
    remember(layer, found.output, last_leaf=found.leaf.unsqueeze(1), **kept)
    return found.output


def is_shed(layer: Any) -> bool:
    """Whether the layer's training forwards leave visits."""
    return bool(layer.epsilon) and layer.decision != "sampled"


def visits(layer: Any, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, reach and node of the last forward's visits; `logits` is layer.last_visits."""
    return logits, layer.last_reach, layer.last_node


def log_flow(logits: Tensor, reach: Tensor, node: Tensor, nodes: int) -> Tensor:
    """The logarithm of the number of samples that go left and right at each node, -inf if none: (nodes, 2)."""
    counts = reach > 0
    sides = F.logsigmoid(torch.stack([-logits, logits], -1)) + torch.where(counts, reach, 1).log().unsqueeze(-1)
    sides = sides.masked_fill(~counts.unsqueeze(-1), -torch.inf)
    # As torch.logsumexp, over the rows of each node.
    index = node.unsqueeze(-1).expand_as(sides)
    most = sides.new_full((nodes, 2), -torch.inf).scatter_reduce(0, index, sides.detach(), "amax")
    most = torch.where(most == -torch.inf, 0, most)
    total = sides.new_zeros(nodes, 2).index_add(0, node, (sides - most.index_select(0, node)).exp())
    return torch.where(total == 0, -torch.inf, torch.where(total == 0, 1, total).log() + most)


def leaf_mass(logits: Tensor, reach: Tensor, node: Tensor, batch: int, depth: int) -> Tensor:
    """The weight of each leaf, over all samples that visit the node above it: (leaves,)."""
    if not depth:
        return reach.new_full((1,), batch)
    last = heap.num_nodes(depth - 1)
    sides = torch.sigmoid(torch.stack([-logits, logits], -1)) * reach.unsqueeze(-1)  # (rows, 2)
    sides = sides * (node >= last).unsqueeze(-1)
    return sides.new_zeros(heap.num_leaves(depth - 1), 2).index_add(0, (node - last).clamp(min=0), sides).flatten()
