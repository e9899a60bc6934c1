"""The flags that all measuring commands of `fastff bench` share: declared once, checked before any work."""

import functools
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from .. import bench as core
from ..activations import GATED, PLAIN
from ..bench import rows as store
from ..bench.case import DEVICES, DTYPES
from ..provenance import checkout
from . import printing
from .flags import FORMATS, Commit, Format, Threads, a_device, among, bad_flags, one, words

SHORT = ("FF", "FFF")

Device = Annotated[str, typer.Option("--device", help=f"{' or '.join(DEVICES)}; default: cuda if there is a GPU")]
Dtype = Annotated[str, typer.Option("--dtype", help=f"list of {', '.join(DTYPES)}")]
Backend = Annotated[
    str, typer.Option("--backend", help="list of backends; default: auto; with --all or --output: all that can run")
]
Model = Annotated[
    str,
    typer.Option(
        "--model", help=f"list of {', '.join(core.MODELS)}; default: {','.join(SHORT)}; with --all or --output: all"
    ),
]
Everything = Annotated[bool, typer.Option("--all", help="measure and print every model, backend and column")]
Budget = Annotated[
    float, typer.Option("--budget", help="seconds of timing per case; a model that needs more is skipped")
]
Samples = Annotated[int, typer.Option("--samples", help="timing samples per model, if the budget allows", min=5)]
Output = Annotated[Path | None, typer.Option("--output", help="append all rows to this CSV file")]
Resume = Annotated[bool, typer.Option("--resume", help="skip cases that --output has from the same commit")]
TF32 = Annotated[bool, typer.Option("--tf32", help="let torch use TF32 for float32 products on a GPU")]
Activation = Annotated[str, typer.Option("--activation", help=f"one of {', '.join([*PLAIN, *GATED])}")]
NodeWidth = Annotated[int, typer.Option("--node-width", help="hidden neurons of a node", min=1)]


@dataclass(frozen=True)
class Options:
    """The shared flags, checked."""

    device: str
    dtypes: Sequence[str]
    backends: Sequence[str]
    models: Sequence[str]
    shown: Sequence[tuple[str, str]]  # the (model, backend) pairs that are printed
    everything: bool
    threads: int
    budget: float
    samples: int
    output: Path | None
    resume: bool
    commit: str
    tf32: bool
    format: str

    def __post_init__(self) -> None:
        if self.output is not None:
            with bad_flags():
                store.read(self.output)  # it must hold such rows, or be new
        if self.resume and not (self.output and self.commit):
            missing = "--commit, since this is no checkout" if self.output else "--output"
            raise typer.BadParameter(f"--resume compares with the rows of a file and their commit. Add {missing}.")
        if not self.budget > 0:
            raise typer.BadParameter(f"--budget is a time in seconds and must be positive; got {self.budget}.")
        if "FFF" not in self.models:
            raise typer.BadParameter(f"--model needs FFF, which the others are compared with; got {self.models}.")


def read_options(
    dtype: Dtype = "float32",
    device: Device = "",
    backend: Backend = "",
    model: Model = "",
    everything: Everything = False,
    format: Format = "table",
    threads: Threads = 0,
    budget: Budget = 20.0,
    samples: Samples = 100,
    output: Output = None,
    resume: Resume = False,
    commit: Commit = "",
    tf32: TF32 = False,
) -> Options:
    """Check the flags. A file gets every model and backend, also those that the table leaves out."""
    one("--format", format, FORMATS)
    asked = among("--model", model, core.MODELS) if model else list(SHORT)
    with bad_flags():
        # MoE runs on backends by name only.
        few = core.backends_for(words(backend) if backend or "MoE" in asked else ["auto"])
        all_backends = core.backends_for(words(backend))
    wide = everything or output is not None
    models = list(core.MODELS) if wide and not model else asked
    backends = all_backends if wide else few
    return Options(
        device=a_device(device),
        dtypes=among("--dtype", dtype, DTYPES),
        backends=backends,
        models=models,
        shown=core.planned(models, backends) if everything else core.planned(asked, few),
        everything=everything,
        threads=threads,
        budget=budget,
        samples=samples,
        output=output,
        resume=resume,
        commit=commit or checkout(),
        tf32=tf32,
        format=format,
    )


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the shared flags to a command, which gets them as its first argument, `options`."""
    _, *own = inspect.signature(command).parameters.values()
    shared = inspect.signature(read_options).parameters.values()

    @functools.wraps(command)
    def run(**values: Any) -> None:
        mine = {parameter.name: values.pop(parameter.name) for parameter in own}
        command(read_options(**values), **mine)

    parameters = [*own, *shared]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def prepare_torch(device: str, dtypes: Sequence[str], threads: int, tf32: bool) -> list[str]:
    """Set torch up as the flags say. Returns the environment variables that this needed, as NAME=value."""
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
        printing.errors.print("This machine announces AMX but kills processes that use it: torch runs without AMX.")
    return [f"{name}={os.environ[name]}"] if name in os.environ else []
