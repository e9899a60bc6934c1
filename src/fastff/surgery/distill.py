"""distill_: train the layers of a converted model on the outputs of its dense blocks, or of the whole dense model."""

import math
import warnings
from typing import Any

import torch
from torch import nn

from ..batches import batches, evaluation_mode
from ..checks import check_int
from ..layer import FFF, trainable_layers
from ..progress import progress as progress_bar
from ..validate import check_allocated
from .distill_layer import check_learner, distill_layer_, learners
from .distill_model import Loss, distill_model_
from .inputs import inputs_of
from .report import Distillation, Report
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
    train_tree: bool = False,
    progress: bool = True,
) -> Distillation:
    """Train the leaves of every FFF layer that `replace_` put into `model`, in the hard pass.

    Only leaves change, frozen ones included, and trees if wanted; requires_grad and the rest of the model stay the
    same. Layers that end up worse on held-out data are restored: the result says so, and a warning follows if nothing
    improved. An error, or Ctrl-C, leaves the whole model unchanged.

    Without a teacher, each layer learns the outputs of the dense block that it replaced, one layer after the other in
    the order of the report, from the inputs that reach it in the converted model. The result is measured as "missed":
    the fraction of the dense block's output variance that the layer's hard pass misses.

    With a teacher, a copy of the model from before `replace_`, all layers learn at once to match the teacher's inputs
    of each block and its output. That takes longer and comes closer. The result is measured as "drift": the difference
    from the teacher as a fraction of its variance, at the inputs of each block and, as "output", at the output.

    Args:
        report: the result of `replace_` for this model; it has the dense blocks.
        data: batches for the model, as in `initialize_tree_`. With a teacher, a step takes one batch, and the last
            tenth of the batches that are read, 16 at most, is held out.
        steps, batch, rate: of Adam, for each layer; the rate decays to 0 along a cosine. With a teacher, `batch` is
            ignored, and the rate should be lower, about 1e-4.
        samples: the number of inputs to collect for a layer; later batches are not read. Ignored with a teacher.
        teacher: the dense model.
        loss: with a teacher, a function of (model's output, teacher's output, batch) that replaces the drift of the
            output; the result has it as "loss".
        train_tree: without a teacher, train the nodes, too. Each input then tries one more leaf, as with
            decision="sampled". Boundaries move, so an input may visit another leaf afterwards.
        progress: show a progress bar (needs rich).
    """
    found = _check(model, report, data, steps, batch, rate, samples, teacher, loss)
    if train_tree not in (True, False):
        raise TypeError(f"train_tree must be True or False; got {train_tree!r}.")
    if train_tree and teacher is not None:
        raise ValueError("train_tree=True trains layer by layer. Call distill_ without teacher= first, then with it.")
    learned = [p for layer in found.values() for p in learners(layer, train_tree)]
    models = [model] if teacher is None else [model, teacher]
    total = steps * (len(found) if teacher is None else 1)
    with unchanged_on_error(*models, values=learned), progress_bar("distilling", total, show=progress) as advance:
        if teacher is None:
            with evaluation_mode(model):
                made = Distillation()
                for name, layer in found.items():
                    x = inputs_of(model, {name: layer}, data, samples)[name]
                    block = report.blocks[name]
                    how: dict[str, Any] = {"steps": steps, "batch": batch, "rate": rate, "train_tree": train_tree}
                    made.append(distill_layer_(name, layer, block, x, advance, **how))
        else:
            made = distill_model_(
                model, teacher, found, report.blocks, data, steps=steps, rate=rate, loss=loss, advance=advance
            )
    if made.trouble:
        warnings.warn(made.trouble, stacklevel=2)
    return made


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
    """Check all arguments; returns the layers to train by name."""
    if torch.is_inference_mode_enabled():
        raise ValueError("distill_ cannot train within torch.inference_mode(). Call it outside.")
    for what, value in (("model", model), ("teacher", model if teacher is None else teacher)):
        if not isinstance(value, nn.Module):
            raise TypeError(f"{what} must be an nn.Module; got {type(value).__name__}. Pass the model itself.")
    if not isinstance(report, Report):
        raise TypeError(
            f"report must be the Report that replace_ returned for this model; got {type(report).__name__}."
        )
    if not report.blocks:
        raise ValueError("the report has no dense blocks to learn from. Pass the one that replace_ returned.")
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
        raise ValueError("loss=... compares the model's output with a teacher's: pass teacher=... too.")
    batches(data)
    found = {name: _layer(model, name) for name in report.blocks}
    trainable_layers(model)
    for name, layer in found.items():
        check_learner(layer, report.blocks[name], name)
        check_allocated(f"a weight of the dense block {name}", *vars(report.blocks[name].weights).values())
    return found


def _layer(model: nn.Module, name: str) -> FFF:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        module = None
    layer = module if isinstance(module, FFF) else getattr(module, "fff", None)
    if not isinstance(layer, FFF):
        raise ValueError(f"{name!r} is not an FFF layer in this model. Pass the report that replace_ returned for it.")
    return layer
