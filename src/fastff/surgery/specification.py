"""The specification of a surgery: what was done to each block, as plain data, and the checks before it is trusted.

It may come from a file that somebody else wrote. So every value is checked for type and range first, without a model.
Then every path must lead, from module to module, only to the part that such a block has there.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..activations import GATED, PLAIN
from ..layer import DECISIONS
from .blocks import FORMS, Block, recognise
from .linears import read_linear

Specification = list[dict[str, Any]]

SIZES = ("in_features", "out_features", "depth", "leaf_width", "node_width")
IN_PLACE = ("split", "in-layer")  # the forms whose FFF replaces the first linear layer
_KEYS = {"name", "form", *SIZES, "width", "activation", "bias", "dropout", "transposition", "decision"}
_KEYS |= {"linears", "identity", "dropout_after"}
_GRID = (-100.0, -3.0, -1.0, -0.1, 0.5, 2.0, 100.0)  # where activations differ


def entry_of(block: Block, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of a specification for a block and the sizes and options of its FFF."""
    return {
        "name": block.name,
        "form": block.form,
        "in_features": block.in_features,
        "width": block.width,
        "out_features": block.out_features,
        "depth": sizes["depth"],
        "leaf_width": sizes["leaf_width"],
        "node_width": sizes["node_width"],
        # A callable is referred to by its path in the model.
        "activation": block.activation if isinstance(block.activation, str) else {"at": block.activation_at},
        "bias": block.bias,
        "dropout": block.dropout,
        "transposition": sizes["transposition"],
        "decision": sizes["decision"],
        "linears": list(block.linears),
        "identity": list(block.identity),
        "dropout_after": block.dropout_after,
    }


def check_specification(specification: Any) -> None:
    """Raise unless this is a valid specification, for any model."""
    if not isinstance(specification, list) or not all(isinstance(entry, dict) for entry in specification):
        raise TypeError("a specification must be a list of dicts; pass the report.specification of replace_.")
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

    for key in ("name", "form", "decision"):
        need(key, isinstance(entry[key], str), "a string")
    after = entry["dropout_after"]
    need("dropout_after", isinstance(after, str) or (type(after) is float and 0 < after < 1), "a path or a rate")
    need("name", entry["name"] != "", "the name of a module")
    need("form", entry["form"] in FORMS, f"one of {', '.join(FORMS)}")
    need("decision", entry["decision"] in DECISIONS, "'soft', 'straight_through' or 'sampled'")
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
    need("activation", known or (at and names is PLAIN), f"one of {', '.join(names)}, or a path in the model")
    count = 3 if form == "gated" else 2
    need("linears", len(set(linears)) == len(linears) == count, f"{count} different paths for a {form} block")
    if form in IN_PLACE:
        need("linears", linears[0] == name, "the module that is replaced, and another one")
        need("identity", entry["identity"][-1:] == linears[-1:], "paths of which the last is the last linear layer")
        need("dropout_after", entry["dropout_after"] == "", f"empty for a block that is {form}")
    else:
        need("linears", all(path.startswith(f"{name}.") for path in linears), f"inside {name!r}")
        need("identity", entry["identity"] == [], f"empty for a {form} block")


def check_fit(model: nn.Module, entry: Mapping[str, Any]) -> None:
    """Raise unless the model has the block that a checked entry describes."""
    name, form, activation = entry["name"], entry["form"], entry["activation"]
    after = entry["dropout_after"] if isinstance(entry["dropout_after"], str) else ""
    for path in [name, *entry["linears"], *entry["identity"], after or name]:
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
        raise ValueError(f"the specification replaces {name!r}, which has more than linear layers in this model.")
    if after and not isinstance(module_at(model, after), nn.Dropout):
        raise ValueError(f"the specification says that {after!r} is an nn.Dropout; in this model it is something else.")
    acting = [activation["at"]] if isinstance(activation, dict) else []
    acting += [p for p in entry["identity"][:-1] if not isinstance(part_at(model, p, name), nn.Dropout)]
    for path in acting:
        value = part_at(model, path, name)
        empty = not isinstance(value, nn.Module) or not [*value.parameters(), *value.buffers()]
        if not empty or recognise(value) is None:
            raise ValueError(
                f"the specification says that {path!r} is an activation; in this model it is something else."
            )
    if isinstance(activation, dict) and "values" in activation:
        values = values_of(part_at(model, activation["at"], name))
        saved = values.new_tensor(activation["values"])
        if not torch.allclose(values, saved, rtol=1e-8, atol=1e-8, equal_nan=True):
            raise ValueError(
                f"the saved activation of {name} differs from the function at {activation['at']!r} in this model. It "
                "was changed by hand, or the model was built differently."
            )


def _are_values(values: Any) -> bool:
    return isinstance(values, list | tuple) and [type(v) for v in values] == [float] * len(_GRID)


def values_of(activation: Any) -> torch.Tensor:
    """An elementwise function's values at a few points, in float64: they tell activations apart."""
    with torch.no_grad():
        y: torch.Tensor = activation(torch.tensor(_GRID, dtype=torch.float64))
    return y.double()


def part_at(model: nn.Module, path: str, name: str) -> Any:
    """The module, or the function kept as an activation, at a path of a specification."""
    parent, _, attribute = path.rpartition(".")
    owner, value = module_at(model, parent), module_at(model, path)
    if value is None and owner is not None and is_activation_name(attribute):
        value = vars(owner).get(attribute)
    if value is None or not callable(value) or isinstance(value, type):
        raise ValueError(f"the specification replaces {name!r}, but this model has no {path!r:.200}.")
    return value


def module_at(model: nn.Module, path: str) -> Any:
    """The module at a path of child modules; None if there is none. No other attribute is ever read."""
    module: nn.Module | None = model
    for name in path.split(".") if path else []:
        module = None if module is None else module._modules.get(name)
    return module


def is_activation_name(attribute: str) -> bool:
    """Whether an attribute's name says that the function it holds is an activation."""
    return "act" in attribute or "nonlin" in attribute
