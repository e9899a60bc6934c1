"""save and load_: an operated model in a directory, as one safetensors file, never as a pickle.

fastff.safetensors has every tensor of the state dict once, and in its header a note: the version of this format and the
surgery's specification. It may have been written by somebody else. So nothing is built before the note has been
checked, by itself and against the names and shapes in the header, and nothing is changed before the operated model has
been compared with the header, tensor by tensor. How the file is written and read is in files.py.

The file does not go by the name that Hugging Face's from_pretrained looks for: it would take the tensors that it knows
and fill the dense blocks at random.
"""

import os
import warnings
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from ..layer import FFF, mark_fitted
from .files import DTYPES, FLOATS, Header, check_directory, check_temperature, kind_of, open_weights, write
from .replace import check_model, commit, plan
from .specification import MEMORY, SIZES, Specification, check_specification, layer_path, module_at, remembered
from .undo import check_memory, unchanged_on_error

VERSION = 2


def save(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Write an operated model into a directory, as `fastff.safetensors`: the state dict, and what `replace_` did.

    One rename puts the file in its place, so that the directory has either the older save or the new one, at any time.
    For Hugging Face models there is `fastff.integrations.transformers.save_pretrained`, which keeps the config too.
    """
    check_directory(directory)
    note = note_of(model)
    _check_layers(model, note["specification"])
    write(directory, tensors_of(model), note)


def load_(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Make a fresh `model` the one that `save` wrote: the same surgery, then the weights, strictly.

    The model is built by the same code as the saved one was. Its weights may be anything; floating-point tensors take
    the dtype that they were saved in, and stay on their device. An error, or Ctrl-C, leaves the model unchanged.
    """
    check_model(model)
    if operated := [path or "the model itself" for path, part in model.named_modules() if vars(part).get(MEMORY)]:
        raise ValueError(
            f"{type(model).__name__} has been operated on already ({_some(operated)}). Pass a fresh one, built by the "
            "same code."
        )
    with unchanged_on_error(model, data=True), open_weights(directory) as saved:
        specification = check_note(saved.note, str(saved.path))
        check_sizes(specification, saved.header)
        commit(plan(model, specification))
        compare(model, saved.header)
        for own, tensor in saved.tensors(model):
            own.data = tensor
        mark_fitted(model)


def note_of(model: nn.Module) -> dict[str, Any]:
    """What to write down about an operated model."""
    check_model(model, saving=True)
    check_memory(model)
    specification = remembered(model)
    layers = [path or "the model itself" for path, module in model.named_modules() if isinstance(module, FFF)]
    if not specification and layers:
        raise ValueError(
            f"{type(model).__name__} has FFF layers ({_some(layers)}), but no surgery on it is known. If it is a part "
            "of a model on which replace_ or apply_ was called, save that one, or operate on the part. If its own code "
            "makes the layers, save model.state_dict()."
        )
    if not specification:
        raise ValueError(
            f"{type(model).__name__} has had no surgery by replace_ or apply_. Save it in its own way: "
            "model.save_pretrained(directory) for Hugging Face models, model.state_dict() for others."
        )
    check_specification(specification)
    for path, layer in model.named_modules():
        if isinstance(layer, FFF) and not layer.temperature_tensor.is_meta:
            check_temperature(f"{path}.temperature_tensor", layer.temperature_tensor)
    return {"version": VERSION, "specification": specification}


def _check_layers(model: nn.Module, specification: Specification) -> None:
    """Tell which FFF layers are not those that load_ will make."""
    known = {module_at(model, layer_path(entry)) for entry in specification}
    places = Counter(child for module in model.modules() for child in module._modules.values())
    shared = [entry["name"] for entry in specification if places[module_at(model, entry["name"])] > 1]
    if shared:
        raise ValueError(
            f"{_some(shared)}, replaced in one place, is used in several now, which load_ cannot do again."
        )
    others = [path for path, module in model.named_modules() if isinstance(module, FFF) and module not in known]
    if others:
        warnings.warn(
            f"no surgery on this model made the FFF layers {_some(others)}: load_ takes this save only for a fresh "
            "model that has them already. If they were put there by hand, or by a surgery on a larger model, it will "
            "not load.",
            stacklevel=3,
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def check_note(note: Any, where: str) -> Specification:
    """The specification in a note, if it is one that can be believed so far."""
    if not isinstance(note, dict) or "version" not in note:
        raise ValueError(f"{where} has no note of a surgery. It was not written by fastff.")
    if type(note["version"]) is not int or note["version"] != VERSION:
        raise ValueError(
            f"{where} has a surgery of format version {note['version']!r:.80}; this is fastff for version {VERSION}. "
            "A newer fastff may read it."
        )
    if not {"version", "specification"} <= set(note) <= {"version", "specification", "config", "generation_config"}:
        raise ValueError(f"{where} has a note of a surgery that fastff did not write: {', '.join(note)}.")
    if not note["specification"]:
        raise ValueError(f"{where} has a surgery that replaces nothing.")
    check_specification(note["specification"])
    return note["specification"]


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The state dict, with tied tensors once, under their first names."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} in the state dict is a {type(tensor).__name__}; only tensors can be saved.")
        if tensor.is_nested or tensor.layout is not torch.strided or not kind_of(tensor):
            layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            saved = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES.values())
            raise ValueError(
                f"{name} is a {tensor.dtype} tensor, {layout}; fastff saves strided tensors of {saved}. If the model "
                "computes it anew, leave it out of the state dict: register_buffer(..., persistent=False). Else "
                "convert it before you save."
            )
        if hasattr(type(tensor), "__tensor_flatten__"):
            raise TypeError(
                f"{name} is a {type(tensor).__name__}, a quantised or wrapped tensor, which fastff neither saves nor "
                "loads. Save the model before it is quantised, and quantise it again after loading."
            )
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def compare(model: nn.Module, header: Header) -> None:
    """Raise unless a file of weights has the tensors of an operated model, all of them and no others."""
    wanted = tensors_of(model)
    wrong = [f"{name} is missing" for name in wanted if name not in header]
    wrong += [f"{name} is not in the model, or tied to another tensor there" for name in header if name not in wanted]
    for name, tensor in wanted.items():
        kind, shape = header.get(name, ("", tuple(tensor.shape)))
        if shape != tuple(tensor.shape):
            wrong.append(f"{name} has the shape {shape}, in the model {tuple(tensor.shape)}")
        elif name in header and not (
            kind in FLOATS if tensor.is_floating_point() else DTYPES.get(kind) == tensor.dtype
        ):
            wrong.append(f"{name} has the dtype {kind}, in the model {tensor.dtype}")
    for path, layer in model.named_modules():
        kinds = {header[f"{path}.{n}"][0] for n in getattr(layer, "_parameters", ()) if f"{path}.{n}" in header}
        if isinstance(layer, FFF) and len(kinds) > 1:
            wrong.append(f"{path}, an FFF, has parameters of several dtypes: {', '.join(sorted(kinds))}")
    if wrong:
        more = f"\n  and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ValueError("the weights do not fit the model:\n  " + "\n  ".join(wrong[:8]) + more)


def check_sizes(specification: Specification, header: Header) -> None:
    """Raise unless a file of weights has the tensors of every FFF in a checked specification, by name and shape. A
    layer that it has not is not built: a tree of depth 40 is one line of JSON, and takes terabytes."""
    for entry in specification:
        path, activation = layer_path(entry), entry["activation"]
        options = {key: entry[key] for key in ("bias", *SIZES)}
        try:
            layer = FFF(**options, activation=activation if isinstance(activation, str) else "relu", device="meta")
        except MemoryError as error:
            raise ValueError(f"the specification is wrong at {path}: {error}") from None
        for name, tensor in layer.state_dict(prefix=f"{path}.").items():
            found = header.get(name, (None, None))[1]
            if found != tuple(tensor.shape):
                what = f"the shape {found}" if found else "none"
                raise ValueError(f"the specification wants {name} of shape {tuple(tensor.shape)}; the file has {what}.")
