"""`fastff bench` and `fastff plan`: read the flags, check them before any work, run, print, save."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from .. import __version__
from .. import bench as core
from ..activations import GATED, PLAIN
from ..bench import presets
from ..bench import rows as store
from ..bench.case import DEEPEST, DEVICES, DTYPES, Case
from ..bench.plan import plan as make_plan
from ..bench.plan import recommend
from ..extras import install
from ..provenance import checkout, command_line
from . import printing
from .flags import LONGEST, Commit, Threads, a_device, among, bad_flags, microseconds, numbers, one, words
from .plugins import add_commands

ALL_MODELS = ",".join(core.MODELS)
QUIET_SECONDS = 5.0
errors = Console(stderr=True)
console = Console()
if not console.is_terminal:
    console = Console(width=150)  # a file has room for a table

app = typer.Typer(
    help="Fast feedforward layers: measure them here, and choose their sizes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(
    help="Inference times of FF, MoE and FFF on the same weights. Every output is checked against float64 before its "
    "time is printed; a wrong one has none, and the exit code is 1.",
    no_args_is_help=True,
)
app.add_typer(bench, name="bench")


def _version(asked: bool) -> None:
    if asked:
        print(f"fastff {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="the version of fastff", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


add_commands(app)

Device = Annotated[str, typer.Option("--device", help=f"{' or '.join(DEVICES)}; default: cuda if there is a GPU")]
Dtype = Annotated[str, typer.Option("--dtype", help=f"a list of {', '.join(DTYPES)}")]
Backend = Annotated[str, typer.Option("--backend", help="a list; default: every backend that can run, and auto")]
Model = Annotated[str, typer.Option("--model", help=f"a list of {', '.join(core.MODELS)}")]
Budget = Annotated[float, typer.Option("--budget", help="seconds of timing per case; what needs more is left out")]
Samples = Annotated[int, typer.Option("--samples", help="per model, if the budget allows", min=5)]
Output = Annotated[Path | None, typer.Option("--output", help="append the rows to this CSV file")]
Resume = Annotated[bool, typer.Option("--resume", help="skip cases that --output has from the same commit")]
TF32 = Annotated[bool, typer.Option("--tf32", help="let torch use TF32 in float32 products on a GPU")]
Activation = Annotated[str, typer.Option("--activation", help=f"one of {', '.join([*PLAIN, *GATED])}")]
NodeWidth = Annotated[int, typer.Option("--node-width", help="neurons of a node", min=1)]


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags that all measuring commands share."""

    device: str
    dtypes: Sequence[str]
    backends: Sequence[str]
    models: Sequence[str]
    threads: int
    budget: float
    samples: int
    output: Path | None
    resume: bool
    commit: str
    tf32: bool

    def __post_init__(self) -> None:
        if self.output is not None:
            with bad_flags():
                store.read(self.output)  # it must be a file of such rows, or none
        if self.resume and not (self.output and self.commit):
            missing = "--commit, since this is no checkout" if self.output else "--output"
            raise typer.BadParameter(f"--resume compares with the rows of a file, of a commit. Add {missing}.")
        if not self.budget > 0:
            raise typer.BadParameter(f"--budget is a time in seconds and must be positive; got {self.budget}.")
        if "FFF" not in self.models:
            raise typer.BadParameter("--model needs FFF: the others are what it is compared with.")


def options_of(device: str, dtype: str, backend: str, model: str, commit: str, **rest: Any) -> Options:
    """The flags as they are typed, checked."""
    with bad_flags():
        backends = core.backends_for(words(backend))
    return Options(
        device=a_device(device),
        dtypes=among("--dtype", dtype, DTYPES),
        backends=backends,
        models=among("--model", model, core.MODELS),
        commit=commit or checkout(),
        **rest,
    )


def preset(name: str, cases_of: Callable[[Case], list[Case]], text: str) -> None:
    """A command that measures given cases."""

    def command(
        depth: Annotated[str, typer.Option(help="only these depths: a list such as 3,5 or 1-8")] = "",
        batch: Annotated[str, typer.Option(help="only these batches: a list")] = "",
        dtype: Dtype = "float32",
        device: Device = "",
        backend: Backend = "",
        model: Model = ALL_MODELS,
        threads: Threads = 0,
        budget: Budget = 20.0,
        samples: Samples = 100,
        output: Output = None,
        resume: Resume = False,
        commit: Commit = "",
        tf32: TF32 = False,
    ) -> None:
        rest = {"threads": threads, "budget": budget, "samples": samples, "output": output, "resume": resume}
        options = options_of(device, dtype, backend, model, commit, tf32=tf32, **rest)
        depths, batches = numbers("--depth", depth, 0, DEEPEST), numbers("--batch", batch, 1)
        cases = []
        with bad_flags():
            for kind in options.dtypes:
                cases += cases_of(dataclasses.replace(presets.BERT, dtype=kind, device=options.device))
        cases = [case for case in cases if case.depth in (depths or [case.depth])]
        cases = [case for case in cases if case.batch in (batches or [case.batch])]
        if not cases:
            raise typer.BadParameter(f"bench {name} has no case of these depths and batches. Use bench size.")
        rows = run(cases, options)
        if name in ("table1", "table3"):
            printing.beside_paper(console, name, rows)
        finish(rows)

    bench.command(name, help=text)(command)


