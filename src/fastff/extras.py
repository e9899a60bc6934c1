"""What an error says where an optional package is missing. There is no release to install by name, so far."""


def install(extra: str) -> str:
    """The command that installs an extra of fastff."""
    return f'pip install ".[{extra}]" in a checkout of fastff'
