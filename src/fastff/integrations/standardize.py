"""Arrays for the scikit-learn estimators: standardisation and sample weights, in float64."""

from typing import Any

import numpy as np
from sklearn.utils.validation import _check_sample_weight


def sample_weights(sample_weight: Any, X: np.ndarray) -> np.ndarray | None:
    """The weights (n_samples,), checked and divided by the largest; None if there are none."""
    if sample_weight is None:
        return None
    weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
    if not weight.any():
        raise ValueError("sample_weight is 0 for every sample; at least one must count.")
    return weight / weight.max()


def moments(values: np.ndarray, weight: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each column; 1 as the deviation of a column that is constant up to rounding.

    They are computed in units of a power of 2, so that no square overflows or underflows.
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


def standardized(values: np.ndarray, mean: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """(values - mean) / scale; infinite or NaN only if the result overflows."""
    _, power = np.frexp(scale)
    with np.errstate(over="ignore", invalid="ignore"):
        return (np.ldexp(values, -power) - np.ldexp(mean, -power)) / np.ldexp(scale, -power)
