"""examples/minilm_pack.py: a run from a packed folder is the run that was packed, to the last bit."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bert_helpers import save_tiny_bert, texts

for needed in ("matplotlib", "rich", "transformers", "tokenizers"):
    pytest.importorskip(needed)

FOLDER = Path(__file__).parents[2] / "examples"
SMALL = ["--sentences", "320", "--held-out", "40", "--samples", "2000", "--batch", "16", "--budget", "0"]


@pytest.fixture(scope="module")
def minilm():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield importlib.import_module("minilm")


@pytest.fixture
def folders(minilm, tmp_path, monkeypatch):
    """A model as transformers saves it, and the same one packed with 400 sentences and 60 to draw from."""
    text = importlib.import_module("minilm_text")
    own, packed = save_tiny_bert(tmp_path / "tiny"), tmp_path / "packed"
    with monkeypatch.context() as patch:
        patch.setattr(
            text, "collect", lambda root, skip, limit, without=(): texts(limit or 60, seed=int(limit is None))
        )
        minilm.main(["--model", str(own), "--pack", str(packed), "--sentences", "400"])
        direct = [minilm.prepare(minilm.options(["--model", str(own), *SMALL, "--seed", seed])) for seed in "01"]
    return own, packed, direct


def test_the_text_is_that_of_a_direct_run_with_any_seed(minilm, folders):
    _, packed, direct = folders
    for seed, (_, text) in zip("01", direct, strict=True):
        assert minilm.prepare(minilm.options(["--model", str(packed), *SMALL, "--seed", seed]))[1] == text
    assert len(direct[0][1].train) == 320
    assert direct[0][1].held_out != direct[1][1].held_out


def test_weights_are_the_same_bits_and_unused_embeddings_are_nan(minilm, folders):
    own, packed, _ = folders
    before, _ = minilm.load(own)
    after, text = minilm.prepare(minilm.options(["--model", str(packed), *SMALL]))
    assert not after.training
    name = "embeddings.word_embeddings.weight"
    assert after.state_dict().keys() == before.state_dict().keys()
    for key, x in after.state_dict().items():
        if key != name:
            assert torch.equal(x, before.state_dict()[key]), key
    kept = ~after.state_dict()[name].isnan().any(1)
    assert torch.equal(after.state_dict()[name][kept], before.state_dict()[name][kept])
    used = {token for one in [*text.train, *text.held_out] for token in one}
    assert used <= set(kept.nonzero().flatten().tolist())
    assert not kept[1]  # [UNK], which is in no sentence
    assert kept[text.pad]


def test_bits_survive_whatever_they_mean(minilm):
    pack = importlib.import_module("minilm_pack")
    odd = torch.tensor([0.0, -0.0, 1e-45, float("inf"), float("nan"), 3.0])
    for x in (odd, odd.to(torch.int64), odd > 0):
        again = pack._numbers(pack._planes(x), x.dtype)
        assert torch.equal(again.view(torch.uint8), x.view(torch.uint8))
    long = pack.Text([[1, 70000], [2]], [[3]], 0)  # a large vocabulary
    arrays = pack._arrays(long)
    assert [pack._sentences(arrays[part], arrays[f"{part}_lengths"]) for part in pack.PARTS] == [*long[:2]]


@pytest.mark.slow
def test_rows_are_the_same_bits(minilm, folders, tmp_path, monkeypatch):
    own, packed, direct = folders
    found, compare = [], minilm.compare
    for name, path in (("direct", own), ("packed", packed)):
        rows = tmp_path / f"{name}.csv"
        with monkeypatch.context() as patch:
            if path is own:
                patch.setattr(minilm, "prepare", lambda o: direct[0])
            seen = []
            patch.setattr(minilm, "compare", lambda *given, seen=seen: seen.append(compare(*given)) or seen[-1])
            given = ["--model", str(path), "--rows", str(rows), "--sizes", "1x16", "--steps", "20", "--rate", "1e-3"]
            minilm.main([*SMALL, *given])
        (row,) = minilm.read(rows)
        found.append((seen, {key: row[key] for key in [*minilm.KEY, *minilm.FOUND]}))
    assert len(found[0][0]) == 2
    assert found[0] == found[1]  # unrounded, and the row with the model's own name
    assert found[1][1]["model"] == "tiny"


def test_what_a_folder_cannot_give_is_named(minilm, folders, tmp_path, capsys):
    own, packed, _ = folders
    for wrong, message in (
        (["--sentences", "500"], "packed with --sentences 400.* Pass fewer"),
        (["--held-out", "61"], "has 60 sentences to draw from; --held-out 61"),
    ):
        with pytest.raises(SystemExit, match=message):
            minilm.prepare(minilm.options(["--model", str(packed), *SMALL, *wrong]))
    with pytest.raises(SystemExit):
        minilm.options(["--model", str(packed), "--pack", str(tmp_path / "again")])
    assert "is packed. Copy the folder" in capsys.readouterr().err
    model, tokenizer = minilm.load(own)
    text = minilm.tokenise(tokenizer, texts(9), texts(9))
    with pytest.raises(SystemExit, match=r"only float32 weights.*torch.bfloat16. Save the model in float32"):
        minilm.pack(tmp_path / "half", model.bfloat16(), "tiny", text, 9)


def test_a_folder_that_is_half_written_is_not_packed(minilm, folders, monkeypatch):
    own, packed, _ = folders
    assert json.loads((packed / "pack.json").read_text())["model"] == "tiny"
    assert minilm.is_packed(packed)
    model, tokenizer = minilm.load(own)

    def full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(OSError, match="no space"):
        minilm.pack(packed, model, "tiny", minilm.tokenise(tokenizer, texts(9), texts(9)), 9)
    assert not minilm.is_packed(packed)


@pytest.mark.gpu
def test_a_run_on_a_gpu(minilm, folders, tmp_path):
    """Fitted, distilled and timed there; close to the same run on the CPU, and no step waits in the loss."""
    _, packed, _ = folders
    rows = {}
    for device in ("cpu", "cuda"):
        path = tmp_path / f"{device}.csv"
        given = ["--model", str(packed), "--rows", str(path), "--sizes", "1x16", "--steps", "20", "--rate", "1e-3"]
        minilm.main([*SMALL, *given, "--device", device, *(["--budget", "1"] if device == "cuda" else [])])
        (rows[device],) = minilm.read(path)
    row = rows["cuda"]
    assert (row["device"], row["machine"]) == ("cuda", torch.cuda.get_device_name())
    assert all(float(row[name]) > 0 for name in minilm.TIMES)
    assert float(row["fitted_cosine"]) == pytest.approx(float(rows["cpu"]["fitted_cosine"]), abs=0.02)
    assert 0 < float(row["fitted_cosine"]) < float(row["cosine"]) < 1

    o = minilm.options(["--model", str(packed), *SMALL, "--device", "cuda"])
    dense, text = minilm.prepare(o)
    batch = minilm.batches(text.held_out, 16, text.pad, device="cuda")[0]
    with torch.no_grad():
        theirs = dense.cuda()(**batch)
    ours = type(theirs)(last_hidden_state=theirs.last_hidden_state + torch.randn_like(theirs.last_hidden_state))
    ours.last_hidden_state.requires_grad_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        minilm.distance(ours, theirs, batch).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ours.last_hidden_state.grad.isfinite().all()
