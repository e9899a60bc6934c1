"""Text models: batches, perplexity, embeddings and the losses of distillation."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("typer")
from typer import BadParameter

from fastff.cli.compare_text import TextModel, distance, divergence, perplexity, read_text_model


class Tokens:
    """A tokenizer: a word is the token of its length."""

    pad_token_id = 0

    def __call__(self, text, truncation=False, max_length=None, verbose=True):
        def one(words):
            return [len(word) for word in words.split()][: max_length if truncation else None]

        return {"input_ids": one(text) if isinstance(text, str) else [one(words) for words in text]}


class Embeds(nn.Module):
    """Each token's state is its row of a table."""

    def __init__(self, seed=0):
        super().__init__()
        self.table = nn.Parameter(torch.randn(12, 5, generator=torch.Generator().manual_seed(seed)))

    def forward(self, input_ids, attention_mask):
        return SimpleNamespace(last_hidden_state=self.table[input_ids], logits=self.table[input_ids] @ self.table.T)


TEXTS = ["a bb ccc", "dddd", "a a bb bb ccc ccc dddd", "ee"]


def test_lines_are_padded_beside_lines_of_their_length():
    made = TextModel(Embeds(), Tokens(), head=False).batches(TEXTS, 2, 5)
    assert [batch["input_ids"].shape for batch in made] == [(2, 1), (2, 5)]  # the longest is cut
    assert made[1]["attention_mask"].sum(1).tolist() == [3, 5]
    assert made[1]["input_ids"][0].tolist() == [1, 2, 3, 0, 0]


def test_running_text_is_cut_into_sequences():
    model = TextModel(Embeds(), Tokens(), head=True)
    made = model.batches(TEXTS, 2, 3)
    assert [batch["input_ids"].shape for batch in made] == [(2, 3), (2, 3)]
    assert torch.cat([batch["input_ids"] for batch in made]).flatten().tolist() == [1, 2, 3, 4, 1, 1, 2, 2, 3, 3, 4, 2]
    ordered, shuffled = (model.batches(TEXTS * 20, 2, 3, seed=seed) for seed in (None, 1))
    pairs = zip(ordered, shuffled, strict=True)
    assert any(not torch.equal(a["input_ids"], b["input_ids"]) for a, b in pairs)
    with pytest.raises(BadParameter, match="12 tokens is shorter than one sequence of --tokens 13"):
        model.batches(TEXTS, 2, 13)


def test_full_batches_repeat_a_short_text():
    made = TextModel(Embeds(), Tokens(), head=False).full_batches(TEXTS, 3, 7)
    assert [batch["input_ids"].shape for batch in made] == [(3, 7)] * 4
    assert made[0]["attention_mask"].all()


def test_the_perplexity_of_a_uniform_guess_is_the_vocabulary():
    model = Embeds()
    nn.init.zeros_(model.table)
    batches = TextModel(model, Tokens(), head=True).batches(TEXTS, 2, 3)
    assert perplexity(model, batches) == pytest.approx(12)
    model.table.data = 1e4 * Embeds().table.data  # sure of the wrong token: exp would overflow
    assert perplexity(model, batches) == math.inf


def test_cosine_ignores_padding():
    """A text alone and the same text in a padded batch have one embedding."""
    made = TextModel(Embeds(), Tokens(), head=False)
    padded = made.batches(TEXTS, 4, 9)
    quality = made.quality(padded)
    assert quality.__name__ == "cosine"
    assert quality(made.model, padded) == pytest.approx(1)
    longer = [{name: torch.nn.functional.pad(x, (0, 3)) for name, x in batch.items()} for batch in padded]
    assert quality(made.model, longer) == pytest.approx(1)
    assert quality(Embeds(seed=1), padded) < 0.9


def test_losses_are_zero_for_the_teacher_alone():
    batch = TextModel(Embeds(), Tokens(), head=False).batches(TEXTS, 4, 9)[0]
    same, other = Embeds()(**batch), Embeds(seed=1)(**batch)
    for loss in (divergence, distance):
        assert abs(loss(same, same, batch).item()) < 1e-6
        assert loss(other, same, batch).item() > 0.1


def test_an_encoder_decoder_is_refused(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    sizes = {"vocab_size": 20, "d_model": 8, "d_ff": 16, "d_kv": 4, "num_layers": 1, "num_heads": 2}
    transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).save_pretrained(tmp_path)
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]").save_pretrained(tmp_path)
    with pytest.raises(BadParameter, match=r"encoder-decoder model; use fastff\.surgery\.compare from Python"):
        read_text_model(tmp_path, "cpu", torch.float32)
