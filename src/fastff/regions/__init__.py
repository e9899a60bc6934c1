"""Regions: each leaf of a tree owns one region of the input space."""

from . import pictures
from .collect import Example
from .development import History
from .diagnosis import Finding, diagnose
from .edit import class_target, edit_, edit_class_, layer_inputs
from .edit_state import edits_state, load_edits_
from .explore import explore
from .freeze import freeze_leaves_, frozen_leaves, unfreeze_leaves_
from .geometry import Margin, Path, boundaries, contains, halfspaces, margin, path
from .reach import Change, empty_regions, smallest_change
from .records import Edit, edits, forget_edits_
from .replay import Replay, select_replay
from .reshape import Reshaped, deepen_, drop_leaves_, merge_siblings_, prune_, split_leaf_
from .rules import export_text, path_text
from .statistics import Region, Statistics, statistics
from .traffic import Traffic
from .usage import Usage, leaves_used, smallest_share, usage

__all__ = [
    "Change",
    "Edit",
    "Example",
    "Finding",
    "History",
    "Margin",
    "Path",
    "Region",
    "Replay",
    "Reshaped",
    "Statistics",
    "Traffic",
    "Usage",
    "boundaries",
    "class_target",
    "contains",
    "deepen_",
    "diagnose",
    "drop_leaves_",
    "edit_",
    "edit_class_",
    "edits",
    "edits_state",
    "empty_regions",
    "explore",
    "export_text",
    "forget_edits_",
    "freeze_leaves_",
    "frozen_leaves",
    "halfspaces",
    "layer_inputs",
    "leaves_used",
    "load_edits_",
    "margin",
    "merge_siblings_",
    "path",
    "path_text",
    "pictures",
    "prune_",
    "select_replay",
    "smallest_change",
    "smallest_share",
    "split_leaf_",
    "statistics",
    "unfreeze_leaves_",
    "usage",
]
