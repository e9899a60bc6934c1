"""Run data through a model and see what reaches its FFF layers.

`data` is a batch or something that yields batches. A batch is a tensor, a mapping (passed as keywords), or a tuple or
list whose first element is the input, as data sets yield (input, target). A DataLoader or any other iterable yields
batches.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .interrupts import guarded
from .layer import FFF
from .switches import eager


def batches(data: Any) -> Iterable[Any]:
    """The batches in `data`."""
    check_kind(data)
    if isinstance(data, list) and _holds_batches(data):
        return data
    if isinstance(data, Tensor | Mapping | tuple | list):
        return [data]
    if isinstance(data, Iterable):
        return data
    raise TypeError(f"data must be a tensor, a batch or an iterable of batches; got {type(data).__name__}.")


def check_kind(data: Any) -> None:
    """Raise for arrays and texts, for lists of them, and for a batch of them by name: no inputs of a model of torch."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            kind = type(value[0] if isinstance(value, list) and value else value)
            if issubclass(kind, str | bytes) or (hasattr(kind, "__array__") and not issubclass(kind, Tensor)):
                raise TypeError(f"data[{key!r}] must be a tensor; got {type(value).__name__} of {kind.__name__}.")
            if isinstance(value, list) and issubclass(kind, int | float | list):
                raise TypeError(
                    f'data[{key!r}] must be a tensor; got a list. Pass return_tensors="pt" to the tokenizer.'
                )
        return
    first = next(iter(data), None) if isinstance(data, tuple | list) else data
    what = "a list of " if first is not data else ""
    if isinstance(first, str | bytes):
        raise TypeError(
            f"data must be tensors; got {what}{type(first).__name__}. Pass tokenised batches, such as "
            'tokenizer(texts, padding=True, return_tensors="pt").'
        )
    if hasattr(first, "__array__") and not isinstance(first, Tensor):  # numpy, pandas
        got = f"{what}{type(first).__name__}"
        raise TypeError(f"data must be tensors; got {got}. Pass torch.from_numpy(array), in the dtype of the model.")


def _holds_batches(data: list[Any]) -> bool:
    """Whether a list is a list of batches, and not a batch [input, target] as a DataLoader yields it.

    It is if its elements are batches of several parts, or inputs of one kind: floating point and of the same shape but
    for their number.
    """
    if not data:
        raise ValueError("data is an empty list: there is no sample in it.")
    if not isinstance(data[0], Tensor):
        return isinstance(data[0], Mapping | tuple | list)
    first = data[0]
    return first.is_floating_point() and all(
        isinstance(x, Tensor) and x.dtype == first.dtype and x.shape[1:] == first.shape[1:] and x.dim() for x in data
    )


def feed(model: nn.Module, batch: Any) -> Any:
    """What a model answers to a batch, on the device where the model is."""
    check_kind(batch)
    first = next(model.parameters(), None)
    if isinstance(batch, Mapping):
        moved = {k: v.to(first.device) if isinstance(v, Tensor) and first is not None else v for k, v in batch.items()}
        return model(**moved)
    x = batch[0] if isinstance(batch, tuple | list) else batch
    return model(x.to(first.device) if isinstance(x, Tensor) and first is not None else x)


@guarded
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """The model in evaluation mode, without gradients and not compiled; then unchanged."""
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad(), eager():
            yield model.eval()
    finally:
        for module, mode in modes.items():
            module.training = mode


def watching(found: Mapping[str, FFF], see: Callable[[str, FFF, Tensor], None]) -> AbstractContextManager[None]:
    """Within the block, call see(name, layer, inputs) before each forward of these layers; inputs are (batch, in)."""

    def hook(layer: FFF, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], name: str) -> None:
        x = args[0] if args else kwargs["x"]
        if not x.dim() or x.shape[-1] != layer.in_features:
            at = f"the FFF layer {name!r}" if name else "the FFF layer"
            raise ValueError(f"{at} has in_features={layer.in_features}; data reaches it as {tuple(x.shape)}.")
        see(name, layer, x.reshape(-1, layer.in_features))

    return hooking((layer.register_forward_pre_hook, partial(hook, name=name)) for name, layer in found.items())


@guarded
def hooking(hooks: Iterable[tuple[Callable[..., RemovableHandle], Callable[..., Any]]]) -> Iterator[None]:
    """Hooks that see keywords too, each with the method that registers it; they are removed after the block."""
    handles: list[RemovableHandle] = []
    try:
        for register, hook in hooks:
            handles.append(register(hook, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


class Enough(Exception):
    """Raised by a watcher to leave a forward that has shown what it should."""


def reached(model: nn.Module, data: Any, samples: int, found: Mapping[str, FFF]) -> tuple[list[str], list[Any]]:
    """These FFF layers in the order in which data reaches them, and as many batches as show each of them `samples`
    inputs."""
    seen: dict[str, int] = {}

    def count(name: str, _: FFF, inputs: Tensor) -> None:
        seen[name] = seen.get(name, 0) + len(inputs)

    kept = []
    with watching(found, count):
        for batch in batches(data):
            feed(model, batch)
            kept.append(batch)
            if len(seen) == len(found) and min(seen.values()) >= samples:
                break
    check_reached(found, seen)
    return list(seen), kept


def check_reached(found: Mapping[str, FFF], seen: Mapping[str, Any]) -> None:
    missing = [name for name in found if not seen.get(name)]
    if missing:
        raise ValueError(
            f"data holds no sample that reaches the FFF layers {missing}. Pass data that runs through them."
        )
