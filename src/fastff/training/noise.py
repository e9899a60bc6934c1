"""Normal noise on the inputs of FFF layers in training."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..layer import FFF


class Noise:
    """A forward hook that adds noise of `deviation` times the standard deviation of the batch.

    `deviation` is a tensor, so that compiled and recorded steps see it change. A copied or saved layer keeps the hook
    without the deviation: that hook does nothing.
    """

    def __init__(self, deviation: Tensor | None = None) -> None:
        self.deviation = deviation
        self.handles: list[RemovableHandle] = []

    def add(self, layers: Iterable[FFF]) -> None:
        self.handles += [layer.register_forward_pre_hook(self, with_kwargs=True) for layer in layers]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def __call__(self, layer: FFF, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> Any:
        if self.deviation is None or not layer.training:
            return None
        x = args[0] if args else kwargs["x"]
        if not x.numel():
            return None
        scale = self.deviation.to(x.dtype) * x.detach().std(correction=0)
        return (x + scale * torch.randn_like(x),), {}

    def __reduce__(self) -> tuple[type["Noise"], tuple[()]]:
        return Noise, ()


def remove_noise(layers: Iterable[FFF]) -> None:
    """Remove the noise of earlier recipes."""
    for layer in layers:
        for hook in list(layer._forward_pre_hooks.values()):
            if isinstance(hook, Noise):
                hook.remove()
