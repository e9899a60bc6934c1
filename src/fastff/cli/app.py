"""The command tree of `fastff`: `bench`, `plan`, `compare`, `explore`, and the commands of installed plug-ins."""

from typing import Annotated

import typer

from .. import __version__
from .bench_commands import bench
from .compare_command import compare
from .explore_command import explore
from .plan_command import plan
from .plugins import add_commands

app = typer.Typer(
    help="Fast feedforward layers: measure them on this machine, choose their sizes, and look inside.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        print(f"fastff {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="print the version of fastff", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


app.add_typer(bench, name="bench", short_help="Measure inference times of FF and FFF, the paper's sizes or your own.")
app.command()(plan)
app.command()(compare)
app.command()(explore)
add_commands(app)
