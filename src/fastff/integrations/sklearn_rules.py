"""The tree of a scikit-learn estimator as text, in the units of its data."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted, validate_data

from ..regions.rules import Wording, describe_leaves, path_text, tree_text


class Rules:
    """export_text and path_text for an estimator with layer_, mean_ and scale_."""

    def export_text(
        self: Any,
        X: Any = None,
        *,
        feature_names: Sequence[str] | None = None,
        class_names: Sequence[str] | None = None,
        digits: int | None = 3,
        max_terms: int | None = 10,
        max_depth: int | None = None,
        spacing: int = 3,
    ) -> str:
        """The tree as rules, in the units of X. The rest is as in `fastff.regions.export_text`.

        Args:
            X: samples. Leaves then say how many they get and what they predict.
            feature_names, class_names: by default as they were in fit.
        """
        check_is_fitted(self)
        classes = getattr(self, "classes_", None)
        if class_names is not None and (classes is None or len(class_names) != len(classes)):
            wanted = "only a classifier has classes" if classes is None else f"this classifier has {len(classes)}"
            raise ValueError(f"class_names must have one name for each class; {wanted}; got {len(class_names)}.")
        wording = self._wording(feature_names, digits, max_terms)
        notes = {}
        if X is not None:
            leaf, answers, names = torch.from_numpy(self.apply(X)), self.predict(X), None
            if classes is not None:
                names = [str(name) for name in (classes if class_names is None else class_names)]
                answers = np.searchsorted(classes, answers)
            notes = describe_leaves(leaf, torch.from_numpy(answers), names)
        return tree_text(self.layer_, wording, notes, max_depth, spacing)

    def path_text(
        self: Any,
        X: Any,
        *,
        feature_names: Sequence[str] | None = None,
        digits: int | None = 3,
        max_terms: int | None = 10,
    ) -> str:
        """The way of one sample, (n_features,) or (1, n_features), as rules in the units of X.

        Distances to boundaries are in standard deviations. The rest is as in `fastff.regions.path_text`.
        """
        check_is_fitted(self)
        one = validate_data(self, [X] if np.ndim(X) == 1 else X, reset=False, dtype=np.float64)
        if len(one) != 1:
            raise ValueError(f"path_text expects one sample; got {len(one)}. Pass a row, such as X[:1].")
        names, mean, scale, *_ = self._wording(feature_names, digits, max_terms)
        options: dict[str, Any] = {"feature_names": names, "mean": mean, "scale": scale}
        return path_text(self.layer_, torch.from_numpy(one[0]), digits=digits, max_terms=max_terms, **options)

    def _wording(self: Any, names: Sequence[str] | None, digits: int | None, max_terms: int | None) -> Wording:
        known = getattr(self, "feature_names_in_", None) if names is None else names
        return Wording.make(self.layer_, known, self.mean_, self.scale_, digits, max_terms)
