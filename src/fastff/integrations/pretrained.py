"""save_pretrained, push_to_hub and from_pretrained for Hugging Face models with FFF layers.

    fastff.replace_(model, depth=4)
    save_pretrained(model, "directory")
    model = from_pretrained("directory")

The config is in the note in the header of fastff.safetensors, so one file decides; the rest is as in
surgery/checkpoint.py. config.json and generation_config.json beside it are for people and other programs, and are not
read. Loading goes config -> model -> surgery -> weights: first on the meta device, where a model has shapes and no
memory, and then, if every tensor in the file fits, on the CPU. configs.py checks the config.
"""

import copy
import json
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedModel

from ..layer import mark_fitted
from ..regions.edit_state import edits_state, load_edits_
from ..surgery.apply import apply_
from ..surgery.checkpoint import check_note, note_of
from ..surgery.files import WEIGHTS, Header, check_directory, kind_of
from ..surgery.quantize import as_saved_
from ..surgery.read import open_weights
from ..surgery.specification import Specification
from ..surgery.weights_check import check_sizes, check_weights, tensors_of
from ..surgery.write import write
from ..switches import PROBING
from .configs import DTYPES, check_config, check_generation, cleaned, guarded
from .hub import fetch, upload

CONFIG, GENERATION = "config.json", "generation_config.json"
_OTHER_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin", "*.index.json", "adapter_model.*")
# transformers looks for a file of this name, and prints the name when it is missing.
_HINT = "fastff wrote this directory: load it with fastff.integrations.transformers.from_pretrained"


