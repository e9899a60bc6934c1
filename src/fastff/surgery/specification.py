"""The specification of a surgery: what was done to each block, as plain data, and the checks before it is believed.

It may come out of a file that somebody else wrote. So every value is checked for its type and range first, without a
model; then every path must lead, from module to module, to what such a block has there, and to nothing else.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..activations import GATED, PLAIN
from ..layer import FFF
from .blocks import FORMS, read_linear, recognise

Specification = list[dict[str, Any]]

SIZES = ("in_features", "out_features", "depth", "leaf_width", "node_width")
IN_PLACE = ("split", "in-layer")  # the forms whose FFF takes the place of the first linear layer
_KEYS = {"name", "form", *SIZES, "width", "activation", "bias", "dropout", "transposition", "decision"}
_KEYS |= {"linears", "identity", "dropout_after"}
_GRID = (-100.0, -3.0, -1.0, -0.1, 0.5, 2.0, 100.0)  # where two activations are told apart
MEMORY = "_fastff_specification"  # the attribute of a model that keeps what was done to it


def check_specification(specification: Any) -> None:
    """Raise unless this is a specification, whatever the model."""
    if not isinstance(specification, list) or not all(isinstance(entry, dict) for entry in specification):
        raise TypeError("a specification is a list of dicts; pass the report.specification of replace_.")
    for entry in specification:
        _check_entry(entry)
    places = Counter(path for entry in specification for path in {entry["name"], *entry["linears"]})
    if twice := [path for path, count in places.items() if count > 1]:
        raise ValueError(f"the specification replaces the same block more than once: {', '.join(twice[:8])}.")


def _check_entry(entry: Mapping[str, Any]) -> None:
    wrong = {str(key) for key in set(entry) ^ _KEYS}
    if wrong:
        raise ValueError(f"this is not an entry of a specification by replace_: {', '.join(sorted(wrong))}.")

    def need(key: str, fine: bool, what: str) -> None:
        if not fine:
            raise ValueError(f"{key} in a specification must be {what}; got {entry[key]!r:.80}.")

    for key in ("name", "form", "decision", "dropout_after"):
        need(key, isinstance(entry[key], str), "a string")
    need("name", entry["name"] != "", "the name of a module")
    need("form", entry["form"] in FORMS, f"one of {', '.join(FORMS)}")
    need("decision", entry["decision"] in ("soft", "straight_through"), "'soft' or 'straight_through'")
    for key in (*SIZES, "width"):
        least, most = (0, 60) if key == "depth" else (1, 2**31)
        need(key, type(entry[key]) is int and least <= entry[key] <= most, f"an integer from {least} to {most}")
    need("bias", isinstance(entry["bias"], bool), "true or false")
    for key in ("dropout", "transposition"):
        need(key, type(entry[key]) in (int, float) and 0 <= entry[key] < 1, "a number in [0, 1)")
    for key in ("linears", "identity"):
        need(key, isinstance(entry[key], list) and all(isinstance(p, str) for p in entry[key]), "a list of strings")

    name, form, linears, activation = entry["name"], entry["form"], entry["linears"], entry["activation"]
    names = GATED if form in ("gated", "packed") else PLAIN
    at = isinstance(activation, dict) and {"at"} <= set(activation) <= {"at", "values"}
    at = at and isinstance(activation["at"], str) and _are_values(activation.get("values", _GRID))
    known = isinstance(activation, str) and activation in names
    need("activation", known or (at and names is PLAIN), f"one of {', '.join(names)}, or where the model has it")
    need("linears", len(set(linears)) == len(linears) == (3 if form == "gated" else 2), f"those of a {form} block")
    if form in IN_PLACE:
        need("linears", linears[0] == name, "the module that is replaced, and another one")
        need("identity", entry["identity"][-1:] == linears[-1:], "paths that end with that of the last linear layer")
        need("dropout_after", entry["dropout_after"] == "", f"empty for a block that is {form}")
    else:
        need("linears", all(path.startswith(f"{name}.") for path in linears), f"inside of {name!r}")
        need("identity", entry["identity"] == [], f"empty for a {form} block")


def check_fit(model: nn.Module, entry: Mapping[str, Any]) -> None:
    """Raise unless the model has the block that a checked entry speaks of."""
    name, form, activation = entry["name"], entry["form"], entry["activation"]
    for path in [name, *entry["linears"], *entry["identity"], entry["dropout_after"] or name]:
        part_at(model, path, name)
    owner = module_at(model, name)
    modules = [module_at(model, path) for path in entry["linears"]]
    linears = [read_linear(module) for module in modules]
    found = [None if linear is None else (linear.in_features, linear.out_features) for linear in linears]
    inner = (entry["in_features"], entry["width"] * (2 if form == "packed" else 1))
    expected = [inner] * (len(found) - 1) + [(entry["width"], entry["out_features"])]
    if found != expected:
        raise ValueError(f"the specification replaces linear layers of {expected} at {name!r}; this model has {found}.")
    own = {id(tensor) for module in modules for tensor in module.parameters()}
    if form not in IN_PLACE and any(id(t) not in own for t in [*owner.parameters(), *owner.buffers()]):
        raise ValueError(f"the specification replaces {name!r}, which has more in this model than linear layers.")
    after = entry["dropout_after"]
    if after and not isinstance(module_at(model, after), nn.Dropout):
        raise ValueError(f"the specification says that {after!r} is an nn.Dropout; in this model it is not.")
    acting = [activation["at"]] if isinstance(activation, dict) else []
    acting += [p for p in entry["identity"][:-1] if not isinstance(part_at(model, p, name), nn.Dropout)]
    for path in acting:
        value = part_at(model, path, name)
        empty = not isinstance(value, nn.Module) or not [*value.parameters(), *value.buffers()]
        if not empty or recognise(value) is None:
            raise ValueError(f"the specification says that {path!r} is an activation; in this model it is not.")
    if isinstance(activation, dict) and "values" in activation:
        values = _values(part_at(model, activation["at"], name))
        saved = values.new_tensor(activation["values"])
        if not torch.allclose(values, saved, rtol=1e-8, atol=1e-8, equal_nan=True):
            raise ValueError(
                f"the activation of {name} was saved as one that is not the function at {activation['at']!r} in this "
                "model. It was changed by hand, or the model is built in another way."
            )


def _are_values(values: Any) -> bool:
    return isinstance(values, list | tuple) and [type(v) for v in values] == [float] * len(_GRID)


def _values(activation: Any) -> torch.Tensor:
    """An elementwise function on a few points, in float64."""
    with torch.no_grad():
        y: torch.Tensor = activation(torch.tensor(_GRID, dtype=torch.float64))
    return y.double()


def part_at(model: nn.Module, path: str, name: str) -> Any:
    """The module, or the function kept as an activation, that a specification means by a path."""
    parent, _, attribute = path.rpartition(".")
    owner, value = module_at(model, parent), module_at(model, path)
    if value is None and owner is not None and is_activation_name(attribute):
        value = vars(owner).get(attribute)
    if value is None or not callable(value) or isinstance(value, type):
        raise ValueError(f"the specification replaces {name!r}, but this model has no {path!r:.200}.")
    return value


def module_at(model: nn.Module, path: str) -> Any:
    """The module at a path of child modules, None if there is none; no other attribute is ever looked at."""
    module: nn.Module | None = model
    for name in path.split(".") if path else []:
        module = None if module is None else module._modules.get(name)
    return module


def is_activation_name(attribute: str) -> bool:
    """Whether an attribute's name says that a function kept there is an activation."""
    return "act" in attribute or "nonlin" in attribute


