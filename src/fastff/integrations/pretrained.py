"""save_pretrained and from_pretrained for Hugging Face models with FFF layers.

    fastff.replace_(model, depth=4)
    save_pretrained(model, "directory")
    model = from_pretrained("directory")

config.json is the model's own, with the note of the surgery under "fastff"; the rest is as in surgery/checkpoint.py.
The way back is config -> model -> surgery -> weights. It is gone on the meta device first, where a model has shapes
and no memory; only when every tensor in the file fits is it gone again for good.
"""

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedModel

from ..hardening import mark_fitted
from ..surgery.checkpoint import (
    check_directory,
    check_note,
    check_sizes,
    compare,
    kind_of,
    note_of,
    open_weights,
    read_json,
    tensors_of,
    write,
)
from ..surgery.replace import apply_
from ..surgery.specification import Specification

CONFIG, GENERATION = "config.json", "generation_config.json"
_OTHER_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin", "*.index.json", "adapter_model.*")
# What makes transformers fetch code or weights from elsewhere, or build something else than the class says.
_FOREIGN = ("auto_map", "custom_pipelines", "quantization_config", "use_pretrained_backbone")


def save_pretrained(model: PreTrainedModel, directory: str | os.PathLike[str]) -> None:
    """Write a Hugging Face model that `replace_` has operated on into a directory, for `from_pretrained` below.

    config.json, with the surgery in it, generation_config.json and fastff.safetensors are written; a tokenizer may save
    itself beside them. An older save there stays as it was until the new one is complete. That the model will load is
    checked before anything is written.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"expected a PreTrainedModel; got {type(model).__name__}. For other models there is fastff.save."
        )
    check_directory(directory)
    note, tensors = note_of(model), tensors_of(model)
    config = json.loads(model.config.to_json_string())
    config = {key: value for key, value in config.items() if key not in ("auto_map", "custom_pipelines")}
    name = type(model).__name__
    if getattr(transformers, name, None) is not type(model):
        name = f"{type(model).__module__}.{name}"  # for the reader: it is not looked for when the model is loaded
    config |= {"architectures": [name], "dtype": str(model.dtype).removeprefix("torch.")}
    if others := [path.name for pattern in _OTHER_WEIGHTS for path in Path(directory).glob(pattern)]:
        raise FileExistsError(
            f"{os.fspath(directory)} has weights of another model: {', '.join(others[:4])}. Choose an empty directory: "
            "transformers would load those under the new config.json."
        )
    _check_config(config)
    header = {name: (kind_of(tensor), tuple(tensor.shape)) for name, tensor in tensors.items()}
    try:
        compare(_build(type(model), config, note["specification"], "meta"), header)
    except ValueError as error:
        raise ValueError(
            f"{type(model).__name__} would not load again: a fresh one of its config, operated on in the same way, is "
            f"something else. Was it changed in another way too? {error}"
        ) from None
    texts = {CONFIG: config | {"fastff": note}}
    if model.can_generate() and model.generation_config is not None:
        texts = {GENERATION: json.loads(model.generation_config.to_json_string())} | texts
    write(directory, tensors, note, texts)


def from_pretrained(directory: str | os.PathLike[str], model_class: Any = None) -> Any:
    """The model that `save_pretrained` wrote, in evaluation mode, on the CPU.

    Args:
        model_class: by default the class that was saved, which must be one of transformers. For others pass the class
            itself; one of transformers' Auto classes is welcome too.

    Loading is strict, and runs no code that comes with the files: an error says what does not fit.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is not a directory. For a model on the Hub, fetch it first: huggingface_hub.snapshot_download."
        )
    config = read_json(folder / CONFIG)
    if "fastff" not in config:
        raise ValueError(f"{folder / CONFIG} has no surgery in it. Load it with transformers' own from_pretrained.")
    note = config.pop("fastff")
    specification = check_note(note, CONFIG)
    _check_config(config)
    chosen = _class(config) if model_class is None else model_class
    with open_weights(folder, note) as weights:
        check_sizes(specification, weights.header)
        _check_counts(config, len(weights.header))
        shapes = _build(chosen, config, specification, "meta")
        compare(shapes, weights.header)
        _check_buffers(shapes)
        values = read_json(folder / GENERATION) if (folder / GENERATION).exists() else None
        generation = None if values is None else GenerationConfig.from_dict(values)
        model = _build(chosen, config, specification, "cpu")
        for own, tensor in weights.tensors(model):
            own.data = tensor
        mark_fitted(model)
    if generation is not None and model.can_generate():
        model.generation_config = generation
    return model.eval()


