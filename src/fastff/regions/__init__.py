"""Regions: each leaf of a tree owns one region of the input space."""

from . import pictures
from .collect import Example
from .development import History
from .diagnosis import Finding, diagnose
from .explore import explore
from .geometry import Margin, Path, boundaries, contains, halfspaces, margin, path
from .reach import Change, empty_regions, smallest_change
from .reshape import Reshaped, deepen_, drop_leaves_, merge_siblings_, prune_, split_leaf_
from .rules import export_text, path_text
from .statistics import Region, Statistics, statistics
from .usage import Usage, leaves_used, smallest_share, usage

__all__ = [
    "Change",
    "Example",
    "Finding",
    "History",
    "Margin",
    "Path",
    "Region",
    "Reshaped",
    "Statistics",
    "Usage",
    "boundaries",
    "contains",
    "deepen_",
    "diagnose",
    "drop_leaves_",
    "empty_regions",
    "explore",
    "export_text",
    "halfspaces",
    "leaves_used",
    "margin",
    "merge_siblings_",
    "path",
    "path_text",
    "pictures",
    "prune_",
    "smallest_change",
    "smallest_share",
    "split_leaf_",
    "statistics",
    "usage",
]
