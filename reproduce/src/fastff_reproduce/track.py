"""The best score of each member of an ensemble, and its weights at that point."""

from collections.abc import Sequence
from typing import Any

from .ensemble import Ensemble


class Track:
    """For every member: the best score so far, its first epoch, and whether patience has run out."""

    def __init__(self, members: int, ensemble: Ensemble | None) -> None:
        self.best = [-1.0] * members
        self.epoch = [0] * members
        self.seen = [0] * members  # the epoch of the last improvement, or of the last halving of the rate
        self.done = [False] * members
        self.state = None if ensemble is None else {n: t.clone() for n, t in ensemble.state_dict().items()}

    def update(self, scores: Sequence[float], epoch: int, ensemble: Ensemble, patience: int) -> None:
        for i, score in enumerate(scores):
            if self.done[i]:
                continue
            if score >= self.best[i] and self.state is not None:
                for name, tensor in ensemble.state_dict().items():
                    self.state[name][i].copy_(tensor[i])
            if score > self.best[i]:
                self.best[i], self.epoch[i], self.seen[i] = score, epoch, epoch
            self.done[i] = bool(patience) and epoch - self.epoch[i] >= patience

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
