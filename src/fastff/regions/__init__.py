"""Regions: each leaf of a tree owns one region of the input space."""

from .geometry import Margin, margin
from .usage import Usage, leaves_used, smallest_share, usage

__all__ = ["Margin", "Usage", "leaves_used", "margin", "smallest_share", "usage"]
