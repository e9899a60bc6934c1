"""The text of examples/minilm.py: sentences from docstrings.

Training text comes from the installed packages, held-out text from Python's standard library. Sentences in both are
removed from the training text; case, numbers and punctuation do not count.
"""

import ast
import hashlib
import random
import re
import sysconfig
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path


def docstrings(root: Path, skip: set[str]) -> Iterator[str]:
    """Docstrings of the Python files below a folder, in a fixed order that mixes the packages."""
    paths = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    names = [name for name in paths if not skip & set(Path(name).parts)]
    for name in sorted(names, key=lambda name: (hashlib.sha256(name.encode()).digest(), name)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about escapes in other people's strings
                tree = ast.parse(paths[name].read_text(encoding="utf-8", errors="replace"))
        except (SyntaxError, ValueError, OSError, RecursionError):
            continue
        kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
        yield from (text for node in ast.walk(tree) if isinstance(node, kinds) and (text := ast.get_docstring(node)))


def sentences(text: str) -> Iterator[str]:
    """Sentences of 6 to 60 words that consist mostly of letters."""
    for paragraph in re.split(r"\n\s*\n", text):
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(paragraph.split())):
            letters = sum(c.isalpha() or c == " " for c in sentence)
            if 6 <= len(sentence.split()) <= 60 and letters > 0.85 * len(sentence):
                yield sentence


def bare(sentence: str) -> str:
    """The sentence without case, numbers and punctuation."""
    return " ".join(re.findall("[a-z]+", sentence.lower()))


def collect(root: Path, skip: set[str], limit: int | None, without: Collection[str] = ()) -> list[str]:
    """Sentences of docstrings, each once, except those in `without`."""
    found: dict[str, str] = {}
    for text in docstrings(root, skip):
        for sentence in sentences(text):
            if (key := bare(sentence)) not in without:
                found.setdefault(key, sentence)
        if limit is not None and len(found) >= limit:
            break
    return list(found.values())[:limit]


def read_text(limit: int, held_out: int, seed: int) -> tuple[list[str], list[str]]:
    """Training sentences from installed packages, and held-out ones from the standard library."""
    tests = {"test", "tests", "idle_test"}
    library = collect(Path(sysconfig.get_path("stdlib")), tests | {"site-packages", "dist-packages"}, None)
    train = collect(Path(sysconfig.get_path("purelib")), tests, limit, without=set(map(bare, library)))
    if len(train) < min(limit, 100) or len(library) < held_out:
        raise SystemExit(f"{len(train)} sentences of installed packages and {len(library)} of the library: too few.")
    return train, random.Random(seed).sample(library, held_out)