preset(
    "blocks",
    presets.blocks,
    "The paper's speed figures: FF, MoE and FFF over 2 to 2**15 blocks of 32 neurons, 768 -> 768, k = 1, batch 256.",
)
preset("table1", presets.table1, "The sizes of the paper's Table 1, batch 2048, beside the speed-ups of the paper.")
preset("table3", presets.table3, "The feedforward layers of the paper's Table 3, batch 2048, beside its speed-ups.")
preset(
    "regimes",
    presets.regimes,
    "From one sample to many per leaf: the tables of docs/speed.md. 768 -> 768, l = 32; on a GPU in bfloat16 also "
    "4096 -> 4096, l = 64.",
)


@bench.command()
def size(
    in_features: Annotated[int, typer.Option("--in", help="inputs of the layer", min=1)] = 768,
    out_features: Annotated[int, typer.Option("--out", help="outputs of the layer", min=1)] = 768,
    leaf_width: Annotated[str, typer.Option(help="a list")] = "32",
    depth: Annotated[str, typer.Option(help="a list such as 3,5 or 1-8")] = "5",
    batch: Annotated[str, typer.Option(help="a list")] = "256",
    activation: Activation = "relu",
    node_width: NodeWidth = 1,
    dtype: Dtype = "float32",
    device: Device = "",
    backend: Backend = "",
    model: Model = ALL_MODELS,
    threads: Threads = 0,
    budget: Budget = 20.0,
    samples: Samples = 100,
    output: Output = None,
    resume: Resume = False,
    commit: Commit = "",
    tf32: TF32 = False,
) -> None:
    """Any size."""
    rest = {"threads": threads, "budget": budget, "samples": samples, "output": output, "resume": resume}
    options = options_of(device, dtype, backend, model, commit, tf32=tf32, **rest)
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
    finish(run(cases, options))


@bench.command()
def plot(
    file: Annotated[Path, typer.Argument(help="rows of fastff bench", exists=True, dir_okay=False)],
    output: Annotated[Path, typer.Option("--output", help="the folder for the pictures")] = Path("figures"),
) -> None:
    """Draw the paper's two speed figures, and the speed-up over depth, from rows of results."""
    try:
        from ..bench.plots import draw

        with bad_flags():
            written = draw(store.read(file), output)
    except ModuleNotFoundError as error:
        raise typer.BadParameter(f"figures need {error.name}: {install('cli')}") from None
    if not written:
        raise typer.BadParameter(f"{file} has no model with times at three depths or more: nothing to draw.")
    for path in written:
        console.print(str(path), soft_wrap=True)


