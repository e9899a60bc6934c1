"""The members of an ensemble, one per seed: how each starts, what trains their trees, and how these are rebalanced."""

from collections.abc import Sequence

import torch
from torch import nn

from fastff.layer import FFF
from fastff.training.boundaries import shift_biases_
from fastff.training.initialize import copy_first_leaf_, initialize_tree_
from fastff.training.recipe import Recipe

from .build import build
from .ensemble import Ensemble
from .runs import Case
from .samples import Samples
from .settings import Settings
from .teacher import Teachers

LOGITS = 1 << 27  # node logits at once while rebalancing: half a gigabyte


def make_members(
    cases: Sequence[Case], settings: Settings, samples: Samples, classes: int, teachers: Teachers | None
) -> list[nn.Module]:
    """The models before the first step: balanced trees, or students of their teachers."""
    models = []
    for i, case in enumerate(cases):
        torch.manual_seed(case.seed)
        own = samples.training[i]
        if teachers is not None:
            model = teachers.student(i, case, samples.x[own[: settings.fit_images]])
        else:
            model = build(case, tuple(samples.x.shape[1:]), classes).to(samples.x.device)
        trees = [module for module in model.modules() if isinstance(module, FFF)]
        if teachers is None:
            for layer in trees if settings.sharing else ():
                copy_first_leaf_(layer)
            if trees and settings.balanced:
                initialize_tree_(model, list(samples.x[own].split(256)), logit_std=settings.logit_std)
        for layer in trees if settings.frozen else ():
            layer.freeze_tree_()
        models.append(model)
    return models


def make_recipe(model: nn.Module, s: Settings, epochs: int) -> Recipe | None:
    """What trains the trees of a model; None if it has no tree. A step of the recipe is an epoch."""
    if not any(isinstance(module, FFF) and module.depth for module in model.modules()):
        return None
    return Recipe(
        model,
        steps=epochs,
        decision=s.decision,
        transposition=s.transposition,
        noise=s.noise,
        sharing=s.sharing,
        balance=s.balance,
        hardening=0.0 if s.frozen else s.hardening,
        reduction=s.reduction,
        temperature=(1.0, s.training_temperature),
        final_temperature=s.final_temperature,
        reset_trees=False,  # make_members has initialised them
    )


def rebalance(ensemble: Ensemble, samples: Samples, settings: Settings) -> None:
    """Rebalance trees that are the whole model. Trees inside a model have the balance loss alone."""
    model = ensemble.model
    if not isinstance(model, FFF) or not model.depth or not settings.balanced or not settings.min_share:
        return
    size = max(1, LOGITS // (len(samples.x) * model.num_nodes))
    for first in range(0, len(samples.seeds), size):
        part = slice(first, first + size)
        (logits,) = ensemble.map(lambda model, x: [model.node_logits(x)], samples.x, own=False, part=part)
        own = logits.gather(1, samples.training[part].unsqueeze(2).expand(-1, -1, model.num_nodes))
        shift_biases_(ensemble.parameters["node_bias"][part], own, settings.min_share)
