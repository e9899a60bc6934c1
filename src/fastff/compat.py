"""Load layers of the public package `fastfeedforward` 0.2.1.

The converted layer agrees with that package in training. In evaluation, that package omits the leaves' output biases
(`b2s`), so its eval() differs from ours by that bias. Ours agrees with training.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import tree as heap
from .layer import FFF
from .tensors import at_least_float32

_NAMES = ("node_weights", "node_biases", "w1s", "b1s", "w2s", "b2s")
_DROPPED = ("depth", "node_usage", "leaf_usage")  # a plain integer kept as a parameter, and two counters


def convert_state_dict(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the parameters of every fastfeedforward layer in a model's state dict to fastff's names and layout.

    Build the model with fastff.FFF layers of the same sizes, then call
    `model.load_state_dict(fastff.compat.convert_state_dict(old))`. All other entries stay unchanged.
    """
    prefixes = [key[: -len("node_weights")] for key in state if key.rpartition(".")[2] == "node_weights"]
    if not prefixes:
        raise ValueError(
            "the state dict has no entry named node_weights, so no layer of fastfeedforward 0.2.1; "
            f"it has {_some(list(state))}."
        )
    converted = dict(state)
    for prefix in prefixes:
        missing = [prefix + name for name in _NAMES if prefix + name not in state]
        if missing:
            raise ValueError(f"the layer {prefix!r} of fastfeedforward 0.2.1 lacks {', '.join(missing)}.")
        old = {name: converted.pop(prefix + name) for name in _NAMES}
        for name in _DROPPED:
            converted.pop(prefix + name, None)
        _check(prefix, old)
        new = {
            "node_weight": old["node_weights"],
            "node_bias": old["node_biases"].squeeze(-1),
            "leaf_in_weight": old["w1s"].mT,
            "leaf_in_bias": old["b1s"],
            "leaf_out_weight": old["w2s"],
            "leaf_out_bias": old["b2s"],
            "temperature_tensor": torch.ones((), dtype=at_least_float32(old["w1s"].dtype), device=old["w1s"].device),
        }
        converted |= {
            prefix + name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in new.items()
        }
    return converted


def from_fastfeedforward(state: Mapping[str, Tensor], prefix: str = "", **options: Any) -> FFF:
    """An FFF layer from the state dict of a fastfeedforward 0.2.1 layer.

    `prefix` selects one layer of a larger model's state dict, such as "encoder.ff". `options` are arguments of FFF that
    a state dict does not hold: activation, dropout, transposition (region_leak in that package), ...
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"expected a state dict; got {type(state).__name__}. Pass module.state_dict().")
    dot = prefix if not prefix or prefix.endswith(".") else prefix + "."
    own = {key[len(dot) :]: tensor for key, tensor in state.items() if key.startswith(dot)}
    own = {key: tensor for key, tensor in own.items() if key in _NAMES}
    if not own:
        raise ValueError(
            f"the state dict has no layer of fastfeedforward 0.2.1 at {prefix!r}; it has {_some(list(state))}."
        )
    converted = convert_state_dict(own)
    leaves, leaf_width, in_features = converted["leaf_in_weight"].shape
    weight = converted["leaf_out_weight"]
    options.setdefault("dtype", weight.dtype)
    options.setdefault("device", weight.device)
    layer = FFF(in_features, weight.shape[-1], depth=heap.depth_of(leaves), leaf_width=leaf_width, **options)
    layer.load_state_dict(converted)
    return layer


def _check(prefix: str, old: Mapping[str, Tensor]) -> None:
    # The sizes are read from these two, so they come first.
    for name, shape in {"w1s": "leaves, in_features, leaf_width", "w2s": "leaves, leaf_width, out_features"}.items():
        if old[name].dim() != 3 or not len(old[name]):
            raise ValueError(f"{prefix}{name} should have the shape ({shape}); got {tuple(old[name].shape)}.")
    leaves, in_features, leaf_width = old["w1s"].shape
    out_features = old["w2s"].shape[-1]
    expected = {
        "node_weights": (leaves - 1, in_features),
        "node_biases": (leaves - 1, 1),
        "b1s": (leaves, leaf_width),
        "w2s": (leaves, leaf_width, out_features),
        "b2s": (leaves, out_features),
    }
    for name, sizes in expected.items():
        if tuple(old[name].shape) != sizes:
            raise ValueError(
                f"{prefix}{name} should have the shape {sizes}, given w1s of {tuple(old['w1s'].shape)}; "
                f"got {tuple(old[name].shape)}."
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "no entries"