@app.command()
def plan(
    in_features: Annotated[int, typer.Option("--in", help="inputs of the layer", min=1)],
    out_features: Annotated[int, typer.Option("--out", help="outputs of the layer", min=1)],
    width: Annotated[int, typer.Option(help="hidden neurons of the dense layer to replace", min=1)],
    latency: Annotated[str, typer.Option(help="budget: time of a call, such as 20us or 1.5ms")] = "",
    speedup: Annotated[float | None, typer.Option(help="budget: times faster than the dense layer")] = None,
    neurons: Annotated[int | None, typer.Option(help="budget: inference size, depth * n + leaf width")] = None,
    regions: Annotated[int | None, typer.Option(help="at least so many leaves: a partition of the inputs")] = None,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    dtype: Annotated[str, typer.Option(help=f"one of {', '.join(DTYPES)}")] = "float32",
    device: Device = "",
    activation: Activation = "relu",
    node_width: NodeWidth = 1,
    deeper: Annotated[int, typer.Option(help="levels beyond those that the width asks for", min=0, max=16)] = 1,
    threads: Threads = 0,
    format: Annotated[str, typer.Option("--format", help="table or json")] = "table",
) -> None:
    """Which leaf width and depth: the paper's user manual, with times measured here.

    With a budget (--latency, --speedup, --neurons): all sizes for the width, those that fit first, the widest leaf
    before the others. With --regions: the depth, and leaf widths to try.
    """
    if format not in ("table", "json"):
        raise typer.BadParameter(f"--format is table or json; got {format!r}.")
    kind, place = one("--dtype", dtype, DTYPES), a_device(device)
    if not threads and place == "cpu" and (threads := core.free_threads()) < torch.get_num_threads():
        told = f"Other processes keep cores busy: measured on {threads} of torch's {torch.get_num_threads()} threads."
        errors.print(told, style="yellow", soft_wrap=True)
    prepare(place, [kind], threads, tf32=False)
    with bad_flags(), bar() as progress:
        task = progress.add_task("measuring", total=None)
        choices = make_plan(
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
            progress=teller(progress, task, "sizes"),
        )
    if format == "json":
        print(json.dumps([dataclasses.asdict(choice) | {"speedup": choice.speedup} for choice in choices], indent=2))
    else:
        title = f"{in_features} -> {out_features} in place of a dense width of {width}, {place}"
        printing.choices(console, choices, title)
    try:
        chosen, why = recommend(choices, regions)
    except MemoryError as error:
        errors.print(f"Nothing to recommend: {error}", style="red", soft_wrap=True)
        raise typer.Exit(1) from None
    if format == "json":
        return
    sizes = f"{in_features}, {out_features}, depth={chosen.depth}, leaf_width={chosen.leaf_width}"
    sizes += f", node_width={node_width}" if node_width > 1 else ""
    sizes += f', activation="{activation}"' if activation != "relu" else ""
    sizes += f", dtype=torch.{kind}" if kind != "float32" else ""
    console.print(f"To paste: {why}.")
    console.print(f"fastff.FFF({sizes})", soft_wrap=True, highlight=False)


def run(cases: list[Case], options: Options) -> list[store.Row]:
    """Measure, print and save; the rows of this run, and with --resume those that were there."""
    command = " ".join([*prepare(options.device, options.dtypes, options.threads, options.tf32), command_line()])
    about = store.about(options.device, command, options.commit)
    pairs = core.planned(options.models, options.backends)
    old = store.read(options.output) if options.output and options.resume else []
    done = store.finished(old)
    rows = []
    with bar() as progress:
        task = progress.add_task("bandwidth", total=len(cases))
        speed, tell = core.bandwidth(options.device), teller(progress, task, "cases")
        for i, case in enumerate(cases, 1):
            progress.update(task, description=str(case))
            if store.is_done(case, pairs, about, done):
                wanted = {store.key(about | case.columns | {"model": m, "backend": name}) for m, name in pairs}
                rows += [row for row in old if store.key(row) in wanted]
            else:
                found = core.measure(
                    case,
                    backends=options.backends,
                    models=options.models,
                    bandwidth=speed,
                    budget=options.budget,
                    samples=options.samples,
                )
                fresh = store.rows_of(found, about)
                if options.output:
                    store.append(options.output, fresh)
                rows += fresh
            tell(i, len(cases))
    setting = f"TF32 {'on' if options.tf32 else 'off'}" if options.device == "cuda" else f"{about['threads']} threads"
    printing.results(console, rows, f"{about['machine']}, {setting}, {speed / 1e9:.4g} GB/s measured")
    return rows


def finish(rows: list[store.Row]) -> None:
    """Exit with 1 if an output was wrong."""
    if any(row["status"] == "wrong" for row in rows):
        raise typer.Exit(1)


def prepare(device: str, dtypes: Sequence[str], threads: int, tf32: bool) -> list[str]:
    """Set torch up as the flags say; the settings of the environment that this needed."""
    torch.backends.cuda.matmul.allow_tf32 = tf32
    if threads:
        torch.set_num_threads(threads)
    name, value = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"
    if device == "cuda" or not {"bfloat16", "float16"}.intersection(dtypes):
        return []
    # Some virtual machines announce the AMX instructions and kill the process that uses them. oneDNN reads this
    # variable when it is first used, which is later.
    code = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); torch.nn.functional.linear(x, x)"
    if name not in os.environ and subprocess.run([sys.executable, "-c", code], capture_output=True).returncode < 0:
        os.environ[name] = value
        errors.print("This machine kills processes that use AMX, which it announces: torch is kept from it.")
    return [f"{name}={os.environ[name]}"] if name in os.environ else []


def teller(progress: Progress, task: TaskID, what: str) -> Callable[[int, int], None]:
    """Shows how many of how many are done: on the bar, or now and then in a line where there is no terminal."""
    last = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal last
        progress.update(task, completed=done, total=total)
        if not errors.is_terminal and time.monotonic() - last > QUIET_SECONDS:
            errors.print(f"{done} of {total} {what}", soft_wrap=True)
            last = time.monotonic()

    return tell


def bar() -> Progress:
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    return Progress(*columns, console=errors, transient=True)
