"""scikit-learn estimators for `explore`: their layer behind their standardisation, and their data as batches."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .collect import Loss

BATCH = 1024
Names = Sequence[str] | Mapping[int, str] | None
Opened = tuple[nn.Module, list[Any], Loss | None, Sequence[str] | None, Names]


class Standardized(nn.Module):
    """An estimator's layer with its standardisation before it, as the estimator itself computes it."""

    def __init__(self, estimator: Any) -> None:
        super().__init__()
        self.layer = estimator.layer_
        self.mean, self.scale = estimator.mean_, estimator.scale_

    def forward(self, x: Tensor) -> Tensor:
        from ..integrations.standardize import standardized

        scaled = standardized(x.double().cpu().numpy(), self.mean, self.scale)
        return self.layer(torch.as_tensor(scaled, dtype=torch.float32, device=self.layer.node_weight.device))


def is_estimator(model: Any) -> bool:
    """Whether this is an FFFClassifier or an FFFRegressor, or a pipeline by mistake."""
    return not isinstance(model, nn.Module) and hasattr(model, "get_params")


def opened(estimator: Any, data: Any, loss: Loss | None, feature_names: Any, class_names: Names) -> Opened:
    """A fitted estimator as a model, with batches of the features as given, a loss, and the names that it knows."""
    import numpy as np

    if not hasattr(estimator, "apply") or not hasattr(estimator, "leaf_width"):
        raise TypeError(
            f"explore expects an FFFClassifier or FFFRegressor; got {type(estimator).__name__}. Of a pipeline, pass "
            "the last step, and data that the other steps have transformed."
        )
    if not hasattr(estimator, "layer_"):
        raise ValueError(f"this {type(estimator).__name__} is not fitted yet. Call fit before explore.")
    features, target = data if isinstance(data, tuple) and len(data) == 2 else (data, None)
    x = torch.from_numpy(np.array(features, dtype=np.float64, ndmin=2))
    if x.shape[1] != estimator.n_features_in_:
        raise ValueError(f"X must have {estimator.n_features_in_} features; got shape {tuple(x.shape)}.")
    names = getattr(estimator, "feature_names_in_", None)
    feature_names = names if feature_names is None else feature_names
    if target is None:
        return Standardized(estimator), list(x.split(BATCH)), None, feature_names, class_names
    if (classes := getattr(estimator, "classes_", None)) is not None:
        unknown = ~np.isin(target, classes)
        if unknown.any():
            raise ValueError(f"y has the class {target[unknown][0]!r}, which the estimator did not see in training.")
        y = torch.from_numpy(np.searchsorted(classes, target).astype(np.int64))
        loss = loss or partial(F.cross_entropy, reduction="none")
        class_names = [str(name) for name in classes] if class_names is None else class_names
    else:
        y = torch.from_numpy(np.array(target, dtype=np.float64))
    if len(y) != len(x):
        raise ValueError(f"X and y must have the same length; got {len(x)} and {len(y)}.")
    batches = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
    return Standardized(estimator), batches, loss, feature_names, class_names
