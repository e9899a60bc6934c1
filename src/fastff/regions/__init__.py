"""Regions: each leaf of a tree owns one region of the input space."""

from . import pictures
from .collect import Example
from .diagnosis import Finding, diagnose
from .explore import explore
from .geometry import Margin, margin
from .history import History
from .statistics import Region, Statistics, statistics
from .usage import Usage, leaves_used, smallest_share, usage

__all__ = [
    "Example",
    "Finding",
    "History",
    "Margin",
    "Region",
    "Statistics",
    "Usage",
    "diagnose",
    "explore",
    "leaves_used",
    "margin",
    "pictures",
    "smallest_share",
    "statistics",
    "usage",
]
