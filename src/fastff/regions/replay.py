"""Replay: which past samples to keep, region by region, and which of them to show again.

A layer that learns something new changes the leaves that the new data visits, and these forget. Unvisited leaves keep
their weights. So a small memory is best spent by region: `select_replay` divides a budget over the regions, and
`Replay.draw(near=x)` shows samples of the regions that x visits.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ..checks import check_choice, check_int
from ..layer import FFF

Strategy = Literal["random", "herding", "hardest"]
STRATEGIES = ("random", "herding", "hardest")


@torch.no_grad()
def select_replay(
    layer: FFF,
    x: Tensor,
    budget: int,
    *,
    labels: Tensor | None = None,
    strategy: Strategy = "herding",
    hardness: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Choose at most `budget` of the inputs x (samples, in) of a layer, by region: their indices, ascending.

    Each label gets the same part of the budget, and within a label each region a part in proportion to its samples.
    For a layer inside a model, pass what `layer_inputs` returns as x; the indices then count its rows.

    Args:
        labels: the class of each sample, (samples,) integers; without them, the regions share the whole budget.
        strategy: which samples of a region and label to keep. "random": any. "herding": those whose running mean stays
            closest to the mean of all of them. "hardest": those with the largest `hardness`.
        hardness: for example the loss of each sample, (samples,).
        generator: of the random numbers, on the CPU.
    """
    budget = check_int("budget", budget, 0)
    check_choice("strategy", strategy, STRATEGIES)
    _check_samples(layer, x, labels, hardness, strategy)
    if not len(x):
        return torch.zeros(0, dtype=torch.int64, device=x.device)
    label = torch.zeros(len(x), dtype=torch.int64, device=x.device) if labels is None else labels.to(x.device)
    leaf, kept = layer.route(x), []
    kinds, of_kind, counts = label.unique(return_inverse=True, return_counts=True)
    quotas = divide(budget, counts.tolist(), [1.0] * len(kinds))
    for kind, quota in enumerate(quotas):
        members = (of_kind == kind).nonzero()[:, 0]
        _, of_leaf, sizes = leaf[members].unique(return_inverse=True, return_counts=True)
        for region, share in enumerate(divide(quota, sizes.tolist(), sizes.tolist())):
            group = members[of_leaf == region]
            hard = None if hardness is None else hardness.to(x.device)[group]
            kept.append(group[_choose(x[group], share, strategy, hard, generator)])
    return torch.cat(kept).sort().values


