"""The text that examples/language.py trains on: files of a folder, by default the source of Python's standard library.

Whole files are held out, in two sets. A small byte-level BPE is trained first.
"""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

LEAST = 200_000  # characters


@dataclass
class Text:
    """Training tokens, and windows (count, context + 1) of two sets of held-out files."""

    tokenizer: Tokenizer
    train: Tensor
    validation: Tensor
    test: Tensor
    bytes_per_token: float  # of the test windows

    def batch(self, generator: torch.Generator, size: int) -> Tensor:
        """Windows of the training text, drawn on the CPU: the same on every device."""
        length = self.test.shape[1]
        starts = torch.randint(len(self.train) - length, (size,), generator=generator)
        return self.train[starts.unsqueeze(1) + torch.arange(length)]

    def unigram_loss(self) -> float:
        """The loss of guessing by token frequency on the test windows."""
        counts = torch.bincount(self.train, minlength=self.tokenizer.get_vocab_size()).float() + 1
        return -(counts / counts.sum()).log()[self.test[:, 1:]].mean().item()


def read_files(folder: Path | None, limit: int) -> list[list[str]]:
    """The texts of files for training, validation and test: about 18 of 20, 1 and 1, by a hash of the name."""
    root = folder or Path(sysconfig.get_path("stdlib"))
    # Tables of characters, all alike, and tests, which are much of the rest.
    left_out = {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data", "idlelib"}
    paths = [p for p in root.rglob("*") if p.suffix in {".py", ".rst", ".txt", ".md"} and p.is_file()]
    names = {p.relative_to(root).as_posix(): p for p in paths if not left_out & set(p.relative_to(root).parts)}
    rank = {name: int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) for name in names}
    sets: list[list[str]] = [[], [], []]
    size, seen = 0, set()
    for name in sorted(names, key=lambda name: (rank[name], name)):
        content = names[name].read_text(encoding="utf-8", errors="replace")
        if content in seen or not content.strip() or size > limit:
            continue
        seen.add(content)
        size += len(content)
        sets[{0: 1, 1: 2}.get(rank[name] % 20, 0)].append(content)
    if size < LEAST or not all(sets):
        raise SystemExit(
            f"{root} has {size:,} characters of .py, .rst, .txt and .md files; at least {LEAST:,} in some dozens "
            "of files are needed. Pass another folder with --text."
        )
    return sets


def read_text(folder: Path | None, limit: int, vocabulary: int, context: int) -> Text:
    files = read_files(folder, limit)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text[:10_000] for text in files[0]), trainer)
    tokens = [[i for e in tokenizer.encode_batch(texts) for i in [*e.ids, 0]] for texts in files]
    train, *held = (torch.tensor(ids) for ids in tokens)
    # Windows evenly over the files, so that a few long files do not decide.
    validation, test = (
        ids.unfold(0, context + 1, context)[:: max(1, (len(ids) - 1) // context // count)][:count]
        for ids, count in zip(held, (64, 256), strict=True)
    )
    if min(len(validation), len(test)) < 4 or len(train) <= context + 1:
        raise SystemExit(f"the text is too short for windows of {context} tokens: pass more with --text.")
    size = sum(len(text.encode()) for text in tokenizer.decode_batch(test[:, 1:].tolist(), skip_special_tokens=False))
    return Text(tokenizer, train, validation, test, size / test[:, 1:].numel())
