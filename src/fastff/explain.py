"""What a layer would do with an input, and why."""

from dataclasses import dataclass, field

from torch import Tensor

from . import functional
from .backends import TABLE, aten, native, reference, select_hard, select_soft, triton, triton_soft
from .layer import FFF
from .tensors import cast


@dataclass(frozen=True)
class Explanation:
    """The backend that runs a layer on an input; `str()` tells it in words."""

    mode: str  # "hard" (eval) or "soft" (train)
    backend: str
    reason: str
    how: str  # what the backend does with this size
    others: dict[str, str] = field(default_factory=dict)  # the backends that cannot run it, and why

    def __str__(self) -> str:
        lines = [f"{self.mode} pass by {self.backend} ({self.reason}): {self.how}"]
        return "\n".join(lines + [f"not {name}: {why}" for name, why in self.others.items()])


def explain(layer: FFF, x: Tensor) -> Explanation:
    """Which backend runs `layer(x)`, as the layer, the input, autograd and autocast are now, and why."""
    if not isinstance(layer, FFF):
        raise TypeError(
            f"explain expects an FFF layer; got {type(layer).__name__}. Pass one of the model's: model.modules()."
        )
    tree, leaves, activation = layer.tree, layer.leaves, layer.activation
    flat = functional.flatten(x, tree.weight)
    dtype = functional.autocast_dtype(flat)
    if layer.training:
        if dtype is not None:
            flat, tree, leaves = flat.to(dtype), cast(tree, dtype), cast(leaves, dtype)
        ops, reason = select_soft(flat, tree, leaves, activation, layer.dropout)
        how = {
            reference: "as it is written",
            aten: "two matrix products, the derivative of the tree by hand",
            triton_soft: "two matrix products with one kernel between them",
        }[ops]
        why = triton_soft.unsupported(flat, tree, leaves, activation, layer.dropout)
        others = {"triton": why} if why else {}
        return Explanation("soft", ops.__name__.rsplit(".", 1)[-1], reason, how, others)
    flat = flat.to(tree.weight.dtype)
    ops, reason = select_hard(flat, tree, leaves, activation)
    if ops is native or ops is triton:
        how = ops.describe(flat, tree, leaves)
        if functional.needs_grad(flat, *leaves):
            how += "; backward runs the visited leaves again, in torch (torch.no_grad() spares the preparations)"
    else:
        how = aten.describe(flat, tree, leaves) if ops is aten else "as it is written"
    others = {name: TABLE[name].unsupported(flat, tree, leaves, activation) for name in ("native", "triton")}
    name = ops.__name__.rsplit(".", 1)[-1]
    return Explanation("hard", name, reason, how, {key: why for key, why in others.items() if why and key != name})
