"""A way to train FFF layers that works: what to add to a training loop, in one object.

    recipe = fastff.Recipe(model, data, steps=epochs * len(loader))
    for x, y in loader:
        loss = task(model(x), y) + recipe.loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        recipe.step()

Trained as the paper says, a tree sends nearly all samples to one or two leaves, and a leaf that sees few samples learns
them by heart. The recipe starts from a balanced tree and keeps it so, trains the leaf that inference will use, and
blurs the inputs by a noise that fades.
"""

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .checks import check_int, check_probability
from .hardening import balance_loss, hardening_loss, layers, set_temperature_
from .initialize import alike_, initialize_tree_, rebalance_
from .layer import FFF


class Recipe:
    """Prepares the FFF layers of a model for training, and goes with it for so many steps.

    Args:
        data: training inputs, as in `initialize_tree_`, for the start and for rebalancing; None leaves both out.
        steps: how often step() will be called. With the last call the noise is gone, the tree rebalanced, and the
            temperature `hard`, at which the soft pass equals the hard one but for samples on a boundary.
        decision, transposition: set on every FFF layer.
        noise: normal noise on the inputs of FFF layers in training, at first so many times the standard deviation of
            the batch; it falls to 0 as a cosine.
        sharing: how much leaves learn from the samples of each other, from 0 to 1, where all learn the same. All leaves
            of a layer then start as its first one. For wide leaves and for layers inside of a model, where a leaf sees
            few samples for its size; not for weights carried over from a dense model, whose leaves differ from the
            start.
        balance: weight of the balance loss.
        hardening, reduction: weight and kind of the hardening loss.
        temperature: at the start and at the end of training; equal ratios in between.
        std: of the node logits at the start.
        least: every `rebalance_every` steps each leaf is given at least this part of its fair share of the data.
        rebalance_every: 0 for a hundredth of the steps.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Any = None,
        *,
        steps: int,
        decision: Literal["soft", "straight_through"] = "straight_through",
        transposition: float = 0.0,
        noise: float = 0.8,
        sharing: float = 0.0,
        balance: float = 0.3,
        hardening: float = 0.0,
        reduction: Literal["mean", "sum", "path"] = "path",
        temperature: tuple[float, float] = (1.0, 1.0),
        hard: float = 1000.0,
        std: float = 1.0,
        least: float = 0.1,
        rebalance_every: int = 0,
    ) -> None:
        self.steps = check_int("steps", steps, 1)
        check_probability("transposition", transposition)
        if not 0 <= sharing <= 1:
            raise ValueError(f"sharing must be from 0 to 1; got {sharing}.")
        if decision not in ("soft", "straight_through"):
            raise ValueError(f"decision must be 'soft' or 'straight_through'; got {decision!r}.")
        for name, value in {"noise": noise, "balance": balance, "hardening": hardening}.items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be 0 or more; got {value}.")
        if not all(math.isfinite(value) and value > 0 for value in (*temperature, hard)):
            raise ValueError(f"temperatures must be positive; got {temperature} and hard={hard}.")
        if isinstance(data, Iterator):
            raise TypeError("data is read again for every rebalancing; pass a tensor, a list or a DataLoader.")
        found = layers(model)
        self.model, self.data, self.count = model, data, 0
        self.noise, self.sharing, self.balance = noise, sharing, balance
        self.hardening, self.reduction = hardening, reduction
        self.temperatures, self.hard, self.least = temperature, hard, least
        self.rebalance_every = check_int("rebalance_every", rebalance_every, 0) or max(1, self.steps // 100)
        for layer in found.values() if sharing else ():
            alike_(layer)  # first, since the trees of later layers are placed by what earlier ones give
        if data is not None:
            initialize_tree_(model, data, std=std)
        for layer in found.values():
            layer.decision, layer.transposition = decision, transposition
            for hooks in (layer._forward_pre_hooks, *(leaf._backward_hooks for leaf in layer.leaf_parameters())):
                for hook in list((hooks or {}).values()):
                    if isinstance(other := getattr(hook, "__self__", None), Recipe):
                        other.close()  # one that was given up
        # A tensor, so that compiled and recorded steps see it change.
        self.deviation = torch.zeros((), device=next(iter(found.values())).node_weight.device)
        self._hooks = []
        for layer in found.values():
            if noise:
                self._hooks.append(layer.register_forward_pre_hook(self._blur, with_kwargs=True))
            for leaf in layer.leaf_parameters() if sharing else ():
                if leaf.requires_grad:
                    self._hooks.append(leaf.register_hook(self._share))
        self._set()

    @property
    def temperature(self) -> float:
        """The temperature now."""
        first, last = self.temperatures
        return self.hard if self.count >= self.steps else first * (last / first) ** (self.count / self.steps)

    def loss(self) -> Tensor | float:
        """What to add to the task's loss, after a training forward."""
        total: Tensor | float = 0.0
        if self.balance:
            total = total + self.balance * balance_loss(self.model)
        if self.hardening:
            total = total + self.hardening * hardening_loss(self.model, self.reduction)
        return total

    def step(self) -> None:
        """Call this after every step of the optimiser."""
        self.count += 1
        if self.data is not None and (self.count >= self.steps or self.count % self.rebalance_every == 0):
            rebalance_(self.model, self.data, least=self.least)
        self._set()

    def _set(self) -> None:
        done = min(1.0, self.count / self.steps)
        self.deviation.fill_(self.noise * (1 + math.cos(math.pi * done)) / 2)
        set_temperature_(self.model, self.temperature)
        if done == 1:
            self.close()

    def close(self) -> None:
        """End the noise and the sharing for good, as the last step does: for a training that ends before its time."""
        for hook in self._hooks:
            hook.remove()

    def _blur(self, layer: FFF, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> Any:
        if not layer.training:
            return None
        x = args[0] if args else kwargs["x"]
        scale = self.deviation.to(x.dtype) * x.detach().std(correction=0)
        return (x + scale * torch.randn_like(x),), {}

    def _share(self, grad: Tensor) -> Tensor:
        return share(grad, self.sharing)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = check_int("count", state["count"], 0)
        self._set()


def share(grad: Tensor, sharing: float, dim: int = 0) -> Tensor:
    """The gradient of a parameter of all leaves, which are along `dim`, with a part of each from the samples of all.

    With g one leaf's gradient, G the sum over the leaves and L their number: (1 - sharing) g + sharing G / sqrt(L). The
    root makes both parts equally noisy, as a leaf sees one sample in L.
    """
    return torch.lerp(grad, grad.sum(dim, keepdim=True) / math.sqrt(grad.shape[dim]), sharing)
