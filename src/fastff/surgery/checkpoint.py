"""save and load_: a converted model in a directory, as one safetensors file, never as a pickle.

fastff.safetensors has every tensor of the state dict once and, in its header, a note: the version of this format and
the surgery's specification. The file may come from somebody else. So nothing is built before the note is checked, by
itself and against the names and shapes in the header, and nothing is changed before the converted model is compared
with the header, tensor by tensor.

The file's name is not the one that Hugging Face's from_pretrained looks for: that would load the tensors that it knows
and fill the dense blocks at random.
"""

import os
import warnings
from collections import Counter
from typing import Any

from torch import nn

from ..layer import FFF, mark_fitted
from ..regions.edit_state import edits_state, load_edits_
from .apply import commit, plan
from .files import check_directory
from .history import HISTORY, history_of, layer_path
from .operable import check_model
from .quantize import as_saved_
from .read import check_temperature, open_weights
from .specification import Specification, check_specification, module_at
from .undo import check_memory, unchanged_on_error
from .weights_check import check_sizes, check_weights, tensors_of
from .write import write

VERSION = 2


def save(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Write a converted model into a directory, as `fastff.safetensors`: the state dict, what `replace_` did, and the
    records of edits.

    One rename puts the file in place, so the directory always has either the old save or the new one. For Hugging Face
    models use `fastff.integrations.transformers.save_pretrained`, which saves the config too.
    """
    check_directory(directory)
    note = note_of(model)
    _check_layers(model, note["specification"])
    write(directory, tensors_of(model) | edits_state(model), note)


def load_(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Load what `save` wrote into a fresh `model`: the same surgery, then the weights, strictly.

    Build the model with the same code as the saved one. Its weights do not matter. Floating-point tensors take the
    saved dtype and stay on their device. An error, or Ctrl-C, leaves the model unchanged.
    """
    check_model(model)
    if operated := [path or "the model itself" for path, part in model.named_modules() if vars(part).get(HISTORY)]:
        raise ValueError(
            f"{type(model).__name__} has been converted already ({_some(operated)}). Pass a fresh model, built by "
            "the same code."
        )
    with unchanged_on_error(model, data=True), open_weights(directory) as saved:
        specification = check_note(saved.note, str(saved.path))
        check_sizes(specification, saved.header)
        commit(plan(model, specification))
        as_saved_(model, saved.header)
        check_weights(model, saved.header)
        for own, tensor in saved.tensors(model):
            own.data = tensor
        load_edits_(model, saved.edits())
        mark_fitted(model)


def note_of(model: nn.Module) -> dict[str, Any]:
    """The note to save with a converted model: format version and specification."""
    check_model(model, saving=True)
    check_memory(model)
    specification = history_of(model)
    layers = [path or "the model itself" for path, module in model.named_modules() if isinstance(module, FFF)]
    if not specification and layers:
        raise ValueError(
            f"{type(model).__name__} has FFF layers ({_some(layers)}), but replace_ and apply_ were not called on it. "
            "If they were called on a larger model, save that one, or call replace_ on this part. If the model's own "
            "code creates the layers, save model.state_dict()."
        )
    if not specification:
        raise ValueError(
            f"{type(model).__name__} has had no surgery by replace_ or apply_. Save it the usual way: "
            "model.save_pretrained(directory) for Hugging Face models, model.state_dict() for others."
        )
    check_specification(specification)
    for path, layer in model.named_modules():
        if isinstance(layer, FFF) and not layer.temperature_tensor.is_meta:
            check_temperature(f"{path}.temperature_tensor", layer.temperature_tensor)
    return {"version": VERSION, "specification": specification}


def _check_layers(model: nn.Module, specification: Specification) -> None:
    """Raise or warn about FFF layers that load_ would not create."""
    known = {module_at(model, layer_path(entry)) for entry in specification}
    places = Counter(child for module in model.modules() for child in module._modules.values())
    shared = [entry["name"] for entry in specification if places[module_at(model, entry["name"])] > 1]
    if shared:
        raise ValueError(
            f"{_some(shared)} was replaced in one place and is now used in several, which load_ cannot repeat."
        )
    others = [path for path, module in model.named_modules() if isinstance(module, FFF) and module not in known]
    if others:
        warnings.warn(
            f"no surgery on this model created the FFF layers {_some(others)}: load_ needs a fresh model that already "
            "has them. If they were added by hand, or by a surgery on a larger model, this save will not load.",
            stacklevel=3,
        )


def check_note(note: Any, where: str) -> Specification:
    """The specification in a note, checked as far as possible without a model."""
    if not isinstance(note, dict) or "version" not in note:
        raise ValueError(f"{where} has no note of a surgery. fastff did not write it.")
    if type(note["version"]) is not int or note["version"] != VERSION:
        raise ValueError(
            f"{where} has format version {note['version']!r:.80}; this fastff reads version {VERSION}. A newer fastff "
            "may read it."
        )
    if not {"version", "specification"} <= set(note) <= {"version", "specification", "config", "generation_config"}:
        raise ValueError(f"{where} has a note that fastff did not write: {', '.join(note)}.")
    if not note["specification"]:
        raise ValueError(f"{where} has an empty specification.")
    check_specification(note["specification"])
    return note["specification"]


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
