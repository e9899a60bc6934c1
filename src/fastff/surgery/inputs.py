"""Collect the inputs that reach each of a model's blocks when data, or an example, runs through the model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..batches import batches, check_kind, check_reached, evaluation_mode, feed, watch_inputs
from .blocks import Block
from .trace import run_example


def run_on(model: nn.Module, batch: Any, who: str = "the model", at: str = "data=") -> Any:
    """The model's output for a batch of data; an error names the data and the model that failed."""
    check_kind(batch)
    try:
        return feed(model, batch)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # foreign code, which may raise anything
        told = str(error).rstrip(".")
        raise ValueError(f"{who} does not run on {at}: {told}. Pass batches as the model takes them.") from error


def inputs_of(model: nn.Module, modules: Mapping[str, nn.Module], data: Any, samples: int) -> dict[str, Tensor]:
    """The first inputs (samples, in) that reach each of these modules when data runs through the model."""
    kept: dict[str, list[Tensor]] = {name: [] for name in modules}
    with evaluation_mode(model), watch_inputs(modules, lambda name, _, x: kept[name].append(x.detach())):
        for batch in batches(data):
            run_on(model, batch)
            if min(sum(map(len, parts)) for parts in kept.values()) >= samples:
                break
    check_reached(modules, {name: sum(map(len, parts)) for name, parts in kept.items()})
    found = {name: torch.cat(parts)[:samples] for name, parts in kept.items()}
    for name, x in found.items():
        if not x.isfinite().all():
            raise ValueError(f"the inputs of {name!r} contain NaN or infinity; clean the data.")
    return found


def inputs_in_example(model: nn.Module, blocks: list[Block], example: Any) -> dict[str, Tensor]:
    """Each block's inputs in the example (rows, in); blocks that it does not reach are left out."""
    try:
        calls = run_example(model, example, training=False)[1]
    except Exception as error:  # foreign code, which may raise anything
        told = str(error).rstrip(".")
        raise ValueError(f"the model does not run on example=: {told}. Pass a batch as the model takes it.") from error
    found = {}
    for block in blocks:
        first = model.get_submodule(block.linears[0])
        rows = [call.input.reshape(-1, block.in_features) for call in calls if call.module is first]
        if rows and torch.cat(rows).isfinite().all():
            found[block.name] = torch.cat(rows)
    return found
