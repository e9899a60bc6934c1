"""Several processes: the batch split over them, and the leaves of large trees too."""

from .shards import gather_leaves_, shard_leaves_
from .synchronize import synchronize_, usage

__all__ = ["gather_leaves_", "shard_leaves_", "synchronize_", "usage"]
