"""When a recipe rebalances: at a fixed interval, or later, so that rebalancing stays within 5 % of the work.

Work is counted in inputs, not in seconds, so that the same seed gives the same training on any machine. A forward's
fixed cost counts as extra inputs. Seconds are measured for the log only.
"""

import time
from typing import Any

from torch import nn

from ..checks import check_int, check_number
from ..layer import fff_layers
from .rebalance import Cost

_SHARE = 0.05  # of all work
_BACKWARD = 2  # a backward's cost, in forwards
_CALL = 1e8  # a forward's fixed cost, in multiplications: a few milliseconds on a CPU


class Budget:
    """Decides at which steps a model is rebalanced: every `interval` steps, or later if `expected` is given.

    `expected` is the cost of the next rebalancing. None: no limit to the work.
    """

    def __init__(self, model: nn.Module, interval: int, expected: Cost | None) -> None:
        self.interval, self.expected = interval, expected
        self.pending = self.trained = self.spent = 0.0  # inputs: since the last step, in all steps, for rebalancing
        self.last = self.rebalances = 0  # the step of the last rebalancing, and their number
        self.seconds, self.began = 0.0, time.perf_counter()
        self._fixed = _CALL / max(sum(p.numel() for p in model.parameters()), 1)

    def add_forward(self, model: nn.Module) -> None:
        """Count the last training forward, and its backward."""
        layers = fff_layers(model).values()
        names = ("last_leaf" if layer.decision == "sampled" or layer.epsilon else "last_logits" for layer in layers)
        seen = [getattr(layer, name) for layer, name in zip(layers, names, strict=True)]
        inputs = [0 if logits is None else len(logits) for logits in seen]
        self.pending += (1 + _BACKWARD) * (max(inputs) + self._fixed)

    def is_due(self, step: int) -> bool:
        """Whether to rebalance in this step."""
        if step - self.last < self.interval or self.expected is None:
            return step - self.last >= self.interval
        spent = self.spent + self._work(self.expected)
        return spent <= _SHARE * (self.trained + self.pending + spent)

    def add_step(self, step: int, cost: Cost, seconds: float) -> None:
        """Count a step, and the cost of its rebalancing."""
        self.trained, self.pending = self.trained + self.pending, 0.0
        if cost.forwards:
            self.last, self.rebalances = step, self.rebalances + 1
            self.spent, self.seconds = self.spent + self._work(cost), self.seconds + seconds
            self.expected = cost if self.expected is not None else None

    def _work(self, cost: Cost) -> float:
        return cost.inputs + cost.forwards * self._fixed

    def state_dict(self) -> dict[str, float]:
        return {"trained": self.trained, "spent": self.spent, "last": self.last}

    def load_state_dict(self, state: dict[str, Any], count: int) -> None:
        """Continue after `count` steps. If `trained` or `spent` is missing, it starts at 0."""
        last = check_int("last", state.get("last", count - count % self.interval), 0)
        trained, spent = (check_number(name, state.get(name, 0.0), 0) for name in ("trained", "spent"))
        self.last, self.trained, self.spent = min(last, count), trained, spent
