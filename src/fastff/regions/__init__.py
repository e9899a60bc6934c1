"""Regions: each leaf of a tree owns one region of the input space."""

from .geometry import Margin, Path, boundaries, contains, halfspaces, margin, path
from .reach import Change, empty_regions, smallest_change
from .reshape import Reshaped, deepen_, drop_leaves_, merge_siblings_, prune_, split_leaf_
from .rules import export_text, path_text
from .usage import Usage, leaves_used, smallest_share, usage

__all__ = [
    "Change",
    "Margin",
    "Path",
    "Reshaped",
    "Usage",
    "boundaries",
    "contains",
    "deepen_",
    "drop_leaves_",
    "empty_regions",
    "export_text",
    "halfspaces",
    "leaves_used",
    "margin",
    "merge_siblings_",
    "path",
    "path_text",
    "prune_",
    "smallest_change",
    "smallest_share",
    "split_leaf_",
    "usage",
]
