"""How evenly the nodes of a tree divide their samples, seen from a few paths of each sample.

Sampled training computes the logits of the visited path and of the alternatives' paths. A batch may bring few samples,
or none, to a node far down, so a layer keeps a running mean over its batches. With p the sigmoids of the logits, a
node's shares are the batch means of 1 - p (left) and p (right), over the paths that reach it, by weight. In
expectation, with soft walks, they are the soft mixture's. The shares of a level sum to 1.

The balance loss alone reads the mean, so it also counts the last batch in: training without it pays nothing.

The mean must not reach back further than needed: boundaries that follow old shares overshoot, and return. With a
mean over 100 batches everywhere, trees of depth 7 lost accuracy (docs/research/sampled.md). So the first levels
remember nothing, and a level with twice the nodes remembers twice the batches.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import tree as heap
from ._torch import in_eager
from .backends import paths
from .sampling import running_sum

_NODES = 16  # a level of up to 16 nodes remembers no earlier batch; one of n nodes, n / 16 batches
_LEAST = 1e-12  # added to a share: a node that sends all one way has a finite loss and gradient


def node_shares(logits: Tensor, leaf: Tensor, weight: Tensor) -> Tensor:
    """The left and right share of every node, given paths as in `Sampled`: (nodes, 2)."""
    sides = torch.sigmoid(torch.stack([-logits, logits], -1)) * reach(logits, leaf, weight).unsqueeze(-1)
    sides = sides.flatten(0, 1) / max(len(logits), 1)  # (batch * paths, depth, 2)
    return paths.node_sums(sides, leaf.flatten())


def reach(logits: Tensor, leaf: Tensor, weight: Tensor) -> Tensor:
    """How much each node of each path counts: (batch, paths, depth).

    The value is the path's weight. With soft walks, it has the gradient of P, the chance of reaching the node:
    the weight times the derivative of log P. A visited path alone counts as certain, without a gradient.
    """
    value = weight.unsqueeze(-1).expand_as(logits)
    if logits.shape[1] == 1:
        return value
    turn = paths.turns(leaf.flatten(), logits.shape[-1]).view(logits.shape)
    taken = F.logsigmoid(torch.where(turn, logits, -logits))
    before = running_sum(taken) - taken
    return value * (before - before.detach()).exp()


def check_shares(name: str, shares: object, nodes: int) -> None:
    """Raise unless this is a running mean for that many nodes."""
    if not isinstance(shares, Tensor) or shares.shape != (nodes, 2) or not shares.is_floating_point():
        got = f"{tuple(shares.shape)} {shares.dtype}" if isinstance(shares, Tensor) else type(shares).__name__
        raise ValueError(f"{name} must be a floating-point tensor of shape {(nodes, 2)}; got {got}.")
    if not (shares.isfinite() & (shares >= 0)).all():
        raise ValueError(f"{name} must be finite, and 0 or more. Load the state of a training that has not diverged.")


def counted(layer: Any, batch: Tensor) -> Tensor:
    """The running shares of an FFF, with its last training forward, which counts once."""
    if layer.shares_due:
        layer.running_shares, layer.shares_due = update(layer.running_shares, batch), False
    found: Tensor = layer.running_shares
    return found


@torch.no_grad()
def update(running: Tensor | None, batch: Tensor) -> Tensor:
    """The running mean after another batch's shares; None before the first. It starts small: see `unevenness`."""
    new = batch.detach()
    # The layer may be reshaped, moved or converted by now.
    running = torch.zeros_like(new) if running is None or running.shape != new.shape else running.to(new)
    part = _by_level(running, lambda level: torch.full_like(level[:, :1], min(1.0, _NODES / len(level))))
    # A NaN would never leave the mean, and the shares of an empty batch are zeros.
    counts = new.isfinite().all() & (new.sum() > 0)
    mean = torch.where(counts, running.lerp(new, part.expand_as(new)), running)
    # In place on a GPU: a CUDA graph reads and writes the same memory at every run. Autograd keeps no running mean.
    return running.copy_(mean) if mean.is_cuda and in_eager() and not running.is_inference() else mean


def unevenness(running: Tensor, batch: Tensor, scale: float = 1.0) -> Tensor:
    """-(log a + log(1 - a)) / 2 of every node, a the share that goes right: (nodes,). `scale` scales the gradient.

    The value is the running mean's, the gradient the last batch's: over many batches, the gradient for all their
    samples. A node that no path has reached has the least value, log 2, and no gradient.
    """
    # All samples pass each level: its sum is the fraction of the mean filled by batches so far.
    total = _by_level(running, lambda level: level.sum().expand(len(level), 1))
    mean = running / total.clamp(min=torch.finfo(running.dtype).tiny)
    sides = mean + scale * (batch - batch.detach()) + _LEAST
    return sides.sum(-1).log() - sides.log().mean(-1)


def _by_level(shares: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """A function's results for the nodes of each level, in one tensor."""
    sizes = heap.level_sizes(heap.depth_of(len(shares) + 1))
    return torch.cat([function(level) for level in shares.split(sizes)]) if sizes else shares
