"""The training loop of the scikit-learn estimators: AdamW on mini-batches, with a Recipe, stopping early if asked."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from sklearn.model_selection import train_test_split
from torch import Tensor

from ..checks import check_int, check_number
from ..layer import FFF
from ..progress import progress
from ..training.recipe import Recipe

FLOAT32 = torch.finfo(torch.float32)
Part = tuple[Tensor, Tensor, Tensor]  # inputs, targets, weights of samples


class Training:
    """One fit of an estimator. Its numbers are checked when it is created, before any data is touched.

    loss_curve, validation_loss_curve: the task's loss of every epoch.
    """

    def __init__(self, estimator: Any) -> None:
        self.estimator = estimator
        self.epochs = check_int("epochs", estimator.epochs, 1)
        self.batch_size = check_int("batch_size", estimator.batch_size, 1)
        self.patience = check_int("patience", estimator.patience, 1)
        # AdamW divides the rate by 1 - 0.9 at first, and multiplies weights by 1 - rate * decay.
        self.rate = check_number("learning_rate", estimator.learning_rate, 0, FLOAT32.max / 10)
        self.decay = check_number("weight_decay", estimator.weight_decay, 0, FLOAT32.max / max(self.rate, 1))
        self.noise = check_number("noise", estimator.noise, 0, FLOAT32.max)
        self.balance = check_number("balance", estimator.balance, 0, FLOAT32.max)
        if not isinstance(estimator.standardize, bool | np.bool_):
            raise TypeError(f"standardize must be True or False; got {estimator.standardize!r}.")
        self.share = check_number("validation", estimator.validation, 0)
        self.device = check_device(estimator.device)
        self.loss_curve: list[float] = []
        self.validation_loss_curve: list[float] = []

    def run(
        self,
        x: np.ndarray,
        target: np.ndarray,
        weight: np.ndarray,
        outputs: int,
        task: Callable[[Tensor, Tensor], Tensor],
        scaled: Callable[[np.ndarray, torch.device], Tensor],
        seed: int,
    ) -> FFF:
        """Train a layer on the weighted mean of task(output, target), a loss for each sample; returns it in eval().

        scaled: standardises inputs and moves them to a device.
        """

        def tensors(x: np.ndarray, target: np.ndarray, weight: np.ndarray) -> Part:
            weights = torch.as_tensor(weight / weight.mean(), dtype=torch.float32, device=self.device)
            return scaled(x, self.device), torch.as_tensor(target, device=self.device), weights

        def mean(output: Tensor, target: Tensor, weight: Tensor) -> Tensor:
            return (task(output, target) * weight).mean()

        held_out = None
        if self.share:
            parts = train_test_split(x, target, weight, test_size=self.share, random_state=seed)
            x, target, weight = parts[::2]
            held_out = tensors(*parts[1::2])
        train = tensors(x, target, weight)
        with _seeded(seed, self.device), progress("epochs", self.epochs, show=bool(self.estimator.verbose)) as advance:
            layer = self._layer(x.shape[1], outputs)
            state = self._train_(layer, train, held_out, mean, advance)
            # A new layer: the recipe's hooks, with the training data behind them, stay with the old one.
            new = self._layer(x.shape[1], outputs).eval()
            new.load_state_dict(state)
            with torch.no_grad():
                self._check_finite({"an output": [new(train[0])]})
        return new

    def _train_(
        self,
        layer: FFF,
        train: Part,
        held_out: Part | None,
        mean: Callable[[Tensor, Tensor, Tensor], Tensor],
        advance: Callable[..., None],
    ) -> dict[str, Tensor]:
        """All epochs; returns the state dict to keep: of the best epoch on held-out samples, or else of the last."""
        steps = self.epochs * -(-len(train[0]) // self.batch_size)
        recipe = Recipe(layer, train[0], steps=steps, noise=self.noise, balance=self.balance)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=self.rate, weight_decay=self.decay)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        best, state = (math.inf, 0), layer.state_dict()
        for epoch in range(self.epochs):
            total, added, failed = self._epoch_(layer, train, mean, recipe, optimizer, schedule)
            self.loss_curve.append(float(total))
            layer.eval()
            watched: dict[str, Iterable[Tensor]] = {"the loss": [total], "the balance loss": [added]}
            if held_out is not None:
                with torch.no_grad():
                    error = mean(layer(held_out[0]), *held_out[1:])
                watched["the loss on held-out samples"] = [error]
                self.validation_loss_curve.append(float(error))
            watched["the mean square of the gradients"] = [s["exp_avg_sq"] for s in optimizer.state.values()]
            watched["a weight"] = layer.parameters()
            self._check_finite(watched, failed)
            if held_out is not None and float(error) < best[0]:
                best, state = (float(error), epoch), {k: v.clone() for k, v in layer.state_dict().items()}
            advance(text=f"loss {(self.validation_loss_curve or self.loss_curve)[-1]:.3g}")
            if held_out is not None and epoch - best[1] >= self.patience:
                break
        return state

    def _epoch_(
        self,
        layer: FFF,
        train: Part,
        mean: Callable[[Tensor, Tensor, Tensor], Tensor],
        recipe: Recipe,
        optimizer: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LRScheduler,
    ) -> tuple[Tensor, Tensor, ValueError | None]:
        """One epoch; returns the task's mean loss, the sum of the recipe's losses, and its error if it failed."""
        x, y, w = train
        total, added = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        layer.train()
        for batch in torch.randperm(len(x), device=self.device).split(self.batch_size):
            loss = mean(layer(x[batch]), y[batch], w[batch])
            extra = recipe.loss()
            optimizer.zero_grad()
            (loss + extra).backward()
            optimizer.step()
            schedule.step()
            total += loss.detach() * len(batch) / len(x)
            added += extra.detach() if isinstance(extra, Tensor) else extra
            try:
                recipe.step()
            except ValueError as failed:  # the tree cannot be rebalanced
                return total, added, failed
        return total, added, None

    def _check_finite(self, watched: dict[str, Iterable[Tensor]], failed: ValueError | None = None) -> None:
        """Raise if the training has diverged: if one of these is not finite, or the tree could not be rebalanced."""
        finite = torch.stack([torch.stack([t.isfinite().all() for t in several]).all() for several in watched.values()])
        if failed is None and finite.all():
            return
        found = [name for name, good in zip(watched, finite.tolist(), strict=True) if not good]
        given = self.estimator
        defaults = {name: p.default for name, p in inspect.signature(type(given)).parameters.items()}
        names = ("learning_rate", "weight_decay", "noise", "balance")
        high = [name for name in names if getattr(given, name) > defaults[name]] or ["learning_rate"]
        remedy = "" if given.standardize else ", or pass standardize=True"
        raise ValueError(
            f"the training diverged: {(found or ['a node logit'])[0]} was not finite in epoch {len(self.loss_curve)}. "
            f"Lower {' or '.join(f'{name} (here {getattr(given, name):g})' for name in high)}{remedy}."
        ) from failed

    def _layer(self, features: int, outputs: int) -> FFF:
        return FFF(
            features,
            outputs,
            depth=self.estimator.depth,
            leaf_width=self.estimator.leaf_width,
            activation=self.estimator.activation,
            device=self.device,
            dtype=torch.float32,
        )


def check_device(value: Any) -> torch.device:
    """The device; raises unless this machine can compute on it."""
    try:
        device = torch.empty((), device=value).device
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device must be one of this machine, such as 'cpu'; got {value!r}: {reason}") from error
    if device.type == "meta":
        raise ValueError(f"device must be one that computes, such as 'cpu'; got {value!r}.")
    return device


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Within the block, torch's generators start from this seed; they are restored after it."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
