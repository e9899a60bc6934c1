"""Commands that other packages add to `fastff`, through entry points of the group "fastff.commands".

The experiments of the paper are such a package, `fastff_reproduce`. Without it, `fastff reproduce` and `fastff report`
say what to install.
"""

from importlib.metadata import entry_points

import typer

from ..extras import install

_REPRODUCE = {"reproduce": "Train an experiment of the paper.", "report": "Write all results into one HTML page."}


def add_commands(app: typer.Typer) -> None:
    """Add the commands of installed packages, and a hint for each known one that is missing."""
    found = {entry.name: entry for entry in entry_points(group="fastff.commands")}
    for name, entry in found.items():
        app.command(name)(entry.load())
    for name in _REPRODUCE.keys() - found.keys():
        _add_hint(app, name)


def _add_hint(app: typer.Typer, name: str) -> None:
    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

    @app.command(name, help=f"{_REPRODUCE[name]} Needs the package fastff-reproduce.", context_settings=settings)
    def hint(_: typer.Context) -> None:
        raise typer.BadParameter(f"`fastff {name}` is in the package fastff-reproduce: {install('reproduce')}")
