"""Losses on the tree: hardening and balance.

They read the tensors that each FFF layer's last training forward left, and sum over the layers of a model:

    y = model(x)
    loss = task(y, target) + h * fastff.hardening_loss(model) + 0.1 * fastff.balance_loss(model)
    loss.backward()

With z the node logits (scaled by the temperature) and p = sigmoid(z), a node's entropy in nats is
H = -p log p - (1 - p) log(1 - p). Below 0.10 on average, rounding the decisions is nearly free.

A layer with `decision="sampled"` and many nodes knows the logits on a few paths of each sample. These stand for all
nodes: the visited path for "mean" and "sum"; all paths, by weight, for "path" and the balance. A layer with
`epsilon` > 0 knows the nodes that each sample visits; the others do not count.
"""

import math
from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..backends import paths
from ..checks import check_choice
from ..functional import mixture, walk
from ..last_forward import recall
from ..layer import FFF, fff_layers
from ..ranks import Ranks, ranks_of
from ..shares import counted, node_shares, reach, unevenness
from ..tree import level_sizes, log_flow, log_reach, one_hot
from ..visits import is_shed, leaf_mass, visits
from ..visits import log_flow as log_flow_of_visits

Reduction = Literal["mean", "sum", "path"]
REDUCTIONS = ("mean", "sum", "path")


def hardening_loss(model: nn.Module, reduction: Reduction = "mean") -> Tensor:
    """The entropy of the decisions in the last training forward, summed over the FFF layers of `model`.

    "mean": over samples and nodes. Use this with the paper's h of 3 to 10; the authors' code computes it.

    "sum": over samples and nodes, the paper's formula to the letter. It grows with the batch and with 2**depth.

    "path": the entropy of the mixture. A node counts by the probability that a sample reaches it; mean over samples.
    """
    check_choice("reduction", reduction, REDUCTIONS)
    losses = []
    for _, layer, logits in last_logits(model):
        if is_shed(layer):
            losses.append(_entropy_of_visits(layer, logits, reduction))
            continue
        if sees_paths(layer):
            entropy = _entropy_of_paths(layer, logits, reduction)  # (batch, depth)
        else:
            entropy = bernoulli_entropy(logits)  # (batch, nodes)
            entropy = log_reach(logits).exp() * entropy if reduction == "path" else entropy
        # max: the loss is 0, not NaN, for depth 0 or an empty batch.
        count = {"mean": max(entropy.numel(), 1), "sum": 1, "path": max(len(entropy), 1)}[reduction]
        losses.append(entropy.sum() / count)
    return torch.stack(losses).sum()


def balance_loss(model: nn.Module, kind: Literal["node", "leaf"] = "node") -> Tensor:
    """How unevenly the last training forward used the tree, summed over the FFF layers of `model`.

    With `decision="sampled"` and many nodes, a running mean over the last forwards is used instead
    (`fastff.shares`).

    "node": the sum over nodes of -(log a + log(1 - a)) / 2**(level + 1), with a the share of a node's samples that go
    right. Its minimum, where every node halves its samples, is depth * log 2.

    "leaf": as in the Switch transformer, the number of leaves times the sum over leaves of f * m, with f the share of
    samples that the hard pass sends to a leaf and m its mean soft weight. It is 1 when both are uniform.

    After `fastff.parallel.synchronize_`, the samples of all ranks count, and all ranks must call this.
    """
    check_choice("kind", kind, ("node", "leaf"))
    found = [(layer, logits, _batch_shares(layer, logits)) for _, layer, logits in last_logits(model)]
    if kind == "leaf" and any(layer.decision == "sampled" for layer, _, _ in found):
        raise ValueError('balance_loss of kind "leaf" needs all leaves; decision="sampled" sees one. Use kind="node".')
    ranks = ranks_of(model)
    shares = [(_shares(*one, kind), 1.0) for one in found] if ranks is None else _shares_of_all(ranks, found, kind)
    losses = []
    for (layer, logits, batch), (own, part) in zip(found, shares, strict=True):
        if _batch(layer, logits) or ranks:
            losses.append(_unevenness(layer, batch, own, kind, part))
        if not _batch(layer, logits):
            losses.append(logits.sum())  # 0, for backward()
    return torch.stack(losses).sum()


