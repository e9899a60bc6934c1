"""Text models for `fastff compare`: a folder that transformers loads, texts as batches, and what to measure.

A model with a language-model head gets running text in sequences of one length: its quality is the perplexity, and it
is distilled by the KL divergence. Any other model is taken as an encoder of texts, one a line: its quality is the
cosine between its embeddings, the mean over the tokens, and the original's.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

from ..batches import evaluation_mode, feed
from ..extras import install

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class TextModel:
    """A model with its tokenizer. head: whether it predicts the next token."""

    model: nn.Module
    tokenizer: Any
    head: bool

    def batches(
        self, texts: Sequence[str], size: int, tokens: int, *, seed: int | None = None, flag: str = "--data"
    ) -> list[Batch]:
        """Batches of `size` sequences; shuffled if there is a seed. flag: where the texts are from, for errors."""
        made = self._running(texts, size, tokens, flag) if self.head else self._lines(texts, size, tokens)
        if seed is not None:
            random.Random(seed).shuffle(made)
        return made

    def _running(self, texts: Sequence[str], size: int, tokens: int, flag: str) -> list[Batch]:
        """All texts one after the other, cut into sequences of `tokens` tokens; the rest is dropped."""
        ids = torch.tensor(self.tokenizer("\n".join(texts), verbose=False)["input_ids"])
        rows = ids[: len(ids) // tokens * tokens].view(-1, tokens)
        if not len(rows):
            raise typer.BadParameter(
                f"{flag}: a text of {len(ids)} tokens is shorter than one sequence of --tokens {tokens}."
            )
        return [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in rows.split(size)]

    def _lines(self, texts: Sequence[str], size: int, tokens: int) -> list[Batch]:
        """A text is a sequence, cut at `tokens` tokens. Texts of similar length share a batch: less padding."""
        ids = sorted(self.tokenizer(list(texts), truncation=True, max_length=tokens)["input_ids"], key=len)
        made = []
        for group in (ids[start : start + size] for start in range(0, len(ids), size)):
            pad = self.tokenizer.pad_token_id or 0
            x = nn.utils.rnn.pad_sequence([torch.tensor(one) for one in group], batch_first=True, padding_value=pad)
            lengths = torch.tensor([len(one) for one in group])
            made.append({"input_ids": x, "attention_mask": (torch.arange(x.shape[1]) < lengths.unsqueeze(1)).long()})
        return made

    def full_batches(self, texts: Sequence[str], size: int, tokens: int, count: int = 4) -> list[Batch]:
        """Batches of `size` sequences of exactly `tokens` tokens, for timing; a short text is repeated."""
        need = count * size * tokens
        ids = self.tokenizer("\n".join(texts), truncation=True, max_length=need)["input_ids"]
        x = torch.tensor((ids * math.ceil(need / len(ids)))[:need]).view(count, size, tokens)
        return [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in x]

    def quality(self, held_out: Sequence[Batch]) -> Callable[[nn.Module, Sequence[Batch]], float]:
        """The measure of quality: perplexity, or the cosine to this model's own embeddings."""
        if self.head:
            return perplexity
        with evaluation_mode(self.model):
            theirs = [_pooled(feed(self.model, batch), batch) for batch in held_out]

        def cosine(model: nn.Module, held_out: Sequence[Batch]) -> float:
            pairs = zip(held_out, theirs, strict=True)
            found = [F.cosine_similarity(_pooled(feed(model, batch), batch), y) for batch, y in pairs]
            return torch.cat(found).mean().item()

        return cosine

    @property
    def loss(self) -> Callable[[Any, Any, Any], Tensor]:
        """What distillation makes small."""
        return divergence if self.head else distance


def perplexity(model: nn.Module, held_out: Sequence[Batch]) -> float:
    """exp of the mean negative log-likelihood of each next token."""
    total, count = 0.0, 0
    for batch in held_out:
        logits = feed(model, batch).logits[:, :-1].float()
        labels = batch["input_ids"][:, 1:].to(logits.device)
        total += F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").item()
        count += labels.numel()
    return math.exp(total / count) if total / count < 700 else math.inf


def divergence(ours: Any, theirs: Any, batch: Batch) -> Tensor:
    """The KL divergence of the predictions from the original's, in nats per token."""
    a, b = (output.logits.float().flatten(0, 1).log_softmax(-1) for output in (ours, theirs))
    return F.kl_div(a, b, reduction="batchmean", log_target=True)


def distance(ours: Any, theirs: Any, batch: Batch) -> Tensor:
    """1 - cosine of the embeddings, and the drift of the states of all tokens."""
    far = 1 - F.cosine_similarity(_pooled(ours, batch), _pooled(theirs, batch)).mean()
    at = batch["attention_mask"].bool().to(ours.last_hidden_state.device)
    a, b = ours.last_hidden_state[at].float(), theirs.last_hidden_state[at].float()
    return far + (a - b).square().mean() / b.var()


def _pooled(output: Any, batch: Batch) -> Tensor:
    """The mean over the tokens of each sequence: (sequences, features)."""
    hidden = output.last_hidden_state.float()
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.device)
    return (hidden * mask).sum(1) / mask.sum(1)


def read_text_model(path: Path, device: str, dtype: torch.dtype) -> TextModel:
    """A model and its tokenizer from a folder. Only local files are read."""
    if not path.is_dir():
        raise typer.BadParameter(f"MODEL must be a folder of transformers, with a config.json; {path} is none.")
    try:
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
    except ModuleNotFoundError:
        raise typer.BadParameter(f"fastff compare needs transformers: {install('transformers')}") from None
    options: dict[str, Any] = {"local_files_only": True}
    try:
        config = AutoConfig.from_pretrained(path, **options)
        head = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in config.architectures or [])
        kind = AutoModelForCausalLM if head else AutoModel
        model: nn.Module = kind.from_pretrained(path, dtype=dtype, **options)
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
    except (OSError, ValueError, KeyError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise typer.BadParameter(f"transformers cannot load {path}: {said:.300}") from None
    if getattr(config, "is_encoder_decoder", False):
        raise typer.BadParameter(f"{path} is an encoder-decoder model; use fastff.surgery.compare from Python.")
    return TextModel(model.to(device).eval(), tokenizer, head)


def read_lines(flag: str, path: Path) -> list[str]:
    """The lines of a text file that are not empty."""
    if not path.is_file():
        raise typer.BadParameter(f"{flag} must be a text file; {path} does not exist.")
    try:
        lines = [line.strip() for line in path.read_text("utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError:
        raise typer.BadParameter(f"{flag} must be text in UTF-8; {path} is not. Convert it first.") from None
    if not lines:
        raise typer.BadParameter(f"{flag} must hold text, one a line; {path} is empty.")
    return lines
