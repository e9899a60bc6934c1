"""quantize_: int8 leaves, for inference: a row of int8 weights per neuron, and one scale per row.

    w[j, k]  ~  scale[j] * q[j, k]          q = round(w / scale), scale[j] = max_k |w[j, k]| / 127

The hidden layer is act((x . q_in) * in_scale + in_bias); the output is (hidden * out_scale) . q_out + out_bias. Nodes
and biases keep their dtype, which is the scales' too. The int8 weights are parameters without a gradient under the same
names as before, so devices, dtypes, copies and state dicts work as usual.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..checks import readable
from ..layer import FFF, fff_layers
from ..tensors import at_least_float32
from .choose import check_filter, passes
from .files import Header
from .operable import check_mode, check_model
from .report import Skipped, table
from .undo import unchanged_on_error

_WEIGHTS = {f"leaf_{name}_weight": f"leaf_{name}_scale" for name in ("in", "out", "gate")}


class Quantized(NamedTuple):
    """One layer with int8 leaves, and the bytes of its parameters before and after."""

    name: str
    leaves: int
    leaf_width: int
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class Quantization:
    """What `quantize_` quantised and skipped; str() gives a table."""

    quantized: list[Quantized]
    skipped: list[Skipped]

    @property
    def bytes_before(self) -> int:
        """The bytes of the quantised layers before."""
        return sum(layer.bytes_before for layer in self.quantized)

    @property
    def bytes_after(self) -> int:
        """The bytes of the quantised layers now."""
        return sum(layer.bytes_after for layer in self.quantized)

    def __str__(self) -> str:
        head = ("int8 leaves", "leaves x width", "before", "after")
        rows = [
            (q.name or "the model", f"{q.leaves} x {q.leaf_width}", readable(q.bytes_before), readable(q.bytes_after))
            for q in self.quantized
        ]
        lines = table([head, *rows])
        if self.skipped:
            lines += ["", *table([("skipped", "why"), *self.skipped])]
        total = f"{readable(self.bytes_before)} -> {readable(self.bytes_after)}"
        return "\n".join([*lines, "", f"parameters of these layers: {total}"])


def quantize_(
    model: nn.Module, *, filter: str | Iterable[str] | Callable[[str, FFF], bool] | None = None
) -> Quantization:
    """Turn the leaf weights of the model's FFF layers into int8, in place, and report the bytes.

    For inference: the hard pass reads a quarter of the bytes of float32 leaves. A layer with int8 leaves raises in
    train() mode. Its inputs and biases still get gradients in eval() mode; its leaf weights do not. Quantise last,
    after training. A layer that shares leaf weights with another module is skipped. An error, or Ctrl-C, leaves the
    model unchanged.

    Args:
        filter: which layers: a glob on the name ("*.layers.1?.mlp"), several globs, or a function of (name, layer).
    """
    check_model(model)
    check_mode()
    layers, wanted = fff_layers(model), check_filter(filter, "layer")
    chosen = {name: layer for name, layer in layers.items() if passes(wanted, name, layer)}
    if not chosen:
        raise ValueError(f"the filter excludes all {len(layers)} FFF layers: {_listed([*layers])}.")
    skipped = [Skipped(name, "excluded by the filter") for name in layers if name not in chosen]
    old = [name for name, layer in chosen.items() if layer.leaves.is_int8]
    if len(old) == len(chosen):
        raise ValueError(f"the leaves are int8 already: {_listed(old)}. Quantise a model once.")
    skipped += [Skipped(name, "its leaves are int8 already") for name in old]
    tied = _tied(model, {name: layer for name, layer in chosen.items() if name not in old})
    if len(old) + len(tied) == len(chosen):
        raise ValueError(f"the leaf weights are tied to other modules: {_listed(tied)}. Untie them first.")
    skipped += [Skipped(name, "its leaf weights are tied to another module") for name in tied]
    left = {name: layer for name, layer in chosen.items() if name not in old and name not in tied}
    new = {name: _int8_parameters(name, layer) for name, layer in left.items()}
    before = {name: _bytes(layers[name]) for name in new}
    with unchanged_on_error(model):
        for name, parameters in new.items():
            _set(layers[name], parameters)
    done = [Quantized(n, layers[n].num_leaves, layers[n].leaf_width, before[n], _bytes(layers[n])) for n in new]
    return Quantization(done, skipped)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(name or "the model itself" for name in names[:8]) + ", ..." * (len(names) > 8)


def _tied(model: nn.Module, layers: Mapping[str, FFF]) -> list[str]:
    """The layers that share leaf weights with another module of the model."""
    owners = Counter(id(p) for module in model.modules() for p in {*module._parameters.values()} if p is not None)
    return [name for name, layer in layers.items() if any(owners[id(layer._parameters.get(k))] > 1 for k in _WEIGHTS)]


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 numbers of the shape of weight (..., features), and a scale (...) in its dtype for each row."""
    dtype, wide = weight.dtype, weight.detach().contiguous().to(at_least_float32(weight.dtype))
    # Rounded up in the weights' dtype, so that no weight is clipped, and never 0. float16 has numbers below `tiny`.
    least = 2.0**-24 if dtype == torch.float16 else torch.finfo(dtype).tiny
    scale = (wide.abs().amax(-1) / 127 * (1 + torch.finfo(dtype).eps / 2) + least).to(dtype)
    rounded = (wide / scale.to(wide.dtype).unsqueeze(-1)).round_().clamp_(-127, 127)
    return rounded.to(torch.int8), scale


