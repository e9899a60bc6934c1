"""The install command that an error names when an optional package is missing.

No release exists yet, so every command starts from a checkout.
"""


def install(extra: str) -> str:
    """The command that installs an extra of fastff, or its package of experiments ("reproduce")."""
    target = "./reproduce" if extra == "reproduce" else f'".[{extra}]"'
    return f"pip install {target} in a checkout of fastff"
