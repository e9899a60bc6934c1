"""`fastff compare`: FFF beside a smaller dense layer, a low rank and int8, in a trained text model."""

import re
from pathlib import Path
from typing import Annotated

import torch
import typer

from ..bench.case import DTYPES
from ..provenance import command_line
from ..surgery import Comparison
from ..surgery import compare as core
from ..surgery.comparison import check_picture
from ..surgery.controls import METHODS
from . import printing
from .compare_text import read_lines, read_text_model
from .flags import FORMATS, Format, Threads, a_device, among, apart, bad_flags, one, words
from .options import Device, prepare_torch


def compare(
    model: Annotated[Path, typer.Argument(help="a folder that transformers loads: config, weights, tokenizer")],
    data: Annotated[Path, typer.Option(help="text to fit and distil with, one text a line")],
    sizes: Annotated[str, typer.Option(help="list of depth x leaf width, such as 4x192,4x376")],
    held_out: Annotated[
        Path | None, typer.Option(help="text to measure the quality on; default: every tenth line of --data")
    ] = None,
    steps: Annotated[int, typer.Option(help="distillation steps; 0 compares fitted models", min=0)] = 600,
    rate: Annotated[float, typer.Option(help="highest learning rate of distillation")] = 1.5e-4,
    batch: Annotated[int, typer.Option(help="sequences in a batch", min=1)] = 32,
    tokens: Annotated[int, typer.Option(help="longest sequence, in tokens", min=2)] = 64,
    samples: Annotated[int, typer.Option(help="inputs of each block to fit to", min=2)] = 32768,
    method: Annotated[str, typer.Option(help=f"list of {', '.join(METHODS)}; default: all")] = "",
    filter: Annotated[str, typer.Option(help="list of globs on the names of blocks; default: all")] = "",
    rows: Annotated[
        Path | None, typer.Option(help="JSON file that keeps the rows; rows that it has are not run again")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="picture to draw: quality over time, such as front.svg")] = None,
    dtype: Annotated[str, typer.Option(help=f"one of {', '.join(DTYPES)}")] = "float32",
    timed: Annotated[
        str, typer.Option(help="sequences x tokens to time; 1x1 is a token of generation. Default: --batch x --tokens")
    ] = "",
    device: Device = "",
    threads: Threads = 0,
    budget: Annotated[float, typer.Option(help="seconds of timing for a row's blocks, and for its model")] = 10.0,
    seed: Annotated[int, typer.Option(help="seed of the fit, of distillation and of the order of batches")] = 0,
    format: Format = "table",
) -> None:
    """Compare FFF layers in a trained text model with what else would make it cheaper.

    For every size: FFF, a dense layer of the same neurons a token, a low rank of the same FLOPs, and the block pruned
    by magnitude, distilled alike; then FFF, dense and the original in int8.
    Language models are compared by perplexity; other models by the cosine to the original's embeddings.
    The files of the model are not changed.
    """
    one("--format", format, FORMATS)
    kind, place = one("--dtype", dtype, DTYPES), a_device(device)
    pairs = _pairs("--sizes", sizes, "depth x leaf width, such as 4x192,4x376")
    shape = _pairs("--timed", timed, "sequences x tokens, such as 1x1") if timed else [(batch, tokens)]
    if len(shape) != 1 or not all(shape[0]):
        raise typer.BadParameter(f"--timed is one shape of at least 1 x 1; got {timed!r}.")
    methods = among("--method", method, METHODS) if method else METHODS
    apart({"--data": data, "--held-out": held_out}, {"--rows": rows, "--plot": plot})
    if plot is not None:
        with bad_flags():
            check_picture(plot)
    texts = read_lines("--data", data)
    others = read_lines("--held-out", held_out) if held_out else texts[9::10]
    texts = texts if held_out else [text for i, text in enumerate(texts) if i % 10 != 9]
    if not others:
        raise typer.BadParameter(f"--data needs at least 10 lines to hold some out; got {len(texts)}. Pass --held-out.")
    prepare_torch(place, [kind], threads, tf32=False)
    found = read_text_model(model, place, getattr(torch, kind))
    most = getattr(found.model.config, "max_position_embeddings", None)
    if isinstance(most, int) and tokens > most:
        raise typer.BadParameter(f"--tokens must be at most {most}, the positions of the model; got {tokens}.")
    held = found.batches(others, batch, tokens, flag="--held-out" if held_out else "--data")
    with bad_flags():
        made = core(
            found.model,
            pairs,
            found.batches(texts, batch, tokens, seed=seed),
            held_out=held,
            quality=found.quality(held),
            lower_is_better=found.head,
            steps=steps,
            rate=rate,
            loss=found.loss,
            samples=samples,
            methods=methods,
            filter=words(filter) or None,
            timed=found.full_batches(others, *shape[0]),
            budget=budget,
            seed=seed,
            rows=rows,
        )
    _print(made, format)
    if plot is not None:
        with bad_flags():
            made.plot(plot)
        printing.errors.print(f"wrote {plot}", soft_wrap=True, highlight=False)


def _print(made: Comparison, format: str) -> None:
    if format == "table":
        printing.console.print(str(made), soft_wrap=True, highlight=False, markup=False)
        return
    about = {"quality_name": made.quality, **{k: v for k, v in made.settings.items() if k != "quality"}}
    about["command"] = command_line()
    records = [row | about for row in made.records()]
    printing.records(records, list(records[0]), format)


def _pairs(flag: str, text: str, what: str) -> list[tuple[int, int]]:
    found = [re.fullmatch(r"(\d{1,3})\s*x\s*(\d{1,9})", word) for word in words(text)]
    if not found or not all(found):
        raise typer.BadParameter(f"{flag} must be {what}; got {text!r}.")
    return [(int(match[1]), int(match[2])) for match in found if match]
