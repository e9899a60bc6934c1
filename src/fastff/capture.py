"""Run data through a model and see what reaches its FFF layers.

`data` is a batch or something that yields batches. A batch is a tensor, a mapping (passed as keywords), or a tuple or
list whose first element is the input, as data sets yield (input, target). A DataLoader or any other iterable yields
batches.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .hardening import layers
from .layer import FFF


def batches(data: Any) -> Iterable[Any]:
    """The batches in `data`."""
    if isinstance(data, Tensor | Mapping | tuple | list):
        return [data]
    if isinstance(data, Iterable):
        return data
    raise TypeError(f"data must be a tensor, a batch or an iterable of batches; got {type(data).__name__}.")


def feed(model: nn.Module, batch: Any) -> None:
    """Run a model on a batch, on the device where the model is."""
    first = next(model.parameters(), None)
    if isinstance(batch, Mapping):
        moved = {k: v.to(first.device) if isinstance(v, Tensor) and first is not None else v for k, v in batch.items()}
        model(**moved)
        return
    x = batch[0] if isinstance(batch, tuple | list) else batch
    model(x.to(first.device) if isinstance(x, Tensor) and first is not None else x)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """The model without its compiled wrapper, in evaluation mode and without gradients; then every mode as it was."""
    model = getattr(model, "_orig_mod", model)
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            yield model.eval()
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def watching(found: Mapping[str, FFF], see: Callable[[str, FFF, Tensor], None]) -> Iterator[None]:
    """Within the block, call see(name, layer, inputs) before each forward of these layers; inputs are (batch, in)."""
    handles = [
        layer.register_forward_pre_hook(
            lambda module, args, name=name: see(name, module, args[0].reshape(-1, module.in_features))
        )
        for name, layer in found.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Enough(Exception):
    """Raised by a watcher to leave a forward that has shown what it should."""


def reached(model: nn.Module, data: Any, samples: int) -> tuple[list[str], list[Any]]:
    """The FFF layers in the order in which data reaches them, and as many batches as show each of them `samples`
    inputs."""
    found = layers(model)
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
    missing = [name for name in found if not seen.get(name)]
    if missing:
        raise ValueError(
            f"data holds no sample that reaches the FFF layers {missing}. Pass data that runs through them."
        )
    return list(seen), kept
