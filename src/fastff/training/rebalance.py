"""Keep the trees of a model balanced: all its FFF layers in one pass over the data, another only where it is needed.

A boundary that moves changes what later layers see. So a pass that moved one is followed by another, for the layers
after the first that changed; the first of these has its inputs for good then. A pass keeps the node logits of the
layers, as many layers at a time as fit into 256 MiB.
"""

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ..batches import batches, check_reached, evaluation_mode, feed, watch_inputs
from ..checks import check_int, check_number, check_share
from ..interrupts import all_or_nothing
from ..layer import FFF, fff_layers
from .initialize import check_finite, shift_biases_

SAMPLES = 65536  # inputs of a layer that are enough
_KEPT = 2**28  # bytes of node logits at a time
SHARE = 0.05  # of the work of a training
_BACKWARD = 2  # forwards that a backward is worth
_CALL = 1e8  # multiplications that the fixed cost of a forward is worth: some milliseconds of a CPU


@dataclass
class Cost:
    """Forwards of a model, and inputs that they brought to the layer that got most."""

    forwards: int = 0
    inputs: int = 0


def rebalance_(model: nn.Module, data: Any, *, min_share: float = 0.1, samples: int = SAMPLES) -> None:
    """Shift the boundaries of every FFF layer so that each leaf gets `min_share` of its fair share of `data`.

    A boundary moves no further than needed for the leaves on either side of it, and a sample to spare, and most do not
    move at all. Directions and leaves stay unchanged. Call it now and then in training: leaves that no sample reaches
    learn nothing, and the balance loss alone may not bring them back.

    It takes one pass over the data where no boundary must move, and a few where some must.

    Args:
        data: as in `initialize_tree_`; the share holds on the inputs that are read.
        min_share: from 0 (nothing is moved) to 1 (every node halves its samples). Samples that a node cannot tell apart
            stay together, and a bias in bfloat16 or float16 lands near its place.
        samples: how many inputs of a layer are enough; batches past that are not read.
    """
    check_share("min_share", min_share)
    rebalance(model, data, min_share, check_int("samples", samples, 1))


def rebalance(model: nn.Module, data: Any, min_share: float, samples: int = SAMPLES, passes: int | None = None) -> Cost:
    """As rebalance_, in at most `passes` passes; returns what they took."""
    found, cost = fff_layers(model), Cost()
    left, first = found, None
    with all_or_nothing(biases(model)), evaluation_mode(model):
        for _ in range(len(found) if passes is None else passes):
            moved = set()
            for group in _groups(left, samples):
                # The first pass sees all layers: how much data they need, and in which order it reaches them.
                seen = _Pass(model, left if first else found, group, first.kept if first else batches(data), samples)
                first = first or seen
                cost.forwards += len(seen.kept)
                cost.inputs += max(seen.counts.values())
                moved |= {name for name in group if _shift(name, group[name], seen.take(name), min_share)}
            order = list(first.counts) if first else []
            places = [i for i, name in enumerate(order) if name in moved]
            again = first is not None and any(calls > len(first.kept) for calls in first.calls.values())
            left = {name: found[name] for name in order[places[0] + (not again) :]} if places else {}
            if not left:
                break
    return cost


def expected(model: nn.Module, data: Any, samples: int = SAMPLES) -> Cost:
    """What one pass will take, judged by the first batch and the number of batches, if that is known."""
    found, source = fff_layers(model), batches(data)
    with evaluation_mode(model), torch.random.fork_rng(devices=[]):  # a DataLoader draws from it
        one = _Pass(model, found, {}, islice(source, 1), 1)
    forwards = math.ceil(samples / max(min(one.counts.get(name, 0) for name in found), 1))
    with suppress(TypeError):  # an iterable of unknown length
        forwards = min(forwards, len(source))  # type: ignore[arg-type]
    return Cost(forwards, forwards * max(one.counts.values()))


