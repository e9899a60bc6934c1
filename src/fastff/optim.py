"""LocalSGD and LocalAdam: each leaf and each node steps when it has seen enough samples.

As the tree hardens, a batch of B samples spreads over 2**depth leaves, and each leaf sees only B / 2**depth of them.
Its gradient, a mean over B samples, is then small and noisy: the paper's shrinking batch problem. Here each block (a
leaf or a node) gathers gradients until it has seen `local_batch` samples of its own, then steps with their mean.
A block that does not step keeps its parameters and its moments. All other parameters of the model step every time.

A sample counts for a leaf by its mixture weight (0 or 1 when decisions are straight-through), and for a node by the
probability of reaching it: straight-through nodes too get the gradient of the soft mixture, from all samples. A sample
counts from its backward until the optimizer's (not the model's) step() or zero_grad(). The loss must be a mean over
the samples that pass through the layers between two steps.
"""

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ._torch import has_escaped, in_eager, is_dtensor
from .checks import check_number
from .layer import FFF, trainable_layers
from .optim_lazy import LazyAdamW, LazySGD, clip_grad_norm_
from .tensors import at_least_float32
from .tree import log_reach, sum_below

__all__ = ["LazyAdamW", "LazySGD", "LocalAdam", "LocalSGD", "clip_grad_norm_"]

_SLACK = 1e-5  # a sum of float32 weights is off by some 1e-7 of it: 31.999998 samples are 32
_OWN_DTYPE = {"mass", "gathered", "step"}  # state that does not have the parameter's dtype


