"""What a layer would do with an input, and why."""

from dataclasses import dataclass, field

from torch import Tensor

from . import functional
from ._torch import is_dtensor
from .backends import BACKENDS, choose, paths, reference, shed, triton_training
from .backends.choice import chosen
from .layer import FFF
from .sampling import most_alternatives
from .tensors import SoftOptions, no_autocast


@dataclass(frozen=True)
class Explanation:
    """The backend that runs a layer on an input; print it for a summary."""

    mode: str  # "hard" (eval), "soft" or "sampled" (train)
    backend: str
    reason: str
    how: str  # what the backend does with this size
    others: dict[str, str] = field(default_factory=dict)  # the backends that cannot run it, and why

    def __str__(self) -> str:
        lines = [f"{self.mode} pass by {self.backend} ({self.reason}): {self.how}"]
        return "\n".join(lines + [f"not {name}: {why}" for name, why in self.others.items()])


def explain(layer: FFF, x: Tensor) -> Explanation:
    """Which backend runs `layer(x)` now, with the present autograd and autocast settings, and why."""
    if not isinstance(layer, FFF):
        raise TypeError(
            f"explain expects an FFF layer; got {type(layer).__name__}. Pass a single FFF layer of the model."
        )
    if layer.training and layer.decision == "sampled":
        return _sampled(layer, x)
    if layer.training:
        options = SoftOptions(layer.temperature_tensor, dropout=layer.dropout)
        request = functional.soft_request(x, layer.tree, layer.leaves, layer.activation, options)
    else:
        request = functional.hard_request(x, layer.tree, layer.leaves, layer.activation)
    backend, reason = choose(request)
    name = next(name for name, one in BACKENDS.items() if one is backend)
    how = ("int8 leaves; " if request.is_int8 else "") + backend.describe(request)
    if layer.training and layer.epsilon and backend is not reference:
        arguments = (*request.arguments, layer.epsilon)
        with no_autocast(request.x):
            how = shed.describe(*arguments)
    if request.kind == "hard" and request.needs_grad and not backend.HAS_GRADIENT:
        how += "; backward runs the visited leaves again, in torch (use torch.no_grad() to avoid this)"
    others = {other: BACKENDS[other].why_not(request) for other in ("native", "triton") if other != name}
    return Explanation(request.kind, name, reason, how, {other: why for other, why in others.items() if why})


def _sampled(layer: FFF, x: Tensor) -> Explanation:
    """Sampled training runs in Triton kernels on a GPU, else in torch operations."""
    with no_autocast(x):
        rows = functional.flatten(x, layer.node_weight).to(layer.node_weight.dtype)
        triton = triton_training.takes(layer.activation, rows, *layer.tree, *layer.leaves)
        alternatives = min(layer.alternatives, most_alternatives(layer.depth))
        few = paths.are_few(rows, layer.tree, alternatives)
    others = f"{alternatives} other{'s' * (alternatives > 1)}"
    how = f"each sample runs the leaf that it visits; for the tree's gradient {others}"
    how += ", and all nodes in one product" if few else ", and the nodes on the way"
    if not layer.depth:
        how = "one leaf, and no tree that learns"
    costs_known = layer.depth and not (rows.is_cuda or is_dtensor(layer.leaf_in_weight))
    if costs_known and shed.is_dense(1 + alternatives, 1, layer.leaves):
        how += f"; all {layer.num_leaves} leaves would take no longer: use decision='straight_through'"
    if triton:
        reason = "auto: the fastest on cuda" if chosen() == "auto" else "chosen by fastff.backend('triton')"
        return Explanation("sampled", "triton", reason, how)
    reason = "auto: its kernels " + ("do not take this layer" if rows.is_cuda else "need a GPU")
    reason = reason if chosen() == "auto" else f"chosen by fastff.backend({chosen()!r})"
    return Explanation("sampled", "aten", reason, how)
