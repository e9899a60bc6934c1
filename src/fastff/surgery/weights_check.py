"""Compare a file of weights with a model: the tensors to save, and the checks before any of them is loaded."""

import torch
from torch import Tensor, nn

from ..layer import FFF
from .files import DTYPES, FLOATS, Header, kind_of
from .history import layer_path
from .specification import SIZES, Specification


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The state dict, with tied tensors once, under the first name."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} in the state dict is a {type(tensor).__name__}; only tensors can be saved.")
        if tensor.is_nested or tensor.layout is not torch.strided or not kind_of(tensor):
            layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            saved = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES.values())
            raise ValueError(
                f"{name} is a {tensor.dtype} tensor, {layout}; fastff saves strided tensors of {saved}. If the model "
                "can recompute it, leave it out of the state dict: register_buffer(..., persistent=False). Otherwise "
                "convert it before saving."
            )
        if hasattr(type(tensor), "__tensor_flatten__"):
            raise TypeError(
                f"{name} is a {type(tensor).__name__}, a quantised or wrapped tensor, which fastff cannot save. Save "
                "the model before quantising it, and quantise it again after loading."
            )
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def check_weights(model: nn.Module, header: Header) -> None:
    """Raise unless a file of weights has exactly the tensors of a converted model."""
    wanted = tensors_of(model)
    wrong = [f"{name} is missing" for name in wanted if name not in header]
    wrong += [
        f"{name} is not in the model, or is tied to another tensor there" for name in header if name not in wanted
    ]
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
        if isinstance(layer, FFF) and len(kinds - {"I8"}) > 1:  # int8 leaves were compared above
            wrong.append(f"{path}, an FFF, has parameters of several dtypes: {', '.join(sorted(kinds))}")
    if wrong:
        more = f"\n  and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ValueError("the weights do not fit the model:\n  " + "\n  ".join(wrong[:8]) + more)


def check_sizes(specification: Specification, header: Header) -> None:
    """Raise unless a file of weights has the tensors of every FFF in a checked specification, by name and shape.

    Layers missing from the file are never built: a tree of depth 40 is one line of JSON, and takes terabytes.
    """
    for entry in specification:
        path, activation = layer_path(entry), entry["activation"]
        options = {key: entry[key] for key in ("bias", *SIZES)}
        try:
            layer = FFF(**options, activation=activation if isinstance(activation, str) else "relu", device="meta")
        except MemoryError as error:
            raise ValueError(f"the specification is invalid at {path}: {error}") from None
        for name, tensor in layer.state_dict(prefix=f"{path}.").items():
            found = header.get(name, (None, None))[1]
            if found != tuple(tensor.shape):
                what = f"the shape {found}" if found else "none"
                raise ValueError(f"the specification wants {name} of shape {tuple(tensor.shape)}; the file has {what}.")