def save_pretrained(model: PreTrainedModel, directory: str | os.PathLike[str]) -> None:
    """Write a Hugging Face model that `replace_` has converted into a directory, for `from_pretrained` below.

    fastff.safetensors has everything that is loaded. One rename puts it in place, so the directory always has either
    the old save or the new one. config.json and generation_config.json are for other programs; a tokenizer may be saved
    beside them. Before anything is written, the model is checked to load again.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"expected a PreTrainedModel; got {type(model).__name__}. For other models use fastff.save; for a PEFT "
            "model pass model.merge_and_unload(), or save the adapters alone with model.save_pretrained."
        )
    check_directory(directory)
    note, tensors = note_of(model), tensors_of(model)
    header = {name: (kind_of(tensor), tuple(tensor.shape)) for name, tensor in tensors.items()}
    name = type(model).__name__
    if getattr(transformers, name, None) is not type(model):
        name = f"{type(model).__module__}.{name}"  # for people: loading does not use it
    written = json.loads(model.config.to_json_string())
    written |= {"architectures": [name], "dtype": str(model.dtype).removeprefix("torch.")}
    config = cleaned(written, type(model.config))
    if others := [path.name for pattern in _OTHER_WEIGHTS for path in Path(directory).glob(pattern)]:
        raise FileExistsError(
            f"{os.fspath(directory)} has weights of another model: {', '.join(others[:4])}. Choose an empty directory: "
            "transformers would load those under the new config.json."
        )
    check_config(config, type(model.config), header)
    try:
        check_weights(_build(type(model), config, note["specification"], "meta", header), header)
    except ValueError as error:
        raise ValueError(
            f"{type(model).__name__} would not load again: a fresh model from its config, after the same surgery, "
            f"differs. Was the model changed in another way too? {error}"
        ) from None
    generation = None
    if model.can_generate() and model.generation_config is not None:
        generation = json.loads(model.generation_config.to_json_string())
        check_generation(generation)
    note |= {"config": config, "generation_config": generation}
    tensors |= edits_state(model)
    write(directory, tensors, note, {CONFIG: written | {"transformers_weights": _HINT}, GENERATION: generation})


def push_to_hub(
    model: PreTrainedModel,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    create_pr: bool | None = None,
    commit_message: str = "Upload a model with FFF layers",
) -> str:
    """Upload what `save_pretrained` writes to a repository on the Hub, for `from_pretrained(repo_id)`.

    The arguments are huggingface_hub's, and so is the result: the address of the commit. The repository has no code.
    """
    options: dict[str, Any] = {"private": private, "token": token, "revision": revision, "create_pr": create_pr}
    return upload(lambda folder: save_pretrained(model, folder), repo_id, commit_message=commit_message, **options)


def from_pretrained(
    directory: str | os.PathLike[str],
    model_class: Any = None,
    *,
    dtype: torch.dtype | str = "auto",
    device_map: Any = None,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
) -> Any:
    """The model that `save_pretrained` wrote, in evaluation mode.

    Args:
        directory: where it is; or a repository's name on the Hub, such as "user/model", which is downloaded first.
        model_class: by default the class that was saved, if transformers has it. Otherwise pass the class itself, or
            one of transformers' Auto classes.
        dtype: of the floating-point tensors, such as torch.bfloat16 or "bfloat16"; "auto" keeps the saved one.
        device_map: one device for the whole model, such as "cuda:0" or 0; by default the CPU.
        revision, token, cache_dir, local_files_only: for a repository, as in huggingface_hub.snapshot_download.

    Loading is strict, opens no connection for a directory, and runs no code from the files; an error says what does not
    fit. While the model is built, the Hub is offline for the whole process.
    """
    check_directory(directory)
    wanted, device = _dtype(dtype), _device(device_map)
    where: dict[str, Any] = {"revision": revision, "token": token, "cache_dir": cache_dir}
    folder = fetch(directory, [WEIGHTS], local_files_only=local_files_only, **where)
    with open_weights(folder) as saved:
        specification, header = check_note(saved.note, str(saved.path)), saved.header
        config, generation = saved.note.get("config"), saved.note.get("generation_config")
        if not isinstance(config, dict):
            raise ValueError(
                f"{saved.path} has no config: fastff.save wrote it. Build the model, and call fastff.load_(model, "
                f"{os.fspath(directory)!r})."
            )
        check_sizes(specification, header)
        chosen = _class(config) if model_class is None else model_class
        check_config(config, _config_class(chosen, config), header)
        if generation is not None:
            check_generation(generation)
        try:
            shapes = _build(chosen, config, specification, "meta", header)
            check_weights(shapes, header)
        except ValueError as error:
            if model_class is None:
                raise
            names = str(config.get("architectures"))[:80]
            raise ValueError(
                f"the save does not fit {model_class.__name__}: it has {names}. Pass that class, or omit model_class. "
                f"{error}"
            ) from error
        _check_buffers(shapes)
        config = config if wanted is None else config | {"dtype": wanted}
        model = _build(chosen, config, specification, "cpu", header)
        for own, tensor in saved.tensors(model):
            own.data = tensor if wanted is None else tensor.to(own.dtype)
        load_edits_(model, saved.edits())
        mark_fitted(model)
    if generation is not None and model.can_generate():
        model.generation_config = GenerationConfig.from_dict(generation)
    model.name_or_path = os.fspath(directory)  # which PEFT writes into its adapters
    return model.to(device).eval()


def _dtype(dtype: Any) -> str | None:
    """The name of a dtype; None for the saved one."""
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, str | torch.dtype) else None
    if name != "auto" and name not in DTYPES:
        raise ValueError(f'dtype must be "auto", for the saved one, or one of {", ".join(DTYPES)}; got {dtype!r}.')
    return None if name == "auto" else name


def _device(device_map: Any) -> torch.device:
    """The device of a device_map; raises unless it is one for the whole model."""
    place: Any = "cpu" if device_map is None else device_map
    place = place[""] if isinstance(place, dict) and set(place) == {""} else place
    try:
        if isinstance(place, dict):
            raise TypeError(f"it maps {', '.join(map(str, place))}")
        device = torch.device(place)
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError) as error:
        told = str(error).splitlines()[0]
        raise ValueError(
            f'device_map must be one device for the whole model, such as "cpu", "cuda:0", 0, torch.device("cuda") or '
            f'{{"": 0}}; got {device_map!r} ({told}). To spread a model, load it and call accelerate.dispatch_model.'
        ) from None
    if device.type == "meta":
        raise ValueError("device_map must not be the meta device, which holds no weights. Pass a device with memory.")
    return device


def _build(model_class: Any, config: dict[str, Any], specification: Specification, device: str, header: Header) -> Any:
    """A fresh model from a config, after surgery; random generators are unchanged. On the meta device, building stops
    when the model has far more modules than a file with that header can fill."""
    kind, values = _config_class(model_class, config), copy.deepcopy(config)
    limit = len(header) if device == "meta" else None  # the real one follows one that was compared
    with PROBING, torch.random.fork_rng([]):  # generators and the Hub's switch are global
        try:
            with torch.device(device), guarded(limit):
                if issubclass(model_class, PreTrainedModel):
                    model = model_class._from_config(kind.from_dict(values))
                else:
                    model = model_class.from_config(kind.from_dict(values), trust_remote_code=False)
        except Exception as error:  # foreign code, on values that may be anything
            told = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ValueError(f"the config does not make a {model_class.__name__} ({told}).") from error
        apply_(model, specification)
        as_saved_(model, header)
    return model


def _config_class(model_class: Any, config: dict[str, Any]) -> Any:
    """The config class for a model class, or for one of transformers' Auto classes."""
    written = config.get("model_type")
    if isinstance(model_class, type) and issubclass(model_class, PreTrainedModel):
        kind: Any = model_class.config_class
        if kind is None or written != kind.model_type:
            raise ValueError(f"the config is for model type {written!r:.80}; {model_class.__name__} has another.")
        return kind
    if not isinstance(model_class, type) or not hasattr(model_class, "from_config"):
        raise TypeError(
            f"model_class must be a model class of transformers, or an Auto class; got {model_class!r:.80}."
        )
    if not isinstance(written, str) or written not in CONFIG_MAPPING:
        raise ValueError(
            f"the config is for model type {written!r:.80}, which transformers does not know. Pass the model class."
        )
    return CONFIG_MAPPING[written]


def _class(config: dict[str, Any]) -> type[PreTrainedModel]:
    """The model class of transformers that a config names."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) else None
    found = getattr(transformers, name, None) if name is not None and name.isidentifier() else None
    if not isinstance(found, type) or not issubclass(found, PreTrainedModel):
        raise ValueError(
            f"architectures in the config must be one model class of transformers; got {names!r:.80}. Pass the class: "
            "from_pretrained(directory, MyModel)."
        )
    return found


def _check_buffers(model: PreTrainedModel) -> None:
    """Raise if the buffers that are not in the file, and that the model computes, would be huge."""
    saved = model.state_dict()
    sizes = {name: buffer.nbytes for name, buffer in model.named_buffers() if name not in saved}
    limit = 2**26 + sum(tensor.nbytes for tensor in saved.values())
    if sum(sizes.values()) > limit:
        most = max(sizes, key=lambda name: sizes[name])
        raise ValueError(f"the config asks for {most} of {sizes[most]} bytes, which the file does not contain.")
