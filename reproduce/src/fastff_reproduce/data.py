"""The data sets of the paper, by name: found or downloaded, checked, and read into tensors.

The files of a data set are in `root/<name>/`, under their published names. Only the published files are used: each one
is checked by its md5 (download.py).
"""

import os
from pathlib import Path
from typing import NamedTuple

from .catalogue import FORMS, File, Form
from .download import checked
from .download import download as fetch
from .readers import Part, digits

NAMES: tuple[str, ...] = ("digits", *FORMS)


class Dataset(NamedTuple):
    """A data set as published: integer pixels, no validation split, no standardisation."""

    name: str
    train: Part
    test: Part
    classes: int
    largest: int  # the largest possible pixel value: 255, or 16 for digits


def directory() -> Path:
    """The directory of the data sets: $FASTFF_DATA, or fastff in the user's cache."""
    if chosen := os.environ.get("FASTFF_DATA"):
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "fastff"


def load(name: str, root: Path | None = None, *, download: bool = True, progress: bool = True) -> Dataset:
    """Load a data set from the files in `root/<name>/`; `root` defaults to `directory()`.

    Missing files are downloaded, with a progress bar, unless `download` is False. `FileNotFoundError` says which files
    are missing and where to put them; `ValueError` says which file is not the published one. digits needs no file: it
    comes with scikit-learn.
    """
    if name not in NAMES:
        raise ValueError(f"unknown data set {name!r}; choose from {', '.join(NAMES)}.")
    if name == "digits":
        return Dataset(name, *digits(), classes=10, largest=16)
    forms = FORMS[name]
    place = directory() if root is None else Path(root)
    if place.exists() and not place.is_dir():
        raise NotADirectoryError(
            f"{place} is not a directory. --data or FASTFF_DATA must name one, with a folder per data set."
        )
    folder = place / name
    form = next((form for form in forms if not _missing(folder, form)), None)
    if form is None:
        form = forms[0]
        for file in _missing(folder, form):
            reasons = fetch(folder, file, form.urls, progress) if download else ["download=False"]
            if reasons:
                raise FileNotFoundError(_advice(name, folder, reasons))
    contents = {file.name: checked(folder, file, forms[0].urls) for file in form.files}
    return Dataset(name, *form.read(contents), classes=100 if name == "cifar100" else 10, largest=255)


def _missing(folder: Path, form: Form) -> list[File]:
    return [file for file in form.files if not (folder / file.name).is_file()]


def _short(form: Form) -> str:
    """The file or folder of a form; of several files, the first and the last."""
    names = list(dict.fromkeys(file.name.partition("/")[0] for file in form.files))
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _advice(name: str, folder: Path, reasons: list[str]) -> str:
    """Which files are missing, and what to do about it."""
    first, *others = FORMS[name]
    lines = [f"{name} needs these missing files, which could not be downloaded:"]
    lines += [f"  {first.urls[0]}{file.name}" for file in _missing(folder, first)]
    lines += [f"  also at {url}" for url in first.urls[1:]]
    lines.append(f"Put them into {folder}")
    if others:
        lines.append(f"Or put one of these there instead: {', '.join(map(_short, others))}")
    lines.append("If the data is in another directory, with a folder per data set: set FASTFF_DATA or pass --data.")
    return "\n".join([*lines, "Reasons:", *(f"  {reason}" for reason in reasons)])