class _Local(torch.optim.Optimizer):
    """Gathers gradients by block. A subclass says how a block steps."""

    def __init__(self, model: nn.Module, local_batch: float, defaults: dict[str, Any]) -> None:
        local_batch = check_number("local_batch", local_batch, 0, above=True)
        for name in defaults.keys() & {"lr", "weight_decay", "eps"}:
            defaults[name] = check_number(name, defaults[name], 0)
        layers = trainable_layers(model)
        groups: list[dict[str, Any]] = []
        for name, layer in layers.items():
            if any(is_dtensor(parameter) for parameter in layer.parameters()):
                raise TypeError(
                    f"{type(self).__name__} needs whole parameters; the FFF layer {name!r} has DTensors, as "
                    "fully_shard makes them. Use an optimizer of torch.optim, or DistributedDataParallel."
                )
            groups.append({"params": layer.leaf_parameters(), "blocks": "leaf", "layer": name})
            if layer.depth:
                groups.append({"params": layer.tree_parameters(), "blocks": "node", "layer": name})
        local = {id(parameter) for group in groups for parameter in group["params"]}
        rest = [parameter for parameter in model.parameters() if id(parameter) not in local]
        if rest:
            groups.append({"params": rest})
        super().__init__(groups, defaults | {"local_batch": local_batch, "blocks": "", "layer": ""})
        self._watch(layers)

    def _watch(self, layers: dict[str, FFF]) -> None:
        self._layers = layers
        # By layer and id, the counts of each forward since the last step: a second backward then adds nothing.
        self._counts: dict[str, dict[int, Tensor]] = {name: {} for name in layers}
        # By layer, the last mixture that step() must not count: already counted, or without a gradient.
        self._handled: weakref.WeakValueDictionary[str, Tensor] = weakref.WeakValueDictionary()
        for name, layer in layers.items():
            handle = layer.register_forward_hook(_Observer(name, weakref.ref(self)))
            weakref.finalize(self, handle.remove)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        counts = self._take_counts()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and group["blocks"]:
                    self._gather(parameter, parameter.grad, group, counts[group["layer"]])
                elif parameter.grad is not None:
                    self._update(parameter, parameter.grad, group, None)
        return loss

    def _gather(self, parameter: Tensor, grad: Tensor, group: dict[str, Any], counts: Tensor) -> None:
        """Add a gradient to the blocks' sums, and step the blocks that have seen enough samples."""
        state, leaves = self.state[parameter], len(counts) // 2
        mass = counts[:leaves] if group["blocks"] == "leaf" else counts[leaves:-1]  # (blocks,)
        if "mass" not in state:
            state["mass"] = torch.zeros_like(mass)
            state["gathered"] = torch.zeros_like(parameter, dtype=at_least_float32(parameter.dtype))
        state["mass"] += mass
        state["gathered"] += grad.to(state["gathered"].dtype) * counts[-1]
        mask = state["mass"] >= group["local_batch"] * (1 - _SLACK)  # (blocks,)
        divisor = state["mass"].clamp(min=torch.finfo(state["mass"].dtype).tiny)
        self._update(parameter, (state["gathered"] / _by_block(divisor, parameter)).to(parameter.dtype), group, mask)
        state["gathered"].masked_fill_(_by_block(mask, parameter), 0)
        state["mass"].masked_fill_(mask, 0)

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any], mask: Tensor | None) -> None:
        """Step the blocks in the mask (None: the whole parameter) with this gradient; leave the others unchanged."""
        raise NotImplementedError

    def _take_counts(self) -> dict[str, Tensor]:
        """The samples that each layer has seen since the last step, over all processes. Resets the counts."""
        distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        graded = {group["layer"] for group in self.param_groups if any(p.grad is not None for p in group["params"])}
        for name, layer in self._layers.items():
            if layer.sharing:
                raise ValueError(
                    f"{type(self).__name__} needs sharing=0; the FFF layer {name!r} has sharing={layer.sharing}, so a "
                    "leaf's gradient comes from the samples of all leaves. Set it to 0, or use torch.optim."
                )
            if layer.decision == "sampled":
                raise ValueError(
                    f"{type(self).__name__} counts samples by the soft mixture; the FFF layer {name!r} has "
                    'decision="sampled", which has none. Use fastff.optim.LazyAdamW or LazySGD.'
                )
            if layer.epsilon:
                raise ValueError(
                    f"{type(self).__name__} counts samples by the mixture of all leaves; the FFF layer {name!r} has "
                    f"epsilon={layer.epsilon}, which sheds some. Set it to 0, or use torch.optim."
                )
            mixture = layer.last_mixture
            if mixture is not None and mixture is not self._handled.get(name) and not has_escaped(mixture):
                # A compiled forward runs no hook. It left its mixture on the layer: only the last forward counts.
                self._counts[name] = self._counts[name] or {0: _count(layer, mixture)}
                self._handled[name] = mixture
            # With several processes, the gradients may come from another's samples.
            if not self._counts[name] and not distributed and (name in graded or not graded):
                raise RuntimeError(
                    f"the FFF layer {name!r} has had no training forward since the last step: nothing to step with. "
                    "Run the model that the optimizer was built for, in train() mode, before each step. A layer that "
                    "is left out must have no gradients, as after zero_grad(set_to_none=True)."
                )
        totals = [sum(self._counts[name].values(), _count(layer, None)) for name, layer in self._layers.items()]
        self._counts = {name: {} for name in self._layers}
        if distributed:
            flat = torch.cat([total.to(totals[0].device) for total in totals])
            dist.all_reduce(flat)
            parts = flat.split([len(total) for total in totals])
            totals = [part.to(total) for part, total in zip(parts, totals, strict=True)]
        return dict(zip(self._layers, totals, strict=True))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, and the count of the samples they came from."""
        super().zero_grad(set_to_none)
        self._counts = {name: {} for name in self._layers}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. A wrapper around the model may have changed the names of its layers meanwhile."""
        own = [(group["blocks"], group["layer"]) for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, stored, (blocks, layer) in zip(self.param_groups, state_dict["param_groups"], own, strict=True):
            group.update(blocks=blocks, layer=layer)
            # torch has cast the state to the parameter's dtype, except for "step", which it has not even moved.
            for parameter, index in zip(group["params"], stored["params"], strict=True):
                for key in _OWN_DTYPE & state_dict["state"].get(index, {}).keys():
                    self.state[parameter][key] = state_dict["state"][index][key].to(parameter.device)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_layers": self._layers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_layers" in state:  # a copy; load_state_dict calls this too, without it
            self._watch(state["_layers"])


class LocalSGD(_Local):
    """Stochastic gradient descent with momentum, by block. At depth 0 it equals torch.optim.SGD.

    With several processes, samples are counted over the default process group, as DistributedDataParallel averages
    gradients. With torch.compile, only the last forward before a step counts, so with gradient accumulation blocks wait
    longer. Parameters sharded by FSDP2 are refused.
    """

    def __init__(
        self, model: nn.Module, lr: float, *, local_batch: float = 32, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        if not 0 <= check_number("momentum", momentum, -sys.float_info.max) < 1:
            raise ValueError(f"momentum must be in [0, 1); got {momentum}.")
        super().__init__(model, local_batch, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any], mask: Tensor | None) -> None:
        state = self.state[parameter]
        grad = grad + group["weight_decay"] * parameter if group["weight_decay"] else grad
        if group["momentum"]:
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(parameter)
            _set(state["momentum"], group["momentum"] * state["momentum"] + grad, mask)
            grad = state["momentum"]
        _set(parameter, parameter - group["lr"] * grad, mask)


class LocalAdam(_Local):
    """Adam with decoupled weight decay, by block. At depth 0 it equals torch.optim.AdamW.

    LocalSGD's notes on several processes, torch.compile and FSDP2 apply.
    """

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
        if not (isinstance(betas, tuple | list) and len(betas) == 2):
            raise TypeError(f"betas must be two numbers; got {betas!r}.")
        if not all(0 <= check_number("betas", beta, -sys.float_info.max) < 1 for beta in betas):
            raise ValueError(f"betas must be in [0, 1); got {betas}.")
        super().__init__(model, local_batch, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any], mask: Tensor | None) -> None:
        state = self.state[parameter]
        if "step" not in state:
            blocks = () if mask is None else mask.shape
            state["step"] = torch.zeros(blocks, dtype=torch.float32, device=parameter.device)  # of each block
            state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        first, second = group["betas"]
        _set(state["step"], state["step"] + 1, mask)
        _set(state["mean"], first * state["mean"] + (1 - first) * grad, mask)
        _set(state["square"], second * state["square"] + (1 - second) * grad * grad, mask)
        step = _by_block(state["step"].clamp(min=1), parameter).to(at_least_float32(parameter.dtype))
        mean = state["mean"] / (1 - first**step)
        root = (state["square"] / (1 - second**step)).sqrt() + group["eps"]
        decayed = parameter * (1 - group["lr"] * group["weight_decay"])
        _set(parameter, (decayed - group["lr"] * mean / root).to(parameter.dtype), mask)


