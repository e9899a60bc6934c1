"""Fast feedforward layers: trained like a feedforward layer, evaluated along one path of a learned binary tree."""

from . import baselines, compat, functional, optim, parallel, regions, surgery, training
from .backends import backend
from .explain import explain
from .layer import FFF
from .regions import usage
from .surgery import apply_, distill_, load_, quantize_, replace_, save
from .training import Recipe, balance_loss, hardening_loss, initialize_tree_, rebalance_

__version__ = "0.1.0"

__all__ = [
    "FFF",
    "Recipe",
    "apply_",
    "backend",
    "balance_loss",
    "baselines",
    "compat",
    "distill_",
    "explain",
    "functional",
    "hardening_loss",
    "initialize_tree_",
    "load_",
    "optim",
    "parallel",
    "quantize_",
    "rebalance_",
    "regions",
    "replace_",
    "save",
    "surgery",
    "training",
    "usage",
]
