"""Measures of a model in evaluation mode: accuracy, entropy of its decisions, visits of its leaves."""

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor, nn

from fastff.backends import torch_backend
from fastff.batches import StopForward, watch_inputs
from fastff.layer import FFF
from fastff.training.losses import bernoulli_entropy
from fastff.tree import one_hot


def accuracy(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> float:
    """In percent."""
    parts = zip(x.split(_at_once(x)), y.split(_at_once(x)), strict=True)
    right = torch.stack([(model(inputs).argmax(-1) == target).sum() for inputs, target in parts])
    return 100.0 * right.sum().item() / len(y)


def _at_once(x: Tensor) -> int:
    """The batch size of an evaluation: smaller for images, which become many tokens each."""
    return 16384 if x.dim() == 2 else 2048


def soft(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """The model with the soft pass of its FFF layers; everything else stays in evaluation mode."""

    def run(x: Tensor) -> Tensor:
        trees = [module for module in model.modules() if isinstance(module, FFF)]
        saved = [tree.forward for tree in trees]
        try:
            for tree in trees:
                tree.forward = tree.soft  # type: ignore[method-assign]
            return model(x)
        finally:
            for tree, forward in zip(trees, saved, strict=True):
                tree.forward = forward  # type: ignore[method-assign]

    return run


def entropies(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The mean entropy of the node decisions of each FFF layer with a tree, at its temperature, on x."""
    found: list[Tensor] = []

    def see(layer: FFF, inputs: Tensor) -> None:
        if layer.depth:
            found.append(bernoulli_entropy(layer.node_logits(inputs) * layer.temperature_tensor).mean())

    _run(model, x, see)
    return found


def visits(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The number of samples of x that visit each leaf, per FFF layer: (leaves,)."""
    parts: list[list[Tensor]] = []

    def see(layer: FFF, inputs: Tensor) -> None:
        # Not by bincount, for which vmap has no rule.
        parts[-1].append(one_hot(torch_backend().walk(layer.node_logits(inputs)), layer.num_leaves, torch.bool).sum(0))

    for inputs in x.split(_at_once(x)):
        parts.append([])
        _run(model, inputs, see)
    return [torch.stack(layer).sum(0) for layer in zip(*parts, strict=True)]


def _run(model: nn.Module, x: Tensor, see: Callable[[FFF, Tensor], None]) -> None:
    """Run x through a model as far as its last FFF layer, and call see(layer, inputs) at each."""
    trees = {name: module for name, module in model.named_modules() if isinstance(module, FFF)}
    left = set(trees)

    def hook(name: str, layer: FFF, inputs: Tensor) -> None:
        see(layer, inputs)
        left.discard(name)
        if not left:
            raise StopForward

    with watch_inputs(trees, hook), suppress(StopForward):
        if trees:
            model(x)