def _batch(layer: FFF, logits: Tensor) -> int:
    """The samples of the last forward."""
    return len(layer.last_leaf if is_shed(layer) and layer.last_leaf is not None else logits)


def _batch_shares(layer: FFF, logits: Tensor) -> Tensor | None:
    """The shares of every node in the last forward, if the layer sees paths: (nodes, 2)."""
    if not sees_paths(layer):
        return None
    assert layer.last_leaf is not None
    assert layer.last_weight is not None
    return node_shares(logits, layer.last_leaf, layer.last_weight)


def _shares(layer: FFF, logits: Tensor, batch_shares: Tensor | None, kind: str) -> Tensor:
    """The shares that the balance loss of a layer reads: means over the samples."""
    if batch_shares is not None:
        return counted(layer, batch_shares)  # (nodes, 2), without a gradient
    batch = max(_batch(layer, logits), 1)
    if is_shed(layer):
        assert layer.last_leaf is not None
        seen = visits(layer, logits)
        if kind == "leaf":
            visited = layer.last_leaf[:, 0].bincount(minlength=layer.num_leaves)
            return torch.stack([visited.to(logits.dtype), leaf_mass(*seen, len(layer.last_leaf), layer.depth)]) / batch
        return log_flow_of_visits(*seen, layer.num_nodes) - _log(batch, logits)  # -inf: no sample visits the node
    if kind == "leaf":
        visited = one_hot(walk(logits), layer.num_leaves, logits.dtype).sum(0)
        return torch.stack([visited, mixture(logits).sum(0)]) / batch  # (2, leaves)
    # In logarithms, a node that nothing reaches, or that sends all one way, has a finite loss and gradient.
    return torch.logsumexp(log_flow(logits), 0) - _log(batch, logits)  # (nodes, 2)


def _log(count: int, like: Tensor) -> Tensor:
    """The logarithm. A compiler would take math.log(count) for a constant, and recompile for every count."""
    return torch.full((), count, dtype=like.dtype, device=like.device).log()


def _shares_of_all(
    ranks: Ranks, found: list[tuple[FFF, Tensor, Tensor | None]], kind: str
) -> list[tuple[Tensor, float]]:
    """The shares of all ranks' samples, and this rank's weight: 1 if all have equally many.

    The gradient comes from this rank's samples; its mean over the ranks is the full one.
    """
    own = [_shares(*one, kind) for one in found]
    counts = torch.tensor(
        [_batch(layer, logits) for layer, logits, _ in found], dtype=torch.float64, device=own[0].device
    )
    parts = (counts / ranks.sum([counts])[0].clamp(min=1)).tolist()  # of all samples
    logarithms = [kind == "node" and batch is None for _, _, batch in found]
    zipped = [*zip(own, parts, logarithms, strict=True)]
    sums = iter(ranks.sum([s * part for s, part, log in zipped if not log]) if not all(logarithms) else ())
    logs = [s + (math.log(part) if part else -torch.inf) for s, part, log in zipped if log]
    log_sums = iter(ranks.log_sum(logs) if logs else ())
    shares = []
    for (layer, _, batch), (s, part, log) in zip(found, zipped, strict=True):
        whole, scale = next(log_sums if log else sums), part * ranks.size
        if batch is not None:
            layer.running_shares = whole  # now equal on all ranks, and still the running mean of all samples
        elif part:
            change = s - s.detach()
            change = (s.detach() - whole).exp() * change if log else change
            whole = whole + scale * change.masked_fill(s.detach() == -torch.inf, 0)
        shares.append((whole, scale))
    return shares


