"""Regions: each leaf of a tree owns one region of the input space."""

from .edit import class_target, edit_, edit_class_, layer_inputs
from .edit_state import edits_state, load_edits_
from .freeze import freeze_leaves_, frozen_leaves, unfreeze_leaves_
from .records import Edit, edits
from .replay import Replay, select_replay
from .traffic import Traffic
from .usage import Usage, leaves_used, smallest_share, usage

__all__ = [
    "Edit",
    "Replay",
    "Traffic",
    "Usage",
    "class_target",
    "edit_",
    "edit_class_",
    "edits",
    "edits_state",
    "freeze_leaves_",
    "frozen_leaves",
    "layer_inputs",
    "leaves_used",
    "load_edits_",
    "select_replay",
    "smallest_share",
    "unfreeze_leaves_",
    "usage",
]
