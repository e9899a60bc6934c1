"""Regions: each leaf of a tree owns one region of the input space."""

from .geometry import Margin, Path, boundaries, contains, halfspaces, margin, path
from .reach import Change, empty_regions, smallest_change
from .rules import export_text, path_text
from .usage import Usage, leaves_used, smallest_share, usage

__all__ = [
    "Change",
    "Margin",
    "Path",
    "Usage",
    "boundaries",
    "contains",
    "empty_regions",
    "export_text",
    "halfspaces",
    "leaves_used",
    "margin",
    "path",
    "path_text",
    "smallest_change",
    "smallest_share",
    "usage",
]
