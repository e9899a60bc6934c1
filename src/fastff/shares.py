"""How evenly the nodes of a tree divide their samples, seen from a few paths of each sample.

Sampled training computes the logits of the visited path and of the alternatives'. A batch may bring few samples, or
none, to a node far down, so a layer keeps a running mean over its batches. With p the sigmoids of the logits, a node's
shares are the means over the batch of 1 - p (left) and p (right), over the paths that reach it, by their weights. In
expectation, with soft walks, they are the soft mixture's. The root's two shares sum to 1.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ._torch import in_eager
from .backends import paths

_KEPT = 0.99  # of the running mean, per forward
_LEAST = 1e-12  # added to a share: a node that sends all one way has a finite loss and gradient


def node_shares(logits: Tensor, leaf: Tensor, weight: Tensor) -> Tensor:
    """The left and right share of every node, given paths as in `Sampled`: (nodes, 2)."""
    sides = torch.sigmoid(torch.stack([-logits, logits], -1)) * reach(logits, leaf, weight).unsqueeze(-1)
    sides = sides.flatten(0, 1) / max(len(logits), 1)  # (batch * paths, depth, 2)
    return paths.node_sums(sides, leaf.flatten())


def reach(logits: Tensor, leaf: Tensor, weight: Tensor) -> Tensor:
    """How much each node of each path counts: (batch, paths, depth).

    Its value is the path's weight. With soft walks, it has the gradient of the probability to reach the node: the
    weight times the derivative of log P. A visited path alone counts as certain, without a gradient.
    """
    value = weight.unsqueeze(-1).expand_as(logits)
    if logits.shape[1] == 1:
        return value
    turn = paths.turns(leaf.flatten(), logits.shape[-1]).view(logits.shape)
    taken = F.logsigmoid(torch.where(turn, logits, -logits))
    before = taken.cumsum(-1) - taken
    return value * (before - before.detach()).exp()


@torch.no_grad()
def update(running: Tensor | None, logits: Tensor, leaf: Tensor, weight: Tensor) -> Tensor:
    """The running mean after another batch; None before the first. It starts small: `unevenness` corrects that."""
    new = (1 - _KEPT) * node_shares(logits.detach(), leaf, weight)
    new = torch.where(new.isfinite().all(), new, 0)  # a NaN would never leave the mean
    fits = running is not None and running.shape == new.shape and running.device == new.device
    if not fits or running is None:
        return new
    mean = running * _KEPT + new
    # In place on a GPU: a CUDA graph reads and writes the same memory at every run. Autograd keeps no running mean.
    return running.copy_(mean) if mean.is_cuda and in_eager() and not running.is_inference() else mean


def unevenness(running: Tensor, logits: Tensor, leaf: Tensor, weight: Tensor) -> Tensor:
    """-(log a + log(1 - a)) / 2 of every node, a the share that goes right: (nodes,).

    The value is the running mean's, and its gradient the last batch's: over many batches, it is the gradient for all of
    their samples. A node that no path has reached has the least value, log 2, and no gradient.
    """
    batch = node_shares(logits, leaf, weight)
    # All samples reach the root: its sum tells how much of the mean the batches so far make up.
    mean = running / running[:1].sum().clamp(min=torch.finfo(running.dtype).tiny)
    sides = mean + (batch - batch.detach()) + _LEAST
    return sides.sum(-1).log() - sides.log().mean(-1)
