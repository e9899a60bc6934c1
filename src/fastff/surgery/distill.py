"""distill_: train the leaves of an operated model on what the dense blocks answer, or on what the whole model did."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..batches import batches, evaluating, hooking
from ..checks import check_int
from ..layer import FFF
from ..validate import check_allocated
from .blocks import Block
from .distill_model import Advance, Loss, fed, teach_
from .fit import dense_layer
from .leaves import check_learner, distill_leaves_, hold_out, missed
from .report import Distillation, Distilled, Report, diverged, no_better, too_few
from .undo import unchanged_on_error


def distill_(
    model: nn.Module,
    report: Report,
    data: Any,
    *,
    steps: int = 1000,
    batch: int = 1024,
    rate: float = 1e-3,
    samples: int = 32768,
    teacher: nn.Module | None = None,
    loss: Loss | None = None,
    progress: bool = True,
) -> Distillation:
    """Train the leaves of every FFF layer that `replace_` put into `model`, in the hard pass.

    Leaves learn also where they are frozen; requires_grad is unchanged afterwards, as are trees and everything else in
    the model. Leaves that training would leave worse, measured on held-out
    data, are put back: the result says so, and there is a warning if nothing improved at all. If it raises or is
    interrupted, the model is unchanged: layers that were finished go back, too.

    Without a teacher, each layer learns what the dense block answers that it replaced. The layers follow each other in
    the order of the report; each learns from the inputs that reach it in the operated model. The result is measured as
    "missed": the share of the dense block's output variance that the layer's hard pass misses.

    With a teacher, a copy of the model from before `replace_`, all layers learn at once: what reaches each block, and
    what the model answers, is to be as in the teacher. That costs more and comes nearer. The result is measured as
    "drift": the difference from the teacher as a share of the teacher's variance, at the inputs of each block, and at
    the output under the name "output".

    Args:
        report: as `replace_` returned it, for this model; it has the dense blocks.
        data: batches for the model, as in `initialize_tree_`. With a teacher, a step takes one of them; of those
            that are read, the last tenth, 16 at most, is held out.
        steps, batch, rate: of Adam, for each layer; the rate falls to 0 as a cosine. With a teacher, `batch` plays no
            part, and the rate should be lower, 1e-4 or so.
        samples: how many inputs of a layer are enough; batches past that are not read. Not with a teacher.
        teacher: the dense model.
        loss: with a teacher, a function of (output of the model, output of the teacher, batch) to take in place of the
            drift of the output; the result has it as "loss".
        progress: show a bar (with rich, if it is installed).
    """
    found = _check(model, report, data, steps, batch, rate, samples, teacher, loss)
    leaves = [p for layer in found.values() for p in layer.leaf_parameters()]
    models = [model] if teacher is None else [model, teacher]
    with unchanged_on_error(*models, values=leaves):
        if teacher is None:
            with _bar(progress, len(found) * steps) as advance, evaluating(model):
                made = Distillation()
                for name, layer in found.items():
                    x = inputs_of(model, {name: layer}, data, samples)[name]
                    learn = partial(distill_leaves_, steps=steps, batch=batch, rate=rate)
                    made.append(_alone_(name, layer, report.blocks[name], x, learn, advance))
        else:
            with _bar(progress, steps) as advance:
                made = teach_(model, teacher, found, report, data, steps=steps, rate=rate, loss=loss, advance=advance)
    if made.trouble:
        warnings.warn(made.trouble, stacklevel=2)
    return made


def _alone_(
    name: str, layer: FFF, block: Block, x: Tensor, learn: Callable[..., Iterable[float]], advance: Advance
) -> Distilled:
    """Train the leaves of one layer on what its dense block answers to the inputs x (samples, in)."""
    dense = dense_layer(block).to(layer.leaf_in_weight)
    held_out, train = hold_out(x)
    leaves = list(layer.leaf_parameters())
    start = [p.detach().clone() for p in leaves]
    before, note = missed(layer, dense, held_out), ""
    if before is None or len(x) == 1:
        note = too_few(1) if len(x) == 1 else "the outputs of the dense block do not vary on these data"
        return Distilled(name, math.nan, math.nan, kept=False, note=note)
    for step, error in enumerate(learn(layer, dense, train), 1):
        advance(f"{name}: {error:.3g}")
        if not math.isfinite(error):
            note = diverged(step, error)
            break
    after = missed(layer, dense, held_out)
    after = math.inf if after is None else after
    if not note and after < before and all(p.isfinite().all() for p in leaves):
        return Distilled(name, before, after)
    for p, old in zip(leaves, start, strict=True):
        p.copy_(old)
    return Distilled(name, before, before, kept=False, note=note or no_better(before, after))


def _check(
    model: nn.Module,
    report: Report,
    data: Any,
    steps: int,
    batch: int,
    rate: float,
    samples: int,
    teacher: nn.Module | None,
    loss: Loss | None,
) -> dict[str, FFF]:
    """The layers to train, when all arguments are as they must be."""
    if torch.is_inference_mode_enabled():
        raise ValueError("nothing can be trained within torch.inference_mode(). Call distill_ outside.")
    for what, value in (("model", model), ("teacher", model if teacher is None else teacher)):
        if not isinstance(value, nn.Module):
            raise TypeError(f"{what} must be an nn.Module; got {type(value).__name__}. Pass the model itself.")
    if not isinstance(report, Report):
        raise TypeError(f"report must be what replace_ returned for this model; got {type(report).__name__}.")
    if not report.blocks:
        raise ValueError("the report has no blocks to learn from. Pass it as replace_ returned it.")
    check_int("steps", steps, 1)
    check_int("batch", batch, 1)
    check_int("samples", samples, 2)
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        raise TypeError(f"rate must be a number; got {rate!r} of type {type(rate).__name__}.")
    if not (0 < rate < math.inf):
        raise ValueError(f"rate must be positive and finite; got {rate}.")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be a function of (output, teacher's output, batch); got {loss!r}.")
    if loss is not None and teacher is None:
        raise ValueError("loss=... compares outputs with a teacher's: pass teacher=... too.")
    batches(data)
    found = {name: _layer(model, name) for name in report.blocks}
    for name, layer in found.items():
        check_learner(layer, report.blocks[name], name)
        check_allocated(f"a weight of the dense block {name}", *vars(report.blocks[name].weights).values())
    return found


def inputs_of(model: nn.Module, modules: dict[str, nn.Module], data: Any, samples: int) -> dict[str, Tensor]:
    """The first inputs (samples, in) that reach each of these modules when data runs through the model."""
    kept: dict[str, list[Tensor]] = {name: [] for name in modules}

    def take(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            x = args[0] if args else next(iter(kwargs.values()))
            kept[name].append(x.detach().reshape(-1, x.shape[-1]))

        return hook

    with evaluating(model), hooking((m.register_forward_pre_hook, take(n)) for n, m in modules.items()):
        for part in batches(data):
            fed(model, part)
            if min(sum(map(len, parts)) for parts in kept.values()) >= samples:
                break
    missing = [name for name, parts in kept.items() if not sum(map(len, parts))]
    if missing:
        raise ValueError(f"data holds no sample that reaches {missing}. Pass data that runs through them.")
    found = {name: torch.cat(parts)[:samples] for name, parts in kept.items()}
    for name, x in found.items():
        if not x.isfinite().all():
            raise ValueError(f"the inputs of {name!r} hold NaN or infinity; clean the data.")
    return found


def _layer(model: nn.Module, name: str) -> FFF:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        module = None
    layer = module if isinstance(module, FFF) else getattr(module, "fff", None)
    if not isinstance(layer, FFF):
        raise ValueError(f"{name!r} is no FFF layer in this model. Pass the report that replace_ made for it.")
    return layer


@contextmanager
def _bar(show: bool, total: int) -> Iterator[Callable[[str], None]]:
    try:
        from rich.progress import Progress
    except ImportError:
        show = False
    if not show:
        yield lambda text: None
        return
    with Progress(transient=True) as bar:
        task = bar.add_task("distilling", total=total)
        yield lambda text: bar.update(task, description=text, advance=1)