def as_saved_(model: nn.Module, header: Header) -> None:
    """Give int8 leaves, still without values, to the FFF layers whose leaves are int8 in a file of weights."""
    for path, layer in model.named_modules():
        if isinstance(layer, FFF) and header.get(f"{path}.leaf_in_weight", ("", ()))[0] == "I8":
            weights = _leaf_weights(path, layer)
            empty = {name: torch.empty_like(weight, dtype=torch.int8) for name, weight in weights.items()}
            _set(
                layer, empty | {_WEIGHTS[name]: weight.new_empty(weight.shape[:2]) for name, weight in weights.items()}
            )


def _int8_parameters(name: str, layer: FFF) -> dict[str, Tensor]:
    """The int8 weights and the scales of a layer, by name; raises if it cannot be quantised."""
    if name.rpartition(".")[2] == "base_layer":
        raise ValueError(f"{name} has an adapter (PEFT), which int8 would round. Call merge_and_unload() first.")
    if layer.node_weight.is_meta and hasattr(layer, "_hf_hook"):
        raise ValueError(
            f"{name or 'the model'} is offloaded (accelerate): its weights are elsewhere. Call fastff.quantize_ first, "
            "and dispatch_model or disk_offload after it."
        )
    made = {}
    for key, weight in _leaf_weights(name, layer).items():
        if not weight.is_meta and not weight.isfinite().all():
            raise ValueError(f"{name or 'the model'} has numbers in {key} that are not finite, which int8 cannot hold.")
        made[key], made[_WEIGHTS[key]] = quantize_rows(weight)
    return made


def _leaf_weights(name: str, layer: FFF) -> dict[str, Tensor]:
    """The float weights of a layer's leaves, by name; raises if something else computes them."""
    if type(layer).leaves is not FFF.leaves or not all(key in layer._parameters for key in _WEIGHTS):
        raise ValueError(
            f"{name or 'the model'} computes its leaves, by a parametrization, by pruning or in a subclass. Make them "
            "plain parameters first, for example with torch.nn.utils.parametrize.remove_parametrizations."
        )
    return {key: weight for key in _WEIGHTS if (weight := layer._parameters[key]) is not None}


def _set(layer: FFF, parameters: Mapping[str, Tensor]) -> None:
    for name, tensor in parameters.items():
        setattr(layer, name, nn.Parameter(tensor, requires_grad=False))


def _bytes(layer: FFF) -> int:
    return sum(parameter.nbytes for parameter in layer.parameters(recurse=False))
