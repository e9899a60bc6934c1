"""Regions: each leaf of a tree owns one region of the input space."""

from .usage import Usage, leaves_used, smallest_share, usage

__all__ = ["Usage", "leaves_used", "smallest_share", "usage"]