def remembered(model: nn.Module) -> Specification:
    """What `replace_` and `apply_` did to a model and to parts of it; activation, dropout and decisions as they are
    now."""
    found = []
    for above, part in model.named_modules():
        for entry in vars(part).get(MEMORY) or ():
            entry = _below(above, entry)
            layer = module_at(model, layer_path(entry))
            if not isinstance(layer, FFF) or any(getattr(layer, key) != entry[key] for key in (*SIZES, "bias")):
                raise ValueError(
                    f"{entry['name']} was replaced by an FFF of depth {entry['depth']} and leaf width "
                    f"{entry['leaf_width']}, and is something else now: what was done to this model is not known."
                )
            now = {key: getattr(layer, key) for key in ("dropout", "transposition", "decision")}
            found.append(entry | now | {"activation": _activation(layer, entry)})
    return found


def _activation(layer: FFF, entry: Mapping[str, Any]) -> Any:
    """The activation of a layer as an entry has it: a name; for a function without one, where a fresh model has it and
    a few of its values, by which another function there is found out."""
    now, was = layer.activation, entry["activation"]
    if isinstance(now, str):
        return now
    tensors = isinstance(now, nn.Module) and [*now.parameters(), *now.buffers()]
    if tensors or not isinstance(was, dict) or isinstance(recognise(now), str | None):
        kind = getattr(now, "__name__", type(now).__name__)
        raise ValueError(
            f"{entry['name']} was given the activation {kind} after the surgery. A function put there by hand is not "
            f"saved, a name is: set one of {', '.join(PLAIN)}."
        )
    return {"at": was["at"], "values": _values(now).tolist()}


def layer_path(entry: Mapping[str, Any]) -> str:
    """Where the FFF of an entry is."""
    return f"{entry['name']}.fff" if entry["dropout_after"] else entry["name"]


def _below(above: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry about a part of a model, as one about the model."""

    def full(path: str) -> str:
        return f"{above}.{path}" if above and path else path

    activation = entry["activation"]
    return {
        **entry,
        "name": full(entry["name"]),
        "activation": {"at": full(activation["at"])} if isinstance(activation, dict) else activation,
        "linears": [full(path) for path in entry["linears"]],
        "identity": [full(path) for path in entry["identity"]],
        "dropout_after": full(entry["dropout_after"]),
    }
