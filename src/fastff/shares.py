"""How evenly the nodes of a tree divide their samples, seen from the paths of the samples alone.

Sampled training computes the logits of one path per sample. A batch may bring few samples, or none, to a node far down,
so a layer keeps a running mean over its batches. With p the sigmoids of the logits, a node's shares are the means over
the batch of 1 - p (left) and p (right), over the samples that reach it. The root's two shares sum to 1.
"""

import torch
from torch import Tensor

from . import tree as heap
from .backends import paths

_KEPT = 0.99  # of the running mean, per forward
_LEAST = 1e-12  # added to a share: a node that sends all one way has a finite loss and gradient


def node_shares(logits: Tensor, leaf: Tensor) -> Tensor:
    """The left and right share of every node, given the logits (batch, depth) on the paths: (nodes, 2)."""
    batch, depth = logits.shape
    sides = torch.sigmoid(torch.stack([-logits, logits], -1)).flatten(0, 1) / max(batch, 1)  # (batch * depth, 2)
    return sides.new_zeros(heap.num_nodes(depth), 2).index_add(0, paths.nodes(leaf, depth).flatten(), sides)


@torch.no_grad()
def update(running: Tensor | None, logits: Tensor, leaf: Tensor) -> Tensor:
    """The running mean after another batch; None before the first. It starts small: `unevenness` corrects that."""
    new = (1 - _KEPT) * node_shares(logits.detach(), leaf)
    fits = running is not None and running.shape == new.shape and running.device == new.device
    return running * _KEPT + new if fits and running is not None else new


def unevenness(running: Tensor, logits: Tensor, leaf: Tensor) -> Tensor:
    """-(log a + log(1 - a)) / 2 of every node, a the share that goes right: (nodes,).

    The value is the running mean's, and its gradient the last batch's: over many batches, it is the gradient for all of
    their samples. A node that no sample has reached has the least value, log 2, and no gradient.
    """
    batch = node_shares(logits, leaf)
    # All samples reach the root: its sum tells how much of the mean the batches so far make up.
    mean = running / running[:1].sum().clamp(min=torch.finfo(running.dtype).tiny)
    sides = mean + (batch - batch.detach()) + _LEAST
    return sides.sum(-1).log() - sides.log().mean(-1)
