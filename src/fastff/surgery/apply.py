"""apply_: put FFF layers into a model as specified. replace_ and load_ end in the same few edits.

Everything is checked and built first; the model changes in one go at the end.
"""

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from ..activations import Activation, identity
from ..layer import FFF
from .guard import SaveGuard, refuse_push
from .history import HISTORY
from .operable import check_mode, check_model
from .specification import SIZES, Specification, check_fit, check_specification, part_at
from .undo import unchanged_on_error


class Edit(NamedTuple):
    """An attribute of a module, and its new value."""

    owner: nn.Module
    name: str
    value: Any


def apply_(model: nn.Module, specification: Specification) -> None:
    """Repeat on a fresh `model` what `replace_` did to another: FFF layers of the same sizes in the same places.

    Their weights are random. Load the other model's state dict afterwards, with strict=True. The model may be on the
    meta device. An error, or Ctrl-C, leaves it unchanged.
    """
    edits = plan(model, specification)
    with unchanged_on_error(model):
        commit(edits)


def plan(model: nn.Module, specification: Specification) -> list[Edit]:
    """The checked edits that apply_ makes, with the layers built."""
    check_mode()
    check_model(model)
    check_specification(specification)
    for entry in specification:
        check_fit(model, entry)
    edits = [edit for entry in specification for edit in edits_for(model, entry, build_layer(model, entry))]
    return [*edits, *remember(model, specification)]


def commit(edits: list[Edit]) -> None:
    """Make the edits, within `unchanged_on_error`."""
    for edit in edits:
        setattr(*edit)


def remember(model: nn.Module, specification: Specification) -> list[Edit]:
    """Add the specification to the history of the model."""
    edits = [Edit(model, HISTORY, [*(getattr(model, HISTORY, None) or []), *copy.deepcopy(specification)])]
    if hasattr(type(model), "save_pretrained") and not getattr(type(model), "_keeps_surgery", False):
        edits.append(Edit(model, "save_pretrained", SaveGuard(model)))
        if hasattr(type(model), "push_to_hub"):
            edits.append(Edit(model, "push_to_hub", refuse_push))
    if isinstance(vars(model).get("name_or_path"), str):
        # PEFT would write it into its adapters as their base model, which is dense.
        edits.append(Edit(model, "name_or_path", ""))
    return edits


def edits_for(model: nn.Module, entry: Mapping[str, Any], layer: nn.Module) -> list[Edit]:
    """The edits that put a layer in the place of one block."""
    new: nn.Module = layer
    if entry["dropout_after"]:
        after = entry["dropout_after"]
        after = model.get_submodule(after) if isinstance(after, str) else nn.Dropout(after).train(layer.training)
        new = nn.Sequential(OrderedDict(fff=layer, dropout=after))
    new.training = layer.training
    edits = [Edit(*_slot(model, entry["name"]), new)]
    for path in entry["identity"]:
        owner, name = _slot(model, path)
        keeps_module = isinstance(getattr(owner, name), nn.Module)
        edits.append(Edit(owner, name, nn.Identity().train(owner.training) if keeps_module else identity))
    # In evaluation, torch.nn's encoder has a fused kernel that reads linear1's and linear2's weights directly.
    parts = entry["name"].split(".")
    for above in (model.get_submodule(".".join(parts[:i])) for i in range(len(parts))):
        if hasattr(above, "activation_relu_or_gelu"):
            edits.append(Edit(above, "activation_relu_or_gelu", 0))
        if hasattr(above, "use_nested_tensor"):
            edits.append(Edit(above, "use_nested_tensor", False))
    return edits


def _slot(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    parent, _, name = path.rpartition(".")
    return model.get_submodule(parent), name


def build_layer(model: nn.Module, entry: Mapping[str, Any]) -> FFF:
    """A new layer for an entry of a specification, with the device, dtype and mode of the module that it replaces."""
    old = model.get_submodule(entry["name"])
    weight = next(old.parameters())
    activation: Activation = entry["activation"]
    if isinstance(activation, Mapping):
        activation = part_at(model, activation["at"], entry["name"])
    options = {key: entry[key] for key in ("bias", "dropout", "transposition", "decision", *SIZES)}
    layer = FFF(**options, activation=activation, device=weight.device, dtype=weight.dtype)
    return layer.train(old.training)
