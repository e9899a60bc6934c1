"""Everything that trains an FFF layer: the recipe, and its parts for your own training loop."""

from .initialize import initialize_tree_
from .losses import balance_loss, entropies, hardening_loss
from .rebalance import rebalance_
from .recipe import Recipe
from .schedule import Schedule, set_temperature_

__all__ = [
    "Recipe",
    "Schedule",
    "balance_loss",
    "entropies",
    "hardening_loss",
    "initialize_tree_",
    "rebalance_",
    "set_temperature_",
]