class _Observer:
    """A forward hook that counts a layer's training forwards while its optimizer is alive."""

    def __init__(self, name: str, owner: Callable[[], _Local | None] | None = None) -> None:
        self.name, self.owner = name, owner

    def __call__(self, layer: FFF, _: Any, output: Tensor) -> None:
        if self.owner is None or not in_eager() or not layer.training:
            return
        optimizer, mixture = self.owner(), layer.last_mixture
        if optimizer is None or mixture is None:
            return
        if output.requires_grad:
            # Counted when backward comes here: for only one of the two forwards under checkpointing.
            counts = _count(layer, mixture)
            output.register_hook(lambda _: optimizer._counts[self.name].update({id(counts): counts}))
        else:
            optimizer._handled[self.name] = mixture

    def __reduce__(self) -> tuple[Any, ...]:
        return _Observer, (self.name,)  # a copied or stored layer has no optimizer


def _count(layer: FFF, mixture: Tensor | None) -> Tensor:
    """The samples of each leaf, each node and in all, in the last training forward: (leaves + nodes + 1,)."""
    wide = at_least_float32(layer.leaf_in_weight.dtype)
    if mixture is None:
        return layer.leaf_in_weight.new_zeros(layer.num_leaves + layer.num_nodes + 1, dtype=wide)
    leaf = mixture.to(wide).sum(0)
    if layer.decision == "straight_through" and layer.last_logits is not None:
        node = log_reach(layer.last_logits.detach()).exp().sum(0)
    else:
        node = sum_below(leaf)
    return torch.cat([leaf, node, leaf.new_full((1,), len(mixture))])


def _by_block(values: Tensor, parameter: Tensor) -> Tensor:
    """Values (blocks,) shaped to broadcast against a parameter (blocks, ...)."""
    return values.view(-1, *[1] * (parameter.dim() - 1)) if values.dim() else values


def _set(target: Tensor, value: Tensor, mask: Tensor | None) -> None:
    """Write the blocks in the mask."""
    target.copy_(value if mask is None else torch.where(_by_block(mask, target), value, target))
