"""Run a part of a model on a probe and record which modules it calls, in which order, with which tensors."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..batches import evaluation_mode, feed, watch_calls
from ..interrupts import guarded
from ..layer import FFF
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
    """The number of inputs that a forward requires."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(scope.forward).parameters.values()
    return max(sum(p.kind in kinds and p.default is p.empty for p in parameters), 1)


def run(scope: nn.Module, x: Tensor, *, training: bool, soft: bool = False) -> tuple[Any, list[Call]]:
    """The output of a module at x, and the calls below it. Other required inputs are None or, if that fails, x."""
    others = required(scope) - 1
    try:
        return _watched(scope, lambda: scope(x, *[None] * others), training, soft)
    except Exception:  # foreign code, which may raise anything
        if not others:
            raise
    return _watched(scope, lambda: scope(x, *[x] * others), training, soft)


def run_example(model: nn.Module, example: Any, *, training: bool, soft: bool = False) -> tuple[Any, list[Call]]:
    """A model's output on a batch, and the calls below it. soft: FFF layers take the soft pass in any mode."""
    return _watched(model, lambda: feed(model, example), training, soft)


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors in a model's output, whatever holds them."""
    found = tree_leaves(dict(output) if hasattr(output, "keys") else output)
    return [value.detach() for value in found if isinstance(value, Tensor)]


def _watched(scope: nn.Module, call: Callable[[], Any], training: bool, soft: bool) -> tuple[Any, list[Call]]:
    calls: list[Call] = []
    childless = [module for module in scope.modules() if next(module.children(), None) is None]
    seen = watch_calls(childless, lambda *call: calls.append(Call(*call)))
    with evaluation_mode(scope), _undisturbed(scope), seen:
        for module in scope.modules():
            # In training, nn.Dropout stays off: anything still random then comes from no module.
            module.training = training and not isinstance(module, nn.Dropout)
        with _soft(scope) if soft else nullcontext():
            return call(), calls


@guarded
def _soft(scope: nn.Module) -> Iterator[None]:
    """Within the block, FFF layers are in train() without their own dropout."""
    layers = [module for module in scope.modules() if isinstance(module, FFF)]
    rates = [layer.dropout for layer in layers]
    try:
        for layer in layers:
            layer.training, layer.dropout = True, 0.0
        yield
    finally:
        for layer, rate in zip(layers, rates, strict=True):
            layer.dropout = rate


@guarded
def _undisturbed(scope: nn.Module) -> Iterator[None]:
    """Within the block, autocast and the fused encoder layer are off; random generators and buffers are then restored.
    One thread at a time: generators and the fused layer belong to the whole process."""
    first = next(scope.parameters())
    devices = [first.device] if first.device.type == "cuda" else []
    buffers = [(buffer, buffer.clone()) for buffer in scope.buffers()]
    with PROBING:
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with torch.random.fork_rng(devices), torch.autocast(first.device.type, enabled=False):
                torch.manual_seed(0)  # the same random numbers in every run
                yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            for buffer, value in buffers:
                buffer.copy_(value)
