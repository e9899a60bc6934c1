"""LazySGD and LazyAdamW: a step touches the leaves and nodes that a sample visited, and no others.

With `decision="sampled"`, a batch visits at most as many leaves as it has samples, and a large tree has many more. Its
dense gradient, moments and weights then cost more time than the pass. These optimizers ask the FFF layers of a model
for sparse gradients (`FFF.sparse_gradients`, COO over the leaves, as from nn.Embedding(sparse=True)) and update only
the rows in them: a step's time and gradient memory depend on the visited rows alone. Torch's own optimizers refuse
sparse gradients or, like SparseAdam, ignore the steps that untouched rows miss. Here, a row that was untouched for k
steps catches up in closed form when it is next touched:

    moments         times beta**k, as torch.optim.AdamW's (SGD's) after k gradients of zero
    weight decay    times the product of (1 - lr * weight_decay) over these k steps, with the lr of each step

One thing differs from the dense optimizer: an untouched row does not go on moving by its old momentum. Where every row
is touched, both are equal. Other parameters of the model step as under torch.
"""

import math
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from ._torch import is_dtensor
from .backends import triton_lazy
from .checks import check_number
from .layer import trainable_layers

_LARGE = 4096  # elements: larger rows are updated in place, smaller ones together in a copy
_OWN_DTYPE = ("last", "decay", "decayed", "step")  # state that does not have the parameter's dtype


