"""precision_of: which weights of a model are quantised, and which stayed in full precision.

torchao's quantize_ and torch's quantize_dynamic change the modules that they know by type, such as nn.Linear, and skip
every other module without a message. An FFF has its own 3-D parameters, so they skip it: a model whose attention is
int8 may keep most of its bytes in float32. Check once after quantising:

    torchao.quantization.quantize_(model, Int8WeightOnlyConfig())
    print(precision_of(model))     # names the FFF layers that are left
    fastff.quantize_(model)        # makes their leaves int8

A weight is a parameter, or torch.ao's packed tensor, of two dimensions or more. Buffers, biases, scales and norms do
not count.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from .._torch import is_dtensor
from ..checks import readable
from ..layer import FFF
from .operable import check_model
from .report import table


class Weight(NamedTuple):
    """One weight: its name, its module's class, how it is stored, its bytes, and whether it is quantised."""

    name: str
    module: str
    kind: str
    bytes: int
    is_quantized: bool


@dataclass(frozen=True)
class Precision:
    """What `precision_of` found; str() gives a table. float_leaves: the FFF layers whose leaves are not int8."""

    weights: list[Weight]
    float_leaves: list[str]

    @property
    def full(self) -> list[Weight]:
        """The weights in full precision."""
        return [weight for weight in self.weights if not weight.is_quantized]

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("weights of", "quantised", "full precision")]
        for module in dict.fromkeys(weight.module for weight in self.weights):
            found = [weight for weight in self.weights if weight.module == module]
            sizes = [sum(w.bytes for w in found if w.is_quantized is wanted) for wanted in (True, False)]
            rows.append((module, *(readable(size) if size else "-" for size in sizes)))
        lines = table(rows)
        if self.float_leaves:
            names = ", ".join(name or "the model itself" for name in self.float_leaves[:4])
            more = f" and {len(self.float_leaves) - 4} more" if len(self.float_leaves) > 4 else ""
            lines += ["", f"float leaves: {names}{more}. Call fastff.quantize_(model) to make them int8."]
        return "\n".join(lines)


def precision_of(model: nn.Module) -> Precision:
    """Which weights are quantised, and which are not: by torchao, by torch.ao, or by `fastff.quantize_`."""
    check_model(model)
    weights, seen = [], set()
    for path, module in model.named_modules():
        for name, tensor in _own(module):
            of_a_leaf = isinstance(module, FFF) and not name.endswith("weight")  # a bias or a scale, one for each leaf
            if tensor.dim() > 1 and not of_a_leaf and id(tensor) not in seen:  # a tied weight counts once
                seen.add(id(tensor))
                full = f"{path}.{name}" if path else name
                is_quantized = tensor.is_quantized or _is_wrapped(tensor) or not tensor.is_floating_point()
                kind = type(tensor).__name__ if _is_wrapped(tensor) else str(tensor.dtype).removeprefix("torch.")
                weights.append(Weight(full, type(module).__name__, kind, _bytes(tensor), is_quantized))
    layers = {path: module for path, module in model.named_modules() if isinstance(module, FFF)}
    return Precision(weights, [path for path, layer in layers.items() if not layer.leaves.is_int8])


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A module's own tensors. torch.ao packs a linear layer's weight, and returns it from a method."""
    yield from module.named_parameters(recurse=False)
    if type(module).__module__.startswith("torch.ao.nn.") and callable(packed := getattr(module, "weight", None)):
        yield "weight", packed()


def _is_wrapped(tensor: Tensor) -> bool:
    """Whether a tensor keeps its values in other tensors, as torchao's do; a DTensor does not count."""
    return hasattr(type(tensor), "__tensor_flatten__") and not is_dtensor(tensor)


def _bytes(tensor: Tensor) -> int:
    if not _is_wrapped(tensor):
        return tensor.numel() * tensor.element_size()
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return sum(_bytes(getattr(tensor, name)) for name in names)
