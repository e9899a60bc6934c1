"""FFF layers in Lightning.

    trainer = lightning.Trainer(callbacks=[FFFCallback(inputs)])
    trainer.fit(module, loader)

Lightning has no hook that can change a loss, so the callback wraps the module's training_step while fit() runs, and
adds the losses to what it returns. A training_step that calls callback.loss() itself is left alone; in manual
optimisation it must do so.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from .driver import RecipeDriver

REMEDY = "In manual optimisation, add callback.loss() to the loss in training_step, after the forward."


class FFFCallback(Callback):
    """Creates a `fastff.Recipe` when training begins, adds its losses, steps it with the optimizer, and logs.

    Args:
        data: training inputs, as in `fastff.Recipe`, for the LightningModule's forward. With several processes, pass
            the same in each.
        steps: the number of optimizer steps that the recipe covers; by default the whole training.
        options: other arguments of `fastff.Recipe`.
    """

    def __init__(self, data: Any = None, *, steps: int | None = None, **options: Any) -> None:
        self.driver = RecipeDriver(data, steps=steps, **options)
        self.done = 0  # steps of the recipe
        self.state: dict[str, Any] = {}  # of the recipe, from a checkpoint
        self.stepped = 0  # steps of the optimizers

    def loss(self) -> Tensor | float:
        """The losses of the FFF layers for a micro-batch, for a training_step that adds them itself."""
        return self.driver.loss()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if not trainer.global_step:  # another training; the count of a checkpoint comes after this
            self.done, self.state = 0, {}
        if not pl_module.automatic_optimization:
            return
        training_step: Callable[..., Any] = pl_module.training_step

        @functools.wraps(training_step)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            calls = self.driver.calls
            result = training_step(*args, **kwargs)
            if result is None:  # a batch that the module skips
                self.driver.calls += 1
            if self.driver.calls > calls:
                return result
            if isinstance(result, dict):
                return result | {"loss": result["loss"] + self.loss()}
            return result + self.loss()

        pl_module.training_step = wrapped  # type: ignore[method-assign]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        steps = trainer.estimated_stepping_batches
        if self.driver.steps is None and not math.isfinite(steps):
            raise ValueError(
                "the number of training steps is not known. Pass FFFCallback(data, steps=...), or set max_steps."
            )
        self.done = self.done or trainer.global_step
        self.driver.begin(pl_module, int(steps) if math.isfinite(steps) else 0, self.done, self.state)
        self.stepped = trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.stepped:  # accumulating gradients
            return
        self.driver.step(REMEDY)
        self.done, self.stepped = self.done + 1, trainer.global_step
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set elsewhere, by setattr
        if every and self.done % every == 0:
            pl_module.log_dict(self.driver.numbers())

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.driver.end()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        _unwrap(pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.driver.end()
        _unwrap(pl_module)

    def state_dict(self) -> dict[str, Any]:
        recipe = self.driver.recipe
        return (recipe.state_dict() if recipe is not None else self.state) | {"count": self.done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.done, self.state = state_dict["count"], state_dict


def _unwrap(module: pl.LightningModule) -> None:
    """Restore a module's own training_step."""
    step = module.__dict__.pop("training_step", None)
    if (own := getattr(step, "__wrapped__", None)) is not None and getattr(own, "__self__", None) is not module:
        module.__dict__["training_step"] = own
