"""distill_: train the leaves of an operated model on what the dense blocks answer, or on what the whole model did."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..capture import batches, evaluating, feed, hooking
from ..checks import check_int
from ..layer import FFF
from .carry import dense_layer
from .leaves import distill_leaves_, hold_out, relative_error
from .report import Report
from .teach import Loss, teach_


class Distilled(NamedTuple):
    """What the hard pass of a layer misses, as a share of the variance of the dense block's output, on held-out inputs
    of the layer. With a teacher: what the operated model misses of the inputs of the block `name`, and, under the name
    "output", of the model's output (or the loss that was given)."""

    name: str
    before: float
    after: float


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
) -> list[Distilled]:
    """Train the leaves of every FFF layer that `replace_` put into `model`, in the hard pass.

    Trees and everything else in the model stay as they are; so do leaves that training would leave worse, measured on
    data that is held out.

    Without a teacher, each layer learns what the dense block answers that it replaced. The layers follow each other in
    the order of the report; each learns from the inputs that reach it in the operated model.

    With a teacher, a copy of the model from before `replace_`, all layers learn at once: what reaches each block, and
    what the model answers, is to be as in the teacher. That costs more and comes nearer.

    Args:
        report: as `replace_` returned it, for this model; it has the dense blocks.
        data: batches for the model, as in `initialize_tree_`. With a teacher, a step takes one of them; of those
            that are read, the last tenth, 16 at most, is held out.
        steps, batch, rate: of Adam, for each layer; the rate falls to 0 as a cosine. With a teacher, `batch` plays no
            part, and the rate should be lower, 1e-4 or so.
        samples: how many inputs of a layer are enough; batches past that are not read. Not with a teacher.
        teacher: the dense model.
        loss: with a teacher, a function of (output of the model, output of the teacher, batch) to take in place of the
            mean square between the outputs, relative to the variance.
        progress: show a bar (with rich, if it is installed).
    """
    check_int("steps", steps, 1)
    if loss is not None and teacher is None:
        raise ValueError("loss=... compares outputs with a teacher's: pass teacher=... too.")
    found = {name: _layer(model, name) for name in report.blocks}
    if teacher is not None:
        with _bar(progress, steps) as advance:
            before, after = teach_(
                model, teacher, found, report, data, steps=steps, rate=rate, loss=loss, advance=advance
            )
        return [Distilled(name, before[name], after[name]) for name in before]
    made = []
    with _bar(progress, len(found) * steps) as advance, evaluating(model):
        for name, layer in found.items():
            dense = dense_layer(report.blocks[name])
            x = inputs_of(model, {name: layer}, data, samples)[name]
            held_out, train = hold_out(x)
            start = [p.detach().clone() for p in layer.leaf_parameters()]
            missed = relative_error(layer, dense, held_out)
            for error in distill_leaves_(layer, dense, train, steps=steps, batch=batch, rate=rate):
                advance(f"{name}: {error:.3g}")
            left = relative_error(layer, dense, held_out)
            if not left < missed:
                left = missed
                for p, old in zip(layer.leaf_parameters(), start, strict=True):
                    p.copy_(old)
            made.append(Distilled(name, missed, left))
    return made


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
            feed(model, part)
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
    module = model.get_submodule(name)
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
