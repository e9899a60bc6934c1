"""The records of edits as tensors, to save beside a model's weights. `fastff.save` and `save_pretrained` include them.

Names start with "fastff_edits.": `json` has the list of records as text in bytes, and `N.before.PARAMETER` and
`N.after.PARAMETER` have the rows of record N. They may come from somebody else, so nothing is kept unchecked.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..layer import FFF, fff_layers
from ..tensors import LEAF_PARAMETERS
from .records import RECORDS, LeafChange, changes_of

PREFIX = "fastff_edits."
_FIELDS = {"layer": str, "number": int, "note": str, "inputs": int, "error_before": float, "error": float}
_LISTS = {"leaves": int, "parameters": str}


def edits_state(model: nn.Module) -> dict[str, Tensor]:
    """The edits of all FFF layers of a model, as tensors by name: save them beside model.state_dict()."""
    entries: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    layers = {name: module for name, module in model.named_modules() if isinstance(module, FFF)}
    for name, layer in (fff_layers(model) if layers else {}).items():
        for change in changes_of(layer):
            entry = {field: getattr(change, field) for field in ("number", "note", "inputs", "error_before", "error")}
            entry |= {"layer": name, "leaves": list(change.leaves), "parameters": list(change.before)}
            for kind, rows in (("before", change.before), ("after", change.after)):
                tensors |= {f"{PREFIX}{len(entries)}.{kind}.{key}": rows[key] for key in rows}
            entries.append(entry)
    if entries:
        text = json.dumps(entries, sort_keys=True).encode()
        tensors[f"{PREFIX}json"] = torch.tensor(list(text), dtype=torch.uint8)
    return tensors


def load_edits_(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give a model the records that `edits_state` made, after its weights were loaded. Other names are ignored.

    Weights are not changed. An error leaves the model unchanged.
    """
    own = {name: tensor for name, tensor in state.items() if name.startswith(PREFIX)}
    if not own:
        return
    layers = fff_layers(model)
    found: dict[str, list[LeafChange]] = {}
    if edited := [name or "the model itself" for name, layer in layers.items() if changes_of(layer)]:
        raise ValueError(f"{', '.join(edited[:4])} has edits already. Load the records into a fresh model.")
    used = {f"{PREFIX}json"}
    for number, entry in enumerate(_entries(own)):
        if entry["layer"] not in layers:
            raise ValueError(f"the records are invalid: the model has no FFF layer {entry['layer']!r:.80}.")
        layer = layers[entry["layer"]]
        before, after = (_rows(own, number, kind, entry, layer, used) for kind in ("before", "after"))
        facts = {name: entry[name] for name in ("number", "note", "inputs", "error_before", "error")}
        change = LeafChange(**facts, leaves=tuple(entry["leaves"]), before=before, after=after)
        found.setdefault(entry["layer"], []).append(change)
    if unknown := sorted(own.keys() - used):
        raise ValueError(f"the records are invalid: no record has {unknown[0]!r:.80}.")
    for name, changes in found.items():
        vars(layers[name])[RECORDS] = tuple(changes)


def _entries(state: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """The list of records, checked as far as possible without a model."""
    text = state.get(f"{PREFIX}json")
    if text is None or text.dtype != torch.uint8 or text.dim() != 1:
        raise ValueError(f"the records are invalid: {PREFIX}json must be text, uint8 (bytes,).")
    try:
        entries = json.loads(bytes(text.tolist()))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the records are invalid: {error}.") from None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("the records are invalid: they must be a list of objects.")
    for number, entry in enumerate(entries):
        if entry.keys() != _FIELDS.keys() | _LISTS.keys():
            raise ValueError(f"the records are invalid: record {number} has the fields {sorted(entry)!s:.200}.")
        right = all(_is(entry[name], kind) for name, kind in _FIELDS.items())
        right &= all(
            isinstance(entry[name], list) and all(_is(value, kind) for value in entry[name])
            for name, kind in _LISTS.items()
        )
        if not right:
            raise ValueError(f"the records are invalid: a field of record {number} has the wrong type.")
    return entries


def _is(value: Any, kind: type) -> bool:
    """Whether a JSON value has this type: a bool is not an int; a float is finite and may be written as an int."""
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return type(value) is kind


def _rows(
    state: Mapping[str, Tensor], number: int, kind: str, entry: Mapping[str, Any], layer: FFF, used: set[str]
) -> dict[str, Tensor]:
    """The rows of one record, if they fit the layer."""
    leaves, found = entry["leaves"], {}
    if leaves != sorted({*leaves}) or any(not 0 <= leaf < layer.num_leaves for leaf in leaves):
        raise ValueError(f"the records are invalid: record {number} has leaves that the layer does not have.")
    for name in entry["parameters"]:
        parameter = layer._parameters.get(name) if name in LEAF_PARAMETERS else None
        key = f"{PREFIX}{number}.{kind}.{name}"
        tensor = state.get(key)
        if parameter is None or tensor is None:
            raise ValueError(
                f"the records are invalid: record {number} needs {name!r:.80} of the layer and of the file."
            )
        wanted = (len(leaves), *parameter.shape[1:])
        if tuple(tensor.shape) != wanted or not tensor.is_floating_point():
            got = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise ValueError(f"the records are invalid: {key} must be floats of shape {wanted}; got {got}.")
        found[name] = tensor.detach().to(parameter.device)
        used.add(key)
    return found
