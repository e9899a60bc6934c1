"""Keep the trees of a model balanced: all FFF layers in one pass over the data, and more passes only where needed.

A boundary that moves changes the inputs of later layers. So after a pass that moved a boundary, another pass follows
for the layers behind the first one that changed. A pass keeps the node logits of as many layers as fit into 256 MiB.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ..batches import batches, check_reached, evaluation_mode, feed, watch_inputs
from ..checks import check_int, check_share
from ..interrupts import all_or_nothing
from ..layer import FFF, fff_layers, trainable_layers
from ..ranks import alone, ranks_of, reshard_, until_enough, whole
from .boundaries import boundary_bias, check_finite, shift_biases_

SAMPLES = 65536  # inputs read for each layer
_LOGIT_BYTES = 2**28  # node logits kept at a time


@dataclass
class Cost:
    """Forwards of a model, and the inputs that reached the layer with the most of them."""

    forwards: int = 0
    inputs: int = 0


def rebalance_(model: nn.Module, data: Any, *, min_share: float = 0.1, samples: int = SAMPLES) -> None:
    """Shift the boundaries of every FFF layer so that each leaf gets `min_share` of its fair share of `data`.

    Most boundaries do not move, and none moves further than needed. Directions and leaves stay unchanged. Call this
    now and then in training: leaves that no sample reaches learn nothing, and the balance loss may not bring them back.
    It takes one pass over the data if no boundary must move, otherwise a few. An error changes nothing.

    Args:
        data: as in `initialize_tree_`. The share holds for the inputs that are read.
        min_share: from 0 (nothing moves) to 1 (every node halves its samples). Samples that a node cannot tell apart
            stay together. Biases in bfloat16 or float16 are rounded, so shares may be smaller.
        samples: stop reading once every layer has seen this many inputs.

    After `fastff.parallel.synchronize_`, all ranks call this, each with its part of the data.
    """
    rebalance(model, data, check_share("min_share", min_share), check_int("samples", samples, 1))


def rebalance(model: nn.Module, data: Any, min_share: float, samples: int = SAMPLES, passes: int | None = None) -> Cost:
    """rebalance_ in at most `passes` passes; returns their cost."""
    layers, cost, ranks = trainable_layers(model), Cost(), ranks_of(model)
    device = next(iter(layers.values())).node_weight.device
    left, first = layers, None
    samples = math.ceil(samples / ranks.size) if ranks else samples
    reshard_(model)
    with all_or_nothing(boundary_biases(model)), evaluation_mode(model):
        for _ in range(len(layers) if passes is None else passes):
            moved = set()
            for group in _groups(left, samples):
                # The first pass sees all layers: it finds how much data they need, and their order in the model.
                with ranks.together(device) if ranks else alone() as everywhere:
                    source = first.read if first else batches(data)
                    seen = _Pass(model, left if first else layers, group, source, samples, everywhere)
                reshard_(model)  # boundaries below must not be copies
                first = first or seen
                cost.forwards += len(seen.read)
                cost.inputs += max(seen.counts.values())
                for name, layer in group.items():
                    logits = seen.take(name)
                    if _shift(name, layer, ranks.gather(logits) if ranks else logits, min_share):
                        moved.add(name)
            order = list(first.counts) if first else []
            places = [i for i, name in enumerate(order) if name in moved]
            # A layer that is called several times in a forward changes its own inputs.
            repeated = first is not None and any(calls > len(first.read) for calls in first.calls.values())
            left = {name: layers[name] for name in order[places[0] + (not repeated) :]} if places else {}
            if not left:
                break
    return cost


def estimate(model: nn.Module, data: Any, samples: int = SAMPLES) -> Cost:
    """The cost of one pass, estimated from the first batch and, if known, the number of batches."""
    layers, source, ranks = fff_layers(model), batches(data), ranks_of(model)
    device = next(iter(layers.values())).node_weight.device
    same_start = torch.random.fork_rng(devices=[])  # a DataLoader uses the RNG
    with evaluation_mode(model), same_start, ranks.together(device) if ranks else alone() as everywhere:
        one = _Pass(model, layers, {}, islice(source, 1), 1, everywhere)
    forwards = math.ceil(samples / max(min(one.counts.values()), 1))
    with suppress(TypeError):  # an iterable of unknown length
        forwards = min(forwards, len(source))  # type: ignore[arg-type]
    return Cost(forwards, forwards * max(one.counts.values()))


def boundary_biases(model: nn.Module) -> list[Tensor]:
    """All tensors that rebalancing changes in a model."""
    return [boundary_bias(layer) for layer in fff_layers(model).values()]


class _Pass:
    """Run batches through a model: count the inputs of the watched layers, and keep the logits of some of them."""

    def __init__(
        self,
        model: nn.Module,
        watched: dict[str, FFF],
        kept: dict[str, FFF],
        source: Iterable[Any],
        samples: int,
        everywhere: Callable[[bool], bool],
    ) -> None:
        self.counts: dict[str, int] = {}  # in the order in which the data reaches the layers
        self.calls: dict[str, int] = {}
        self.read: list[Any] = []  # batches
        self._logits: dict[str, list[Tensor]] = {name: [] for name in kept}

        def see(name: str, layer: FFF, x: Tensor) -> None:
            before = self.counts.get(name, 0)
            self.counts[name], self.calls[name] = before + len(x), self.calls.get(name, 0) + 1
            if name in kept and before < samples:
                x = x[: samples - before].to(layer.node_weight.dtype)
                check_finite(name, x)
                self._logits[name].append(layer.node_logits(x))

        def is_enough() -> bool:
            return len(self.counts) == len(watched) and min(self.counts.values()) >= samples

        with watch_inputs(watched, see):
            for batch in until_enough(source, is_enough, everywhere):
                feed(model, batch)
                self.read.append(batch)
        check_reached(watched, self.counts)

    def take(self, name: str) -> Tensor:
        """The logits (samples, nodes) of a layer, which are then forgotten."""
        return torch.cat(self._logits.pop(name))


def _groups(layers: dict[str, FFF], samples: int) -> Iterator[dict[str, FFF]]:
    """The layers in groups whose logits fit into memory together."""
    group: dict[str, FFF] = {}
    total = 0
    for name, layer in layers.items():
        size = samples * layer.num_nodes * layer.temperature_tensor.element_size()
        if group and total + size > _LOGIT_BYTES:
            yield group
            group, total = {}, 0
        group[name], total = layer, total + size
    yield group


@torch.no_grad()
def _shift(name: str, layer: FFF, logits: Tensor, min_share: float) -> bool:
    """Move the boundaries of one layer where needed; return whether any moved."""
    with whole(boundary_bias(layer)) as bias:
        before, finite = bias.clone(), logits.isfinite().all()
        if finite:
            shift_biases_(bias.unsqueeze(0), logits.unsqueeze(0), min_share)
    if not (finite and bias.isfinite().all()):
        raise ValueError(
            f"the FFF layer {name!r} has node logits or boundaries that are not finite in {bias.dtype}. If training "
            "diverged, lower the learning rate, noise or balance. Otherwise standardise the inputs, call "
            "initialize_tree_, or use a wider dtype."
        )
    return not torch.equal(bias, before)
