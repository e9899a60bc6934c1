"""compare: is a converted model cheaper, at the same quality, than what a user would do instead?

For every size, FFF layers stand beside three controls: a dense layer of as many neurons per token and a low-rank block
of the same FLOPs, fitted to the same inputs, and the block pruned to its largest neurons. All are distilled from the
original with the same batches, steps and rate. FFF and dense in int8, the original in int8 and the untouched original
complete the table.
controls.py makes the models, comparison_times.py times each beside the original, comparison.py shows the rows,
comparison_file.py keeps them.
"""

import copy
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..batches import batches, evaluation_mode
from ..checks import check_int, check_number
from ..progress import progress as progress_bar
from ..provenance import machine
from .blocks import Block
from .choose import Filter, check_filter, choose
from .comparison import Compared, Comparison
from .comparison_file import fingerprint, read_rows, write_rows
from .comparison_rows import Quality, Rows, match
from .comparison_times import timed_batches
from .controls import METHODS, Task, first_linears, tasks
from .distill_model import HELD_OUT_BATCHES, Loss
from .inputs import inputs_of, run_on
from .int8_control import MISSING
from .operable import check_mode, check_model


def compare(
    model: nn.Module,
    sizes: Iterable[tuple[int, int]],
    data: Any,
    *,
    held_out: Any,
    quality: Quality | None = None,
    lower_is_better: bool = False,
    steps: int = 1000,
    rate: float = 1e-4,
    loss: Loss | None = None,
    samples: int = 32768,
    methods: Sequence[str] = METHODS,
    filter: Filter | None = None,
    example: Any = None,
    timed: Any = None,
    budget: float = 10.0,
    seed: int = 0,
    rows: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Comparison:
    """Compare FFF layers in place of a model's feedforward blocks with other ways to make it cheaper.

    Each size gets six rows: FFF; a dense layer with as many neurons per token; both in int8 after training; the block
    with low-rank matrices, at the same FLOPs; the block pruned by magnitude to as many neurons. FFF, dense and low rank
    are fitted to `data`. All are distilled from the original with the same batches, steps and rate. The original has
    three rows: unchanged, in int8, and with int8 weights. The model is not changed: all work is done on copies.

    Args:
        sizes: (depth, leaf_width) of the FFF layers. A token uses depth + leaf_width neurons, which must be at most the
            width of the narrowest block.
        data: batches for the model, as in `replace_` and `distill_`: to fit and to distil. Batches are kept in memory.
        held_out: other batches, for the quality.
        quality: a function of (model, batches of held_out) that returns a number. By default "match": the fraction of
            the variance of the original's output that the model reproduces, 1 - drift.
        lower_is_better: whether a lower quality value is better, as for perplexity.
        steps, rate, loss: of distillation, as in `distill_` with a teacher. steps=0 compares fitted models.
        samples: the number of inputs of each block to fit to.
        methods: which to run: "FFF", "FFF int8", "dense", "dense int8", "low rank", "pruned", "int8", "int8 weights".
        filter, example: which blocks, and a batch to find them with, as in `replace_`.
        timed: the batch to time, or several of one shape; by default the first of held_out.
        budget: seconds of timing, roughly, for a row's blocks, and again for its model; slow models take longer.
        seed: of the fit and of distillation; the same for every row.
        rows: a JSON file that keeps the rows. Rows in it are not run again, so an interrupted comparison can resume.
        progress: show a progress bar (needs rich).
    """
    check_mode()
    check_model(model)
    pairs = _check_sizes(sizes)
    check_int("steps", steps, 0)
    check_int("samples", samples, 2)
    check_number("rate", rate, 0, above=True)
    check_number("budget", budget, 0, above=True)
    wrong = [method for method in methods if method not in METHODS]
    if wrong or isinstance(methods, str):
        raise ValueError(f"methods must be some of {', '.join(METHODS)}; got {methods!r}.")
    for what, function in (("quality", quality), ("loss", loss)):
        if function is not None and not callable(function):
            raise TypeError(f"{what} must be a function; got {function!r} of type {type(function).__name__}.")
    globs = check_filter(filter)
    original = copy.deepcopy(model).eval().requires_grad_(False)
    blocks, skipped = choose(original, example, globs)
    _check_blocks(pairs, blocks, steps)
    held = [*batches(held_out)]
    if not held:
        raise ValueError("held_out holds no batch. Pass batches that are not in data.")
    with evaluation_mode(original):  # before the data, which may take minutes
        run_on(original, held[0], at="held_out=")
        inputs = timed_batches(Batches(held) if timed is None else timed)
        run_on(original, inputs[0], at="held_out=" if timed is None else "timed=")
    train = _read(original, blocks, data, samples, steps)
    name = "match" if quality is None else getattr(quality, "__name__", type(quality).__name__)
    settings = {
        "model": f"{type(model).__name__} {fingerprint([original, [(b.name, b.activation) for b in blocks]])}",
        "blocks": len(blocks),
        "data": fingerprint([*train]),
        "held_out": fingerprint(held),
        "timed": fingerprint(inputs),
        "quality": f"{name} {fingerprint(quality)}",
        "loss": "drift" if loss is None else f"{getattr(loss, '__name__', type(loss).__name__)} {fingerprint(loss)}",
        "steps": steps,
        "rate": rate,
        "samples": samples,
        "seed": seed,
        "machine": machine(next(original.parameters()).device.type),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    path = None if rows is None else Path(rows)
    done = [] if path is None else read_rows(path, settings)
    wanted = tasks(blocks, pairs, methods)
    missing = [task for task in wanted if _row_of(task, done) is None]
    maker = Rows(
        original=original,
        blocks=blocks,
        train=train,
        held_out=held,
        timed=inputs,
        quality=quality or match(original),
        steps=steps,
        rate=rate,
        loss=loss,
        samples=samples,
        budget=budget,
        options={"filter": globs, "example": example},
    )
    device = next(original.parameters()).device
    with progress_bar("comparing", len(missing) * (steps + 1), show=progress, unit="steps") as advance:
        for task in missing:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                torch.manual_seed(seed)
                row = maker.row(task, advance)
            done = [*(old for old in done if (old.method, old.size) != task[:2]), row]
            if path is not None:
                write_rows(path, settings, done)
    made = {(row.method, row.size): row for row in done}
    return Comparison([made[task[:2]] for task in wanted], name, lower_is_better, settings, skipped)


class Batches:
    """Batches that can be read repeatedly. A list of integer tensors would be taken for one batch."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[Any]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)


def _read(original: nn.Module, blocks: Sequence[Block], data: Any, samples: int, steps: int) -> Batches:
    """Read data once, as far as the fit and distillation need it: every row then learns from the same batches."""
    kept: list[Any] = []
    source = iter(batches(data))

    def read() -> Iterator[Any]:
        for batch in source:
            kept.append(batch)
            yield batch

    inputs_of(original, first_linears(original, blocks), read(), samples)
    kept += islice(source, max(0, steps + HELD_OUT_BATCHES - len(kept)) if steps else 0)
    return Batches(kept)


def _row_of(task: Task, rows: Sequence[Compared]) -> Compared | None:
    """The row of a task, if it has a result. A row that missed a tool is made again: it may be installed by now."""
    done = (row for row in rows if row.quality is not None and MISSING not in row.note)
    return next((row for row in done if (row.method, row.size) == task[:2]), None)


def _check_sizes(sizes: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    try:
        pairs = [(depth, leaf_width) for depth, leaf_width in sizes]
    except (TypeError, ValueError):
        raise TypeError(
            f"sizes must be pairs (depth, leaf_width), such as [(4, 192), (4, 376)]; got {sizes!r}."
        ) from None
    if not pairs:
        raise ValueError("sizes is empty. Pass pairs (depth, leaf_width), such as [(4, 192), (4, 376)].")
    return list(dict.fromkeys((check_int("depth", d, 0), check_int("leaf_width", w, 1)) for d, w in pairs))


def _check_blocks(sizes: Sequence[tuple[int, int]], blocks: Sequence[Block], steps: int) -> None:
    narrow = min(blocks, key=lambda block: block.width)
    for depth, leaf_width in sizes:
        if depth + leaf_width > narrow.width:
            raise ValueError(
                f"a token must use at most the {narrow.width} neurons of {narrow.name}; {depth} x {leaf_width} uses "
                f"{depth + leaf_width}. Choose a smaller leaf_width, or exclude the block with filter=."
            )
    if steps and any(block.weights.up.dtype == torch.float16 for block in blocks):
        raise ValueError("Adam overflows in float16. Compare in float32 or bfloat16, or pass steps=0.")
