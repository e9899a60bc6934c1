"""Fit an FFF layer to a dense one: its tree from data, its leaves from the dense layer's neurons.

The tree splits the data in halves across the direction of largest variance. Each leaf then gets neurons of the dense
layer, and output weights that fit it over the leaf's region by least squares: as far as the dropped neurons correlate
with the kept ones, their contribution is kept too. So the dropped neurons are those that others can replace: of the
candidates, whose contribution varies most, rounds of least squares drop those whose loss adds least to the error.

A dense layer is an FFF of depth 0 here: one leaf, always visited.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .. import tree as heap
from ..backends.reference import leaf_hidden
from ..layer import FFF

_PRINCIPAL_SAMPLES = 8192  # enough for a direction
# All neurons as candidates, and rounds that drop fewer, are slower and no better (MiniLM, 4 x 192: cosine 0.867 each).
_CANDIDATES, _KEPT_IN_ROUND = 3, 0.7  # candidates for each place in a leaf; the part that a round keeps


@torch.no_grad()
def principal_tree_(layer: FFF, x: Tensor, *, logit_std: float = 1.0) -> None:
    """Split the samples x (batch, in) in halves at every node, across the direction in which they vary most.

    logit_std: the standard deviation of a node's logits over the samples that reach it. A node that no sample reaches
    splits the samples of its nearest ancestor.
    """
    if layer.node_width != 1:
        raise ValueError(f"a principal tree needs linear nodes; this layer has node_width={layer.node_width}.")
    groups = [x]
    for m in range(layer.depth):
        parts = []
        for node, samples in zip(range(heap.level(m).start, heap.level(m).stop), groups, strict=True):
            direction, middle, spread = _split(samples)
            layer.node_weight[node] = logit_std / spread * direction
            layer.node_bias[node] = -logit_std / spread * middle
            right = (samples * layer.node_weight[node]).sum(-1) + layer.node_bias[node] >= 0
            parts += [part if len(part) else samples for part in (samples[~right], samples[right])]
        groups = parts


def _split(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The direction in which x varies most, the median along it, and the standard deviation along it."""
    some = x[torch.randperm(len(x), device=x.device)[:_PRINCIPAL_SAMPLES]].float()
    centred = some - some.mean(0)
    covariance = centred.mT @ centred
    direction = torch.linalg.eigh(covariance).eigenvectors[:, -1]
    along = x.float() @ direction
    spread = along.std(correction=0)
    low, high = along.kthvalue((len(x) + 1) // 2).values, along.kthvalue(len(x) // 2 + 1).values
    return direction.to(x.dtype), ((low + high) / 2).to(x.dtype), torch.where(spread > 0, spread, 1).to(x.dtype)


@torch.no_grad()
def fit_leaves_(layer: FFF, dense: FFF, x: Tensor, *, ridge: float = 1e-3) -> None:
    """Give every leaf the neurons of a dense layer that matter most to its samples among x, and fit their outputs.

    ridge: how strongly the output weights stay near the dense layer's, relative to a neuron's mean square. With few
    samples, a leaf stays close to these.
    """
    check_dense(layer, dense)
    if layer.leaf_width > dense.leaf_width:
        raise ValueError(
            f"a leaf cannot have more neurons than the dense layer; got leaf_width={layer.leaf_width} for "
            f"{dense.leaf_width}. Choose smaller leaves, or a deeper tree."
        )
    leaf = layer.route(x)
    for j in range(layer.num_leaves):
        samples = x[leaf == j]
        samples = samples if len(samples) > 1 else x
        hidden = leaf_hidden(samples, dense.leaves, dense.activation)[:, 0].float()  # (samples, width)
        out = dense.leaf_out_weight[0].float()  # (width, out)
        kept = _choose(hidden, out, layer.leaf_width, ridge, centred=layer.bias)
        for name in ("in_weight", "in_bias", "gate_weight", "gate_bias"):
            if (ours := getattr(layer, f"leaf_{name}")) is not None:
                ours[j] = getattr(dense, f"leaf_{name}")[0, kept]
        features, weight = hidden[:, kept], out[kept]
        missing = hidden @ out - features @ weight  # the contribution of the dropped neurons
        if layer.leaf_out_bias is not None and dense.leaf_out_bias is not None:
            center, offset = features.mean(0), missing.mean(0)
            features, missing = features - center, missing - offset
        weight = weight + _least_squares(features, missing, ridge)
        layer.leaf_out_weight[j] = weight.to(layer.leaf_out_weight.dtype)
        if layer.leaf_out_bias is not None and dense.leaf_out_bias is not None:
            bias = dense.leaf_out_bias[0] + offset - center @ (weight - out[kept])
            layer.leaf_out_bias[j] = bias.to(layer.leaf_out_bias.dtype)


def _choose(hidden: Tensor, out: Tensor, count: int, ridge: float, *, centred: bool) -> Tensor:
    """The neurons of hidden (samples, width) to keep, given output weights (width, out): (count,).

    With G the second moments of the candidates and w the weights that fit the output, dropping neuron i and refitting
    the others adds |w_i|^2 / (G^-1)_ii to the squared error.
    """
    size = hidden.var(0, correction=0) * out.square().sum(1)
    candidates = size.topk(min(_CANDIDATES * count, len(size))).indices
    features, target = hidden[:, candidates], hidden @ out
    if centred:
        features, target = features - features.mean(0), target - target.mean(0)
    gram, cross = (features.mT @ features).double(), (features.mT @ target).double()
    gram.diagonal().add_(max(ridge, 1e-6) * gram.diagonal().mean() + 1e-12)
    left = torch.arange(len(candidates), device=hidden.device)
    while len(left) > count:
        inverse = torch.linalg.inv(gram[left][:, left])
        cost = (inverse @ cross[left]).square().sum(1) / inverse.diagonal()
        left = left[cost.topk(max(count, int(_KEPT_IN_ROUND * len(left)))).indices]
    return candidates[left]


def _least_squares(features: Tensor, target: Tensor, ridge: float) -> Tensor:
    """Minimise |features w - target|^2 + ridge n s |w|^2 over w, for n samples and s the features' mean square."""
    features, target = features.double(), target.double()
    gram = features.mT @ features
    gram.diagonal().add_(ridge * gram.diagonal().mean() + 1e-12)
    return torch.linalg.solve(gram, features.mT @ target).float()


def check_dense(layer: FFF, dense: FFF) -> None:
    """Raise unless `dense` is a dense layer of the same sizes and activation."""
    if dense.depth:
        raise ValueError(f"the dense layer must be an FFF of depth 0; got depth {dense.depth}.")
    check_same_function(layer, dense)


def check_same_function(layer: FFF, dense: Any, at: str = "") -> None:
    """Raise unless a layer has the sizes and the activation of a dense layer or block."""
    for name in ("in_features", "out_features", "activation"):
        ours, theirs = getattr(layer, name), getattr(dense, name)
        # In a copied model, activations that are modules are new.
        if ours != theirs and not (type(ours) is type(theirs) and isinstance(ours, nn.Module)):
            place = f"{at}: " if at else ""
            raise ValueError(
                f"{place}{name} is {ours!r} in the layer and {theirs!r} in the dense one; they must be equal."
            )
