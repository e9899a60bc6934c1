"""The tensors of a layer's last training forward, which the losses read.

They are plain attributes of the layer, so that torch.compile can write them. They hold their graph until backward has
passed, then only their values. They are not part of the layer's state: neither saved nor copied.
"""

import weakref

import torch
from torch import Tensor, nn

from ._torch import has_escaped, in_backward, in_eager, in_transform

_SOFT, _SAMPLED = ("last_logits", "last_mixture"), ("last_path", "last_leaf", "last_weight", "shares_due")
_SHED = ("last_visits", "last_reach", "last_node")
LAST = (*_SOFT, *_SAMPLED, *_SHED)  # the attributes


def remember(layer: nn.Module, source: Tensor, **values: Tensor | bool | None) -> None:
    """Set these attributes of a layer, in place of the previous forward's.

    `source` is the tensor they are computed from. Every backward through the layer's output passes it.
    """
    if in_eager() and in_backward():
        return  # a recomputation by gradient checkpointing; the losses have read the first forward
    for name, value in values.items():
        setattr(layer, name, value)
    if in_eager():
        for name in (name for name, value in values.items() if isinstance(value, Tensor)):
            release_after_backward(layer, name, source)


def recall(layer: nn.Module, name: str, label: str, differentiable: bool) -> Tensor:
    """A tensor of the last training forward; an error if there was none, or if it lacks the gradient wanted."""
    tensor: Tensor | None = getattr(layer, name)
    if tensor is None:
        raise RuntimeError(
            f"{label} has had no training forward yet. Call model.train() and run the model on a batch first."
        )
    if in_eager() and has_escaped(tensor):
        raise RuntimeError(
            f"the last training forward of {label} ran inside torch.func (vmap, grad), which has ended. Compute the "
            "losses inside it, or run the model again outside."
        )
    # Inside vmap, a tensor does not show if a gradient is recorded outside.
    if differentiable and torch.is_grad_enabled() and not tensor.requires_grad and not in_transform():
        raise RuntimeError(
            f"the last training forward of {label} has no gradient: backward has passed it, it ran under "
            "torch.no_grad() or reentrant checkpointing, or later forwards left the layer out. Compute the losses "
            "before backward and for the layers that ran, checkpoint with use_reentrant=False, or read the value "
            "under torch.no_grad()."
        )
    # A compiled forward cannot register hooks, so the reader does.
    if in_eager() and not tensor._backward_hooks:
        release_after_backward(layer, name, tensor)
    return tensor


def release_after_backward(layer: nn.Module, name: str, source: Tensor) -> None:
    """Make backward through `source` detach the tensor, so that the layer keeps no graph alive."""
    tensor: Tensor = getattr(layer, name)
    if not tensor.requires_grad or not source.requires_grad:
        return
    # Weak references: the source owns the hook, and strong ones would form a cycle.
    owner, stored = weakref.ref(layer), weakref.ref(tensor)

    def release(_: Tensor) -> None:
        layer = owner()
        # With create_graph=True the graph is still wanted, and autograd runs the hook with gradients enabled.
        if layer is not None and getattr(layer, name) is stored() is not None and not torch.is_grad_enabled():
            setattr(layer, name, getattr(layer, name).detach())

    source.register_hook(release)
