"""Commands that other packages add to `fastff`, through entry points of the group "fastff.commands".

The experiments of the paper are such a package, `fastff_reproduce`. Without it, `fastff reproduce` and `fastff report`
say what to install. A plug-in that cannot be imported says why, and every other command still runs.
"""

from importlib.metadata import EntryPoint, entry_points

import typer

from ..extras import install

_REPRODUCE = {"reproduce": "Train an experiment of the paper.", "report": "Write all results into one HTML page."}


def add_commands(app: typer.Typer) -> None:
    """Add the commands of installed packages, and a hint for each known command that is missing."""
    found = {entry.name: entry for entry in entry_points(group="fastff.commands")}
    for name, entry in found.items():
        try:
            command = entry.load()
        except Exception as error:  # a plug-in may fail in any way
            why = f"`fastff {name}` could not be loaded from {entry.value}: {type(error).__name__}: {error}"
            _add_hint(app, name, "This command could not be loaded.", f"{why}. {_remedy(entry)}")
        else:
            app.command(name)(command)
    for name, text in _REPRODUCE.items():
        if name not in found:
            why = f"`fastff {name}` is in the package fastff-reproduce: {install('reproduce')}"
            _add_hint(app, name, f"{text} Needs the package fastff-reproduce.", why)


def _remedy(entry: EntryPoint) -> str:
    if entry.name in _REPRODUCE:
        return f"Install it again: {install('reproduce')}"
    return f"Install {entry.dist.name} again." if entry.dist else "Install its package again."


def _add_hint(app: typer.Typer, name: str, text: str, why: str) -> None:
    """A command that only says why it cannot run, whatever its arguments."""
    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

    @app.command(name, help=text, context_settings=settings)
    def hint(_: typer.Context) -> None:
        raise typer.BadParameter(why)
