"""`python -m fastff_reproduce reproduce|report`, for where the package is on the path and not installed."""

import typer

from .cli import report, reproduce

app = typer.Typer(no_args_is_help=True, add_completion=False)
app.command()(reproduce)
app.command()(report)

if __name__ == "__main__":
    app()
