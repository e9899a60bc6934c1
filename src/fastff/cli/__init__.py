"""The command `fastff`. It needs typer and rich, an extra; without them one line says what to install."""

import errno
import io
import signal
import sys

from ..extras import install

_ROOM = "Make room, and run the command again."
_PLACE = "Allow writing there, or choose another place."
_REMEDIES = {errno.ENOSPC: _ROOM, errno.EDQUOT: _ROOM, errno.EFBIG: _ROOM}
_REMEDIES |= dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.EEXIST), _PLACE)


def main() -> None:
    try:
        _main()
    except KeyboardInterrupt:  # while modules are imported; commands end in the same way
        sys.exit(128 + signal.SIGINT)


def _main() -> None:
    try:
        from .app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"The command line of fastff needs {error.name}: {install('cli')}")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a ± that the encoding lacks becomes a question mark
    try:
        app(prog_name="fastff")
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"fastff: {_sentence(error)}")


def _sentence(error: Exception) -> str:
    """What went wrong with a file, and a remedy if the error names none."""
    if not isinstance(error, OSError) or error.errno not in _REMEDIES:
        return str(error)
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror}. {_REMEDIES[error.errno]}"
