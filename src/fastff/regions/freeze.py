"""Freeze regions: some leaves of a layer keep their weights while the others train.

All leaves are rows of the same parameters, so `requires_grad` cannot tell them apart. A hook on each parameter sets the
gradient of frozen rows to zero. Momentum and weight decay move rows without a gradient too, so a hook on every torch
optimizer restores frozen rows after its step, bit for bit.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .. import tree as heap
from ..checks import check_int
from ..layer import FFF


def freeze_leaves_(layer: FFF, leaves: Iterable[int] | int, *, nodes: bool = True) -> FFF:
    """Keep the weights of these leaves, and of the nodes on their paths, while the rest of the layer trains.

    In a frozen region, outputs of the hard pass then keep every bit. The optimizer must be from torch.optim or
    fastff.optim, or derive from torch.optim.Optimizer. Freezing adds up over calls, is kept in copies of the
    layer, and is not saved. `edit_`, load_state_dict and a Recipe that rebalances still change frozen rows.

    Args:
        nodes: whether to freeze the nodes on the paths too. Otherwise the regions may move, while the leaves stay.
    """
    wanted = _check_leaves(layer, leaves)
    found = _frozen(layer) or _Frozen()
    found.leaves = tuple(sorted({*found.leaves, *wanted}))
    if nodes:
        on_paths = {node for leaf in wanted for node, _ in heap.path(leaf, layer.depth)}
        found.nodes = tuple(sorted({*found.nodes, *on_paths}))
    if _frozen(layer) is None:
        layer.register_forward_pre_hook(found)
    found.arm(layer)
    layer.fitted_tree = layer.fitted_leaves = True  # a Recipe keeps both
    return layer


def unfreeze_leaves_(layer: FFF, leaves: Iterable[int] | int | None = None) -> FFF:
    """Let these leaves train again (None: all), and the nodes that lead to no other frozen leaf."""
    wanted = range(layer.num_leaves) if leaves is None else _check_leaves(layer, leaves)
    found = _frozen(layer)
    if found is None:
        return layer
    found.leaves = tuple(leaf for leaf in found.leaves if leaf not in set(wanted))
    needed = {node for leaf in found.leaves for node, _ in heap.path(leaf, layer.depth)}
    found.nodes = tuple(node for node in found.nodes if node in needed)
    found.disarm()
    if found.leaves:
        found.arm(layer)
        return layer
    for key in [key for key, hook in layer._forward_pre_hooks.items() if hook is found]:
        del layer._forward_pre_hooks[key]
    return layer


def frozen_leaves(layer: FFF) -> tuple[int, ...]:
    """The leaves that `freeze_leaves_` has frozen."""
    found = _frozen(layer)
    return () if found is None else found.leaves


class _Frozen:
    """The frozen rows of a layer, as its forward hook, so that a copied layer freezes its own rows."""

    def __init__(self, leaves: Sequence[int] = (), nodes: Sequence[int] = ()) -> None:
        self.leaves, self.nodes = tuple(leaves), tuple(nodes)
        self.layer: weakref.ref[FFF] | None = None
        self.hooked: dict[str, tuple[nn.Parameter, Any]] = {}  # by name: the parameter, and the handle of its hook

    def __call__(self, layer: FFF, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self.arm(layer)

    def arm(self, layer: FFF) -> None:
        """Hook the layer's parameters, and the optimizers. Parameters may be new: moved, replaced, or trainable now."""
        if layer.sparse_gradients and layer.training:
            # Their rows catch up on weight decay later, which the hook after a step does not see.
            raise RuntimeError(
                "frozen leaves do not go with fastff.optim.LazyAdamW and LazySGD; got a layer that trains with one. "
                "Use an optimizer of torch.optim and set layer.sparse_gradients = False, or call unfreeze_leaves_."
            )
        if self.layer is None or self.layer() is not layer:
            self.layer = weakref.ref(layer)
            _watched.add(self)
        _hook_optimizers()
        for name, rows in self.rows(layer).items():
            parameter, known = layer._parameters[name], self.hooked.get(name)
            if parameter is None or not parameter.requires_grad or (known and known[0] is parameter):
                continue
            if known:
                known[1].remove()
            self.hooked[name] = parameter, parameter.register_hook(_Zero(rows))

    def disarm(self) -> None:
        for _, handle in self.hooked.values():
            handle.remove()
        self.hooked = {}
        _watched.discard(self)
        self.layer = None

    def rows(self, layer: FFF) -> dict[str, tuple[int, ...]]:
        """The frozen rows of each parameter, by name."""
        parts = {"leaf_": self.leaves, "node_": self.nodes}
        own = {name: parts.get(name[:5], ()) for name, value in layer._parameters.items() if value is not None}
        return {name: rows for name, rows in own.items() if rows}

    def __reduce__(self) -> tuple[Any, ...]:
        return _Frozen, (self.leaves, self.nodes)


class _Zero:
    """Sets some rows of a gradient to zero."""

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = list(rows)

    def __call__(self, grad: Tensor) -> Tensor:
        return grad.index_fill(0, torch.tensor(self.rows, device=grad.device), 0)


_watched: "weakref.WeakSet[_Frozen]" = weakref.WeakSet()
_hooks: list[Any] = []  # the handles of the two hooks on all optimizers, once there is something to freeze
_kept: list[tuple[Tensor, Tensor, Tensor]] = []  # parameter, rows and their values, during a step


def _hook_optimizers() -> None:
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_keep))
        _hooks.append(register_optimizer_step_post_hook(_restore))


@torch.no_grad()
def _keep(optimizer: Any, *_: Any) -> None:
    """Before a step: remember the parameters' frozen rows."""
    _kept.clear()
    if not _watched:
        return
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for frozen in _watched:
        layer = frozen.layer() if frozen.layer is not None else None
        for name, rows in frozen.rows(layer).items() if layer is not None else ():
            parameter = layer._parameters[name]  # type: ignore[union-attr]
            if parameter is not None and id(parameter) in own:
                index = torch.tensor(rows, device=parameter.device)
                _kept.append((parameter, index, parameter[index]))


@torch.no_grad()
def _restore(*_: Any) -> None:
    """After a step: put them back."""
    for parameter, index, values in _kept:
        parameter[index] = values
    _kept.clear()


def _frozen(layer: FFF) -> _Frozen | None:
    return next((hook for hook in layer._forward_pre_hooks.values() if isinstance(hook, _Frozen)), None)


def _check_leaves(layer: FFF, leaves: Iterable[int] | int) -> list[int]:
    if not isinstance(layer, FFF):
        raise TypeError(f"layer must be an FFF; got {type(layer).__name__}.")
    given = leaves.tolist() if isinstance(leaves, Tensor) else leaves
    found = [check_int("a leaf", leaf, 0) for leaf in ([given] if not isinstance(given, Iterable) else given)]
    if wrong := [leaf for leaf in found if leaf >= layer.num_leaves]:
        raise IndexError(f"leaves must be within 0..{layer.num_leaves - 1}; got {wrong[0]}.")
    return found