class Budget:
    """When a training rebalances: every `every` steps, or later, so that it is no more than a part of the work.

    Work is counted in inputs, a forward's fixed cost as some inputs more, and not in seconds: the same seeds give the
    same training on any machine. Seconds are taken down for the log.
    """

    def __init__(self, model: nn.Module, every: int) -> None:
        self.every = every
        self.next: Cost | None = None  # what the next rebalancing will take; None: it is not limited
        self.seen = self.trained = self.spent = 0.0  # inputs: since the last step, in all steps, for rebalancing
        self.last = self.times = 0  # the step of the last rebalancing, and how many there were
        self.seconds, self.began = 0.0, time.perf_counter()
        self._fixed = _CALL / max(sum(p.numel() for p in model.parameters()), 1)

    def saw(self, model: nn.Module) -> None:
        """Count the last training forward."""
        inputs = [0 if layer.last_logits is None else len(layer.last_logits) for layer in fff_layers(model).values()]
        self.seen += (1 + _BACKWARD) * (max(inputs) + self._fixed)

    def is_due(self, count: int) -> bool:
        if count - self.last < self.every or self.next is None:
            return count - self.last >= self.every
        spent = self.spent + self._work(self.next)
        return spent <= SHARE * (self.trained + self.seen + spent)

    def stepped(self, count: int, cost: Cost, seconds: float) -> None:
        """After a step, and what it took to rebalance in it."""
        self.trained, self.seen = self.trained + self.seen, 0.0
        if cost.forwards:
            self.last, self.times = count, self.times + 1
            self.spent, self.seconds = self.spent + self._work(cost), self.seconds + seconds
            self.next = cost if self.next is not None else None

    def _work(self, cost: Cost) -> float:
        return cost.inputs + cost.forwards * self._fixed

    def state_dict(self) -> dict[str, float]:
        return {"trained": self.trained, "spent": self.spent, "last": self.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        count = state["count"]
        last = check_int("last", state.get("last", count - count % self.every), 0)
        trained, spent = (check_number(name, state.get(name, 0.0), 0) for name in ("trained", "spent"))
        self.last, self.trained, self.spent = min(last, count), trained, spent


class _Pass:
    """One run of batches through a model: how many inputs each watched layer gets, and the logits of some layers."""

    def __init__(
        self, model: nn.Module, watched: dict[str, FFF], kept: dict[str, FFF], source: Iterable[Any], samples: int
    ) -> None:
        self.counts: dict[str, int] = {}  # in the order in which the data reaches the layers
        self.calls: dict[str, int] = {}
        self.kept: list[Any] = []
        self._logits: dict[str, list[Tensor]] = {name: [] for name in kept}

        def see(name: str, layer: FFF, x: Tensor) -> None:
            before = self.counts.get(name, 0)
            self.counts[name], self.calls[name] = before + len(x), self.calls.get(name, 0) + 1
            if name in kept and before < samples:
                x = x[: samples - before].to(layer.node_weight.dtype)
                check_finite(name, x)
                self._logits[name].append(layer.node_logits(x))

        with watch_inputs(watched, see):
            for batch in source:
                feed(model, batch)
                self.kept.append(batch)
                if len(self.counts) == len(watched) and min(self.counts.values()) >= samples:
                    break
        check_reached(watched, self.counts)

    def take(self, name: str) -> Tensor:
        """The logits of a layer, once: (samples, nodes)."""
        return torch.cat(self._logits.pop(name))


def _groups(found: dict[str, FFF], samples: int) -> Iterator[dict[str, FFF]]:
    """Layers whose logits fit into memory together, one after the other."""
    group: dict[str, FFF] = {}
    size = 0
    for name, layer in found.items():
        own = samples * layer.num_nodes * layer.temperature_tensor.element_size()
        if group and size + own > _KEPT:
            yield group
            group, size = {}, 0
        group[name], size = layer, size + own
    yield group


def biases(model: nn.Module) -> list[Tensor]:
    """All that rebalancing changes in a model."""
    return [_shifted(layer) for layer in fff_layers(model).values()]


def _shifted(layer: FFF) -> Tensor:
    """The biases that place the boundaries."""
    return layer.node_bias if layer.node_out_bias is None else layer.node_out_bias


@torch.no_grad()
def _shift(name: str, layer: FFF, logits: Tensor, min_share: float) -> bool:
    """Move the boundaries of one layer where they must; returns whether one did."""
    bias = _shifted(layer)
    before, finite = bias.clone(), logits.isfinite().all()
    if finite:
        shift_biases_(bias.unsqueeze(0), logits.unsqueeze(0), min_share)
    if not (finite and bias.isfinite().all()):
        raise ValueError(
            f"the FFF layer {name!r} has node logits or boundaries that are not finite in {bias.dtype}. If a training "
            "diverged, lower its rate, noise or balance; else standardise the inputs, place the tree by "
            "initialize_tree_, or use a wider dtype."
        )
    return not torch.equal(bias, before)
