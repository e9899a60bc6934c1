"""What a training forward leaves behind for the losses.

Tensors on the layer, as plain attributes, so that torch.compile can write them; with their graph until backward is
through, with their values after that. They are not part of the state: neither saved nor copied.
"""

import weakref

import torch
from torch import Tensor, nn

from ._torch import has_escaped, in_backward, in_eager, in_transform


def remember(layer: nn.Module, source: Tensor, **tensors: Tensor) -> None:
    """Set these attributes of a layer, replacing what the forward before left there.

    `source` is what they are computed from, on the way of every backward through the layer's output.
    """
    if in_eager() and in_backward():
        return  # a recomputation by gradient checkpointing; the losses have read the first forward
    for name, tensor in tensors.items():
        setattr(layer, name, tensor)
    if in_eager():
        for name in tensors:
            release_after_backward(layer, name, source)


def recall(layer: nn.Module, name: str, label: str, differentiable: bool) -> Tensor:
    """What the last training forward left; an error if there was none, or it cannot give the gradient wanted."""
    tensor: Tensor | None = getattr(layer, name)
    if tensor is None:
        raise RuntimeError(
            f"{label} has had no training forward yet. Call model.train() and run the model on a batch first."
        )
    if in_eager() and has_escaped(tensor):
        raise RuntimeError(
            f"the last training forward of {label} ran inside torch.func (vmap, grad), which has ended. Compute the "
            "losses inside it, or run the model once more outside."
        )
    # Inside vmap a tensor does not show whether a gradient is recorded outside of it.
    if differentiable and torch.is_grad_enabled() and not tensor.requires_grad and not in_transform():
        raise RuntimeError(
            f"the last training forward of {label} has no gradient to give: backward has been through it, it ran under "
            "torch.no_grad() or reentrant checkpointing, or the layer was left out since. Compute the losses before "
            "backward and of the layers that ran, checkpoint with use_reentrant=False, or read the value under "
            "torch.no_grad()."
        )
    # A compiled forward cannot register hooks; its reader does it here.
    if in_eager() and not tensor._backward_hooks:
        release_after_backward(layer, name, tensor)
    return tensor


def release_after_backward(layer: nn.Module, name: str, source: Tensor) -> None:
    """Have backward through `source` replace the tensor by its values alone: the layer then keeps no graph alive."""
    tensor: Tensor = getattr(layer, name)
    if not tensor.requires_grad or not source.requires_grad:
        return
    # Weak references: the hook belongs to the source, and would otherwise keep all of them alive in a circle.
    owner, kept = weakref.ref(layer), weakref.ref(tensor)

    def release(_: Tensor) -> None:
        layer = owner()
        # With create_graph=True the graph is still wanted, and autograd runs the hook with gradients enabled.
        if layer is not None and getattr(layer, name) is kept() is not None and not torch.is_grad_enabled():
            setattr(layer, name, getattr(layer, name).detach())

    source.register_hook(release)
