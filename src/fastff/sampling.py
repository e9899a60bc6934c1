"""Which alternatives a sample tries in sampled training, and how much each one counts.

With `decision="sampled"`, a sample visits one leaf, as in inference, and a few alternatives: it leaves its path at one
level and walks on to another leaf. With z the logits on the path (batch, depth) and p = sigmoid(z), the level is drawn

    "mixture"      by the probability that a soft walk first leaves the path there
    "even"         evenly
    "stratified"   evenly, and in equal numbers over the batch
    "boundary"     in proportion to p (1 - p), so mostly where a decision is close

An estimate is then divided by the probability of its level, so its expectation is the sum over all levels. With several
alternatives, a sample's draws are spread over the levels (systematic sampling): "even" with `depth` alternatives takes
every level once. What the expectation is, see `backends/sampled.py`.
"""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import check_int

Estimator = Literal["mixture", "even", "stratified", "boundary"]
ESTIMATORS: tuple[str, ...] = get_args(Estimator)


def check_alternatives(alternatives: int, depth: int) -> int:
    """The number of alternatives, if a tree of this depth has that many."""
    alternatives = check_int("alternatives", alternatives, 1)
    if alternatives > max(depth, 1):
        raise ValueError(
            f"alternatives must be at most the depth, one for each level; got {alternatives} at depth {depth}."
        )
    return alternatives


def draw(logits: Tensor, estimator: str, alternatives: int) -> tuple[Tensor, Tensor]:
    """The level at which each alternative leaves the path, and its weight: (batch, alternatives) each.

    The weight is 1 / (alternatives * probability of the level). For "mixture" it is the probability that a soft walk
    ends in another leaf, over `alternatives`: the walk itself then has the right distribution.
    """
    batch, depth = logits.shape
    if estimator in ("even", "stratified"):
        if alternatives == depth:
            return _every_level(logits), torch.ones_like(logits)
        place = _uniforms(logits, alternatives, estimator == "stratified")
        level = (place * depth).long().clamp(max=depth - 1)
        return level, torch.full_like(place, depth / alternatives)
    mass = leaving(logits) if estimator == "mixture" else torch.sigmoid(logits) * torch.sigmoid(-logits)
    total = mass.sum(-1, keepdim=True)  # (batch, 1)
    # Levels whose mass lies left of the place. A NaN compares as False: level 0, a valid one.
    place = _uniforms(logits, alternatives, False) * total
    level = (place.unsqueeze(-1) >= mass.cumsum(-1).unsqueeze(1)).sum(-1).clamp(max=depth - 1)
    if estimator == "mixture":
        return level, (total / alternatives).expand(batch, alternatives)
    chosen = mass.gather(-1, level)
    # All decisions may be so clear that p (1 - p) is 0. So is the gradient then.
    return level, torch.where(chosen > 0, total / (alternatives * chosen), 0)


def thresholds(logits: Tensor) -> Tensor:
    """Random thresholds like `logits`: a logit z is at least its threshold with probability sigmoid(z)."""
    return torch.logit(torch.rand(logits.shape, dtype=logits.dtype, device=logits.device))


def leaving(logits: Tensor) -> Tensor:
    """The probability that a soft walk leaves the hard path at each level: (batch, depth).

    They sum to 1 minus the visited leaf's mixture weight, without the rounding error of that difference.
    """
    clear = logits.abs()
    stays = F.logsigmoid(clear).cumsum(-1)  # the hard path takes the likelier side
    reaches = torch.cat([torch.zeros_like(stays[:, :1]), stays[:, :-1]], -1)
    return reaches.exp() * torch.sigmoid(-clear)


def _uniforms(logits: Tensor, alternatives: int, stratified: bool) -> Tensor:
    """Numbers in [0, 1), one in each of `alternatives` equal parts: (batch, alternatives)."""
    batch, device = logits.shape[0], logits.device
    start = torch.rand(batch, 1, dtype=logits.dtype, device=device)
    if stratified:
        start = (torch.randperm(batch, device=device).unsqueeze(-1) + start) / max(batch, 1)
    return (start + torch.arange(alternatives, device=device)) / alternatives


def _every_level(logits: Tensor) -> Tensor:
    return torch.arange(logits.shape[-1], device=logits.device).expand(logits.shape)
