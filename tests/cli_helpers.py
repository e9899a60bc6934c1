"""What the tests of the command line share."""

from pathlib import Path

from typer.testing import CliRunner

from fastff.cli.app import app

ROOT = Path(__file__).parents[1]
SIZE = "bench size --in 20 --out 12 --leaf-width 4 --depth 2 --batch 33 --device cpu --budget 0.05 --samples 5"
QUICK = f"{SIZE} --backend reference,auto"


def fastff_(command):
    """Run a command line in this process."""
    return CliRunner().invoke(app, command.split() if isinstance(command, str) else command)


def cells(output):
    """The cells of every row of the tables in an output."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if line[:1] == "│"]
