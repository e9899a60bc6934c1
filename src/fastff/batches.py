"""Run data through a model and watch its layers' inputs.

`data` is a batch, or an iterable that yields batches, such as a DataLoader. A batch is a tensor, a mapping (passed as
keyword arguments), or a tuple or list whose first element is the input, as data sets yield (input, target).

    with evaluation_mode(model), watch_inputs(fff_layers(model), see):
        for batch in batches(data):
            feed(model, batch)
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .interrupts import guarded
from .layer import FFF
from .ranks import until_enough
from .switches import eager

M = TypeVar("M", bound=nn.Module)


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
    """Raise for arrays and strings, alone, in a list or in a mapping: a torch model takes tensors."""
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
    """Whether a list holds batches, and is not one batch [input, target] as a DataLoader yields it.

    It does if its elements are mappings, tuples or lists, or floating-point tensors that differ in batch size only.
    """
    if not data:
        raise ValueError("data is an empty list. Pass at least one batch.")
    if not isinstance(data[0], Tensor):
        return isinstance(data[0], Mapping | tuple | list)
    first = data[0]
    return first.is_floating_point() and all(
        isinstance(x, Tensor) and x.dtype == first.dtype and x.shape[1:] == first.shape[1:] and x.dim() for x in data
    )


def feed(model: nn.Module, batch: Any) -> Any:
    """The model's output for a batch, which is moved to the model's device."""
    check_kind(batch)
    first = next(model.parameters(), None)
    if isinstance(batch, Mapping):
        moved = {k: v.to(first.device) if isinstance(v, Tensor) and first is not None else v for k, v in batch.items()}
        return model(**moved)
    x = batch[0] if isinstance(batch, tuple | list) else batch
    return model(x.to(first.device) if isinstance(x, Tensor) and first is not None else x)


@guarded
def evaluation_mode(model: nn.Module) -> Iterator[nn.Module]:
    """Within the block, the model is in eval(), without gradients and not compiled. Afterwards, modes are restored."""
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad(), eager():
            yield model.eval()
    finally:
        for module, mode in modes.items():
            module.training = mode


def watch_inputs(modules: Mapping[str, M], see: Callable[[str, M, Tensor], None]) -> AbstractContextManager[None]:
    """Within the block, call see(name, module, x) before each forward of these modules; x is its input, (batch, in)."""

    def hook(module: M, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> None:
        x = _first(args, kwargs)
        if isinstance(module, FFF) and (not x.dim() or x.shape[-1] != module.in_features):
            at = f"the FFF layer {name!r}" if name else "the FFF layer"
            raise ValueError(f"{at} has in_features={module.in_features}; data reaches it as {tuple(x.shape)}.")
        see(name, module, x.reshape(-1, x.shape[-1]))

    return _hooks((module.register_forward_pre_hook, partial(hook, name=name)) for name, module in modules.items())


def watch_calls(modules: Iterable[M], see: Callable[[M, Any, Any], None]) -> AbstractContextManager[None]:
    """Within the block, call see(module, input, output) after each forward of these modules, in whatever shape."""

    def hook(module: M, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        see(module, _first(args, kwargs), output)

    return _hooks((module.register_forward_hook, hook) for module in modules)


class StopForward(Exception):
    """Raised by a watcher to end a forward that has shown enough."""


def read_until(
    model: nn.Module, data: Any, samples: int, found: Mapping[str, FFF], everywhere: Callable[[bool], bool]
) -> tuple[list[str], list[Any]]:
    """Read data until each of these layers has seen `samples` inputs, on all ranks (`ranks.until_enough`).

    Returns the names of the layers, in the order in which data reaches them, and the batches that were read.
    """
    seen: dict[str, int] = {}

    def count(name: str, _: FFF, inputs: Tensor) -> None:
        seen[name] = seen.get(name, 0) + len(inputs)

    def is_enough() -> bool:
        return len(seen) == len(found) and min(seen.values()) >= samples

    kept = []
    with watch_inputs(found, count):
        for batch in until_enough(batches(data), is_enough, everywhere):
            feed(model, batch)
            kept.append(batch)
    check_reached(found, seen)
    return list(seen), kept


def check_reached(modules: Iterable[str], seen: Mapping[str, Any]) -> None:
    """Raise if `seen`, the samples by name, lacks some of these modules."""
    missing = [name for name in modules if not seen.get(name)]
    if missing:
        raise ValueError(f"no sample in data reaches the layers {missing}. Pass data that runs through them.")


@guarded
def _hooks(hooks: Iterable[tuple[Callable[..., RemovableHandle], Callable[..., Any]]]) -> Iterator[None]:
    """Registers each hook by the method beside it, with keyword arguments; removes all after the block."""
    handles: list[RemovableHandle] = []
    try:
        for register, hook in hooks:
            handles.append(register(hook, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()), None)
