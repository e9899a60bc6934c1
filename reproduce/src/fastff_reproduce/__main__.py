"""`python -m fastff_reproduce reproduce|report`: the commands where the package is on the path but not installed."""

import sys

import typer

from .cli import report, reproduce

app = typer.Typer(no_args_is_help=True, add_completion=False)
app.command()(reproduce)
app.command()(report)

if __name__ == "__main__":
    try:
        app(prog_name="fastff_reproduce")
    except OSError as error:  # its message has the remedy
        sys.exit(f"fastff_reproduce: {error}")
