"""The surgeries that a model has had. The model keeps them as an attribute, so that `save` knows what to write."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..activations import PLAIN
from ..layer import FFF
from .blocks import recognise
from .specification import SIZES, Specification, module_at, values_of

HISTORY = "_fastff_specification"  # the attribute of a converted model


def history_of(model: nn.Module) -> Specification:
    """What `replace_` and `apply_` did to a model and its parts, with the current depth, activation, dropout and
    decisions."""
    found = []
    for above, part in model.named_modules():
        for entry in vars(part).get(HISTORY) or ():
            entry = _below(above, entry)
            layer = module_at(model, layer_path(entry))
            fixed = {*SIZES, "bias"} - {"depth"}  # regions.split_leaf_ and prune_ change the depth
            if not isinstance(layer, FFF) or any(getattr(layer, key) != entry[key] for key in fixed):
                raise ValueError(
                    f"{entry['name']} was replaced by an FFF of depth {entry['depth']} and leaf width "
                    f"{entry['leaf_width']}, and is something else now, so the surgery on this model is not known. "
                    "If PEFT adapters wrap it, call merge_and_unload() first."
                )
            now = {key: getattr(layer, key) for key in ("depth", "dropout", "transposition", "decision")}
            found.append(entry | now | {"activation": _activation(layer, entry)})
    return found


def _activation(layer: FFF, entry: Mapping[str, Any]) -> Any:
    """A layer's activation as an entry stores it: by name. A function without a name is stored as its path in a fresh
    model and some of its values, which tell it from another function at that path."""
    now, was = layer.activation, entry["activation"]
    if isinstance(now, str):
        return now
    tensors = isinstance(now, nn.Module) and [*now.parameters(), *now.buffers()]
    if tensors or not isinstance(was, dict) or isinstance(recognise(now), str | None):
        kind = getattr(now, "__name__", type(now).__name__)
        raise ValueError(
            f"{entry['name']} was given the activation {kind} after the surgery. Such a function cannot be saved, but "
            f"a name can: set one of {', '.join(PLAIN)}."
        )
    return {"at": was["at"], "values": values_of(now).tolist()}


def layer_path(entry: Mapping[str, Any]) -> str:
    """The path of an entry's FFF."""
    return f"{entry['name']}.fff" if entry["dropout_after"] else entry["name"]


def _below(above: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry for a part of a model, rewritten for the whole model; `above` is the path of the part."""

    def full(path: str) -> str:
        return f"{above}.{path}" if above and path else path

    activation = entry["activation"]
    return {
        **entry,
        "name": full(entry["name"]),
        "activation": {"at": full(activation["at"])} if isinstance(activation, dict) else activation,
        "linears": [full(path) for path in entry["linears"]],
        "identity": [full(path) for path in entry["identity"]],
        "dropout_after": full(after) if isinstance(after := entry["dropout_after"], str) else after,
    }
