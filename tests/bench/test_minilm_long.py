"""benchmarks/minilm_long.py: its passes are the model's, its text is the sentences', and its layers travel."""

import copy
import importlib
from itertools import islice, pairwise

import pytest
import torch

import fastff
from bert_helpers import save_tiny_bert, texts

for needed in ("rich", "transformers", "tokenizers"):
    pytest.importorskip(needed)

minilm_long = importlib.import_module("minilm_long")  # numpy, which it needs, comes with transformers
minilm = minilm_long.minilm


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Options that train a tiny BERT: few of them. Its training text gives 40 sentences to validation."""
    monkeypatch.setattr(minilm, "read_text", lambda limit, held_out, seed: (texts(limit), texts(held_out, seed=1)))
    monkeypatch.setattr(minilm_long, "VALIDATION", 40)
    given = ["--model", str(save_tiny_bert(tmp_path / "tiny")), "--sizes", "1x16", "--rate", "1e-3"]
    given += ["--samples", "2000", "--sentences", "360", "--batch", "16", "--held-out", "40"]
    return [*given, "--rows", str(tmp_path / "rows.csv")]


@pytest.mark.parametrize(("depth", "count"), [(0, 63), (1, 1), (3, 257)])
def test_leaves_in_one_product_compute_the_layer_and_its_gradients(depth, count):
    layer = fastff.FFF(11, 7, depth=depth, leaf_width=5, activation="gelu", dtype=torch.float64).eval()
    x, weight = torch.randn(count, 2, 11, dtype=torch.float64, requires_grad=True), torch.randn(count, 2, 7).double()
    wanted, found = [], []
    for into, y in ((wanted, layer(x)), (found, minilm_long.visited(layer, x))):
        into += [y, *torch.autograd.grad((y * weight).sum(), [x, *layer.leaf_parameters()])]
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert torch.get_float32_matmul_precision() == "highest"


def test_the_passes_are_the_models(tiny):
    dense, text = minilm.prepare(minilm.options(tiny[:-2]))
    model, _ = minilm.operate(dense, (1, 16), minilm.batches(text.train, 16, text.pad), minilm.options(tiny[:-2]))
    pair = minilm_long.Pair(dense, [*minilm_long.fff_layers(model).values()])
    batch = minilm.batches(text.held_out, 16, text.pad)[0]
    there = batch["attention_mask"].bool()
    assert not there.all()
    with torch.no_grad():
        start = dense.embeddings(batch["input_ids"])
        for converted, whole in ((False, dense), (True, model.eval())):
            seen, ours = pair.run(start, there, converted)
            theirs = whole(**batch).last_hidden_state
            torch.testing.assert_close(ours[there], theirs[there], rtol=1e-4, atol=1e-4)
            assert len(seen) == 2
        loss, parts = pair.loss(batch["input_ids"], there, 4.0)
        far = 1 - (minilm.embed(dense, [batch]) * minilm.embed(model, [batch])).sum(1).mean()
    assert parts[0] == pytest.approx(far.item(), abs=1e-5)
    assert loss == pytest.approx((parts[0] + parts[1] + 4 * parts[2]).item(), rel=1e-6)
    assert parts.min() > 0.001


def test_an_epoch_has_every_sentence_once():
    sentences = [[1, *range(3, 3 + n), 2] for n in torch.randint(1, 62, (96,)).tolist()]
    found = []
    for ids, there in islice(minilm_long.endless(sentences, 16, 0.0, "cpu"), 6):
        assert ids.shape == there.shape
        assert len(ids) == 16
        assert ids[~there].count_nonzero() == 0
        found += [one[mask].tolist() for one, mask in zip(ids, there, strict=True)]
    assert sorted(found) == sorted(sentences)


def test_mixtures_are_parts_of_sentences_between_the_first_and_the_last_token():
    """The tokens of sentence i count up from 1000 (i + 1)."""
    count = 200
    lengths = torch.randint(3, 65, (count,))
    at = torch.arange(64)
    ids = torch.where(at == 0, 1, 1000 * torch.arange(1, count + 1).unsqueeze(1) + at)
    ids = torch.where(at == lengths.unsqueeze(1) - 1, 2, ids).masked_fill(at >= lengths.unsqueeze(1), 0)
    made, sizes = minilm_long.mixtures(ids, lengths, 1.0)
    joined = 0
    for i, (row, size) in enumerate(zip(made.tolist(), sizes.tolist(), strict=True)):
        assert (row[0], row[size - 1], any(row[size:])) == (1, 2, False)
        inner = row[1 : size - 1]
        jumps = [b for a, b in pairwise(inner) if b != a + 1]
        assert inner[0] // 1000 == i + 1
        assert len(jumps) <= 1
        for start in (inner[0], *jumps):  # inside of a sentence
            source = start // 1000 - 1
            assert 1 <= start % 1000 <= lengths[source] - 2
        joined += len(jumps)
    assert 60 < joined < 130  # of 200, half
    same, _ = minilm_long.mixtures(ids, lengths, 0.0)
    assert same is ids
    part, _ = minilm_long.mixtures(ids, lengths, 0.5)
    assert 50 < (part == ids).all(1).sum() < 150


def test_a_run_and_its_layers_elsewhere(tiny, tmp_path, monkeypatch):
    """The loss falls, the teacher stays the same, and restored layers are the trained ones, rounded to float16."""
    teachers, models, losses, histories = [], [], [], []
    prepare, train_, restore_ = minilm.prepare, minilm_long.train_, minilm_long.restore_

    def prepared(o):
        dense, text = prepare(o)
        teachers.append((dense, copy.deepcopy(dense.state_dict())))
        return dense, text

    def loss(model, dense, ids):
        pair = minilm_long.Pair(dense, [*minilm_long.fff_layers(model).values()])
        return pair.loss(*next(minilm_long.endless(ids, len(ids), 0.0, "cpu")), 4.0)[1].tolist()

    def train(model, dense, ids, *rest):
        losses.append(loss(model, dense, ids))
        histories.append(train_(model, dense, ids, *rest))
        losses.append(loss(model, dense, ids))
        models.append(model)
        return histories[-1]

    monkeypatch.setattr(minilm, "prepare", prepared)
    monkeypatch.setattr(minilm_long, "train_", train)
    monkeypatch.setattr(minilm_long, "restore_", lambda model, path: models.append(model) or restore_(model, path))
    folder = tmp_path / "layers"
    minilm_long.main([*tiny, "--steps", "60", "--save", str(folder)])
    minilm_long.main([*tiny, "--restore", str(folder), "--budget", "0"])
    assert all(after < 0.9 * before for before, after in zip(*losses, strict=True)), losses
    assert [one["steps"] for one in histories[0]] == [*range(6, 61, 6)]
    assert histories[0][-1]["cosine"] > histories[0][0]["cosine"]
    for dense, before in teachers:
        assert all(torch.equal(x, before[name]) for name, x in dense.state_dict().items())

    trained, restored = models
    for name, p in trained.named_parameters():
        rounded = p.half().float() if p.dim() == 3 else p
        assert torch.equal(restored.get_parameter(name), rounded), name
    first, second = minilm.read(tmp_path / "rows.csv")
    assert (first["depth"], first["leaf_width"], first["neurons"], first["steps"]) == ("1", "16", "17", "60")
    assert 0 < float(first["fitted_cosine"]) < float(first["cosine"]) < 1
    assert float(second["cosine"]) == pytest.approx(float(first["cosine"]), abs=1e-4)
    same = [*minilm.KEY[:-1], "neurons", "parameters", "fitted_cosine", "fitted_overlap"]
    assert [second[name] for name in same] == [first[name] for name in same]
    assert first["command"].startswith("python benchmarks/minilm_long.py --model ")
    assert (first["seconds"] != "", second["seconds"]) == (True, "")


@pytest.mark.slow
def test_the_clock_ends_a_run(tiny, tmp_path, capsys):
    minilm_long.main([*tiny, "--seconds", "0.5", "--steps", "100000", "--augment", "0"])
    (row,) = minilm.read(tmp_path / "rows.csv")
    assert 1 < int(row["steps"]) < 1000
    assert capsys.readouterr().out.count("embeddings") <= minilm_long.CHECKS


def test_a_run_that_cannot_be_says_why(tiny, tmp_path, capsys):
    for wrong, message in (
        (["--steps", "2", "--sizes", "4by376"], "depth x leaf width, as in 4x376"),
        (["--steps", "2", "--model", str(tmp_path / "packed")], "--model needs a folder"),
        (["--restore", str(tmp_path / "layers")], "--restore needs a folder"),
        ([], "pass --seconds, --steps or both"),
    ):
        with pytest.raises(SystemExit):
            minilm_long.main([*tiny, *wrong])
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"there is no .*1x16.pt. Train the layers first, with --save"):
        minilm_long.main([*tiny, "--restore", str(tmp_path)])
    with pytest.raises(SystemExit, match="320 training sentences make no batch of 512"):
        minilm_long.main([*tiny, "--steps", "2", "--batch", "512"])