def divide(budget: int, available: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Divide a budget by weights into whole parts, none of which exceeds the number available."""
    budget, ideal = min(budget, sum(available)), [0.0] * len(available)
    free = [i for i, size in enumerate(available) if size]
    while free:
        left, total = budget - sum(ideal), sum(weights[i] for i in free)
        more = {i: left * (weights[i] / total if total else 1 / len(free)) for i in free}
        full = [i for i in free if more[i] >= available[i]]
        for i in full or free:
            ideal[i] = float(available[i]) if full else more[i]
        free = [i for i in free if i not in full] if full else []
    parts = [int(part) for part in ideal]
    rest = sorted((i for i in range(len(parts)) if parts[i] < available[i]), key=lambda i: parts[i] - ideal[i])
    for i in rest[: budget - sum(parts)]:
        parts[i] += 1
    return parts


def _choose(x: Tensor, count: int, strategy: str, hardness: Tensor | None, generator: torch.Generator | None) -> Tensor:
    """The positions of `count` of the samples x (samples, in)."""
    if strategy == "hardest" and hardness is not None:
        return hardness.argsort(descending=True, stable=True)[:count]
    if strategy == "herding":
        return herd(x, count)
    return torch.randperm(len(x), generator=generator)[:count].to(x.device)


def herd(x: Tensor, count: int) -> Tensor:
    """The positions of `count` samples of x (samples, in). Each brings their mean closest to the mean of all."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean, total = wide.mean(0), torch.zeros_like(wide[0])
    squares, taken = wide.square().sum(1), torch.zeros(len(x), dtype=torch.bool, device=x.device)
    chosen = torch.zeros(count, dtype=torch.int64, device=x.device)
    for k in range(count):
        # |(total + x) / (k + 1) - mean|^2, times (k + 1)^2 and without its constant
        distance = squares + 2 * (wide @ (total - (k + 1) * mean))
        chosen[k] = distance.masked_fill(taken, torch.inf).argmin()
        taken[chosen[k]] = True
        total = total + wide[chosen[k]]
    return chosen


class Replay:
    """A memory of at most `budget` samples of a layer's past, chosen by region.

        memory = Replay(layer, 500)
        for task in tasks:
            for x, y in task:
                old_x, old_y = memory.draw(len(x), near=x)
                ...  # train on both
            memory.add_(task_x, task_y)

    Regions are the layer's when samples are added; call `reroute_()` after its tree has changed.
    """

    def __init__(self, layer: FFF, budget: int, *, strategy: Strategy = "herding", seed: int = 0) -> None:
        check_choice("strategy", strategy, STRATEGIES)
        self.layer, self.budget, self.strategy = layer, check_int("budget", budget, 1), strategy
        self.generator = torch.Generator().manual_seed(check_int("seed", seed, 0))
        self.x = layer.node_weight.detach().new_zeros(0, layer.in_features)
        self.labels = torch.zeros(0, dtype=torch.int64, device=self.x.device)
        self.hardness = torch.zeros(0, device=self.x.device)
        self.reroute_()

    def __len__(self) -> int:
        return len(self.x)

    def add_(self, x: Tensor, labels: Tensor, hardness: Tensor | None = None) -> None:
        """Choose again, from what is stored and from these samples, (samples, in) and (samples,)."""
        _check_samples(self.layer, x, labels, hardness, self.strategy)
        device = self.x.device
        hard = torch.zeros(len(x)) if hardness is None else hardness.detach().float()
        parts = ((self.x, x.detach()), (self.labels, labels), (self.hardness, hard))
        every, label, hard = (torch.cat([old, new.to(device)]) for old, new in parts)
        options = {"labels": label, "hardness": hard, "generator": self.generator}
        kept = select_replay(self.layer, every, self.budget, strategy=self.strategy, **options)  # type: ignore[arg-type]
        self.x, self.labels, self.hardness = every[kept], label[kept], hard[kept]
        self.reroute_()

    def draw(self, count: int, *, near: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`count` stored samples, with replacement: of any region, or of the regions that the inputs `near` visit.

        Each input in `near` stands for one draw from its own region, if any sample is stored there.
        """
        count = check_int("count", count, 0) if len(self) else 0
        index = torch.randint(max(len(self), 1), (count,), generator=self.generator)
        if near is not None and count and len(near):
            at = torch.randint(len(near), (count,), generator=self.generator)
            leaf = self.layer.route(near.to(self.x.device))[at.to(self.x.device)].cpu()
            size = self._sizes[leaf]
            offset = (torch.rand(count, generator=self.generator) * size).long().clamp(max=(size - 1).clamp(min=0))
            index = torch.where(size > 0, self._order[(self._starts[leaf] + offset).clamp(max=len(self) - 1)], index)
        index = index.to(self.x.device)
        return self.x[index], self.labels[index]

    def reroute_(self) -> None:
        """Find the regions of the stored samples again."""
        self.leaf = self.layer.route(self.x)
        self._order = self.leaf.cpu().argsort(stable=True)
        self._sizes = torch.bincount(self.leaf.cpu(), minlength=self.layer.num_leaves)
        self._starts = self._sizes.cumsum(0) - self._sizes

    def __repr__(self) -> str:
        used = int((self._sizes > 0).sum())
        return f"Replay({len(self)} of {self.budget} samples, in {used} of {self.layer.num_leaves} regions)"


def _check_samples(layer: FFF, x: Tensor, labels: Tensor | None, hardness: Tensor | None, strategy: str) -> None:
    """Raise unless there is one label and, where it is needed, one hardness for each sample."""
    if not isinstance(layer, FFF):
        raise TypeError(f"layer must be an FFF; got {type(layer).__name__}.")
    if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[1] != layer.in_features:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x must be inputs of the layer, (samples, {layer.in_features}); got {got}.")
    for name, values in (("labels", labels), ("hardness", hardness)):
        if values is not None and (not isinstance(values, Tensor) or values.shape != x.shape[:1]):
            got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(f"{name} must have shape ({len(x)},), one for each sample; got {got}.")
    if labels is not None and (labels.is_floating_point() or labels.is_complex()):
        raise TypeError(f"labels must be integers, the classes; got {labels.dtype}.")
    if strategy == "hardest" and hardness is None:
        raise ValueError('strategy="hardest" needs a hardness for each sample, such as its loss; got None.')
