"""distill_: train the leaves of an operated model, layer by layer, on what the dense blocks answer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..capture import batches, evaluating, feed
from ..checks import check_int
from ..layer import FFF
from .carry import dense_layer
from .leaves import distill_leaves_, hold_out, relative_error
from .report import Report


class Distilled(NamedTuple):
    """What the hard pass of a layer misses, as a share of the variance of the dense block's output, on held-out inputs
    of the layer."""

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
    progress: bool = True,
) -> list[Distilled]:
    """Train the leaves of every FFF layer that `replace_` put into `model` against the dense block that it replaced.

    The layers follow each other in the order of the report; each learns from the inputs that reach it in the operated
    model. Trees and everything else in the model stay as they are.

    Args:
        report: as `replace_` returned it, for this model; it has the dense blocks.
        data: batches for the model, as in `initialize_tree_`.
        steps, batch, rate: of Adam, for each layer; the rate falls to 0 as a cosine.
        samples: how many inputs of a layer are enough; batches past that are not read.
        progress: show a bar (with rich, if it is installed).
    """
    check_int("steps", steps, 1)
    found = {name: _layer(model, name) for name in report.blocks}
    made = []
    with _bar(progress, len(found) * steps) as advance, evaluating(model):
        for name, layer in found.items():
            dense = dense_layer(report.blocks[name])
            x = inputs_of(model, {name: layer}, data, samples)[name]
            held_out, train = hold_out(x)
            before = relative_error(layer, dense, held_out)
            for loss in distill_leaves_(layer, dense, train, steps=steps, batch=batch, rate=rate):
                advance(f"{name}: {loss:.3g}")
            made.append(Distilled(name, before, relative_error(layer, dense, held_out)))
    return made


def inputs_of(model: nn.Module, modules: dict[str, nn.Module], data: Any, samples: int) -> dict[str, Tensor]:
    """The first inputs (samples, in) that reach each of these modules when data runs through the model."""
    kept: dict[str, list[Tensor]] = {name: [] for name in modules}

    def take(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            x = args[0] if args else next(iter(kwargs.values()))
            kept[name].append(x.detach().reshape(-1, x.shape[-1]))

        return hook

    handles = [m.register_forward_pre_hook(take(name), with_kwargs=True) for name, m in modules.items()]
    try:
        with evaluating(model):
            for part in batches(data):
                feed(model, part)
                if min(sum(map(len, parts)) for parts in kept.values()) >= samples:
                    break
    finally:
        for handle in handles:
            handle.remove()
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
