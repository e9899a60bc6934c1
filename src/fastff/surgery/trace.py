"""Run a part of a model on a probe and see which modules it calls, in which order and on what."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..batches import evaluating, feed, hooking
from ..interrupts import guarded
from ..switches import PROBING


class Call(NamedTuple):
    """One call of a module that has no children."""

    module: nn.Module
    input: Any
    output: Any


def probe(in_features: int, like: Tensor, batch: tuple[int, ...] = (2, 4)) -> Tensor:
    """Random inputs (*batch, in_features), drawn without touching the global generator."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*batch, in_features, generator=generator).to(like)


def required(scope: nn.Module) -> int:
    """How many inputs a forward cannot do without."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(scope.forward).parameters.values()
    return max(sum(p.kind in kinds and p.default is p.empty for p in parameters), 1)


def run(scope: nn.Module, x: Tensor, *, training: bool) -> tuple[Any, list[Call]]:
    """The output of a module at x, and the calls below it. Other inputs that it requires are None, or x too."""
    others = required(scope) - 1
    try:
        return _watched(scope, lambda: scope(x, *[None] * others), training)
    except Exception:  # someone else's forward, which may raise anything
        if not others:
            raise
    return _watched(scope, lambda: scope(x, *[x] * others), training)


def run_example(model: nn.Module, example: Any, *, training: bool) -> tuple[Any, list[Call]]:
    """The output of a model on a batch of its own, and the calls below it."""
    return _watched(model, lambda: feed(model, example), training)


def _watched(scope: nn.Module, call: Callable[[], Any], training: bool) -> tuple[Any, list[Call]]:
    calls: list[Call] = []

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls.append(Call(module, args[0] if args else next(iter(kwargs.values()), None), output))

    last = [module for module in scope.modules() if next(module.children(), None) is None]
    seen = hooking((module.register_forward_hook, hook) for module in last)
    with evaluating(scope), _undisturbed(scope), seen:
        for module in scope.modules():
            # In training, nn.Dropout stays off: what is still random then, no module shows.
            module.training = training and not isinstance(module, nn.Dropout)
        return call(), calls


@guarded
def _undisturbed(scope: nn.Module) -> Iterator[None]:
    """Random generators and buffers unchanged afterwards; autocast and the fused encoder layer off meanwhile. One
    thread at a time: generators and the fused layer belong to the whole process."""
    first = next(scope.parameters())
    devices = [first.device] if first.device.type == "cuda" else []
    buffers = [(buffer, buffer.clone()) for buffer in scope.buffers()]
    with PROBING:
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with torch.random.fork_rng(devices), torch.autocast(first.device.type, enabled=False):
                torch.manual_seed(0)  # what is random is so alike in every run
                yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            for buffer, value in buffers:
                buffer.copy_(value)
