"""`fastff bench`: measure given sizes or the paper's, print the times, save the rows, draw figures."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from .. import bench as core
from ..bench import presets
from ..bench import rows as store
from ..bench.case import DEEPEST, Case
from ..extras import install
from ..progress import progress
from ..provenance import command_line
from . import bench_tables, printing
from .flags import LONGEST, bad_flags, numbers
from .options import Activation, NodeWidth, Options, prepare_torch, with_options

bench = typer.Typer(
    help="Inference times of FF and FFF on the same weights; with --all also of MoE, the paper's gather and every "
    "backend. Every output is checked against float64 first. A wrong output gets no time, and the exit code is 1.",
    no_args_is_help=True,
)


def preset(name: str, cases_of: Callable[[Case], list[Case]], text: str) -> None:
    """Add a command that measures given cases."""

    def command(
        options: Options,
        depth: Annotated[str, typer.Option(help="only these depths: a list such as 3,5 or 1-8")] = "",
        batch: Annotated[str, typer.Option(help="only these batch sizes: a list")] = "",
    ) -> None:
        depths, batches = numbers("--depth", depth, 0, DEEPEST), numbers("--batch", batch, 1)
        cases = []
        with bad_flags():
            for kind in options.dtypes:
                cases += cases_of(dataclasses.replace(presets.BERT, dtype=kind, device=options.device))
        cases = [case for case in cases if case.depth in (depths or [case.depth])]
        cases = [case for case in cases if case.batch in (batches or [case.batch])]
        if not cases:
            raise typer.BadParameter(f"bench {name} has no case of these depths and batches. Use bench size.")
        run(cases, options, paper=name if name in ("table1", "table3") else "")

    bench.command(name, help=text)(with_options(command))


preset(
    "blocks",
    presets.blocks,
    "The paper's speed figures: 2 to 2**15 blocks of 32 neurons, 768 -> 768, batch 256. MoE needs --all.",
)
preset("table1", presets.table1, "The sizes of the paper's Table 1, batch 2048, beside the paper's speed-ups.")
preset(
    "table3", presets.table3, "The feedforward layers of the paper's Table 3, batch 2048, beside the paper's speed-ups."
)
preset(
    "regimes",
    presets.regimes,
    "From one sample to many samples per leaf: 768 -> 768, leaf width 32; on a GPU in bfloat16 also 4096 -> 4096, "
    "leaf width 64.",
)


@bench.command()
@with_options
def size(
    options: Options,
    in_features: Annotated[int, typer.Option("--in", help="inputs of the layer", min=1)] = 768,
    out_features: Annotated[int, typer.Option("--out", help="outputs of the layer", min=1)] = 768,
    leaf_width: Annotated[str, typer.Option(help="list of leaf widths")] = "32",
    depth: Annotated[str, typer.Option(help="list of depths, such as 3,5 or 1-8")] = "5",
    batch: Annotated[str, typer.Option(help="list of batch sizes")] = "256",
    activation: Activation = "relu",
    node_width: NodeWidth = 1,
) -> None:
    """Measure any size: FF and FFF; with --all also MoE, gather and every backend."""
    leaves, depths = numbers("--leaf-width", leaf_width, 1), numbers("--depth", depth, 0, DEEPEST)
    batches = numbers("--batch", batch, 1)
    if (count := len(options.dtypes) * len(leaves) * len(depths) * len(batches)) > LONGEST:
        raise typer.BadParameter(f"bench size measures at most {LONGEST} cases; these lists ask for {count}.")
    with bad_flags():
        cases = [
            Case(in_features, out_features, leaf, d, b, kind, options.device, node_width, activation)
            for kind in options.dtypes
            for leaf in leaves
            for d in depths
            for b in batches
        ]
    if not cases:
        raise typer.BadParameter("--leaf-width, --depth and --batch need at least one number each.")
    run(cases, options)


@bench.command()
def plot(
    file: Annotated[Path, typer.Argument(help="CSV file of fastff bench --output", exists=True, dir_okay=False)],
    output: Annotated[Path, typer.Option("--output", help="folder for the pictures")] = Path("figures"),
) -> None:
    """Draw the paper's two speed figures and the speed-up over depth from the rows of a CSV file."""
    try:
        from ..bench.plots import draw

        with bad_flags():
            written = draw(store.read(file), output)
    except ModuleNotFoundError as error:
        raise typer.BadParameter(f"figures need {error.name}: {install('cli')}") from None
    if not written:
        raise typer.BadParameter(f"{file} has no model with times at three depths or more: nothing to draw.")
    for path in written:
        printing.console.print(str(path), soft_wrap=True)


def run(cases: list[Case], options: Options, paper: str = "") -> None:
    """Measure, save and print. The exit code is 1 if an output was wrong.

    `paper` is "table1" or "table3": the speed-ups stand beside the paper's, and other tables need --all.
    """
    command = " ".join([*prepare_torch(options.device, options.dtypes, options.threads, options.tf32), command_line()])
    about = store.about(options.device, command, options.commit)
    bandwidth, rows = measure(cases, options, about)
    shown = [row for row in rows if (row["model"], row["backend"]) in options.shown or row["status"] == "wrong"]
    if options.format != "table":
        printing.records(shown, store.COLUMNS, options.format)
    else:
        console = printing.console
        tf32 = f"TF32 {'on' if options.tf32 else 'off'}"
        threads = "1 thread" if about["threads"] == 1 else f"{about['threads']} threads"
        setting = tf32 if options.device == "cuda" else threads
        console.print(escape(f"{about['machine']}, {setting}, {bandwidth / 1e9:.4g} GB/s measured"))
        if options.everything or not paper:
            bench_tables.results(console, shown, everything=options.everything)
        if paper:
            bench_tables.beside_paper(console, paper, rows)
        bench_tables.notes(console, shown)
    if any(row["status"] == "wrong" for row in rows):
        raise typer.Exit(1)


def measure(cases: list[Case], options: Options, about: store.Row) -> tuple[float, list[store.Row]]:
    """The bandwidth of the machine, and the rows of this run, with --resume also those that the file had."""
    pairs = core.planned(options.models, options.backends)
    old = store.read(options.output) if options.output and options.resume else []
    done = store.finished(old)
    rows = []
    with progress("measuring", len(cases), unit="cases") as advance:
        advance(0, text="bandwidth")
        bandwidth = core.bandwidth(options.device)
        for case in cases:
            advance(0, text=str(case))
            if store.is_done(case, pairs, about, done):
                wanted = {store.key(about | case.columns | {"model": m, "backend": name}) for m, name in pairs}
                rows += [row for row in old if store.key(row) in wanted]
            else:
                found = core.measure(
                    case,
                    backends=options.backends,
                    models=options.models,
                    bandwidth=bandwidth,
                    budget=options.budget,
                    samples=options.samples,
                )
                fresh = store.rows_of(found, about)
                if options.output:
                    store.append(options.output, fresh)
                rows += fresh
            advance(text=str(case))
    return bandwidth, rows
