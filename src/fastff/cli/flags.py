"""Read and check the text of flags. An error names the flag, what it takes and what it got."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer

from ..atomic import check_no_database
from ..bench.case import DEVICES

FORMATS = ("table", "json", "csv")
Commit = Annotated[str, typer.Option("--commit", help="commit to write into the rows; default: the checkout's")]
Format = Annotated[
    str, typer.Option("--format", help=f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}; json and csv have all columns")
]

DIGITS = 18
LARGEST = 2**53
LONGEST = 1000  # numbers in a list


def _threads(count: int) -> int:
    cores = os.cpu_count() or 1
    if not 0 <= count <= cores:
        raise typer.BadParameter(
            f"--threads must be 0 (torch's default) to {cores}, the cores of this machine; got {count}."
        )
    return count


Threads = Annotated[
    int,
    typer.Option("--threads", help="torch threads on a CPU, at most its cores; 0: torch's default", callback=_threads),
]


@contextmanager
def bad_flags() -> Iterator[None]:
    """Errors of the package about a value become errors of the command line."""
    try:
        yield
    except (ValueError, TypeError, MemoryError) as error:
        raise typer.BadParameter(str(error)) from None


def a_device(name: str) -> str:
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if one("--device", name, DEVICES) == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("--device cuda needs a GPU that torch can use; none was found. Use cpu.")
    return name


def apart(read: Mapping[str, Path | None], written: Mapping[str, Path | None]) -> None:
    """Check, before any file is written, that no written file is another file of the command or a database."""
    files = {flag: path for flag, path in {**read, **written}.items() if path is not None}
    for flag in written:
        for other, path in files.items():
            if flag in files and other != flag and _same(files[flag], path):
                raise typer.BadParameter(f"{flag} and {other} are the same file, {path}. Choose another for {flag}.")
        if flag in files:
            with bad_flags():
                check_no_database(files[flag])


def _same(one: Path, other: Path) -> bool:
    if one.exists() and other.exists():
        return (one.is_file() or other.is_file()) and one.samefile(other)  # /dev/null may be both
    return one.resolve() == other.resolve()


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def one(flag: str, text: str, known: Sequence[str]) -> str:
    if text not in known:
        raise typer.BadParameter(f"{flag} is one of {', '.join(known)}; got {text!r}.")
    return text


def among(flag: str, text: str, known: Sequence[str]) -> list[str]:
    found = words(text)
    wrong = [word for word in found if word not in known]
    if wrong or not found:
        raise typer.BadParameter(f"{flag} is a list of {', '.join(known)}; got {text!r}.")
    return list(dict.fromkeys(found))


def numbers(flag: str, text: str, least: int, most: int = LARGEST) -> list[int]:
    """The numbers of a list such as 3,5 or 1-8; empty if the text is empty."""
    found: list[int] = []
    for word in words(text):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", word)
        if match and max(map(len, match.groups(""))) > DIGITS:
            raise typer.BadParameter(f"{flag} is a list of numbers up to {most}; got one of more than {DIGITS} digits.")
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not least <= first <= last:
            raise typer.BadParameter(f"{flag} is a list of numbers from {least} up, such as 3,5 or 1-8; got {text!r}.")
        if last > most:
            raise typer.BadParameter(f"{flag} is a list of numbers up to {most}; got {word!r}.")
        if len(found) + last - first >= LONGEST:
            raise typer.BadParameter(f"{flag} is a list of at most {LONGEST} numbers; got {text!r}.")
        found += range(first, last + 1)
    return list(dict.fromkeys(found))


def microseconds(text: str) -> float:
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(us|µs|ms|s)", text.strip())
    if not match or not float(match[1]):
        raise typer.BadParameter(f"--latency is a time with its unit, such as 20us, 1.5ms or 2s; got {text!r}.")
    return float(match[1]) * {"us": 1, "µs": 1, "ms": 1e3, "s": 1e6}[match[2]]