class _Lazy(torch.optim.Optimizer):
    """Updates rows of FFF layers' parameters. A subclass says how."""

    def __init__(self, model: nn.Module, node_lr: float | None, defaults: dict[str, Any]) -> None:
        for name in defaults.keys() & {"lr", "weight_decay", "eps"}:
            defaults[name] = check_number(name, defaults[name], 0)
        node_lr = defaults["lr"] if node_lr is None else check_number("node_lr", node_lr, 0)
        layers = trainable_layers(model)
        for name, layer in layers.items():
            if any(is_dtensor(parameter) for parameter in layer.parameters()):
                raise TypeError(
                    f"{type(self).__name__} needs whole parameters; the FFF layer {name!r} has DTensors, as "
                    "fully_shard and shard_leaves_ make them. Use an optimizer of torch.optim."
                )
            if layer.ranks is not None and layer.ranks.size > 1:
                raise TypeError(
                    f"{type(self).__name__} needs sparse gradients, which DistributedDataParallel cannot average; the "
                    f"FFF layer {name!r} is synchronised over {layer.ranks.size} ranks. Use an optimizer of "
                    "torch.optim."
                )
        # Each once: layers may share parameters.
        leaves = [*dict.fromkeys(p for layer in layers.values() for p in layer.leaf_parameters())]
        nodes = [*dict.fromkeys(p for layer in layers.values() if layer.depth for p in layer.tree_parameters())]
        own = {id(p) for p in (*leaves, *nodes)}
        rest = [p for p in model.parameters() if id(p) not in own]
        groups: list[dict[str, Any]] = [{"params": leaves, "rows": True}]
        groups += [{"params": nodes, "rows": True, "lr": node_lr}] if nodes else []
        groups += [{"params": rest}] if rest else []
        super().__init__(groups, defaults | {"rows": False})
        for layer in layers.values():
            layer.sparse_gradients = True

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["lr"] * group["weight_decay"] >= 1:
                raise ValueError(f"lr * weight_decay must be below 1; got {group['lr']} * {group['weight_decay']}.")
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)
        return loss

    def _step(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            self._start(parameter, state, group)
        for moment in self._moments(state):
            if (moment.dtype, moment.device) != (parameter.dtype, parameter.device):
                raise RuntimeError(
                    f"{type(self).__name__} has moments in {moment.dtype} on {moment.device}, for parameters in "
                    f"{parameter.dtype} on {parameter.device}: the model was converted after a step. Call "
                    "optimizer.load_state_dict(optimizer.state_dict()), which converts the moments."
                )
        if not group["rows"]:
            if grad.is_sparse:
                raise RuntimeError(
                    f"{type(self).__name__} takes sparse gradients of FFF layers alone; a parameter of shape "
                    f"{tuple(parameter.shape)} has one, too. Build its layer, such as nn.Embedding, with sparse=False."
                )
            self._update([parameter], [grad], [[t] for t in self._moments(state)], state["step"], group)
            state["step"] += 1
            return
        rows, values = touched(grad)
        if not self._by_kernel(parameter, values, rows, state, group):
            self._by_torch(parameter, values, rows, state, group)
        state["step"] += 1
        state["decay"] += math.log1p(-group["lr"] * group["weight_decay"])
        state["last"][rows] = int(state["step"])
        state["decayed"][rows] = state["decay"]

    def _by_kernel(
        self, parameter: Tensor, grad: Tensor, rows: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> bool:
        """Step these rows by a kernel, if there is one."""
        return False

    def _by_torch(
        self, parameter: Tensor, values: Tensor, rows: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        """Step these rows by torch operations."""
        self._catch_up(parameter, state, group, rows)
        tensors = [parameter, *self._moments(state)]
        if len(rows) == len(parameter):
            pieces, grads = [[t] for t in tensors], [values]
        elif parameter[0].numel() >= _LARGE:
            pieces, grads = [_rows(t, rows) for t in tensors], list(values.unbind())
        else:
            pieces, grads = [[t.index_select(0, rows)] for t in tensors], [values]
        self._update(pieces[0], grads, pieces[1:], state["step"], group)
        if len(rows) < len(parameter) and parameter[0].numel() < _LARGE:
            for tensor, (copied,) in zip(tensors, pieces, strict=True):
                tensor.index_copy_(0, rows, copied)

    def _start(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = torch.zeros((), dtype=torch.float32)  # of the parameter; on the CPU
        for name in self._factors(group):
            state[name] = torch.zeros_like(parameter)
        if group["rows"]:
            device = parameter.device
            state["last"] = torch.zeros(len(parameter), dtype=torch.int64, device=device)  # the step of each row
            state["decay"] = torch.zeros((), dtype=torch.float64, device=device)  # sum of log(1 - lr * decay)
            state["decayed"] = torch.zeros(len(parameter), dtype=torch.float64, device=device)  # applied to each row

    def _catch_up(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any], rows: Tensor) -> None:
        """Apply the decay that rows missed, up to the last step."""
        gap = int(state["step"]) - state["last"][rows]
        late = gap > 0
        if not late.any():
            return
        rows, gap = rows[late], gap[late].double()
        for name, factor in self._factors(group).items():
            _scale(state[name], rows, factor**gap)
        if group["weight_decay"] or state["decay"] != 0:  # it may have been set to 0 meanwhile
            _scale(parameter, rows, (state["decay"] - state["decayed"][rows]).exp())
        state["last"][rows] = int(state["step"])
        state["decayed"][rows] = state["decay"]

    @torch.no_grad()
    def catch_up_(self) -> None:
        """Apply the decay that rows have missed. If `weight_decay` is not 0, call this before you evaluate or
        save a model."""
        for group in self.param_groups:
            for parameter in group["params"] if group["rows"] else ():
                if state := self.state.get(parameter):
                    everything = torch.arange(len(parameter), device=parameter.device)
                    self._catch_up(parameter, state, group, everything)

    def _moments(self, state: dict[str, Any]) -> list[Tensor]:
        return [state[name] for name in ("mean", "square") if name in state]

    def _factors(self, group: dict[str, Any]) -> dict[str, float]:
        """The moments' names, and their factors in one step without a gradient."""
        raise NotImplementedError

    def _update(
        self,
        parameters: list[Tensor],
        grads: list[Tensor],
        moments: list[list[Tensor]],
        step: Tensor,
        group: dict[str, Any],
    ) -> None:
        """Step these tensors, which may be rows, in place. `step` is the number of steps before, on the CPU."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. An error changes nothing."""
        self._check_state(state_dict)
        super().load_state_dict(state_dict)
        # torch has cast the state to the dtype of the parameter.
        for group, stored in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, index in zip(group["params"], stored["params"], strict=True):
                found = state_dict["state"].get(index, {})
                for key in _OWN_DTYPE:
                    if key in found:
                        place = "cpu" if key == "step" else parameter.device
                        self.state[parameter][key] = found[key].clone().to(place)

    def _check_state(self, state_dict: dict[str, Any]) -> None:
        """Raise unless this is the state of an optimizer of this class, for parameters of these shapes."""
        groups = state_dict.get("param_groups") if isinstance(state_dict, dict) else None
        if not groups or any(set(self.defaults) - set(group) for group in groups):
            raise ValueError(f"this is not the state of a {type(self).__name__}. Pass its state_dict().")
        for group, stored in zip(self.param_groups, groups, strict=False):  # torch compares the numbers
            for parameter, index in zip(group["params"], stored["params"], strict=False):
                for name, value in state_dict["state"].get(index, {}).items():
                    rows = parameter.shape[:1] if name in ("last", "decayed") else parameter.shape
                    if value.shape != (() if name in ("step", "decay") else rows):
                        raise ValueError(
                            f"the optimizer's state has {name!r} of shape {tuple(value.shape)} for a parameter of "
                            f"shape {tuple(parameter.shape)}. Load the state of an optimizer for this model."
                        )


class LazySGD(_Lazy):
    """Stochastic gradient descent with momentum; a step touches the visited leaves and nodes.

    Weight decay is decoupled: it shrinks the weights and does not enter the momentum. Without momentum, it is
    torch.optim.SGD's.

    Args:
        node_lr: learning rate of the nodes; None: `lr`.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        *,
        node_lr: float | None = None,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        if not 0 <= check_number("momentum", momentum, -sys.float_info.max) < 1:
            raise ValueError(f"momentum must be in [0, 1); got {momentum}.")
        super().__init__(model, node_lr, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def _factors(self, group: dict[str, Any]) -> dict[str, float]:
        return {"mean": group["momentum"]} if group["momentum"] else {}

    def _update(
        self,
        parameters: list[Tensor],
        grads: list[Tensor],
        moments: list[list[Tensor]],
        step: Tensor,
        group: dict[str, Any],
    ) -> None:
        decay = 1 - group["lr"] * group["weight_decay"]
        if decay != 1:
            for parameter in parameters:
                parameter.mul_(decay)
        buffers: list[Tensor | None] = list(moments[0]) if moments else [None] * len(parameters)
        sgd(
            parameters,
            grads,
            buffers,
            foreach=False,
            weight_decay=0.0,
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


class LazyAdamW(_Lazy):
    """AdamW; a step touches the visited leaves and nodes.

    Args:
        node_lr: learning rate of the nodes; None: `lr`.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        *,
        node_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        if not (isinstance(betas, tuple | list) and len(betas) == 2):
            raise TypeError(f"betas must be two numbers; got {betas!r}.")
        if not all(0 <= check_number("betas", beta, -sys.float_info.max) < 1 for beta in betas):
            raise ValueError(f"betas must be in [0, 1); got {betas}.")
        super().__init__(model, node_lr, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _by_kernel(
        self, parameter: Tensor, grad: Tensor, rows: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> bool:
        if isinstance(group["lr"], Tensor):
            return False
        return triton_lazy.steps(parameter, grad, rows, state, group)

    def _factors(self, group: dict[str, Any]) -> dict[str, float]:
        return {"mean": group["betas"][0], "square": group["betas"][1]}

    def _update(
        self,
        parameters: list[Tensor],
        grads: list[Tensor],
        moments: list[list[Tensor]],
        step: Tensor,
        group: dict[str, Any],
    ) -> None:
        if parameters:
            mean, square = moments
            # The fused kernel reads gradients in the memory order of the parameters.
            grads = [
                grad if grad.stride() == parameter.stride() else torch.empty_like(parameter).copy_(grad)
                for grad, parameter in zip(grads, parameters, strict=True)
            ]
            # The fused kernel adds 1 to a count per tensor, which it reads on the tensor's device: filled there,
            # without copies.
            counts = torch.full((len(parameters),), step.item(), dtype=step.dtype, device=parameters[0].device)
            adamw(
                parameters,
                grads,
                mean,
                square,
                [],
                list(counts.unbind()),
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


@torch.no_grad()
def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float) -> Tensor:
    """torch.nn.utils.clip_grad_norm_ for dense and sparse gradients and DTensors together; returns the 2-norm.

    Torch's own refuses sparse gradients, and DTensors beside plain tensors.
    """
    if max_norm != math.inf:  # inf: only the norm is wanted
        check_number("max_norm", max_norm, 0)
    if isinstance(parameters, nn.Module):
        raise TypeError(f"clip_grad_norm_ expects parameters; got {type(parameters).__name__}. Pass its .parameters().")
    values: list[Tensor] = []
    sharded: list[Any] = []  # DTensors
    for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
        if parameter.grad is not None:
            parameter.grad = parameter.grad.coalesce() if parameter.grad.is_sparse else parameter.grad
            value = parameter.grad.values() if parameter.grad.is_sparse else parameter.grad
            (sharded if is_dtensor(value) else values).append(value)
    total = get_total_norm(values)
    if sharded:
        norm = get_total_norm(sharded).full_tensor()  # type: ignore[attr-defined]
        total = torch.linalg.vector_norm(torch.stack([total.to(norm), norm]))
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # as torch does
    for value in values + [value.to_local() for value in sharded]:
        value.mul_(factor.to(value))
    return total


def touched(grad: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of a gradient that are not zero, and their values."""
    if grad.is_sparse:
        rows = grad._indices()[0]
        if grad.is_coalesced() or (rows[1:] > rows[:-1]).all():  # one backward: coalesce() would copy all values
            return rows, grad._values()
        grad = grad.coalesce()
        return grad.indices()[0], grad.values()
    rows = grad.flatten(1).any(1) if grad.dim() > 1 else grad != 0
    found = rows.nonzero().squeeze(1)
    return found, grad[found]


def _rows(tensor: Tensor, rows: Tensor) -> list[Tensor]:
    """Views of these rows."""
    return [tensor.select(0, row) for row in rows.tolist()]


def _scale(tensor: Tensor, rows: Tensor, factors: Tensor) -> None:
    """Multiply these rows."""
    if tensor[0].numel() < _LARGE:
        shape = -1, *[1] * (tensor.dim() - 1)
        tensor.index_copy_(0, rows, tensor.index_select(0, rows) * factors.to(tensor.dtype).view(shape))
        return
    for row, factor in zip(_rows(tensor, rows), factors.tolist(), strict=True):
        row.mul_(factor)