def _build(model_class: Any, config: dict[str, Any], specification: Specification, device: str) -> Any:
    """A fresh model of a config, operated on; the random generators are left as they were."""
    kind, values = _config_class(model_class, config), copy.deepcopy(config)
    with torch.random.fork_rng([]):
        try:
            with torch.device(device):
                if issubclass(model_class, PreTrainedModel):
                    model = model_class._from_config(kind.from_dict(values))
                else:
                    model = model_class.from_config(kind.from_dict(values), trust_remote_code=False)
        except Exception as error:  # transformers' own code, on values that may be anything
            told = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ValueError(f"{CONFIG} does not make a {model_class.__name__} ({told}).") from error
        apply_(model, specification)
    return model


def _config_class(model_class: Any, config: dict[str, Any]) -> Any:
    """The class of a config for a class of models, or for one of transformers' Auto classes."""
    written = config.get("model_type")
    if isinstance(model_class, type) and issubclass(model_class, PreTrainedModel):
        kind: Any = model_class.config_class
        if kind is None or written != kind.model_type:
            raise ValueError(f"{CONFIG} is that of a {written!r:.80}, which {model_class.__name__} is not.")
        return kind
    if not isinstance(model_class, type) or not hasattr(model_class, "from_config"):
        raise TypeError(
            f"model_class must be a model class of transformers, or an Auto class; got {model_class!r:.80}."
        )
    if not isinstance(written, str) or written not in CONFIG_MAPPING:
        raise ValueError(
            f"{CONFIG} is that of a {written!r:.80}, which transformers does not know. Pass the model class."
        )
    return CONFIG_MAPPING[written]


def _class(config: dict[str, Any]) -> type[PreTrainedModel]:
    """The class of transformers that a config names."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) else None
    found = getattr(transformers, name, None) if name is not None and name.isidentifier() else None
    if not isinstance(found, type) or not issubclass(found, PreTrainedModel):
        raise ValueError(
            f"{CONFIG} names {names!r:.80} as architectures, where one model class of transformers is expected. Pass "
            "the class: from_pretrained(directory, MyModel)."
        )
    return found


def _check_config(config: dict[str, Any]) -> None:
    """Raise where a config asks for more than the class that it is for."""
    for key, value in _items(config):
        if (key in _FOREIGN and value) or (key.endswith("_implementation") and value is not None):
            raise ValueError(
                f"{CONFIG} has {key} = {value!r:.80}, which may fetch code or weights from elsewhere, or change what "
                "the model is made of; fastff neither saves nor loads such models."
            )
    if config.get("dtype") not in ("float64", "float32", "float16", "bfloat16"):
        raise ValueError(f"{CONFIG} must have a floating-point dtype; got {config.get('dtype')!r:.80}.")


def _check_counts(config: dict[str, Any], tensors: int) -> None:
    """Raise where a config asks for many more layers than a file of so many tensors can have: building them takes time,
    even on the meta device."""
    for key, value in _items(config):
        if (
            any(word in key for word in ("layer", "block", "expert"))
            and isinstance(value, int)
            and value > 1000 + tensors
        ):
            raise ValueError(f"{CONFIG} has {key} = {value}, more than the file has tensors ({tensors}).")


def _check_buffers(model: PreTrainedModel) -> None:
    """Raise where the tensors that are computed anew, and are in no file, would be huge."""
    saved = model.state_dict()
    sizes = {name: buffer.nbytes for name, buffer in model.named_buffers() if name not in saved}
    limit = 2**30 + sum(tensor.nbytes for tensor in saved.values())
    if sum(sizes.values()) > limit:
        most = max(sizes, key=lambda name: sizes[name])
        raise ValueError(f"{CONFIG} asks for {most} of {sizes[most]} bytes, which is not in the file of weights.")


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """All names in JSON, at any depth, and what they stand for."""
    if isinstance(value, dict):
        yield from value.items()
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _items(inner)
