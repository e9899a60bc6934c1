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
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..batches import batches
from ..checks import check_int, check_number, check_probability, check_share
from ..interrupts import all_or_nothing, uninterrupted
from ..layer import FFF, fff_layers, mark_fitted
from .initialize import copy_first_leaf_, place_trees
from .losses import balance_loss, check_reduction, hardening_loss
from .rebalance import Budget, Cost, biases, expected, rebalance
from .schedule import check_temperature, set_temperature_


class Recipe:
    """Prepares the FFF layers of a model for training, and drives them for `steps` steps.

    An error, or Ctrl-C, in the constructor or in step() leaves the model unchanged.

    Args:
        data: training inputs, as in `initialize_tree_`, for the start and for rebalancing; None leaves both out.
        steps: how often step() will be called. With the last call the noise is gone, the tree rebalanced, and the
            temperature is `final_temperature`, at which the soft pass equals the hard one but for samples on a
            boundary. Later calls rebalance as before, within the same part of the work.
        decision, transposition, sharing: set on every FFF layer. With sharing all leaves of a layer start as its first
            one. It is for wide leaves and for layers inside of a model, where a leaf sees few samples for its size; not
            for weights carried over from a dense model, whose leaves differ from the start.
        noise: normal noise on the inputs of FFF layers in training, at first this multiple of the standard deviation of
            the batch; it falls to 0 as a cosine.
        balance: weight of the balance loss.
        hardening, reduction: weight and kind of the hardening loss.
        temperature: at the start and at the end of training; equal ratios in between.
        logit_std: of the node logits at the start.
        min_share: in rebalancing each leaf is given at least this part of its fair share of the data.
        rebalance_every: steps from one rebalancing to the next. 0 is a hundredth of the steps, or more where
            rebalancing would take more than a twentieth of the work, counted in inputs.
        reset_trees: which layers get a new tree, and with sharing, new leaves. None: those that nothing has fitted yet.
            `initialize_tree_`, `replace_`, `load_`, load_state_dict and a training by a Recipe fit layers, which are
            kept. True: all. False: none.
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
        final_temperature: float = 1000.0,
        logit_std: float = 1.0,
        min_share: float = 0.1,
        rebalance_every: int = 0,
        reset_trees: bool | None = None,
    ) -> None:
        # All arguments are checked before anything changes.
        found = fff_layers(model)
        self.steps, self.count = check_int("steps", steps, 1), 0
        check_probability("transposition", transposition)
        check_share("sharing", sharing)
        check_share("min_share", min_share)
        check_reduction(reduction)
        if decision not in ("soft", "straight_through"):
            raise ValueError(f"decision must be 'soft' or 'straight_through'; got {decision!r}.")
        if not (reset_trees is None or isinstance(reset_trees, bool)):
            raise TypeError(f"reset_trees must be True, False or None; got {reset_trees!r}.")
        largest = min(torch.finfo(layer.node_weight.dtype).max for layer in found.values())
        self.noise = check_number("noise", noise, 0, largest)
        self.balance = check_number("balance", balance, 0, largest)
        self.hardening = check_number("hardening", hardening, 0, largest)
        self.reduction: Literal["mean", "sum", "path"] = reduction
        self.temperatures = _check_temperatures(temperature, found.values())
        self.final_temperature = check_temperature("final_temperature", final_temperature, found.values())
        logit_std, self.min_share = check_number("logit_std", logit_std, 0, above=True), float(min_share)
        every = check_int("rebalance_every", rebalance_every, 0)
        if isinstance(data, Iterator):
            raise TypeError("data is read again for every rebalancing; pass a tensor, a list or a DataLoader.")
        if data is not None:
            batches(data)
        self.model, self.data = model, data

        old = {
            name: layer
            for name, layer in found.items()
            if not reset_trees and (reset_trees is False or _is_fitted(layer))
        }
        alike = [
            x for x in found.values() if sharing and reset_trees is not False and (reset_trees or not x.fitted_leaves)
        ]
        new = {} if data is None else {name: layer for name, layer in found.items() if name not in old}
        self.kept = list(old)  # the layers whose trees were kept
        # A tensor, so that compiled and recorded steps see it change.
        self.deviation = torch.zeros((), device=next(iter(found.values())).node_weight.device)
        self._noise = _Noise(self.deviation)
        settings = {"decision": decision, "transposition": float(transposition), "sharing": float(sharing)}
        changed = [p for layer in alike for p in layer.leaf_parameters()]
        changed += [p for layer in new.values() for p in layer.tree_parameters()]
        with all_or_nothing(changed, lambda: self._begin(found.values(), new, settings)):
            for layer in alike:  # first, since the trees of later layers are placed by what earlier ones give
                copy_first_leaf_(layer)
            if new:
                place_trees(model, data, new, logit_std)
            self._budget = Budget(model, every or max(1, self.steps // 100))
            if data is not None and self.min_share and not every:
                self._budget.next = expected(model, data)

    def _begin(self, found: Iterable[FFF], new: dict[str, FFF], settings: dict[str, Any]) -> None:
        for layer in found:
            vars(layer).update(settings)
            for hook in list(layer._forward_pre_hooks.values()):
                if isinstance(hook, _Noise):
                    hook.remove()  # of a recipe that was given up
        for layer in new.values():
            layer.fitted_tree = True
        if self.noise:
            self._noise.blur(found)
        self._set()

    @property
    def temperature(self) -> float:
        """The temperature now."""
        first, last = self.temperatures
        return (
            self.final_temperature if self.count >= self.steps else first * (last / first) ** (self.count / self.steps)
        )

    @property
    def rebalance_seconds(self) -> float:
        """The time that rebalancing has taken in step() so far."""
        return self._budget.seconds

    @property
    def rebalance_share(self) -> float:
        """The same as a part of the time since the recipe was made."""
        return self._budget.seconds / max(time.perf_counter() - self._budget.began, 1e-9)

    def loss(self) -> Tensor | float:
        """What to add to the task's loss, after a training forward."""
        if self.data is not None and not torch.compiler.is_compiling():
            self._budget.saw(self.model)
        total: Tensor | float = 0.0
        if self.balance:
            total = total + self.balance * balance_loss(self.model)
        if self.hardening:
            total = total + self.hardening * hardening_loss(self.model, self.reduction)
        return total

    def step(self) -> None:
        """Call this after every step of the optimiser."""
        budget, count = self._budget, self.count + 1
        if self.data is not None and not budget.seen:  # loss() was not called, or compiled
            budget.saw(self.model)
        last = count == self.steps
        due = self.data is not None and bool(self.min_share) and (last or budget.is_due(count))
        began, cost = time.perf_counter(), Cost()

        def commit() -> None:
            self.count = count
            budget.stepped(count, cost, time.perf_counter() - began)
            mark_fitted(self.model)
            self._set()

        with all_or_nothing(biases(self.model) if due else (), commit):
            if due:
                cost = rebalance(self.model, self.data, self.min_share, passes=None if last else 1)

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
        with all_or_nothing(biases(model), lambda: set_temperature_(model, self.final_temperature)):
            if self.data is not None and self.min_share:
                with torch.random.fork_rng(devices=[]):  # a DataLoader draws from it, and the training goes on
                    rebalance(model, self.data, self.min_share)

    def close(self) -> None:
        """End the noise for good, as the last step does: for a training that ends before its time."""
        with uninterrupted():
            self._noise.remove()

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "steps": self.steps, **self._budget.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state. Without the numbers on rebalancing, the next one comes as if the steps had been alike."""
        if "count" not in state:
            raise ValueError(
                f"a recipe's state has a count; got {', '.join(state) or 'nothing'}. Pass its state_dict()."
            )
        count = check_int("count", state["count"], 0)
        if state.get("steps", self.steps) != self.steps:
            warnings.warn(
                f"the recipe was made for steps={self.steps}; the state comes from one with steps={state['steps']}. "
                f"Noise and temperature continue at step {count} of {self.steps}.",
                stacklevel=2,
            )
        with uninterrupted():
            self._budget.load_state_dict(state | {"count": count})
            self.count = count
            self._set()

    def __repr__(self) -> str:
        found = fff_layers(self.model)
        parts = [f"{min(self.count, self.steps)} of {self.steps} steps done"]
        parts += [f"temperature {self.temperature:.4g}", f"noise {float(self.deviation):.3g}"]
        parts.append(f"{len(found)} FFF {'layers' if len(found) > 1 else 'layer'}")
        if self.kept:
            names = ", ".join(repr(name) for name in self.kept[:4]) + (", ..." if len(self.kept) > 4 else "")
            parts.append(f"kept the tree of {len(self.kept)} ({names})")
        if self._budget.times:
            parts.append(
                f"rebalanced {self._budget.times} time{'s' * (self._budget.times > 1)}, {self.rebalance_seconds:.2g} s"
            )
        return f"Recipe({'; '.join(parts)})"


class _Noise:
    """Blurs the inputs of layers in training. Copies of a layer, and layers from a file, have no recipe, nor noise."""

    def __init__(self, deviation: Tensor | None = None) -> None:
        self.deviation = deviation
        self.handles: list[RemovableHandle] = []

    def blur(self, found: Iterable[FFF]) -> None:
        self.handles += [layer.register_forward_pre_hook(self, with_kwargs=True) for layer in found]

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


def _is_fitted(layer: FFF) -> bool:
    """Whether something gave a layer its tree. One of zeros, as surgery leaves it without data, divides nothing."""
    weight = layer.node_weight if layer.node_out_weight is None else layer.node_out_weight
    return layer.fitted_tree and (not layer.depth or bool(weight.any()))


def _check_temperatures(value: Any, found: Iterable[FFF]) -> tuple[float, float]:
    if not (isinstance(value, tuple | list) and len(value) == 2):
        raise TypeError(f"temperature must be two numbers, at the start and at the end; got {value!r}.")
    first, last = (check_temperature("temperature", one, found) for one in value)
    if not (math.isfinite(last / first) and last / first > 0):
        raise ValueError(f"temperature must not rise or fall by more than a float can hold; got {value}.")
    return first, last
