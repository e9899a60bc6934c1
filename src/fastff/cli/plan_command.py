"""`fastff plan`: the leaf width and depth for a budget, measured on this machine."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .. import bench as core
from ..bench.case import DTYPES
from ..progress import progress
from . import printing
from .flags import FORMATS, Format, Threads, a_device, bad_flags, microseconds, one
from .options import Activation, Device, NodeWidth, prepare_torch
from .printing import bytes_, number, other_load, show, times


def plan(
    in_features: Annotated[int, typer.Option("--in", help="inputs of the layer", min=1)],
    out_features: Annotated[int, typer.Option("--out", help="outputs of the layer", min=1)],
    width: Annotated[int, typer.Option(help="hidden neurons of the dense layer to replace", min=1)],
    latency: Annotated[str, typer.Option(help="budget: maximum time of a call, such as 20us or 1.5ms")] = "",
    speedup: Annotated[float | None, typer.Option(help="budget: minimum speed-up over the dense layer")] = None,
    neurons: Annotated[int | None, typer.Option(help="budget: maximum inference size, in neurons")] = None,
    regions: Annotated[int | None, typer.Option(help="minimum number of leaves: a partition of the inputs")] = None,
    batch: Annotated[int, typer.Option(help="batch size", min=1)] = 1,
    dtype: Annotated[str, typer.Option(help=f"one of {', '.join(DTYPES)}")] = "float32",
    device: Device = "",
    activation: Activation = "relu",
    node_width: NodeWidth = 1,
    deeper: Annotated[int, typer.Option(help="levels to try beyond those that the width needs", min=0, max=16)] = 1,
    threads: Threads = 0,
    everything: Annotated[bool, typer.Option("--all", help="print every column")] = False,
    format: Format = "table",
) -> None:
    """Recommend a leaf width and depth, timed on this machine.

    With a budget (--latency, --speedup, --neurons), sizes that fit come first, widest leaf first.
    Without one, the widest leaf with at least half of the best speed-up is recommended.
    With --regions: the depth, and leaf widths to try.
    """
    one("--format", format, FORMATS)
    kind, place = one("--dtype", dtype, DTYPES), a_device(device)
    if not threads and place == "cpu" and (threads := core.free_threads()) < torch.get_num_threads():
        told = f"Other processes keep cores busy: measured on {threads} of torch's {torch.get_num_threads()} threads."
        printing.errors.print(told, style="yellow", soft_wrap=True)
    prepare_torch(place, [kind], threads, tf32=False)
    with bad_flags(), progress("measuring", None, unit="sizes") as advance:
        choices = core.plan(
            in_features,
            out_features,
            width,
            latency_us=microseconds(latency) if latency else None,
            speedup=speedup,
            neurons=neurons,
            regions=regions,
            batch=batch,
            dtype=kind,
            device=place,
            activation=activation,
            node_width=node_width,
            deeper=deeper,
            progress=lambda _, total: advance(total=total),
        )
    chosen, why, failure = None, "", ""
    try:
        chosen, why = core.recommend(choices, regions)
    except MemoryError as error:
        failure = str(error)
    if format == "table":
        title = f"{in_features} -> {out_features} in place of a dense width of {width}, {place}"
        _table(printing.console, choices, title, everything)
    else:
        asked: dict[str, Any] = {
            "in_features": in_features,
            "out_features": out_features,
            "width": width,
            "batch": batch,
        }
        asked |= {"dtype": kind, "device": place, "activation": activation, "node_width": node_width}
        rows = [{"recommended": one is chosen} | dataclasses.asdict(one) | asked for one in choices]
        printing.records(rows, list(rows[0]), format)
    if chosen is None:
        printing.errors.print(f"Nothing to recommend: {failure}", style="red", soft_wrap=True)
        raise typer.Exit(1)
    if format != "table":
        return
    sizes = f"{in_features}, {out_features}, depth={chosen.depth}, leaf_width={chosen.leaf_width}"
    sizes += f", node_width={node_width}" if node_width > 1 else ""
    sizes += f', activation="{activation}"' if activation != "relu" else ""
    sizes += f", dtype=torch.{kind}" if kind != "float32" else ""
    printing.console.print(f"Recommended: {why}.")
    printing.console.print(f"fastff.FFF({sizes})", soft_wrap=True, highlight=False)


def _table(console: Console, choices: Sequence[core.Choice], title: str, everything: bool) -> None:
    """The choices; without `everything`, only the columns that a choice is made by."""
    budget = choices[0].fits is not None
    columns = {
        "fits": budget,
        "leaf width": True,
        "depth": True,
        "training width": everything,
        "training size": everything,
        "inference size": True,
        "parameters": everything,
        "time": True,
        "p20 to p80": everything,
        "speed-up": True,
    }
    console.print(escape(title))
    table = Table()
    for name, shown in columns.items():
        if shown:
            table.add_column(name, justify="left" if name == "fits" else "right")
    for choice in choices:
        cells = ["yes" if choice.fits else "", str(choice.leaf_width), str(choice.depth), str(choice.training_width)]
        cells += [str(choice.training_size), str(choice.inference_size), bytes_(choice.parameter_bytes)]
        if choice.time_us is None:
            cells += [choice.note or "-", "-", "-"]
        else:
            spread = f"{number(choice.p20_us or 0)} to {number(choice.p80_us or 0)}"
            cells += [f"{number(choice.time_us)} µs", spread, times(choice.speedup) or "-"]
        kept = [cell for cell, shown in zip(cells, columns.values(), strict=True) if shown]
        table.add_row(*kept, style="" if choice.fits is not False else "dim")
    show(console, table)
    if dense := dict.fromkeys(f"{number(choice.dense_us)} µs" for choice in choices if choice.dense_us):
        console.print(f"Dense layer, timed alternately: {', '.join(dense)}.", style="dim")
    other_load(console, max((choice.other_load or 0.0 for choice in choices), default=0.0))
    if budget and not any(choice.fits for choice in choices):
        console.print("Nothing fits the budget.", style="yellow")
