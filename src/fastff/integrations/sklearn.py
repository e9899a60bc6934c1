"""One FFF layer as a scikit-learn estimator.

    model = FFFClassifier(depth=4, leaf_width=16).fit(X, y)
    model.predict(X), model.predict_proba(X), model.apply(X)

Inputs are standardised, the layer is trained by `fastff.Recipe` with AdamW and a learning rate that falls to 0 as a
cosine, and prediction is the hard pass: every sample is answered by one leaf, which apply() tells.

A fit that fails, or diverges, raises and leaves the estimator unchanged.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
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
from ..checks import check_int, check_number
from ..interrupts import guarded
from ..layer import FFF
from ..training.recipe import Recipe

FLOAT32 = torch.finfo(torch.float32)


def _known_arguments(init: Callable[..., None]) -> Callable[..., None]:
    """An __init__ that names the estimator, and the remedy, for an argument that there is not."""
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


class _FFFEstimator(BaseEstimator):  # type: ignore[misc]
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
        """The index of the leaf that answers each sample, from 0 to 2**depth - 1: (n_samples,)."""
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
        scaled = _standardized(X, self.mean_, self.scale_)
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
        epochs, batch_size = check_int("epochs", self.epochs, 1), check_int("batch_size", self.batch_size, 1)
        patience = check_int("patience", self.patience, 1)
        # AdamW divides the rate by 1 - 0.9 at first, and multiplies weights by 1 - rate * decay.
        rate = check_number("learning_rate", self.learning_rate, 0, FLOAT32.max / 10)
        decay = check_number("weight_decay", self.weight_decay, 0, FLOAT32.max / max(rate, 1))
        noise = check_number("noise", self.noise, 0, FLOAT32.max)
        balance = check_number("balance", self.balance, 0, FLOAT32.max)
        if not isinstance(self.standardize, bool | np.bool_):
            raise TypeError(f"standardize must be True or False; got {self.standardize!r}.")
        share = check_number("validation", self.validation, 0)
        device, features = _device(self.device), X.shape[1]
        if sample_weight is not None:  # a sample without weight is as if it were not there
            some = sample_weight >= FLOAT32.tiny
            X, target, sample_weight = X[some], target[some], sample_weight[some]
        if share >= 1 or math.ceil(share * len(X)) >= len(X):
            raise ValueError(
                f"validation is a share of the samples, from 0 to below 1, that leaves some for the training; got "
                f"{self.validation} of {len(X)} samples."
            )
        weight = np.ones(len(X)) if sample_weight is None else sample_weight
        self.mean_, self.scale_ = (
            _moments(X, sample_weight) if self.standardize else (np.zeros(features), np.ones(features))
        )
        if not self.standardize and 0 < np.abs(X).max(initial=0) < FLOAT32.tiny:
            raise ValueError("X has only values too small for float32; scale it up, or pass standardize=True.")
        seed = check_random_state(self.random_state).randint(2**31)

        def tensors(X: np.ndarray, target: np.ndarray, weight: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
            weights = torch.as_tensor(weight / weight.mean(), dtype=torch.float32, device=device)
            return self._scaled(X, device), torch.as_tensor(target, device=device), weights

        def mean(output: Tensor, target: Tensor, weight: Tensor) -> Tensor:
            return (task(output, target) * weight).mean()

        kept = None
        if share:
            parts = train_test_split(X, target, weight, test_size=share, random_state=seed)
            X, target, weight = parts[::2]
            kept = tensors(*parts[1::2])
        x, y, w = tensors(X, target, weight)
        with _seeded(seed, device), _progress(epochs, self.verbose) as advance:
            layer = self._layer(features, outputs, device)
            steps = epochs * -(-len(x) // batch_size)
            recipe = Recipe(layer, x, steps=steps, noise=noise, balance=balance)
            optimizer = torch.optim.AdamW(layer.parameters(), lr=rate, weight_decay=decay)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
            best, state = (math.inf, 0), layer.state_dict()
            self.loss_curve_, self.validation_loss_curve_ = [], []
            for epoch in range(epochs):
                total, added = torch.zeros((), device=device), torch.zeros((), device=device)
                failed: ValueError | None = None
                layer.train()
                for batch in torch.randperm(len(x), device=device).split(batch_size):
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
                    except ValueError as raised:  # the tree cannot be rebalanced
                        failed = raised
                        break
                self.loss_curve_.append(float(total))
                layer.eval()
                watched: dict[str, Iterable[Tensor]] = {"the loss": [total], "the balance loss": [added]}
                if kept is not None:
                    with torch.no_grad():
                        error = mean(layer(kept[0]), *kept[1:])
                    watched["the loss on the samples held out"] = [error]
                    self.validation_loss_curve_.append(float(error))
                watched["the mean square of the gradients"] = [s["exp_avg_sq"] for s in optimizer.state.values()]
                watched["a weight"] = layer.parameters()
                self._check_finite(epoch, watched, failed)
                if kept is not None and float(error) < best[0]:
                    best, state = (float(error), epoch), {k: v.clone() for k, v in layer.state_dict().items()}
                advance((self.validation_loss_curve_ or self.loss_curve_)[-1])
                if kept is not None and epoch - best[1] >= patience:
                    break
            # A new layer: the recipe's hooks, with the training data behind them, stay with the old one.
            self.layer_ = self._layer(features, outputs, device).eval()
            self.layer_.load_state_dict(state)
            with torch.no_grad():
                self._check_finite(epoch, {"an output": [self.layer_(x)]})
        self.n_iter_ = len(self.loss_curve_)
        return self

    def _check_finite(self, epoch: int, watched: dict[str, Iterable[Tensor]], failed: ValueError | None = None) -> None:
        """Raise if the training has diverged: if one of these is not finite, or the tree could not be rebalanced."""
        finite = torch.stack([torch.stack([t.isfinite().all() for t in several]).all() for several in watched.values()])
        if failed is None and finite.all():
            return
        found = [name for name, good in zip(watched, finite.tolist(), strict=True) if not good]
        defaults = {name: p.default for name, p in inspect.signature(type(self)).parameters.items()}
        names = ("learning_rate", "weight_decay", "noise", "balance")
        high = [name for name in names if getattr(self, name) > defaults[name]] or ["learning_rate"]
        remedy = "" if self.standardize else ", or pass standardize=True"
        raise ValueError(
            f"the training diverged: {(found or ['a node logit'])[0]} was not finite in epoch {epoch + 1}. "
            f"Lower {' or '.join(f'{name} (here {getattr(self, name):g})' for name in high)}{remedy}."
        ) from failed

    def _layer(self, features: int, outputs: int, device: torch.device) -> FFF:
        return FFF(
            features,
            outputs,
            depth=self.depth,
            leaf_width=self.leaf_width,
            activation=self.activation,
            device=device,
            dtype=torch.float32,
        )


class FFFClassifier(ClassifierMixin, _FFFEstimator):  # type: ignore[misc]
    """A classifier of one FFF layer.

    fit takes sample_weight. There is no class_weight: for classes of unequal size pass scikit-learn's
    compute_sample_weight("balanced", y).

    Args:
        depth, leaf_width, activation: of the layer, as in `fastff.FFF`: 2**depth leaves of leaf_width neurons.
        epochs, batch_size, learning_rate, weight_decay: of the training, by AdamW; the rate falls to 0 as a cosine.
        noise, balance: of the recipe, as in `fastff.Recipe`.
        standardize: bring every feature to mean 0 and deviation 1. Without it, see that features are of one scale.
        validation: a share of the samples to hold out. With it the parameters of the epoch with the least loss on them
            are kept, and training stops when `patience` epochs have brought no better one.
        random_state: a number, for the same result every time. torch's generators stay unchanged.
        device: for training and prediction.
        verbose: show a progress bar, by `rich`.

    Attributes:
        classes_, n_features_in_, feature_names_in_: as in every classifier.
        layer_: the `fastff.FFF`, in evaluation mode; mean_ and scale_: what its inputs were standardised by.
        loss_curve_, validation_loss_curve_: the task's loss of every epoch; n_iter_: how many there were.
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on X (n_samples, n_features) and y (n_samples,); sample_weight (n_samples,) weighs the loss."""
        with _all_or_nothing(self):
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
        with _all_or_nothing(self):
            X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)
            y = np.asarray(y, dtype=np.float64)
            weight = _weights(sample_weight, X)
            self.target_mean_, self.target_scale_ = _moments(y, weight)
            target = _standardized(y, self.target_mean_, self.target_scale_).astype(np.float32).reshape(len(y), -1)
            self.one_target_ = y.ndim == 1
            return self._fit(X, target, target.shape[1], lambda output, y: (output - y).square().mean(1), weight)

    def predict(self, X: Any) -> np.ndarray:
        """The targets of each sample: (n_samples,), or (n_samples, n_targets) as they were given."""
        y = self._outputs(X)
        return (y[:, 0] if self.one_target_ else y) * self.target_scale_ + self.target_mean_


def _weights(sample_weight: Any, X: np.ndarray) -> np.ndarray | None:
    """The weights (n_samples,), checked, as parts of the largest; None if there are none."""
    if sample_weight is None:
        return None
    weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
    if not weight.any():
        raise ValueError("sample_weight is 0 for every sample; at least one must count.")
    return weight / weight.max()


def _moments(values: np.ndarray, weight: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of each column; where it is constant, but for rounding, the deviation is 1.

    They are taken in units of a power of 2, so that no square is too large or too small for a float.
    """
    peak = np.abs(values).max(0, initial=0)
    _, power = np.frexp(peak)
    values, peak = np.ldexp(values, -power), np.ldexp(peak, -power)
    if weight is None:
        mean, scale = values.mean(0), values.std(0)
    else:
        mean = np.average(values, 0, weight)
        scale = np.sqrt(np.average((values - mean) ** 2, 0, weight))
    constant = scale <= 10 * np.finfo(np.float64).eps * peak
    return np.ldexp(mean, power), np.where(constant, 1.0, np.ldexp(scale, power))


def _standardized(values: np.ndarray, mean: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """(values - mean) / scale; infinite or NaN only where that is too large for a float."""
    _, power = np.frexp(scale)
    with np.errstate(over="ignore", invalid="ignore"):
        return (np.ldexp(values, -power) - np.ldexp(mean, -power)) / np.ldexp(scale, -power)


def _device(value: Any) -> torch.device:
    """The device, if one can compute there."""
    try:
        device = torch.empty((), device=value).device
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device must be one of this machine, such as 'cpu'; got {value!r}: {reason}") from error
    if device.type == "meta":
        raise ValueError(f"device must be one that computes, such as 'cpu'; got {value!r}.")
    return device


@guarded
def _all_or_nothing(estimator: Any) -> Iterator[None]:
    """If the block raises, the estimator gets all its attributes back."""
    before = dict(vars(estimator))
    try:
        yield
    except BaseException:
        vars(estimator).clear()
        vars(estimator).update(before)
        raise


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """torch's generators from this seed; then unchanged."""
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
