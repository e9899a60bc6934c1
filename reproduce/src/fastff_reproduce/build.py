"""The models of the experiments: FF, MoE and FFF alone, or as the blocks of a vision transformer."""

import functools
import math

from torch import nn

from fastff.baselines import FF, MoE
from fastff.layer import FFF

from .runs import MODELS, Case
from .vit import ViT


def build(case: Case, shape: tuple[int, ...], classes: int) -> nn.Module:
    """The model of a case, for inputs of this shape."""
    features = math.prod(shape)
    if case.model == "FF":
        return FF(features, classes, width=case.width)
    if case.model == "MoE":
        experts = case.width // case.leaf_width
        return MoE(features, classes, num_experts=experts, expert_width=case.leaf_width, k=2)
    if case.model == "FFF":
        return FFF(features, classes, depth=case.depth, leaf_width=case.leaf_width)
    if case.model in ("ViT-FF", "ViT-FFF"):
        channels, height, width = shape
        return ViT((channels, height, width), classes, feedforward=functools.partial(_block, case))
    raise ValueError(f"unknown model {case.model!r}; choose from {', '.join(MODELS)}.")


def is_transformer(case: Case) -> bool:
    return case.model.startswith("ViT")


def _block(case: Case, dim: int) -> nn.Module:
    """A feedforward block of a transformer."""
    if case.model == "ViT-FF":
        return FF(dim, dim, width=case.width)
    return FFF(dim, dim, depth=case.depth, leaf_width=case.leaf_width)
