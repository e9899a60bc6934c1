"""One FFF layer as a scikit-learn estimator.

    model = FFFClassifier(depth=4, leaf_width=16).fit(X, y)
    model.predict(X), model.predict_proba(X), model.apply(X)

Inputs are standardised, the layer is trained by `fastff.Recipe` with AdamW and a learning rate that falls to 0 as a
cosine, and prediction is the hard pass: every sample is answered by one leaf, which apply() tells.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.base import BaseEstimator, ClassifierMixin, MultiOutputMixin, RegressorMixin
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.extmath import softmax
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor

from ..activations import Activation
from ..checks import check_int
from ..layer import FFF
from ..recipe import Recipe


class _FFFEstimator(BaseEstimator):  # type: ignore[misc]
    """What the classifier and the regressor share."""

    mean_: np.ndarray
    scale_: np.ndarray

    def __init__(
        self,
        depth: int = 3,
        leaf_width: int = 16,
        *,
        activation: Activation = "relu",
        epochs: int = 100,
        batch_size: int = 64,
        learning_rate: float = 1e-2,
        weight_decay: float = 0.1,
        noise: float = 0.8,
        balance: float = 0.1,
        standardize: bool = True,
        validation: float = 0.0,
        patience: int = 20,
        random_state: Any = None,
        device: str = "cpu",
        verbose: bool = False,
    ) -> None:
        self.depth = depth
        self.leaf_width = leaf_width
        self.activation = activation
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.noise = noise
        self.balance = balance
        self.standardize = standardize
        self.validation = validation
        self.patience = patience
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    def apply(self, X: Any) -> np.ndarray:
        """The index of the leaf that answers each sample, from 0 to 2**depth - 1: (n_samples,)."""
        x = self._inputs(X)
        with torch.no_grad():
            return self.layer_.route(x).cpu().numpy()

    def _outputs(self, X: Any) -> np.ndarray:
        x = self._inputs(X)
        with torch.no_grad():
            return self.layer_(x).double().cpu().numpy()

    def _inputs(self, X: Any) -> Tensor:
        check_is_fitted(self)
        return self._scaled(validate_data(self, X, reset=False, dtype=np.float64))

    def _scaled(self, X: np.ndarray) -> Tensor:
        scaled = (X - self.mean_) / self.scale_
        if not np.isfinite(scaled).all() or np.abs(scaled).max(initial=0) > np.finfo(np.float32).max:
            raise ValueError("X has values too large for float32; scale it down.")
        return torch.as_tensor(scaled, dtype=torch.float32, device=self.device)

    def _fit(
        self,
        X: np.ndarray,
        target: np.ndarray,
        outputs: int,
        task: Callable[[Tensor, Tensor], Tensor],
        sample_weight: np.ndarray | None,
    ) -> Self:
        """Train on the mean of task(output, target), a loss for each sample, weighted if there are weights."""
        epochs, batch_size = check_int("epochs", self.epochs, 1), check_int("batch_size", self.batch_size, 1)
        patience = check_int("patience", self.patience, 1)
        for name in ("learning_rate", "weight_decay"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name} must be 0 or more; got {getattr(self, name)}.")
        if not 0 <= self.validation < 1:
            raise ValueError(f"validation is a share of the samples, from 0 to below 1; got {self.validation}.")
        features = X.shape[1]
        if sample_weight is not None:  # a sample without weight is as if it were not there
            some = sample_weight > 0
            X, target, sample_weight = X[some], target[some], sample_weight[some]
        weight = np.ones(len(X)) if sample_weight is None else sample_weight / sample_weight.mean()
        self.mean_, self.scale_ = (
            _moments(X, sample_weight) if self.standardize else (np.zeros(features), np.ones(features))
        )
        seed = check_random_state(self.random_state).randint(2**31)
        kept = None
        if self.validation:
            parts = train_test_split(X, target, weight, test_size=self.validation, random_state=seed)
            X, held, target, wanted, weight, held_weight = parts
            kept = self._scaled(held), torch.as_tensor(wanted, device=self.device), self._tensor(held_weight)
        x, y, w = self._scaled(X), torch.as_tensor(target, device=self.device), self._tensor(weight)

        def mean(output: Tensor, target: Tensor, weight: Tensor) -> Tensor:
            loss = task(output, target)
            return loss.mean() if sample_weight is None else (loss * weight).sum() / weight.sum()

        with _seeded(seed, x.device), _progress(epochs, self.verbose) as advance:
            layer = self._layer(features, outputs)
            steps = epochs * -(-len(x) // batch_size)
            recipe = Recipe(layer, x, steps=steps, noise=self.noise, balance=self.balance)
            optimizer = torch.optim.AdamW(layer.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay)
            rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
            best, state = (math.inf, 0), layer.state_dict()
            self.loss_curve_, self.validation_loss_curve_ = [], []
            for epoch in range(epochs):
                total = torch.zeros((), device=x.device)
                layer.train()
                for batch in torch.randperm(len(x), device=x.device).split(batch_size):
                    loss = mean(layer(x[batch]), y[batch], w[batch])
                    optimizer.zero_grad()
                    (loss + recipe.loss()).backward()
                    optimizer.step()
                    rate.step()
                    recipe.step()
                    total += loss.detach() * len(batch) / len(x)
                self.loss_curve_.append(float(total))
                layer.eval()
                if kept is not None:
                    with torch.no_grad():
                        error = float(mean(layer(kept[0]), *kept[1:]))
                    self.validation_loss_curve_.append(error)
                    if error < best[0]:
                        best, state = (error, epoch), {k: v.clone() for k, v in layer.state_dict().items()}
                advance(error if kept is not None else self.loss_curve_[-1])
                if kept is not None and epoch - best[1] >= patience:
                    break
            # A new layer: the recipe's hooks, with the training data behind them, stay with the old one.
            self.layer_ = self._layer(features, outputs).eval()
            self.layer_.load_state_dict(state)
        self.n_iter_ = len(self.loss_curve_)
        return self

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.as_tensor(values, dtype=torch.float32, device=self.device)

    def _layer(self, features: int, outputs: int) -> FFF:
        return FFF(
            features,
            outputs,
            depth=self.depth,
            leaf_width=self.leaf_width,
            activation=self.activation,
            device=self.device,
            dtype=torch.float32,
        )


class FFFClassifier(ClassifierMixin, _FFFEstimator):  # type: ignore[misc]
    """A classifier of one FFF layer.

    fit takes sample_weight. There is no class_weight: for classes of unequal size pass scikit-learn's
    compute_sample_weight("balanced", y).

    Args:
        depth, leaf_width, activation: of the layer, as in `fastff.FFF`: 2**depth leaves of so many neurons.
        epochs, batch_size, learning_rate, weight_decay: of the training, by AdamW; the rate falls to 0 as a cosine.
        noise, balance: of the recipe, as in `fastff.Recipe`.
        standardize: bring every feature to mean 0 and deviation 1. Without it, see that features are of one scale.
        validation: a share of the samples to hold out. With it the parameters of the epoch with the least loss on them
            are kept, and training stops when `patience` epochs have brought no better one.
        random_state: a number, for the same result every time. The state of torch's generators is left as it was.
        device: for training and prediction.
        verbose: show a progress bar, by `rich`.

    Attributes:
        classes_, n_features_in_, feature_names_in_: as in every classifier.
        layer_: the `fastff.FFF`, in evaluation mode; mean_ and scale_: what its inputs were standardised by.
        loss_curve_, validation_loss_curve_: the task's loss of every epoch; n_iter_: how many there were.
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on X (n_samples, n_features) and y (n_samples,); sample_weight (n_samples,) weighs the loss."""
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        weight = _weights(sample_weight, X)
        self.classes_, target = np.unique(y, return_inverse=True)
        task = partial(F.cross_entropy, reduction="none")
        return self._fit(X, target.astype(np.int64), len(self.classes_), task, weight)

    def predict(self, X: Any) -> np.ndarray:
        """The most likely class of each sample: (n_samples,)."""
        scores = self._outputs(X)
        return self.classes_[scores.argmax(1)]

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of each class, in the order of classes_: (n_samples, n_classes)."""
        return softmax(self._outputs(X))


