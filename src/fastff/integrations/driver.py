"""RecipeDriver: what the callbacks for Hugging Face's Trainer and for Lightning share."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..layer import fff_layers
from ..regions import usage
from ..training.losses import entropies
from ..training.recipe import Recipe


class RecipeDriver:
    """Creates a Recipe when training begins, steps it with the optimizer, and reports how the trees do.

    Args:
        data: training inputs, as in `fastff.Recipe`. With several processes, pass the same in each.
        steps: the number of optimizer steps that the recipe covers; None for the whole training.
        options: other arguments of `fastff.Recipe`.
    """

    def __init__(self, data: Any = None, *, steps: int | None = None, **options: Any) -> None:
        inspect.signature(Recipe).bind(nn.Identity(), data, steps=1, **options)  # an unknown option is an error here
        self.data, self.steps, self.options = data, steps, options
        self.recipe: Recipe | None = None
        self.added: Tensor | float = 0.0  # by the last call of loss()
        self.calls = 0  # of loss() since the last step

    def begin(self, model: nn.Module, steps: int, done: int = 0, state: dict[str, Any] | None = None) -> None:
        """Create the recipe. done: steps already made, after which the model keeps its trees. state: of the recipe."""
        self.end()
        steps = steps if self.steps is None else self.steps
        self.recipe = Recipe(model, self.data, steps=steps, **self.options | ({"reset_trees": False} if done else {}))
        self.recipe.load_state_dict((state or {}) | {"count": done})
        self.calls = 0
        if not done and torch.distributed.is_available() and torch.distributed.is_initialized():
            for layer in fff_layers(model).values():
                for parameter in layer.tree_parameters():
                    torch.distributed.broadcast(parameter.data, 0)

    def loss(self) -> Tensor | float:
        """The losses of the FFF layers, to add to the loss of a micro-batch after its forward."""
        if self.recipe is None:
            raise RuntimeError("training has not begun. Call loss() in a training step.")
        extra = self.recipe.loss()
        self.added = extra.detach() if isinstance(extra, Tensor) else extra
        self.calls += 1
        return extra

    def step(self, remedy: str) -> None:
        """Call this after every optimizer step; `remedy` says how to add the losses if loss() was not called."""
        if self.recipe is None:
            return
        if not self.calls and (self.recipe.balance or self.recipe.hardening):
            raise RuntimeError(f"a training step was made without the losses of the FFF layers. {remedy}")
        self.calls = 0
        self.recipe.step()

    def numbers(self) -> dict[str, float]:
        """Metrics of the last training forward, for a log."""
        if self.recipe is None:
            return {}
        model = self.recipe.model
        found = {"fff/loss": float(self.added), "fff/temperature": self.recipe.temperature}
        if self.recipe.data is not None:
            found["fff/rebalance_seconds"] = self.recipe.rebalance_seconds
            found["fff/rebalance_share"] = self.recipe.rebalance_share
            found["fff/kept_trees"] = float(len(self.recipe.kept_trees))
        entropy = entropies(model)
        for name, used in usage(model).items():
            place = f"fff/{name}/" if name else "fff/"
            if len(entropy[name]):
                found[f"{place}entropy"] = float(entropy[name].mean())
            found[f"{place}leaves_used"] = float(used.leaves_used)
            found[f"{place}smallest_share"] = used.smallest_share
        return found

    def end(self) -> None:
        """Remove the noise from the layers, if training has stopped early."""
        if self.recipe is not None:
            self.recipe.close()
        self.recipe = None
