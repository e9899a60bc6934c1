"""Inference, measured: FF, MoE and FFF on the same weights, every output checked before its time counts.

`fastff bench` is the command line of this; `measure(Case(...))` the same from Python. Nothing here is imported by the
layers.
"""

from .case import Case, count_visited, floor_bytes
from .measure import MODELS, Measurement, Result, backends_for, measure, planned, together
from .timing import Times, bandwidth, free_threads

__all__ = [
    "MODELS",
    "Case",
    "Measurement",
    "Result",
    "Times",
    "backends_for",
    "bandwidth",
    "count_visited",
    "floor_bytes",
    "free_threads",
    "measure",
    "planned",
    "together",
]
