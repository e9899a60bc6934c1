"""The recommended way to train FFF layers: three lines in a training loop.

    recipe = fastff.Recipe(model, data, steps=epochs * len(loader))
    for x, y in loader:
        loss = task(model(x), y) + recipe.loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        recipe.step()

Trained as in the paper, a tree sends nearly all samples to a few leaves, and leaves that see few samples overfit.
The recipe starts from a balanced tree and keeps it balanced, trains the leaf that inference will use, and adds noise to
the inputs, fading over training.
"""

import math
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..adapters import outside_checkpoints
from ..batches import batches
from ..checks import check_choice, check_int, check_number, check_probability, check_share
from ..interrupts import all_or_nothing, uninterrupted
from ..layer import DECISIONS, FFF, Decision, fff_layers, mark_fitted, trainable_layers
from ..ranks import alone, ranks_of
from ..sampling import check_alternatives
from ..shares import check_shares
from ..visits import check_epsilon
from .budget import Budget
from .initialize import copy_first_leaf_, place_trees
from .losses import REDUCTIONS, Reduction, balance_loss, hardening_loss
from .noise import Noise, remove_noise
from .rebalance import Cost, boundary_biases, estimate, rebalance
from .schedule import Schedule, check_temperature, set_temperature_


class Recipe:
    """Prepares the FFF layers of a model for training, and drives training for `steps` steps.

    An error, or Ctrl-C, in the constructor or in step() leaves the model unchanged.

    Args:
        data: training inputs: a tensor, a list of batches or a DataLoader. They place and rebalance the trees;
            without data, neither happens.
        steps: the number of calls of step(). In the last one the noise ends, the tree is rebalanced, and the
            temperature becomes `final_temperature`. Later calls still rebalance.
        noise: normal noise on the inputs of FFF layers in training, as a multiple of the standard deviation of
            all values of the layer's input; decays to 0 along a cosine.
        balance: weight of the balance loss; with "sampled" decisions, divided by the temperature.
        sharing: fraction of each leaf's gradient that is shared across leaves (0: independent). With sharing, all
            leaves of a layer start as copies of its first one. Use it for wide leaves and for layers inside a model,
            where a leaf sees few samples for its size; not for weights taken from a dense model.
        transposition: probability that a node swaps the weights of its children for a sample, against overfitting.
        reset_trees: which layers get a new tree and, with sharing, new leaves. None: those not yet fitted by
            `initialize_tree_`, `replace_`, `load_`, load_state_dict or an earlier Recipe. True: all. False: none.

    Rarely changed:
        decision: "straight_through" trains the leaf that inference will use; "soft" trains the mixture of all leaves;
            "sampled" trains the leaf that inference will use, and the tree through a few others at any depth.
        epsilon: each sample skips the leaves whose weight is below `epsilon` times the even share, 2**-depth, as in
            `FFF`; not with "sampled". Replaces the layers' own value.
        alternatives: with "sampled", how many other leaves each sample tries, for example one per level. Replaces
            the layers' own value.
        temperature: at the start and the end of training, changing by a constant factor per step. Let it rise
            with "soft", and with "sampled" in deep trees.
        final_temperature: the temperature after the last step. At 1000 the soft pass equals the hard one, except for
            samples on a boundary.
        hardening, reduction: weight and kind of the hardening loss.
        logit_std: standard deviation of the node logits in a new tree.
        min_share: rebalancing gives each leaf at least this part of its fair share of the data.
        rebalance_every: steps between rebalancings. 0: a hundredth of `steps`, or more if rebalancing would otherwise
            exceed a twentieth of the work, counted in inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Any = None,
        *,
        steps: int,
        noise: float = 0.8,
        balance: float = 0.3,
        sharing: float = 0.0,
        transposition: float = 0.0,
        reset_trees: bool | None = None,
        decision: Decision = "straight_through",
        epsilon: float = 0.0,
        alternatives: int = 1,
        temperature: tuple[float, float] = (1.0, 1.0),
        final_temperature: float = 1000.0,
        hardening: float = 0.0,
        reduction: Reduction = "path",
        logit_std: float = 1.0,
        min_share: float = 0.1,
        rebalance_every: int = 0,
    ) -> None:
        # All arguments are checked before anything changes.
        layers = trainable_layers(model)
        largest = min(torch.finfo(layer.node_weight.dtype).max for layer in layers.values())
        self.steps, self.count = check_int("steps", steps, 1), 0
        self.noise = check_number("noise", noise, 0, largest)
        self.balance = check_number("balance", balance, 0, largest)
        self.hardening = check_number("hardening", hardening, 0, largest)
        check_choice("reduction", reduction, REDUCTIONS)
        self.reduction = reduction
        if not (isinstance(temperature, tuple | list) and len(temperature) == 2):
            raise TypeError(f"temperature must be two numbers, at the start and at the end; got {temperature!r}.")
        first, last = (check_temperature("temperature", value, layers.values()) for value in temperature)
        self._temperatures = Schedule("exponential", first, last, self.steps)
        self.final_temperature = check_temperature("final_temperature", final_temperature, layers.values())
        logit_std = check_number("logit_std", logit_std, 0, above=True)
        self.min_share = check_share("min_share", min_share)
        rebalance_every = check_int("rebalance_every", rebalance_every, 0)
        check_choice("decision", decision, DECISIONS)
        check_alternatives(alternatives, max(layer.depth for layer in layers.values()))
        settings: dict[str, Any] = {"decision": decision, "sharing": check_share("sharing", sharing)}
        settings["transposition"] = check_probability("transposition", transposition)
        settings["alternatives"], settings["epsilon"] = int(alternatives), check_epsilon(epsilon, decision)
        if not (reset_trees is None or isinstance(reset_trees, bool)):
            raise TypeError(f"reset_trees must be True, False or None; got {reset_trees!r}.")
        device, ranks = next(iter(layers.values())).node_weight.device, ranks_of(model)
        with ranks.together(device) if ranks else alone():
            if isinstance(data, Iterator):
                raise TypeError("data is read again for every rebalancing; pass a tensor, a list or a DataLoader.")
            if data is not None:
                batches(data)
        if ranks and not ranks.agree(str(data is None), device):
            raise ValueError("some ranks have data, others have none. Give each rank its part, or none any.")
        self.model, self.data = model, data
        if left_out := outside_checkpoints(model, layers):
            warnings.warn(
                f"the recipe moves the trees of {left_out[0]}{' and others' * (len(left_out) > 1)}, and a PEFT model's "
                "checkpoints leave them out. Name the layers in modules_to_save, or save the merged model: "
                "fastff.save(model.merge_and_unload(), directory).",
                stacklevel=2,
            )

        def is_new(fitted: bool) -> bool:
            return not fitted if reset_trees is None else reset_trees

        self.kept_trees = [name for name, layer in layers.items() if not is_new(_has_tree(layer))]
        placed = {} if data is None else {name: x for name, x in layers.items() if name not in self.kept_trees}
        copied = [layer for layer in layers.values() if sharing and is_new(layer.fitted_leaves)]
        self.deviation = torch.zeros((), device=device)
        self._noise = Noise(self.deviation)
        changed = [p for layer in copied for p in layer.leaf_parameters()]
        changed += [p for layer in placed.values() for p in layer.tree_parameters()]
        with all_or_nothing(changed, lambda: self._begin(layers.values(), placed, settings)):
            for layer in copied:  # first, since they change the inputs of later layers
                copy_first_leaf_(layer)
            if placed:
                place_trees(model, data, placed, logit_std)
            limited = data is not None and self.min_share and not rebalance_every
            expected = estimate(model, data) if limited else None
            self._budget = Budget(model, rebalance_every or max(1, self.steps // 100), expected)

    def _begin(self, layers: Iterable[FFF], placed: dict[str, FFF], settings: dict[str, Any]) -> None:
        remove_noise(layers)
        for layer in layers:
            vars(layer).update(settings)
        for layer in placed.values():
            layer.fitted_tree = True
        if self.noise:
            self._noise.add(layers)
        self._set()

    @property
    def temperature(self) -> float:
        """The temperature now."""
        return self._temperatures.at(self.count) if self.count < self.steps else self.final_temperature

    @property
    def rebalance_seconds(self) -> float:
        """The time that rebalancing has taken in step() so far."""
        return self._budget.seconds

    @property
    def rebalance_share(self) -> float:
        """rebalance_seconds as a share of time since the recipe was made."""
        return self._budget.seconds / max(time.perf_counter() - self._budget.began, 1e-9)

    def loss(self) -> Tensor | float:
        """The losses on the trees. Add them to the task's loss, after a training forward."""
        if self.data is not None and not torch.compiler.is_compiling():
            self._budget.add_forward(self.model)
        total: Tensor | float = 0.0
        if self.balance:
            total = total + self._balance_weight() * balance_loss(self.model)
        if self.hardening:
            total = total + self.hardening * hardening_loss(self.model, self.reduction)
        return total

    def _balance_weight(self) -> Tensor | float:
        """The temperature scales the gradient of the loss. With sampled decisions, that cost 0.9 points (MNIST)."""
        layer = next(iter(fff_layers(self.model).values()))
        return self.balance / layer.temperature_tensor if layer.decision == "sampled" else self.balance

    def step(self) -> None:
        """Call this after every step of the optimizer."""
        budget, count = self._budget, self.count + 1
        if self.data is not None and not budget.pending:  # loss() was compiled or not called
            budget.add_forward(self.model)
        last = count == self.steps
        due = self.data is not None and self.min_share > 0 and (last or budget.is_due(count))
        if not last and count - budget.last >= budget.interval and (ranks := ranks_of(self.model)):
            due = ranks.first(due, self.deviation.device)  # ranks may have done different amounts of work
        began, cost = time.perf_counter(), Cost()

        def commit() -> None:
            self.count = count
            budget.add_step(count, cost, time.perf_counter() - began)
            mark_fitted(self.model)
            self._set()

        with all_or_nothing(boundary_biases(self.model) if due else (), commit):
            if due:
                cost = rebalance(self.model, self.data, self.min_share, passes=None if last else 1)

    def _set(self) -> None:
        """Set noise and temperature to their values at this step."""
        done = min(1.0, self.count / self.steps)
        self.deviation.fill_(self.noise * (1 + math.cos(math.pi * done)) / 2)
        set_temperature_(self.model, self.temperature)
        if done == 1:
            self.close()

    def finish_(self, model: nn.Module) -> None:
        """Rebalance and harden a model, as the last step does in training.

        Use it for a running mean of the weights, for copies evaluated during training, and, after close(), for training
        that ends early.
        """
        with all_or_nothing(boundary_biases(model), lambda: set_temperature_(model, self.final_temperature)):
            if self.data is not None and self.min_share:
                with torch.random.fork_rng(devices=[]):  # a DataLoader uses the RNG, as training does
                    rebalance(model, self.data, self.min_share)

    def close(self) -> None:
        """Remove the noise, as the last step does. Call it if training ends early."""
        with uninterrupted():
            self._noise.remove()

    def state_dict(self) -> dict[str, Any]:
        layers = fff_layers(self.model).items()
        # Copies: on a GPU, later steps overwrite this memory.
        shares = {name: layer.running_shares.clone() for name, layer in layers if layer.running_shares is not None}
        return {"count": self.count, "steps": self.steps, **self._budget.state_dict(), "running_shares": shares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state_dict()."""
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
        layers, found = fff_layers(self.model), state.get("running_shares", {})
        if unknown := [name for name in found if name not in layers]:
            raise ValueError(
                f"the recipe's state has running shares of {unknown[:4]}; the model has {list(layers)[:4]}. "
                "Load the state of a recipe for this model."
            )
        for name, shares in found.items():
            check_shares(f"the running shares of the FFF layer {name!r}", shares, layers[name].num_nodes)
        with uninterrupted():
            self._budget.load_state_dict(state, count)
            self.count = count
            for name, shares in found.items():
                layers[name].running_shares = shares.to(layers[name].node_weight.device, copy=True)
            self._set()

    def __repr__(self) -> str:
        layers, kept, rebalances = len(fff_layers(self.model)), len(self.kept_trees), self._budget.rebalances
        parts = [f"{min(self.count, self.steps)} of {self.steps} steps done"]
        parts += [f"temperature {self.temperature:.4g}", f"noise {float(self.deviation):.3g}"]
        parts.append(f"{layers} FFF {'layers' if layers > 1 else 'layer'}")
        if kept:
            names = ", ".join(repr(name) for name in self.kept_trees[:4])
            parts.append(f"kept the tree of {kept} ({names}{', ...' if kept > 4 else ''})")
        if rebalances:
            parts.append(f"rebalanced {rebalances} time{'s' * (rebalances > 1)}, {self.rebalance_seconds:.2g} s")
        return f"Recipe({'; '.join(parts)})"


def _has_tree(layer: FFF) -> bool:
    """Whether the tree has been fitted. Surgery without data leaves a tree of zeros, which divides nothing."""
    weight = layer.node_weight if layer.node_out_weight is None else layer.node_out_weight
    return layer.fitted_tree and (not layer.depth or bool(weight.any()))
