"""An FFF layer that answers as a dense one does: its tree from data, its leaves from the dense layer's neurons.

Each leaf is given the neurons whose contribution varies most over the leaf's region, and output weights that fit the
dense layer there by least squares: what the other neurons do, as far as it can be told from those that are kept, is
carried over with them. Distillation then trains the leaves further against the dense layer's outputs.

A dense layer is an FFF of depth 0 here: one leaf, always visited.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import tree as heap
from ..activations import function
from ..backends.reference import leaf_hidden
from ..checks import check_int
from ..layer import FFF

FEW = 20  # inputs: too few to measure on
ROUNDING = 8  # units in the last place: outputs that vary by no more do not vary
_PRINCIPAL_SAMPLES = 8192  # a direction needs no more


@torch.no_grad()
def principal_tree_(layer: FFF, x: Tensor, *, logit_std: float = 1.0) -> None:
    """Split the samples x (batch, in) in halves at every node, across the direction in which they vary most.

    logit_std: the deviation of a node's logits over the samples that reach it. A node that no sample reaches splits
    as its nearest ancestor's samples would.
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
    """The direction in which x varies most, the median along it, and the deviation."""
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
    """Give every leaf those neurons of a dense layer that matter most to its samples among x, and fit their outputs.

    ridge: how strongly the output weights are held at the dense layer's own, relative to the mean square of a neuron; a
    leaf with few samples stays close to them.
    """
    _check_pair(layer, dense)
    if layer.leaf_width > dense.leaf_width:
        raise ValueError(
            f"a leaf has no more neurons than the dense layer; got leaf_width={layer.leaf_width} for "
            f"{dense.leaf_width}. Choose a smaller leaf, or a deeper tree."
        )
    leaf = layer.route(x)
    for j in range(layer.num_leaves):
        samples = x[leaf == j]
        samples = samples if len(samples) > 1 else x
        hidden = leaf_hidden(samples, dense.leaves, dense.activation)[:, 0].float()  # (samples, width)
        out = dense.leaf_out_weight[0].float()  # (width, out)
        kept = (hidden.var(0, correction=0) * out.square().sum(1)).topk(layer.leaf_width).indices
        for name in ("in_weight", "in_bias", "gate_weight", "gate_bias"):
            if (ours := getattr(layer, f"leaf_{name}")) is not None:
                ours[j] = getattr(dense, f"leaf_{name}")[0, kept]
        features, weight = hidden[:, kept], out[kept]
        missing = hidden @ out - features @ weight  # what the neurons that are left out would add
        if layer.leaf_out_bias is not None and dense.leaf_out_bias is not None:
            center, offset = features.mean(0), missing.mean(0)
            features, missing = features - center, missing - offset
        weight = weight + _least_squares(features, missing, ridge)
        layer.leaf_out_weight[j] = weight.to(layer.leaf_out_weight.dtype)
        if layer.leaf_out_bias is not None and dense.leaf_out_bias is not None:
            bias = dense.leaf_out_bias[0] + offset - center @ (weight - out[kept])
            layer.leaf_out_bias[j] = bias.to(layer.leaf_out_bias.dtype)


def _least_squares(features: Tensor, target: Tensor, ridge: float) -> Tensor:
    """The w with the least |features w - target|^2 + ridge n s |w|^2, n samples and s the features' mean square."""
    features, target = features.double(), target.double()
    gram = features.mT @ features
    gram.diagonal().add_(ridge * gram.diagonal().mean() + 1e-12)
    return torch.linalg.solve(gram, features.mT @ target).float()


def hold_out(x: Tensor) -> tuple[Tensor, Tensor]:
    """A tenth of the inputs x (samples, in) to measure on, and the others; all for both if there are few."""
    tenth = torch.arange(len(x), device=x.device) % 10 == 0
    return (x[tenth], x[~tenth]) if len(x) >= FEW else (x, x)


