"""Which alternatives a sample tries in sampled training, and how much each one counts.

With `decision="sampled"`, a sample visits one leaf, as in inference, and a few alternatives: it leaves its path at some
level and walks to another leaf. With z the logits on the path (batch, depth) and p = sigmoid(z), the level is drawn

    "mixture"      by the probability that a soft walk first leaves the path there
    "even"         evenly

An estimate is then divided by the probability of its level, so its expectation is the sum over all levels. With several
alternatives, a sample's draws are spread over the levels (stratified sampling: one draw in each of `alternatives` equal
parts of the probability, independent of the others). "even" with `depth` alternatives takes every level once. For the
expectations, see `backends/sampled.py`.
"""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import check_int
from .tree import num_leaves

Estimator = Literal["mixture", "even"]
ESTIMATORS: tuple[str, ...] = get_args(Estimator)


def check_alternatives(alternatives: int, depth: int) -> int:
    """The number of alternatives, if a tree of this depth has that many other leaves."""
    alternatives, others = check_int("alternatives", alternatives, 1), most_alternatives(depth)
    if alternatives > others:
        raise ValueError(
            f"alternatives must be at most {others}, the other leaves of a tree of depth {depth}; got {alternatives}."
        )
    return alternatives


def most_alternatives(depth: int) -> int:
    """The number of unvisited leaves; 1 if there are none."""
    return max(num_leaves(depth) - 1, 1)


def draw(logits: Tensor, estimator: str, alternatives: int) -> tuple[Tensor, Tensor]:
    """The level at which each alternative leaves the path, and its weight: (batch, alternatives) each.

    The weight is 1 / (alternatives * probability of the level). For "mixture", it is the probability that a soft walk
    ends in another leaf, over `alternatives`; the walk then has the right distribution.
    """
    return place(logits, estimator, torch.rand(len(logits), alternatives, dtype=logits.dtype, device=logits.device))


def place(logits: Tensor, estimator: str, within: Tensor) -> tuple[Tensor, Tensor]:
    """As `draw`, by given numbers in [0, 1): (batch, alternatives)."""
    (batch, depth), alternatives = logits.shape, within.shape[1]
    if estimator == "even" and alternatives == depth:
        return torch.arange(depth, device=logits.device).expand(logits.shape), torch.ones_like(logits)
    # One in each of `alternatives` equal parts.
    at = (within + torch.arange(alternatives, device=logits.device)) / alternatives
    if estimator == "even":
        return (at * depth).long().clamp(max=depth - 1), torch.full_like(at, depth / alternatives)
    mass = leaving(logits)
    total = mass.sum(-1, keepdim=True)  # (batch, 1)
    # Levels whose mass lies left of the place. A NaN compares as False: level 0, a valid one.
    level = ((at * total).unsqueeze(-1) >= running_sum(mass).unsqueeze(1)).sum(-1).clamp(max=depth - 1)
    return level, (total / alternatives).expand(batch, alternatives)


def level_chances(logits: Tensor, alternatives: int) -> Tensor:
    """The probability of each level for each draw of "mixture": (batch, alternatives, depth), summing to 1."""
    ends = running_sum(leaving(logits))  # (batch, depth)
    ends = torch.where(ends[:, -1:] > 0, ends / ends[:, -1:], 1)  # all on level 0, if no decision is in doubt
    # Not arange / alternatives, which is float32: (alternatives, 1)
    part = torch.arange(alternatives, dtype=ends.dtype, device=ends.device).unsqueeze(-1) / alternatives
    below = ((ends.unsqueeze(1) - part) * alternatives).clamp(0, 1)  # up to each level, within a draw's part
    return below.diff(dim=-1, prepend=torch.zeros_like(below[..., :1]))


def thresholds(logits: Tensor) -> Tensor:
    """Random thresholds like `logits`: a logit z is at least its threshold with probability sigmoid(z)."""
    return torch.logit(torch.rand(logits.shape, dtype=logits.dtype, device=logits.device))


def leaving(logits: Tensor) -> Tensor:
    """The probability that a soft walk leaves the hard path at each level: (batch, depth).

    They sum to 1 minus the visited leaf's mixture weight, without the rounding error of that difference.
    """
    clear = logits.abs()
    stays = running_sum(F.logsigmoid(clear))  # the hard path takes the likelier side
    reaches = torch.cat([torch.zeros_like(stays[:, :1]), stays[:, :-1]], -1)
    return reaches.exp() * torch.sigmoid(-clear)


def running_sum(values: Tensor) -> Tensor:
    """values.cumsum(-1), for a few columns. On a GPU, torch's adds in no fixed order, and raises under
    torch.use_deterministic_algorithms(True)."""
    sums: list[Tensor] = []
    for column in values.unbind(-1):
        sums.append(sums[-1] + column if sums else column)
    return torch.stack(sums, -1) if sums else values
