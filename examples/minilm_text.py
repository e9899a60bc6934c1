"""The text of examples/minilm.py: sentences from docstrings, their token ids, and batches of them.

Training text comes from the installed packages, held-out text from Python's standard library. Sentences in both are
removed from the training text; case, numbers and punctuation do not count.
"""

import ast
import hashlib
import random
import re
import sysconfig
import warnings
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")
Batch = dict[str, Tensor]
Sentences = list[list[int]]  # token ids

TOKENS = 64  # of a sentence; the rest is cut off


class Text(NamedTuple):
    """Token ids of sentences, and the token that fills up short ones in a batch."""

    train: Sentences
    held_out: Sentences
    pad: int


# Sentences


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


def read_text(limit: int, held_out: int | None, seed: int) -> tuple[list[str], list[str]]:
    """Training sentences from installed packages; held-out ones from the standard library, or with None all of it."""
    tests = {"test", "tests", "idle_test"}
    library = collect(Path(sysconfig.get_path("stdlib")), tests | {"site-packages", "dist-packages"}, None)
    train = collect(Path(sysconfig.get_path("purelib")), tests, limit, without=set(map(bare, library)))
    if len(train) < min(limit, 100) or len(library) < (held_out or 1):
        raise SystemExit(f"{len(train)} sentences of installed packages and {len(library)} of the library: too few.")
    return train, library if held_out is None else held_out_of(library, held_out, seed)


def held_out_of(library: Sequence[T], count: int, seed: int) -> list[T]:
    return random.Random(seed).sample(library, count)


# Token ids


def tokenise(tokenizer: Any, train: Sequence[str], held_out: Sequence[str]) -> Text:
    parts = (tokenizer(list(some), truncation=True, max_length=TOKENS)["input_ids"] for some in (train, held_out))
    return Text(*parts, tokenizer.pad_token_id or 0)


def batches(ids: Sentences, size: int, pad: int, seed: int | None = None, device: str = "cpu") -> list[Batch]:
    """Batches of sentences of similar length, to keep padding short; shuffled if there is a seed."""
    order = sorted(range(len(ids)), key=lambda i: (len(ids[i]), i)) if seed is not None else range(len(ids))
    groups = [[ids[i] for i in order[start : start + size]] for start in range(0, len(ids), size)]
    if seed is not None:
        random.Random(seed).shuffle(groups)
    made = []
    for group in groups:
        tensors = [torch.tensor(one) for one in group]
        x = nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=pad)
        lengths = torch.tensor([len(one) for one in group])
        mask = (torch.arange(x.shape[1]) < lengths.unsqueeze(1)).long()
        made.append({"input_ids": x.to(device), "attention_mask": mask.to(device)})
    return made


def full_batch(ids: Sentences, count: int, device: str = "cpu") -> Batch:
    """`count` sequences of exactly TOKENS tokens of running text."""
    running = [token for one in ids for token in one]
    x = torch.tensor((running * (count * TOKENS // len(running) + 1))[: count * TOKENS]).view(count, TOKENS).to(device)
    return {"input_ids": x, "attention_mask": torch.ones_like(x)}