class FFFRegressor(RegressorMixin, MultiOutputMixin, _FFFEstimator):  # type: ignore[misc]
    """A regressor of one FFF layer, for one target or several. Arguments and attributes are those of FFFClassifier.

    Targets are standardised for the training; its loss is the mean square error.
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on X (n_samples, n_features) and y (n_samples,) or (n_samples, n_targets); sample_weight (n_samples,)
        weighs the loss."""
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)
        y = np.asarray(y, dtype=np.float64)
        weight = _weights(sample_weight, X)
        self.target_mean_, self.target_scale_ = _moments(y, weight)
        target = ((y - self.target_mean_) / self.target_scale_).astype(np.float32).reshape(len(y), -1)
        self.one_target_ = y.ndim == 1
        return self._fit(X, target, target.shape[1], lambda output, y: (output - y).square().mean(1), weight)

    def predict(self, X: Any) -> np.ndarray:
        """The targets of each sample: (n_samples,), or (n_samples, n_targets) as they were given."""
        y = self._outputs(X)
        return (y[:, 0] if self.one_target_ else y) * self.target_scale_ + self.target_mean_


def _weights(sample_weight: Any, X: np.ndarray) -> np.ndarray | None:
    """The weights (n_samples,), checked; None if there are none."""
    if sample_weight is None:
        return None
    weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
    if not weight.any():
        raise ValueError("sample_weight is 0 for every sample; at least one must count.")
    return weight


def _moments(values: np.ndarray, weight: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of each column; where it is constant, but for rounding, the deviation is 1."""
    if weight is None:
        mean, scale = values.mean(0), values.std(0)
    else:
        mean = np.average(values, 0, weight)
        scale = np.sqrt(np.average((values - mean) ** 2, 0, weight))
    constant = scale <= 10 * np.finfo(np.float64).eps * np.abs(values).max(0, initial=0)
    return mean, np.where(constant, 1.0, scale)


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """torch's generators from this seed; then as they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@contextmanager
def _progress(epochs: int, verbose: bool) -> Iterator[Callable[[float], None]]:
    """A function to call with the loss of every epoch; it moves a bar if one is wanted."""
    if not verbose:
        yield lambda loss: None
        return
    from rich.progress import Progress

    with Progress(*Progress.get_default_columns(), "loss {task.fields[loss]:.3g}") as bar:
        task = bar.add_task("epochs", total=epochs, loss=math.nan)
        yield lambda loss: bar.update(task, advance=1, loss=loss)
