"""Fast feedforward layers: trained like a feedforward layer, evaluated along one path of a learned binary tree."""

from . import compat, functional, optim
from .backends import backend
from .baselines import FF, MoE, importance_loss, load_loss
from .compat import from_fastfeedforward
from .explain import Explanation, explain
from .hardening import Schedule, balance_loss, entropies, hardening_loss, set_temperature_
from .initialize import initialize_tree_
from .layer import FFF
from .rebalance import rebalance_
from .recipe import Recipe
from .regions import Usage, usage
from .surgery import Report, apply_, distill_, load_, replace_, save

__version__ = "0.1.0"

__all__ = [
    "FF",
    "FFF",
    "Explanation",
    "MoE",
    "Recipe",
    "Report",
    "Schedule",
    "Usage",
    "apply_",
    "backend",
    "balance_loss",
    "compat",
    "distill_",
    "entropies",
    "explain",
    "from_fastfeedforward",
    "functional",
    "hardening_loss",
    "importance_loss",
    "initialize_tree_",
    "load_",
    "load_loss",
    "optim",
    "rebalance_",
    "replace_",
    "save",
    "set_temperature_",
    "usage",
]
