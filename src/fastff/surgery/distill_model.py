"""Distillation of a whole model: all leaves learn at once, in the hard pass, to match the dense model.

Layer by layer, the errors of the FFFs add up on the way to the model's output. Here the loss is the drift from the
teacher at the inputs of each replaced block and at the output, on the same batch. So a later layer learns to correct
an earlier one's error.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ..batches import batches, check_reached, evaluation_mode, watch_calls
from ..interrupts import guarded
from ..layer import FFF
from .blocks import Block
from .closeness import check_same_shape, check_varies, drift, first_tensor
from .distill_layer import Advance, visited
from .inputs import run_on
from .linears import read_linear
from .report import Distillation, Distilled, diverged, no_better

Loss = Callable[[Any, Any, Any], Tensor]

OUTPUT = "output"
HELD_OUT_BATCHES = 16  # at most


def distill_model_(
    model: nn.Module,
    teacher: nn.Module,
    layers: Mapping[str, nn.Module],
    blocks: Mapping[str, Block],
    data: Any,
    *,
    steps: int,
    rate: float,
    loss: Loss | None,
    advance: Advance,
) -> Distillation:
    """Train the leaves of these layers; returns the drift at each place before and after, on held-out batches.

    If the output ends up no closer to the teacher's, the leaves are restored. blocks: the dense block that each layer
    replaced. A layer that is no FFF, such as a control in `compare`, trains all its parameters.
    """
    pair = _Pair(model, teacher, layers, blocks, loss)
    leaves = [p for layer in layers.values() for p in _leaves(layer)]
    train, held_out = _split(data, steps)
    start = [p.detach().clone() for p in leaves]
    with evaluation_mode(model), evaluation_mode(teacher), pair.watch():
        before = pair.measure(held_out)
        if not math.isfinite(before[OUTPUT]):
            raise ValueError(f"the {pair.measured} of the output is {before[OUTPUT]} before any step; clean the data.")
        trees = [layer for layer in layers.values() if isinstance(layer, FFF)]
        with _only(model, leaves), _training_forward(trees):
            note = _train_(pair, leaves, train, steps, rate, advance)
        after = pair.measure(held_out)
        kept = not note and after[OUTPUT] < before[OUTPUT] and all(bool(p.isfinite().all()) for p in leaves)
        if not kept:
            note = note or no_better(before[OUTPUT], after[OUTPUT], pair.measured)
            after = before
            for p, old in zip(leaves, start, strict=True):
                p.copy_(old)
    return Distillation(
        [Distilled(name, before[name], after[name], "drift", kept) for name in layers]
        + [Distilled(OUTPUT, before[OUTPUT], after[OUTPUT], pair.measured, kept, note)]
    )


def _leaves(layer: nn.Module) -> Iterable[nn.Parameter]:
    return layer.leaf_parameters() if isinstance(layer, FFF) else layer.parameters()


def _split(data: Any, steps: int) -> tuple[list[Any], list[Any]]:
    """The batches to train on, and the last, to measure on: replace_ may have fitted leaves to the first."""
    parts = list(islice(batches(data), steps + HELD_OUT_BATCHES))
    if not parts:
        raise ValueError("data holds no batch. Pass batches for the model.")
    train = parts[: len(parts) - min(HELD_OUT_BATCHES, len(parts) // 10)]
    return train, parts[len(train) :] or parts


def _train_(
    pair: "_Pair", leaves: list[nn.Parameter], train: list[Any], steps: int, rate: float, advance: Advance
) -> str:
    """Adam on the sum of the drifts; returns why it diverged, or ""."""
    optimizer = torch.optim.Adam(leaves, lr=rate, fused=leaves[0].device.type in ("cpu", "cuda"))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(_rate_factor, steps=steps))
    order: list[int] = []
    for step in range(1, steps + 1):
        order = order or torch.randperm(len(train)).tolist()
        with torch.enable_grad():
            found = pair.drifts(train[order.pop()])
            if not found[OUTPUT].requires_grad:
                raise ValueError("loss must be differentiable in the model's output; its result has no gradient.")
            total = found[OUTPUT] + sum(found[name] for name in pair.layers) / len(pair.layers)
            optimizer.zero_grad()
            total.backward()
        optimizer.step()
        schedule.step()
        advance(text=f"{OUTPUT}: {found[OUTPUT].item():.3g}")
        if not math.isfinite(total.item()):
            return diverged(step, total.item())
    return ""


def _rate_factor(step: int, steps: int) -> float:
    """Scales the rate: linear warm-up for a twentieth of the steps, then a cosine down to 0."""
    return min(1.0, (step + 1) * 20 / steps) * (1 + math.cos(math.pi * step / steps)) / 2


class _Pair:
    """A model and its teacher, compared at the inputs of each replaced block and at the output."""

    def __init__(
        self,
        model: nn.Module,
        teacher: nn.Module,
        layers: Mapping[str, nn.Module],
        blocks: Mapping[str, Block],
        loss: Loss | None,
    ) -> None:
        self.model, self.teacher, self.layers, self.loss = model, teacher, layers, loss
        self.measured = "drift" if loss is None else "loss"
        self.dense = {name: _first_linear(teacher, blocks[name]) for name in layers}
        self.inputs: dict[nn.Module, Any] = {}  # of the last batch, by layer or linear layer

    def watch(self) -> AbstractContextManager[None]:
        """Within the block, keep the inputs of each replaced block in both models."""

        def see(module: nn.Module, x: Any, _: Any) -> None:
            self.inputs[module] = x

        return watch_calls(dict.fromkeys([*self.layers.values(), *self.dense.values()]), see)

    def drifts(self, batch: Any) -> dict[str, Tensor]:
        """The drift on a batch, by place; at the output, the given loss if there is one."""
        with torch.no_grad():
            theirs = run_on(self.teacher, batch, "the teacher")
        ours = run_on(self.model, batch)
        pairs = {name: (layer, self.dense[name]) for name, layer in self.layers.items()}
        check_reached(pairs, {name: all(m in self.inputs for m in both) for name, both in pairs.items()})
        found = {}
        for name, both in pairs.items():
            a, b = (self.inputs[module] for module in both)
            check_same_shape(f"the input of {name}", a, b)
            found[name] = drift(a, b)
        if self.loss is None:
            ours, theirs = first_tensor(ours), first_tensor(theirs)
            check_same_shape("the output", ours, theirs)
            check_varies(theirs)
        found[OUTPUT] = drift(ours, theirs) if self.loss is None else self.loss(ours, theirs, batch)
        if not isinstance(found[OUTPUT], Tensor) or found[OUTPUT].numel() != 1:
            raise TypeError(f"loss must return a tensor with one number; got {_describe(found[OUTPUT])}.")
        return found

    def measure(self, held_out: list[Any]) -> dict[str, float]:
        """The mean drift over batches, by place."""
        found = [self.drifts(batch) for batch in held_out]
        return {name: sum(one[name].item() for one in found) / len(found) for name in found[0]}


def _describe(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r} of type {type(value).__name__}"


@guarded
def _only(model: nn.Module, leaves: list[nn.Parameter]) -> Iterator[None]:
    """Within the block, only these parameters of a model train; requires_grad and grad are then restored."""
    state = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    try:
        for p, *_ in state:
            p.requires_grad_(False)
        for p in leaves:
            p.requires_grad_(True)
        yield
    finally:
        for p, wanted, grad in state:
            p.requires_grad_(wanted)
            p.grad = grad


@guarded
def _training_forward(layers: Iterable[FFF]) -> Iterator[None]:
    """Within the block, these layers run `visited`, the hard pass for training."""
    layers = list(layers)
    try:
        for layer in layers:
            layer.forward = partial(visited, layer)  # type: ignore[method-assign]
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def _first_linear(teacher: nn.Module, block: Block) -> nn.Module:
    """The first linear layer of a block in the teacher."""
    path = block.linears[0]
    try:
        found = teacher.get_submodule(path)
    except AttributeError:
        found = None
    if found is None or isinstance(found, FFF):
        raise ValueError(f"the teacher has no dense block at {path!r}. Pass a copy of the model from before replace_.")
    linear = read_linear(found)
    if linear is not None and linear.in_features != block.in_features:
        raise ValueError(
            f"{path} takes {block.in_features} features in the model and {linear.in_features} in the teacher; they "
            "must be equal. Pass a copy of the model from before replace_."
        )
    return found
