"""What is measured of a model in eval(): how often it is right, how decided its trees are, how evenly they are used."""

from collections.abc import Callable

from torch import Tensor, nn

from ..capture import watching
from ..hardening import bernoulli_entropy
from ..layer import FFF
from ..regions import Usage, usage


def accuracy(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> float:
    """In percent."""
    parts = zip(x.split(_at_once(x)), y.split(_at_once(x)), strict=True)
    return 100.0 * sum((model(inputs).argmax(-1) == target).sum().item() for inputs, target in parts) / len(y)


def _at_once(x: Tensor) -> int:
    """How many samples go through a model in one evaluation: images become many tokens each."""
    return 16384 if x.dim() == 2 else 2048


def soft(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """A model in which FFF layers mix their leaves as in training, and all else is as in evaluation."""

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


def entropies(model: nn.Module, x: Tensor) -> list[float]:
    """The mean entropy of the nodes of every FFF layer that has some, at its temperature, when x runs through."""
    found: list[float] = []

    def see(_: str, layer: FFF, inputs: Tensor) -> None:
        found.append(bernoulli_entropy(layer.node_logits(inputs) * layer.temperature).mean().item())

    trees = {name: module for name, module in model.named_modules() if isinstance(module, FFF) and module.depth}
    with watching(trees, see):
        if trees:
            model(x)
    return found


def spread(model: nn.Module, x: Tensor) -> list[Usage]:
    """How x spreads over the leaves of every FFF layer."""
    has_trees = any(isinstance(module, FFF) for module in model.modules())
    return list(usage(model, list(x.split(_at_once(x)))).values()) if has_trees else []
