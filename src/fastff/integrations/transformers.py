"""FFF layers in Hugging Face's Trainer.

    trainer = FFFTrainer(model, args, train_dataset=data, callbacks=[FFFCallback(batch)])
    trainer.train()

A callback can create a Recipe and step it, but the Trainer's own methods compute the loss and write the log. So there
are two parts: the callback, and a mixin for any Trainer class. FFFTrainer is the plain Trainer with the mixin.

Every checkpoint of a Trainer has the state of the Recipe, among the states of its callbacks. pretrained.py saves and
loads the models.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..adapters import outside_checkpoints
from ..layer import fff_layers
from ..surgery.history import HISTORY
from .driver import RecipeDriver
from .pretrained import from_pretrained, push_to_hub, save_pretrained

__all__ = ["FFFCallback", "FFFTrainer", "FFFTrainerMixin", "from_pretrained", "push_to_hub", "save_pretrained"]

STATE, SHARES = "fastff.Recipe", "running_shares"
REMEDY = (
    "Train with FFFTrainer, or with your own class as class MyTrainer(FFFTrainerMixin, Trainer); a compute_loss that "
    "does not call super().compute_loss must add callback.loss()."
)


class FFFCallback(TrainerCallback):
    """Creates a `fastff.Recipe` when training begins, and steps it with the optimizer.

    Args:
        data: training inputs, as in `fastff.Recipe`: for instance a batch (a dict) from the data collator. With several
            processes, pass the same in each.
        steps: the number of optimizer steps that the recipe covers; by default the whole training.
        options: other arguments of `fastff.Recipe`.
    """

    def __init__(self, data: Any = None, *, steps: int | None = None, **options: Any) -> None:
        self.driver = RecipeDriver(data, steps=steps, **options)

    def loss(self) -> Tensor | float:
        """The losses of the FFF layers for a micro-batch, for your own compute_loss."""
        return self.driver.loss()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.n_gpu > 1:
            raise ValueError(
                f"the Trainer runs {args.n_gpu} GPUs in one process with DataParallel, which hides the losses of FFF "
                "layers. Start one process per GPU, with torchrun or accelerate launch."
            )
        model = kwargs["model"]
        if left_out := outside_checkpoints(model, fff_layers(model)):
            raise ValueError(
                "a Trainer's checkpoint of a PEFT model must hold the trees that FFFCallback moves; got adapters alone "
                f"for {', '.join(left_out[:4])}. Name these layers in modules_to_save, or train the adapters without "
                "the callback, in a plain Trainer."
            )
        if args.push_to_hub and HISTORY in vars(model):
            raise ValueError(
                "push_to_hub=True uploads what the Trainer saves, which loads with random dense blocks in place of FFF "
                "layers. Leave it out, and call fastff.integrations.transformers.push_to_hub(model, repo_id) at the "
                "end."
            )
        kept: Any = state.stateful_callbacks
        of_recipe: dict[str, Any] = dict(kept.get(STATE, {}).get("attributes", {}))
        if shares := of_recipe.get(SHARES):
            of_recipe[SHARES] = {name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in shares.items()}
        self.driver.begin(model, state.max_steps, state.global_step, of_recipe)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.driver.step(REMEDY)
        if self.driver.recipe is not None:
            kept: Any = state.stateful_callbacks  # a part of every checkpoint
            of_recipe = self.driver.recipe.state_dict()
            of_recipe[SHARES] = {name: shares.tolist() for name, shares in of_recipe[SHARES].items()}  # it is JSON
            kept[STATE] = {"args": {}, "attributes": of_recipe}

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.driver.end()


class FFFTrainerMixin:
    """Adds the losses of the FFF layers to a Trainer's, and their entropies and usage to its logs.

    Put it before the Trainer class: class MyTrainer(FFFTrainerMixin, Seq2SeqTrainer). Evaluation is unchanged.
    """

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        trainer: Any = self
        result = super().compute_loss(  # type: ignore[misc]
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch, **kwargs
        )
        if not model.training:
            return result
        extra = _callback(trainer).loss()
        # A loss that is a mean over the whole accumulated batch is not divided by the number of micro-batches again.
        scaled = trainer.loss_is_scaled_for_ga
        if scaled is None:
            scaled = trainer.compute_loss_func is not None or (
                trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
            )
        extra = extra / trainer.current_gradient_accumulation_steps if scaled else extra
        return (result[0] + extra, *result[1:]) if return_outputs else result + extra

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs.update(_callback(self).driver.numbers())
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


class FFFTrainer(FFFTrainerMixin, Trainer):
    """Hugging Face's Trainer with the losses of FFF layers. It needs an FFFCallback among its callbacks."""


def _callback(trainer: Any) -> FFFCallback:
    found = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, FFFCallback)]
    if len(found) != 1:
        raise ValueError(
            f"a Trainer with FFFTrainerMixin needs one FFFCallback; got {len(found)}. "
            "Pass callbacks=[FFFCallback(data)]."
        )
    return found[0]