def _unevenness(layer: FFF, batch_shares: Tensor | None, shares: Tensor, kind: str, scale: float) -> Tensor:
    """The balance loss of a layer. `scale` multiplies the gradient of a layer that sees paths."""
    if batch_shares is not None:
        return _mean_by_level(unevenness(shares, batch_shares, scale), layer.depth)
    if kind == "leaf":
        return layer.num_leaves * (shares[0] * shares[1]).sum()
    shares = shares.masked_fill(shares[:, :1] == -torch.inf, 0)  # unvisited: the least value, and no gradient
    return _mean_by_level(torch.logsumexp(shares, -1) - shares.mean(-1), layer.depth)  # -(log a + log(1 - a)) / 2


def _entropy_of_visits(layer: FFF, logits: Tensor, reduction: str) -> Tensor:
    assert layer.last_leaf is not None
    logits, reach, _ = visits(layer, logits)
    count, entropy = reach > 0, bernoulli_entropy(logits)
    if reduction == "path":
        return (reach * entropy).sum() / max(len(layer.last_leaf), 1)
    total = torch.where(count, entropy, 0).sum()
    return total if reduction == "sum" else total / count.sum().clamp(min=1)


def _entropy_of_paths(layer: FFF, logits: Tensor, reduction: str) -> Tensor:
    """Entropies that sum to the loss: (batch, depth)."""
    if reduction != "path":
        return bernoulli_entropy(logits[:, 0])
    assert layer.last_leaf is not None
    assert layer.last_weight is not None
    return (bernoulli_entropy(logits) * reach(logits, layer.last_leaf, layer.last_weight)).sum(1)


def _mean_by_level(values: Tensor, depth: int) -> Tensor:
    """The mean over each level's nodes, summed over levels; values (nodes,)."""
    return sum((part.mean() for part in values.split(level_sizes(depth))), values.new_zeros(()))


@torch.no_grad()
def entropies(model: nn.Module) -> dict[str, Tensor]:
    """The mean entropy of every node over the last training forward: a (nodes,) tensor for each FFF layer, by name.

    With `epsilon` > 0, or `decision="sampled"` and many nodes, the mean over the samples that visited the node, and 0
    if none did.
    """
    return {name: _node_entropy(layer, logits) for name, layer, logits in last_logits(model)}


def _node_entropy(layer: FFF, logits: Tensor) -> Tensor:
    if is_shed(layer):
        logits, reach, node = visits(layer, logits)
        entropy, counts = bernoulli_entropy(logits), (reach > 0).to(logits.dtype)
        total, count = (t.new_zeros(layer.num_nodes).index_add_(0, node, t) for t in (entropy * counts, counts))
        return total / count.clamp(min=1)
    if not sees_paths(layer) or layer.last_leaf is None:
        return bernoulli_entropy(logits).sum(0) / max(len(logits), 1)
    entropy, node = bernoulli_entropy(logits[:, 0]), paths.nodes(layer.last_leaf[:, 0], layer.depth).flatten()
    total = entropy.new_zeros(layer.num_nodes).index_add_(0, node, entropy.flatten())
    return total / node.bincount(minlength=layer.num_nodes).clamp(min=1)


def bernoulli_entropy(logits: Tensor) -> Tensor:
    """H(sigmoid(z)) in nats."""
    # softplus(z) - z sigmoid(z), written in |z| so that nothing cancels: the two terms have the same sign.
    a = logits.abs()
    return F.softplus(-a) + a * torch.sigmoid(-a)


def last_logits(model: nn.Module) -> Iterator[tuple[str, FFF, Tensor]]:
    """The name of every FFF layer, the layer, and the logits (batch, nodes) of its last training forward.

    With `decision="sampled"` and many nodes, the logits on the paths: (batch, paths, depth); with `epsilon` > 0, of the
    visits: (rows,).
    """
    for name, layer in fff_layers(model).items():
        trained = layer.depth > 0 and any(parameter.requires_grad for parameter in layer.tree_parameters())
        stored = "last_path" if sees_paths(layer) else "last_visits" if is_shed(layer) else "last_logits"
        yield name, layer, recall(layer, stored, f"the FFF layer {name!r}", trained)


def sees_paths(layer: FFF) -> bool:
    """Whether the layer's last training forward left the logits of paths instead of all nodes."""
    return layer.decision == "sampled" and layer.last_logits is None
