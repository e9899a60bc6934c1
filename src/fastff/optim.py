"""Localised optimisation, against the shrinking batch problem.

As the tree hardens, a batch of B samples spreads over 2**depth leaves and each of them sees only B / 2**depth: its
gradient, an average over B samples most of which are not its own, is small and noisy. Here every leaf and every node
gathers gradients until it has seen `local_batch` samples of its own, then steps with the mean over them. A block that
does not step keeps its parameters and its moments. All other parameters of the model step every time.

A sample counts for a leaf by its mixture weight (0 or 1 when decisions are straight-through), for a node by the
weights of the leaves below it. The loss must be a mean over the samples that pass through the layers since the last
step.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ._torch import in_backward, in_eager
from .backends.reference import at_least_float32
from .hardening import layers
from .layer import FFF
from .regions import above


class _Local(torch.optim.Optimizer):
    """The gathering, shared by the optimisers; a subclass says how a block steps."""

    def __init__(self, model: nn.Module, local_batch: float, defaults: dict[str, Any]) -> None:
        if not local_batch > 0:
            raise ValueError(f"local_batch must be positive; got {local_batch}.")
        for name in ("lr", "weight_decay"):
            if not defaults[name] >= 0:
                raise ValueError(f"{name} must not be negative; got {defaults[name]}.")
        self._layers = layers(model)
        self._seen: dict[str, Tensor] = {}  # by layer, since the last step: the mass of each leaf, then the samples
        self._counted: dict[str, Callable[[], Tensor | None]] = {}  # by layer: the mixture that was counted last
        groups: list[dict[str, Any]] = []
        for name, layer in self._layers.items():
            groups.append({"params": layer.leaf_parameters(), "blocks": "leaf", "layer": name})
            if layer.depth:
                groups.append({"params": layer.tree_parameters(), "blocks": "node", "layer": name})
        local = {id(parameter) for group in groups for parameter in group["params"]}
        rest = [parameter for parameter in model.parameters() if id(parameter) not in local]
        if rest:
            groups.append({"params": rest, "blocks": "", "layer": ""})
        super().__init__(groups, defaults | {"local_batch": local_batch})
        owner = weakref.ref(self)
        for name, layer in self._layers.items():
            layer.register_forward_hook(_Observer(owner, name))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        seen = {name: self._take(name) for name in self._layers}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not group["blocks"]:
                    self._update(parameter, parameter.grad, state, group, None)
                    continue
                mass, samples = seen[group["layer"]][:-1], seen[group["layer"]][-1]
                if group["blocks"] == "node":
                    mass = above(mass)
                if "mass" not in state:
                    state["mass"] = torch.zeros_like(mass)
                    state["gathered"] = torch.zeros_like(parameter)
                state["mass"] += mass
                state["gathered"] += parameter.grad * samples.to(parameter.dtype)
                ready = state["mass"] >= group["local_batch"]  # (blocks,)
                own = state["mass"].clamp(min=torch.finfo(mass.dtype).tiny).to(parameter.dtype)
                self._update(parameter, state["gathered"] / _by_block(own, parameter), state, group, ready)
                state["gathered"].masked_fill_(_by_block(ready, parameter), 0)
                state["mass"].masked_fill_(ready, 0)
        return loss

    def _update(
        self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any], ready: Tensor | None
    ) -> None:
        """Step the blocks that are ready (None: the whole parameter) with this gradient; leave the others untouched."""
        raise NotImplementedError

    def _observe(self, name: str, mixture: Tensor) -> None:
        """Count the samples of one training forward."""
        wide = at_least_float32(mixture.dtype)
        mass = torch.cat([mixture.to(wide).sum(0), torch.full((1,), len(mixture), dtype=wide, device=mixture.device)])
        self._seen[name] = self._seen[name] + mass if name in self._seen else mass
        self._counted[name] = weakref.ref(mixture)

    def _take(self, name: str) -> Tensor:
        """What a layer has seen since the last step, over all processes."""
        mixture = self._layers[name]._mixture
        # A compiled forward runs no hook; what it left on the layer is counted here: the last forward, and no other.
        if name not in self._seen and mixture is not None and mixture is not self._counted.get(name, lambda: None)():
            self._observe(name, mixture)
        if name not in self._seen:
            raise RuntimeError(
                f"the FFF layer {name!r} has had no training forward since the last step: nothing to step with. "
                "Run the model that the optimiser was built for, in train() mode, before each step."
            )
        seen = self._seen.pop(name)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(seen)
        return seen


class LocalSGD(_Local):
    """Stochastic gradient descent with momentum, each leaf and node at its own pace. At depth 0, torch.optim.SGD."""

    def __init__(
        self, model: nn.Module, lr: float, *, local_batch: float = 32, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1); got {momentum}.")
        super().__init__(model, local_batch, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def _update(
        self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any], ready: Tensor | None
    ) -> None:
        grad = grad + group["weight_decay"] * parameter if group["weight_decay"] else grad
        if group["momentum"]:
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(parameter)
            _set(state["momentum"], group["momentum"] * state["momentum"] + grad, ready)
            grad = state["momentum"]
        _set(parameter, parameter - group["lr"] * grad, ready)


class LocalAdam(_Local):
    """Adam with decoupled weight decay, each leaf and node at its own pace. At depth 0, torch.optim.AdamW."""

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        *,
        local_batch: float = 32,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be in [0, 1); got {betas}.")
        super().__init__(model, local_batch, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _update(
        self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any], ready: Tensor | None
    ) -> None:
        if "step" not in state:
            blocks = () if ready is None else ready.shape
            state["step"] = torch.zeros(blocks, dtype=torch.float32, device=parameter.device)  # of each block
            state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        first, second = group["betas"]
        _set(state["step"], state["step"] + 1, ready)
        _set(state["mean"], first * state["mean"] + (1 - first) * grad, ready)
        _set(state["square"], second * state["square"] + (1 - second) * grad * grad, ready)
        step = _by_block(state["step"].clamp(min=1), parameter).to(at_least_float32(parameter.dtype))
        mean = state["mean"] / (1 - first**step)
        root = (state["square"] / (1 - second**step)).sqrt() + group["eps"]
        decayed = parameter * (1 - group["lr"] * group["weight_decay"])
        _set(parameter, (decayed - group["lr"] * mean / root).to(parameter.dtype), ready)


class _Observer:
    """A forward hook that reports a layer's training forwards to its optimiser, if that is still alive."""

    def __init__(self, owner: Callable[[], _Local | None], name: str) -> None:
        self.owner, self.name = owner, name

    def __call__(self, layer: FFF, _: Any, __: Any) -> None:
        if not in_eager() or not layer.training or in_backward() or layer._mixture is None:
            return
        optimizer = self.owner()
        if optimizer is not None:
            optimizer._observe(self.name, layer._mixture)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Observer, (_no_one, self.name)  # a copied or stored layer has no optimiser


def _no_one() -> None:
    return None


def _by_block(values: Tensor, parameter: Tensor) -> Tensor:
    """Values (blocks,) shaped to broadcast against a parameter (blocks, ...)."""
    return values.view(-1, *[1] * (parameter.dim() - 1)) if values.dim() else values


def _set(target: Tensor, value: Tensor, ready: Tensor | None) -> None:
    """Write the blocks that are ready."""
    target.copy_(value if ready is None else torch.where(_by_block(ready, target), value, target))
