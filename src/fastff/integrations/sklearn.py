"""One FFF layer as a scikit-learn estimator.

    model = FFFClassifier(depth=4, leaf_width=16).fit(X, y)
    model.predict(X), model.predict_proba(X), model.apply(X)

Inputs are standardised. The layer is trained by `fastff.Recipe` with AdamW and a learning rate that decays to 0 along a
cosine. Prediction is the hard pass: one leaf answers each sample, and apply() says which.

A fit that fails, or diverges, raises and leaves the estimator unchanged.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.base import BaseEstimator, ClassifierMixin, MultiOutputMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.extmath import softmax
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from ..activations import Activation
from ..interrupts import guarded
from .sklearn_rules import Rules
from .sklearn_training import FLOAT32, Training
from .standardize import moments, sample_weights, standardized


def _known_arguments(init: Callable[..., None]) -> Callable[..., None]:
    """An __init__ whose error for an unknown argument names the estimator and the remedy."""
    known = inspect.signature(init).parameters

    @wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs.keys() - known.keys():
            remedy = f"It has {', '.join(list(known)[1:])}."
            if name == "class_weight" and isinstance(self, ClassifierMixin):
                remedy = 'Pass sklearn.utils.class_weight.compute_sample_weight("balanced", y) to fit as sample_weight.'
            raise TypeError(f"{type(self).__name__} has no argument {name!r}. {remedy}")
        init(self, *args, **kwargs)

    return checked


class _FFFEstimator(Rules, BaseEstimator):  # type: ignore[misc]
    """What the classifier and the regressor share."""

    mean_: np.ndarray
    scale_: np.ndarray

    @_known_arguments
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
        """The index of the leaf that answers each sample, 0 to 2**depth - 1: (n_samples,)."""
        x = self._inputs(X)
        with torch.no_grad():
            return self.layer_.route(x).cpu().numpy()

    def _outputs(self, X: Any) -> np.ndarray:
        x = self._inputs(X)
        with torch.no_grad():
            outputs = self.layer_(x)
        if not outputs.isfinite().all():
            raise ValueError("X has values too large for float32; scale it down.")
        return outputs.double().cpu().numpy()

    def _inputs(self, X: Any) -> Tensor:
        check_is_fitted(self)
        return self._scaled(validate_data(self, X, reset=False, dtype=np.float64), self.layer_.node_weight.device)

    def _scaled(self, X: np.ndarray, device: torch.device) -> Tensor:
        scaled = standardized(X, self.mean_, self.scale_)
        if not np.isfinite(scaled).all() or np.abs(scaled).max(initial=0) > FLOAT32.max:
            raise ValueError("X has values too large for float32; scale it down.")
        return torch.as_tensor(scaled, dtype=torch.float32, device=device)

    def _fit(
        self,
        X: np.ndarray,
        target: np.ndarray,
        outputs: int,
        task: Callable[[Tensor, Tensor], Tensor],
        sample_weight: np.ndarray | None,
    ) -> Self:
        """Train on the mean of task(output, target), a loss for each sample, weighted if there are weights."""
        training, features = Training(self), X.shape[1]
        if sample_weight is not None:  # samples without weight are left out
            some = sample_weight >= FLOAT32.tiny
            X, target, sample_weight = X[some], target[some], sample_weight[some]
        if training.share >= 1 or math.ceil(training.share * len(X)) >= len(X):
            raise ValueError(
                f"validation must be a share of the samples, 0 or more and below 1, that leaves some for training; got "
                f"{self.validation} of {len(X)} samples."
            )
        weight = np.ones(len(X)) if sample_weight is None else sample_weight
        self.mean_, self.scale_ = (
            moments(X, sample_weight) if self.standardize else (np.zeros(features), np.ones(features))
        )
        if not self.standardize and 0 < np.abs(X).max(initial=0) < FLOAT32.tiny:
            raise ValueError("X has only values too small for float32; scale it up, or pass standardize=True.")
        seed = check_random_state(self.random_state).randint(2**31)
        self.layer_ = training.run(X, target, weight, outputs, task, self._scaled, seed)
        self.loss_curve_, self.validation_loss_curve_ = training.loss_curve, training.validation_loss_curve
        self.n_iter_ = len(self.loss_curve_)
        return self


class FFFClassifier(ClassifierMixin, _FFFEstimator):  # type: ignore[misc]
    """A classifier that is one FFF layer.

    fit takes sample_weight. There is no class_weight: for classes of unequal size pass scikit-learn's
    compute_sample_weight("balanced", y).

    Args:
        depth, leaf_width, activation: of the layer, as in `fastff.FFF`: 2**depth leaves of leaf_width neurons.
        epochs, batch_size, learning_rate, weight_decay: of AdamW; the rate decays to 0 along a cosine.
        noise, balance: of the recipe, as in `fastff.Recipe`.
        standardize: scale every feature to mean 0 and standard deviation 1. Without it, use features of one scale.
        validation: the share of the samples to hold out. The parameters of the epoch with the lowest loss on them are
            kept, and training stops after `patience` epochs without a better one.
        random_state: a seed, for reproducible results. torch's own generators are unchanged.
        device: for training and prediction.
        verbose: show a progress bar (needs rich).

    Attributes:
        classes_, n_features_in_, feature_names_in_: as in every classifier.
        layer_: the `fastff.FFF`, in evaluation mode. mean_, scale_: the statistics that standardise its inputs.
        loss_curve_, validation_loss_curve_: the task's loss of every epoch. n_iter_: the number of epochs.
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on X (n_samples, n_features) and y (n_samples,); sample_weight (n_samples,) weighs the loss."""
        with _all_or_nothing(self):
            X, y = validate_data(self, X, y, dtype=np.float64)
            check_classification_targets(y)
            weight = sample_weights(sample_weight, X)
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
    """A regressor that is one FFF layer, for one target or several. Arguments and attributes: as in FFFClassifier.

    Targets are standardised for training; the loss is the mean squared error.
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on X (n_samples, n_features) and y (n_samples,) or (n_samples, n_targets); sample_weight (n_samples,)
        weighs the loss."""
        with _all_or_nothing(self):
            X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)
            y = np.asarray(y, dtype=np.float64)
            weight = sample_weights(sample_weight, X)
            self.target_mean_, self.target_scale_ = moments(y, weight)
            target = standardized(y, self.target_mean_, self.target_scale_).astype(np.float32).reshape(len(y), -1)
            self.one_target_ = y.ndim == 1
            return self._fit(X, target, target.shape[1], lambda output, y: (output - y).square().mean(1), weight)

    def predict(self, X: Any) -> np.ndarray:
        """The targets of each sample: (n_samples,), or (n_samples, n_targets) as they were given."""
        y = self._outputs(X)
        return (y[:, 0] if self.one_target_ else y) * self.target_scale_ + self.target_mean_


@guarded
def _all_or_nothing(estimator: Any) -> Iterator[None]:
    """If the block raises, all attributes of the estimator are restored."""
    before = dict(vars(estimator))
    try:
        yield
    except BaseException:
        vars(estimator).clear()
        vars(estimator).update(before)
        raise
