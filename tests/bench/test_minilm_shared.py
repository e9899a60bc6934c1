"""benchmarks/minilm_shared.py: a shared part computes what its neurons did, and its rows are made once."""

import csv

import minilm_controls
import minilm_shared
import pytest
import torch
from torch import nn

import fastff
from bert_helpers import save_tiny_bert, texts
from fastff.surgery.choose import choose


def test_a_shared_part_and_leaves_of_all_the_others_are_the_block():
    torch.manual_seed(0)
    model = nn.Sequential(fastff.baselines.FF(6, 4, width=24, activation="gelu")).eval()
    ((block,), _), x = choose(model, None, None), torch.randn(500, 6)
    made = minilm_shared.fit(block, 2, 17, 7, x)
    assert (made.tree.leaf_width, made.beside.leaf_width) == (17, 7)
    torch.testing.assert_close(made(x), model(x), rtol=1e-4, atol=1e-4)
    fewer = minilm_shared.fit(block, 2, 8, 7, x)
    error = (fewer(x) - model(x)).square().mean() / model(x).var()
    assert 1e-6 < error < 0.2


@pytest.mark.slow
def test_rows(tmp_path, monkeypatch):
    for needed in ("rich", "transformers", "tokenizers"):
        pytest.importorskip(needed)
    minilm = minilm_controls.examples()
    monkeypatch.setattr(minilm, "read_text", lambda limit, held_out, seed: (texts(limit), texts(held_out, seed=1)))
    path = tmp_path / "rows.csv"
    given = ["--model", str(save_tiny_bert(tmp_path / "tiny")), "--samples", "2000", "--sentences", "320"]
    given += ["--held-out", "40", "--output", str(path)]
    minilm_shared.main([*given, "--sizes", "1x16+0"])
    minilm_shared.main([*given, "--sizes", "1x16+0,1x48+16"])
    with path.open(newline="") as file:
        some, everything = csv.DictReader(file)
    assert (some["neurons"], everything["neurons"]) == ("17", "65")
    assert float(some["cosine"]) < 0.999 < float(everything["cosine"])