@torch.no_grad()
def missed(layer: FFF, dense: Callable[[Tensor], Tensor], x: Tensor) -> float | None:
    """The share of the variance of the dense block's output at x that the hard pass misses; None if the output
    varies by no more than rounding.

    1.0 is the error of a constant answer, the mean output.
    """
    mode = layer.training
    error = variance = square = 0.0
    outputs = [dense(part) for part in x.split(8192)]
    mean = torch.cat(outputs).double().mean(0)
    for part, y in zip(x.split(8192), outputs, strict=True):
        error += (layer.eval()(part) - y).double().square().sum().item()
        variance += (y.double() - mean).square().sum().item()
        square += y.double().square().sum().item()
    layer.train(mode)
    return None if variance <= (ROUNDING * torch.finfo(x.dtype).eps) ** 2 * square else error / variance


def visited(layer: FFF, x: Tensor) -> Tensor:
    """The hard pass at x (..., in), made for learning: the samples of a leaf together, and its gradient apart.

    An index into the parameter of all leaves would have a gradient of its size, once for every leaf that is visited.
    """
    flat = x.reshape(-1, layer.in_features)
    if not len(flat):
        return layer(x)
    leaf, order = layer.route(flat).sort()
    used, counts = leaf.unique_consecutive(return_counts=True)
    parts = [[None] * layer.num_leaves if t is None else t.unbind() for t in layer.leaves]
    act, y = function(layer.activation), []
    for j, some in zip(used.tolist(), flat[order].split(counts.tolist()), strict=True):
        in_weight, in_bias, out_weight, out_bias, gate_weight, gate_bias = (part[j] for part in parts)
        hidden = F.linear(some, in_weight, in_bias)
        hidden = act(hidden) if gate_weight is None else act(F.linear(some, gate_weight, gate_bias)) * hidden
        y.append(F.linear(hidden, out_weight.mT, out_bias))
    return torch.cat(y)[order.argsort()].reshape(*x.shape[:-1], layer.out_features)


def distill_leaves_(
    layer: FFF, dense: FFF, x: Tensor, *, steps: int = 1000, batch: int = 1024, rate: float = 1e-3
) -> Iterable[float]:
    """Train the leaves of a layer on the outputs of a dense one; yields the loss of every step.

    The tree stays as it is, and a sample trains the leaf that it visits: this is the hard pass, with its derivative.
    """
    _check_pair(layer, dense)
    check_learner(layer, dense)
    check_int("steps", steps, 1)
    leaves = list(layer.leaf_parameters())
    state = [(p, p.requires_grad, p.grad) for p in leaves]
    optimizer = torch.optim.Adam(leaves, lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    try:
        for parameter in leaves:
            parameter.requires_grad_(True)
        for _ in range(steps):
            some = x[torch.randint(len(x), (min(batch, len(x)),), device=x.device)]
            with torch.no_grad():
                y = dense(some)
            with torch.enable_grad():
                loss = F.mse_loss(visited(layer, some), y)
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            schedule.step()
            yield loss.item()
    finally:
        for parameter, wanted, grad in state:
            parameter.requires_grad_(wanted)
            parameter.grad = grad


def _check_pair(layer: FFF, dense: FFF) -> None:
    if dense.depth:
        raise ValueError(f"the dense layer is an FFF of depth 0; got depth {dense.depth}.")
    _check_same(layer, dense)


def check_learner(layer: FFF, dense: Any, at: str = "") -> None:
    """Raise unless a layer can learn from a dense one, or a dense block."""
    if layer.leaf_in_weight.dtype == torch.float16:
        raise ValueError("Adam overflows in float16: distil in float32 or bfloat16, and convert the model afterwards.")
    _check_same(layer, dense, at)


def _check_same(layer: FFF, dense: Any, at: str = "") -> None:
    for name in ("in_features", "out_features", "activation"):
        ours, theirs = getattr(layer, name), getattr(dense, name)
        # A copied model has copies of activations that are modules.
        if ours != theirs and not (type(ours) is type(theirs) and isinstance(ours, nn.Module)):
            place = f"{at}: " if at else ""
            raise ValueError(
                f"{place}{name} is {ours!r} in the layer and {theirs!r} in the dense one; they must be equal."
            )
