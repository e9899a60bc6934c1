"""Kept of a stream of samples for statistics: counts of integers, and the few samples with the lowest scores.

Both are bounded: by the distinct values that a leaf has seen, and by `size` samples for each group. A group is a node
or a leaf, in heap order: node i is group i, and leaf j of a tree with n nodes is group n + j.
"""

import torch
from torch import Tensor


def path_groups(leaf: Tensor, depth: int) -> Tensor:
    """The groups on the path to a leaf, from the root to the leaf: (..., depth + 1)."""
    level = torch.arange(depth + 1, device=leaf.device)
    return 2**level - 1 + (leaf.unsqueeze(-1) >> (depth - level))


# A leaf and a value make one number, the value in its lower bits: sorting pairs takes far longer.
_BITS = 40
MOST = 1 << _BITS  # above all values


class Histogram:
    """How often each leaf saw each integer below 2**40, such as a label or a token."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._pair = torch.empty(0, dtype=torch.int64)  # ascending
        self._count = torch.empty(0, dtype=torch.int64)
        self._groups: dict[int, tuple[Tensor, Tensor]] | None = None

    def add(self, leaf: Tensor, value: Tensor) -> None:
        """Count value (batch,) for leaf (batch,). Negative values, such as an ignored label, do not count."""
        known = value >= 0
        pair = torch.cat([self._pair, (leaf[known] << _BITS) + value[known]])
        count = torch.cat([self._count, torch.ones(len(pair) - len(self._pair), dtype=torch.int64)])
        self._pair, self._count = _sum_equal(pair, count)
        self._groups = None

    @property
    def values(self) -> list[int]:
        """The values that were seen, ascending."""
        return torch.unique(self._pair & (1 << _BITS) - 1).tolist()

    def of(self, group: int) -> dict[int, int]:
        """The count of each value in a group, most frequent first; equal counts in the order of their values."""
        if self._groups is None:
            self._groups = self._by_group()
        if group not in self._groups:
            return {}
        value, count = self._groups[group]
        return dict(zip(value.tolist(), count.tolist(), strict=True))

    def purity(self) -> Tensor:
        """The share of the most frequent value in each group, NaN for a group without values: (groups,) float64."""
        purity = torch.full(((2 << self.depth) - 1,), torch.nan, dtype=torch.float64)
        for group in range(len(purity)):
            if counts := self.of(group):
                purity[group] = max(counts.values()) / sum(counts.values())
        return purity

    def _by_group(self) -> dict[int, tuple[Tensor, Tensor]]:
        found: dict[int, tuple[Tensor, Tensor]] = {}
        leaf, value = self._pair >> _BITS, self._pair & (1 << _BITS) - 1
        for level in range(self.depth + 1):
            pair, count = _sum_equal((leaf >> (self.depth - level) << _BITS) + value, self._count)
            order = torch.argsort(count, descending=True, stable=True)
            order = order[torch.argsort(pair[order] >> _BITS, stable=True)]
            group, size = torch.unique_consecutive(pair[order] >> _BITS, return_counts=True)
            values = (pair[order] & (1 << _BITS) - 1).split(size.tolist())
            parts = zip(values, count[order].split(size.tolist()), strict=True)
            found |= dict(zip((group + 2**level - 1).tolist(), parts, strict=True))
        return found


def _sum_equal(pair: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct pairs, with the sums of their counts."""
    found, place = torch.unique(pair, return_inverse=True)
    return found, torch.zeros(len(found), dtype=torch.int64).index_add_(0, place, count)


class Lowest:
    """The `size` samples with the lowest scores in each group; if equal, the earlier sample."""

    def __init__(self, groups: int, size: int) -> None:
        self.score = torch.full((groups, size), torch.inf, dtype=torch.float64)
        self.sample = torch.full((groups, size), -1)  # their numbers; -1: none

    def add(self, group: Tensor, score: Tensor, sample: Tensor) -> None:
        """Offer samples, (n,) each: the group, the score and the sample's number."""
        groups, size = self.sample.shape
        held = self.sample >= 0
        group = torch.cat([torch.arange(groups).unsqueeze(1).expand(-1, size)[held], group])
        score = torch.cat([self.score[held], score.double()])
        sample = torch.cat([self.sample[held], sample])
        order = torch.argsort(score, stable=True)
        order = order[torch.argsort(group[order], stable=True)]
        group = group[order]
        first = torch.searchsorted(group, torch.arange(groups))
        rank = torch.arange(len(group)) - first[group]
        kept = rank < size
        self.score.fill_(torch.inf)
        self.sample.fill_(-1)
        self.score[group[kept], rank[kept]] = score[order][kept]
        self.sample[group[kept], rank[kept]] = sample[order][kept]

    def of(self, group: int) -> list[int]:
        """The samples of a group, lowest score first."""
        return [sample for sample in self.sample[group].tolist() if sample >= 0]
