"""The command `fastff`. What it needs beyond torch is an extra; without it there is one line that says so."""

import sys


def main() -> None:
    try:
        from .commands import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f'The command line of fastff needs {error.name}: pip install "fastff[cli]"')
    try:
        app(prog_name="fastff")
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"fastff: {error}")
