"""save and load_: an operated model in a directory, as JSON and safetensors, never as a pickle.

fastff.safetensors has every tensor of the state dict once; a JSON file has a note: the version of this format, a token
that the weights carry too, and the surgery's specification. Both may have been written by somebody else. So nothing is
built before the note has been checked, by itself and against the names and shapes in the file of weights, and nothing
is changed before the operated model has been compared with that file, tensor by tensor.

The weights do not go by the name that Hugging Face's from_pretrained looks for: it would take the tensors that it
knows, draw those of the dense blocks at random, and go on.
"""

import json
import os
import secrets
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..hardening import mark_fitted
from ..layer import FFF
from .replace import check_model, commit, plan
from .specification import SIZES, Specification, check_specification, layer_path, module_at, remembered

VERSION = 1
WEIGHTS = "fastff.safetensors"
NOTE = "fastff.json"
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_OTHERS = {"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32}
_DTYPES = _FLOATS | _OTHERS | {"I64": torch.int64}


def save(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Write an operated model into a directory: `fastff.json` says what `replace_` did, `fastff.safetensors` has the
    state dict. An older save in that directory stays as it was until the new one is complete.

    For Hugging Face models there is `fastff.integrations.transformers.save_pretrained`, which keeps the config too.
    """
    check_directory(directory)
    note = note_of(model)
    _check_layers(model, note["specification"])
    write(directory, tensors_of(model), note, {NOTE: note})


def load_(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Make a fresh `model` the one that `save` wrote: the same surgery, then the weights, strictly.

    The model is built by the same code as the saved one was. Its weights may be anything; floating-point tensors take
    the dtype that they were saved in, and stay on their device. An error leaves the model as it was.
    """
    note = read_json(Path(directory) / NOTE)
    specification = check_note(note, NOTE)
    with open_weights(directory, note) as weights:
        check_sizes(specification, weights.header)
        undo = commit(plan(model, specification))
        try:
            compare(model, weights.header)
            for own, tensor in [*weights.tensors(model)]:  # all are read before the first is set
                own.data = tensor
            mark_fitted(model)
        except BaseException:
            commit(undo)
            raise


def note_of(model: nn.Module) -> dict[str, Any]:
    """What to write down about an operated model."""
    check_model(model)
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
    return {"version": VERSION, "token": secrets.token_hex(16), "specification": specification}


def check_directory(directory: str | os.PathLike[str]) -> None:
    """Raise for a path that Python takes for the current directory, and nobody else does."""
    if not os.fspath(directory):
        raise ValueError('the path of the directory is empty. Pass "." for the current directory.')


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
    if set(note) != {"version", "token", "specification"} or not isinstance(note["token"], str):
        raise ValueError(f"{where} has a note of a surgery that fastff did not write: {', '.join(map(str, note))}.")
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
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def kind_of(tensor: Tensor) -> str:
    """What safetensors calls the dtype of a tensor; "" if it is not saved."""
    return next((kind for kind, dtype in _DTYPES.items() if dtype == tensor.dtype), "")


def compare(model: nn.Module, header: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Raise unless a file of weights has the tensors of an operated model, all of them and no others."""
    wanted = tensors_of(model)
    wrong = [f"{name} is missing" for name in wanted if name not in header]
    wrong += [f"{name} is not in the model, or tied to another tensor there" for name in header if name not in wanted]
    for name, tensor in wanted.items():
        kind, shape = header.get(name, ("", tuple(tensor.shape)))
        if shape != tuple(tensor.shape):
            wrong.append(f"{name} has the shape {shape}, in the model {tuple(tensor.shape)}")
        elif name in header and not (
            kind in _FLOATS if tensor.is_floating_point() else _DTYPES.get(kind) == tensor.dtype
        ):
            wrong.append(f"{name} has the dtype {kind}, in the model {tensor.dtype}")
    for path, layer in model.named_modules():
        kinds = {header[f"{path}.{n}"][0] for n in getattr(layer, "_parameters", ()) if f"{path}.{n}" in header}
        if isinstance(layer, FFF) and len(kinds) > 1:
            wrong.append(f"{path}, an FFF, has parameters of several dtypes: {', '.join(sorted(kinds))}")
    if wrong:
        more = f"\n  and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ValueError("the weights do not fit the model:\n  " + "\n  ".join(wrong[:8]) + more)


class Saved:
    """An open file of weights: what it has, and the tensors themselves, read when asked for."""

    def __init__(self, file: Any) -> None:
        self.file = file
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, it is no dict
        self.header = {name: (s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}

    def tensors(self, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """Each tensor of a model that was compared with the file, and what its data is to be, on its device. What is
        tied stays tied."""
        own = model.state_dict(keep_vars=True)
        for name in self.header:
            # A copy: the tensor itself lies in the file, which may be written again.
            yield own[name], self.file.get_tensor(name).clone().to(own[name].device)


@contextmanager
def open_weights(directory: str | os.PathLike[str], note: Mapping[str, Any]) -> Iterator[Saved]:
    """The weights in a directory, if they are whole, and those that the note was written with."""
    safetensors = _safetensors()
    path = Path(directory) / WEIGHTS
    if not path.is_file():
        others = sorted(
            p.name for p in Path(directory).iterdir() if p.suffix in (".bin", ".pt", ".pth", ".safetensors")
        )
        there = f" There is {', '.join(others[:4])}; fastff reads no other file, and never a pickle." if others else ""
        raise FileNotFoundError(f"{path} is not there.{there}")
    try:
        opened = safetensors.safe_open(path, "pt")
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{path} is not a whole safetensors file: it is truncated, or of another kind ({error})."
        ) from None
    with opened as file:
        if (file.metadata() or {}).get("fastff") != note["token"]:
            raise ValueError(
                f"{path} and the note of the surgery are not of the same save: one of them was written later, or "
                "copied from elsewhere. Save the model again."
            )
        yield Saved(file)


def check_sizes(specification: Specification, header: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
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


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file with one object in it and no name twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a name stands in it twice")
        return dict(pairs)

    try:
        value = json.loads(path.read_text("utf-8"), object_pairs_hook=once)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is not there: {path.parent} is no directory that fastff wrote.") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON as fastff writes it: {error}.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object; got a {type(value).__name__}.")
    return value


def write(
    directory: str | os.PathLike[str], tensors: Mapping[str, Tensor], note: Mapping[str, Any], texts: Mapping[str, Any]
) -> None:
    """Write weights and JSON files: all under other names first, then renamed, the last of `texts` at the end."""
    _safetensors()
    from safetensors.torch import save_file

    folder = Path(directory)
    strange = [name for name, tensor in tensors.items() if tensor.is_meta or not kind_of(tensor)]
    if strange:
        raise ValueError(f"cannot save {', '.join(strange[:8])}: on the meta device, or of a dtype that is not saved.")
    written, whole, storages = [], {}, set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        # The file has no views: two tensors that lie in one storage, and are not tied, are written as two.
        storage = tensor.untyped_storage()
        if tensor.numel() and (storage.data_ptr() in storages or storage.nbytes() != tensor.nbytes):
            tensor = tensor.clone()
        storages.add(tensor.untyped_storage().data_ptr())
        whole[name] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    names = [WEIGHTS, *texts]
    temporary = {name: folder / f".{name}.{note['token'][:8]}.tmp" for name in names}
    try:
        save_file(whole, temporary[WEIGHTS], metadata={"format": "pt", "fastff": note["token"]})
        for name, value in texts.items():
            temporary[name].write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", "utf-8")
        for path in temporary.values():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        for name in names:
            os.replace(temporary[name], folder / name)
            written.append(name)
    finally:
        for name in names:
            if name not in written:
                temporary[name].unlink(missing_ok=True)


def _safetensors() -> Any:
    try:
        import safetensors
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            'saving and loading need safetensors: pip install "fastff[safetensors]"', name="safetensors"
        ) from None
    return safetensors
