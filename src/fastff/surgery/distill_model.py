"""Distillation of a whole operated model against the model that it was: all leaves learn at once, in the hard pass.

Layer by layer, an FFF learns what its block answers, and what it still misses adds up on the way to the model's output.
Here the loss is taken where it matters: at what reaches each replaced block, at what the model answers, both compared
with the teacher's on the same batch. So a later layer learns to make up for what an earlier one misses.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ..batches import batches, check_kind, evaluating, feed, hooking
from ..interrupts import guarded
from ..layer import FFF
from .blocks import Block, read_linear
from .leaves import ROUNDING, visited
from .report import Distillation, Distilled, Report, diverged, no_better, too_few

Loss = Callable[[Any, Any, Any], Tensor]
Advance = Callable[[str], None]
Errors = dict[str, float]  # by place

OUTPUT = "output"
_MEASURED = 16  # batches


def teach_(
    model: nn.Module,
    teacher: nn.Module,
    layers: dict[str, FFF],
    report: Report,
    data: Any,
    *,
    steps: int,
    rate: float,
    loss: Loss | None,
    advance: Advance,
) -> Distillation:
    """Train the leaves of these layers; returns the drift at each place before and after, on held-out batches.

    If the output is no nearer to the teacher's in the end, the leaves are put back.
    """
    measured = "drift" if loss is None else "loss"
    places = {name: _dense(teacher, report.blocks[name]) for name in layers}
    leaves = [p for layer in layers.values() for p in layer.leaf_parameters()]
    parts = list(islice(batches(data), steps + _MEASURED))
    if not parts:
        raise ValueError("data holds no batch. Pass batches for the model.")
    # The last ones: replace_ may have fitted the leaves to the first.
    train = parts[: len(parts) - min(_MEASURED, len(parts) // 10)]
    held = parts[len(train) :] or parts
    state = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    start = [p.detach().clone() for p in leaves]
    watched = seeing(model, layers), seeing(teacher, places)
    with evaluating(model), evaluating(teacher), watched[0] as ours, watched[1] as theirs:

        def drifts(batch: Any) -> dict[str, Tensor]:
            with torch.no_grad():
                fed(teacher, batch, "the teacher")
            fed(model, batch)
            if missing := [name for name in layers if name not in ours or name not in theirs]:
                raise ValueError(f"data holds no sample that reaches {missing}. Pass data that runs through them.")
            for name in layers:
                _check_pair(f"what reaches {name}", ours[name], theirs[name])
            found = {name: drift(ours[name], theirs[name]) for name in layers}
            a, b = ours[OUTPUT], theirs[OUTPUT]
            if loss is None:
                a, b = first_tensor(a), first_tensor(b)
                _check_pair("the output", a, b)
                _check_varies(b)
            found[OUTPUT] = drift(a, b) if loss is None else loss(a, b, batch)
            if not isinstance(found[OUTPUT], Tensor) or found[OUTPUT].numel() != 1:
                raise TypeError(f"loss must return a tensor with one number; got {_describe(found[OUTPUT])}.")
            return found

        def measure() -> Errors:
            found = [drifts(batch) for batch in held]
            return {name: sum(one[name].item() for one in found) / len(found) for name in found[0]}

        before, note = measure(), ""
        if not math.isfinite(before[OUTPUT]):
            raise ValueError(f"the {measured} of the output is {before[OUTPUT]} before any step; clean the data.")
        try:
            for p, *_ in state:
                p.requires_grad_(False)
            for p in leaves:
                p.requires_grad_(True)
            optimizer = torch.optim.Adam(leaves, lr=rate, fused=leaves[0].device.type in ("cpu", "cuda"))
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(_share, steps=steps))
            order: list[int] = []
            with learning(layers.values()):
                for step in range(1, steps + 1):
                    order = order or torch.randperm(len(train)).tolist()
                    with torch.enable_grad():
                        found = drifts(train[order.pop()])
                        if not found[OUTPUT].requires_grad:
                            raise ValueError("loss must be differentiable in the model's output; its result is not.")
                        total = found[OUTPUT] + sum(found[name] for name in layers) / len(layers)
                        optimizer.zero_grad()
                        total.backward()
                    optimizer.step()
                    schedule.step()
                    advance(f"{OUTPUT}: {found[OUTPUT].item():.3g}")
                    if not math.isfinite(total.item()):
                        note = diverged(step, total.item())
                        break
        finally:
            for p, wanted, grad in state:
                p.requires_grad_(wanted)
                p.grad = grad
        after = measure()
        kept = not note and after[OUTPUT] < before[OUTPUT] and all(bool(p.isfinite().all()) for p in leaves)
        if not kept:
            note = note or no_better(before[OUTPUT], after[OUTPUT], measured)
            after = before
            for p, old in zip(leaves, start, strict=True):
                p.copy_(old)
    return Distillation(
        [Distilled(name, before[name], after[name], "drift", kept) for name in layers]
        + [Distilled(OUTPUT, before[OUTPUT], after[OUTPUT], measured, kept, note)]
    )


def _describe(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r} of type {type(value).__name__}"


def drift(ours: Tensor, theirs: Tensor) -> Tensor:
    """The mean square of the difference from a teacher, over the variance of theirs about the mean of each feature."""
    variance, rounding = _spread(theirs)
    least = rounding.clamp_min(torch.finfo(torch.float32).tiny)
    return (ours.float() - theirs.float()).square().mean() / variance.maximum(least)


def _spread(x: Tensor) -> tuple[Tensor, Tensor]:
    """The variance of x (..., features) about the mean of each feature, and what of it may be rounding."""
    wide = x.detach().float().reshape(-1, x.shape[-1])
    eps = max(torch.finfo(kind).eps for kind in (x.dtype, torch.float32))
    return (wide - wide.mean(0)).square().mean(), (ROUNDING * eps) ** 2 * wide.square().mean()


def _check_pair(what: str, ours: Tensor, theirs: Tensor) -> None:
    if ours.shape != theirs.shape:
        raise ValueError(
            f"{what} has the shape {tuple(ours.shape)} in the model and {tuple(theirs.shape)} in the teacher; they "
            "must be equal. Pass a copy of the model from before replace_."
        )


def _check_varies(theirs: Tensor) -> None:
    """Raise where the drift of the output would be a share of nothing."""
    variance, rounding = _spread(theirs)
    if variance <= rounding:
        rows = theirs.numel() // theirs.shape[-1]
        why = too_few(1) if rows == 1 else "the teacher's outputs do not vary on these data"
        raise ValueError(
            f"{why}: the drift of a batch is a share of its variance. Pass larger batches that vary (a DataLoader with "
            "drop_last=True), or loss=..."
        )


def fed(model: nn.Module, batch: Any, who: str = "the model") -> Any:
    """What a model answers to a batch of data; an error says that the data are at fault, or whose model it is."""
    check_kind(batch)
    try:
        return feed(model, batch)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # someone else's forward, which may raise anything
        told = str(error).rstrip(".")
        raise ValueError(f"{who} does not run on data=: {told}. Pass batches as the model takes them.") from error


def first_tensor(output: Any) -> Tensor:
    """What a model answers with: a tensor, or the first one of a tuple or of a mapping."""
    values = (
        output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else [output]
    )
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
            return value
    raise TypeError(f"the model answers with a {type(output).__name__} without a tensor in it; pass loss=...")


@guarded
def seeing(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[dict[str, Any]]:
    """What reaches each of these modules of a model, and what the model answers: always of the batch that ran last."""
    seen: dict[str, Any] = {}

    def arrives(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> None:
        seen[name] = args[0] if args else next(iter(kwargs.values()))

    def answers(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen[OUTPUT] = output

    before = [(module.register_forward_pre_hook, partial(arrives, name=name)) for name, module in modules.items()]
    with hooking([*before, (model.register_forward_hook, answers)]):
        yield seen


@guarded
def learning(layers: Any) -> Iterator[None]:
    """These layers with the hard pass that is made for learning."""
    layers = list(layers)
    try:
        for layer in layers:
            layer.forward = partial(visited, layer)
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def _share(step: int, steps: int) -> float:
    """Of the rate: it rises for a twentieth of the steps, then falls to 0 as a cosine."""
    return min(1.0, (step + 1) * 20 / steps) * (1 + math.cos(math.pi * step / steps)) / 2


def _dense(teacher: nn.Module, block: Block) -> nn.Module:
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
