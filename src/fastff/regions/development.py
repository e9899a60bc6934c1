"""How a tree develops in training: its leaves in use, their smallest share, and the entropy of its decisions."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..batches import batches, check_reached, evaluation_mode, feed, watch_inputs
from ..functional import walk
from ..layer import FFF, fff_layers
from ..training.losses import bernoulli_entropy, entropies
from .usage import leaves_used, smallest_share, usage

Found = dict[str, tuple[Tensor, float]]


@dataclass
class Lines:
    """One FFF layer: a number for each call of `History.record`."""

    leaves: int
    leaves_used: list[int] = field(default_factory=list)
    smallest_share: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)  # nats, the mean over samples and nodes


class History:
    """Records how the trees of a model are used.

        history = fastff.regions.History()
        for epoch in range(epochs):
            ...  # train
            history.record(model, data, step=epoch)

    `pictures.draw_training(history)` draws it.
    """

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.layers: dict[str, Lines] = {}

    def record(self, model: nn.Module, data: Any = None, *, step: float | None = None) -> None:
        """Add a point for every FFF layer.

        With `data`, the model runs on it in evaluation mode. Without, the last training forward is read: then use
        large batches. `step` is the place on the axis; default: 1, 2, 3, ...
        """
        found = _last(model) if data is None else _over(model, data)
        if self.layers and self.layers.keys() != found.keys():
            raise ValueError(f"history has the layers {list(self.layers)}; the model has {list(found)}.")
        self.steps.append(len(self.steps) + 1 if step is None else step)
        for name, (count, entropy) in found.items():
            lines = self.layers.setdefault(name, Lines(len(count)))
            lines.leaves_used.append(leaves_used(count))
            lines.smallest_share.append(smallest_share(count))
            lines.entropy.append(entropy)


def _last(model: nn.Module) -> Found:
    """The leaves' counts and the mean entropy of the last training forward, by layer."""
    entropy = {name: float(found.mean()) if len(found) else 0.0 for name, found in entropies(model).items()}
    return {name: (found.leaf_count, entropy[name]) for name, found in usage(model).items()}


def _over(model: nn.Module, data: Any) -> Found:
    """The leaves' counts and the mean entropy over samples and nodes, by layer. Data is read once."""
    total: dict[str, tuple[Tensor, float, int]] = {}

    def see(name: str, layer: FFF, x: Tensor) -> None:
        logits = layer.node_logits(x) * layer.temperature_tensor
        count = torch.bincount(walk(logits), minlength=layer.num_leaves).cpu()
        entropy = float(bernoulli_entropy(logits).double().sum())
        before = total.get(name, (torch.zeros_like(count), 0.0, 0))
        total[name] = before[0] + count, before[1] + entropy, before[2] + logits.numel()

    layers = fff_layers(model)
    with evaluation_mode(model), watch_inputs(layers, see):
        for batch in batches(data):
            feed(model, batch)
    check_reached(layers, {name: int(count.sum()) for name, (count, _, _) in total.items()})
    return {name: (total[name][0], total[name][1] / max(total[name][2], 1)) for name in layers}
