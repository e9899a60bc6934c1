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
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .checks import check_int, check_probability, check_share
from .hardening import balance_loss, hardening_loss, layers, set_temperature_
from .initialize import alike_, initialize_tree_, rebalance_
from .layer import FFF


class Recipe:
    """Prepares the FFF layers of a model for training, and goes with it for so many steps.

    Args:
        data: training inputs, as in `initialize_tree_`, for the start and for rebalancing; None leaves both out.
        steps: how often step() will be called. With the last call the noise is gone, the tree rebalanced, and the
            temperature `hard`, at which the soft pass equals the hard one but for samples on a boundary.
        decision, transposition, sharing: set on every FFF layer. With sharing all leaves of a layer start as its first
            one. It is for wide leaves and for layers inside of a model, where a leaf sees few samples for its size; not
            for weights carried over from a dense model, whose leaves differ from the start.
        noise: normal noise on the inputs of FFF layers in training, at first so many times the standard deviation of
            the batch; it falls to 0 as a cosine.
        balance: weight of the balance loss.
        hardening, reduction: weight and kind of the hardening loss.
        temperature: at the start and at the end of training; equal ratios in between.
        std: of the node logits at the start.
        least: every `rebalance_every` steps each leaf is given at least this part of its fair share of the data.
        rebalance_every: 0 for a hundredth of the steps.
        fresh: False for a model in the midst of a training: its trees and leaves stay as they are.
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
        fresh: bool = True,
    ) -> None:
        self.steps = check_int("steps", steps, 1)
        check_probability("transposition", transposition)
        check_share("sharing", sharing)
        check_share("least", least)
        if decision not in ("soft", "straight_through"):
            raise ValueError(f"decision must be 'soft' or 'straight_through'; got {decision!r}.")
        for name, value in {"noise": noise, "balance": balance, "hardening": hardening}.items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite, and 0 or more; got {value}.")
        if not all(math.isfinite(value) and value > 0 for value in (*temperature, hard)):
            raise ValueError(f"temperatures must be finite and positive; got {temperature} and hard={hard}.")
        if isinstance(data, Iterator):
            raise TypeError("data is read again for every rebalancing; pass a tensor, a list or a DataLoader.")
        found = layers(model)
        self.model, self.data, self.count = model, data, 0
        self.noise, self.balance = noise, balance
        self.hardening, self.reduction = hardening, reduction
        self.temperatures, self.hard, self.least = temperature, hard, least
        self.rebalance_every = check_int("rebalance_every", rebalance_every, 0) or max(1, self.steps // 100)
        if fresh:
            _start(model, data, std, alike=sharing > 0)
        for layer in found.values():
            layer.decision, layer.transposition, layer.sharing = decision, transposition, sharing
            for hook in list(layer._forward_pre_hooks.values()):
                if isinstance(hook, _Noise):
                    hook.remove()  # of a recipe that was given up
        # A tensor, so that compiled and recorded steps see it change.
        self.deviation = torch.zeros((), device=next(iter(found.values())).node_weight.device)
        self._noise = _Noise(self.deviation, found.values() if noise else ())
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

    def finish_(self, model: nn.Module) -> None:
        """Rebalance a model and make it hard, as the last step does to the one that trains.

        For a running mean of the weights, for copies that are looked at on the way, and, after close(), for a training
        that ends before its time.
        """
        if self.data is not None:
            with torch.random.fork_rng(devices=[]):  # a DataLoader draws from it, and the training goes on
                rebalance_(model, self.data, least=self.least)
        set_temperature_(model, self.hard)

    def close(self) -> None:
        """End the noise for good, as the last step does: for a training that ends before its time."""
        self._noise.remove()

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = check_int("count", state["count"], 0)
        self._set()


class _Noise:
    """Blurs the inputs of layers in training. Copies of a layer, and layers from a file, have no recipe, nor noise."""

    def __init__(self, deviation: Tensor | None = None, blurred: Iterable[FFF] = ()) -> None:
        self.deviation = deviation
        self.handles = [layer.register_forward_pre_hook(self, with_kwargs=True) for layer in blurred]

    def __call__(self, layer: FFF, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> Any:
        if self.deviation is None or not layer.training:
            return None
        x = args[0] if args else kwargs["x"]
        scale = self.deviation.to(x.dtype) * x.detach().std(correction=0)
        return (x + scale * torch.randn_like(x),), {}

    def __reduce__(self) -> tuple[type["_Noise"], tuple[()]]:
        return _Noise, ()

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def _start(model: nn.Module, data: Any, std: float, alike: bool) -> None:
    """Place the trees, on leaves that are alike if asked for; all or nothing."""
    before = [(p, p.detach().clone()) for layer in layers(model).values() if alike for p in layer.leaf_parameters()]
    try:
        if alike:  # first, since the trees of later layers are placed by what earlier ones give
            for layer in layers(model).values():
                alike_(layer)
        if data is not None:
            initialize_tree_(model, data, std=std)
    except BaseException:
        with torch.no_grad():
            for parameter, value in before:
                parameter.copy_(value)
        raise
