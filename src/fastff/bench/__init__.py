"""Inference, measured: FF, MoE and FFF on the same weights. Every output is checked before its time counts.

`fastff bench` and `fastff plan` are the command line. From Python, `measure(Case(...))` times one size, and
`plan(in_features, out_features, width, ...)` finds leaf width and depth for a budget. No layer imports this package.
"""

from .case import Case, count_visited, floor_bytes
from .hardware import OtherLoad, bandwidth, free_threads
from .measuring import MODELS, backends_for, measure, planned, together
from .planning import Choice, plan, recommend
from .results import Measurement, Result
from .runners import EagerRunner
from .timing import Times, interleave

__all__ = [
    "MODELS",
    "Case",
    "Choice",
    "EagerRunner",
    "Measurement",
    "OtherLoad",
    "Result",
    "Times",
    "backends_for",
    "bandwidth",
    "count_visited",
    "floor_bytes",
    "free_threads",
    "interleave",
    "measure",
    "plan",
    "planned",
    "recommend",
    "together",
]
