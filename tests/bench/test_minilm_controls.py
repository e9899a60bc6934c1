"""benchmarks/minilm_controls.py: rows of a tiny BERT, each made once."""

import csv

import minilm_controls
import pytest
import torch

from bert_helpers import save_tiny_bert, texts

for needed in ("rich", "transformers", "tokenizers"):
    pytest.importorskip(needed)


@pytest.mark.slow
def test_rows(tmp_path, monkeypatch, capsys):
    minilm = minilm_controls.examples()
    monkeypatch.setattr(minilm, "read_text", lambda limit, held_out, seed: (texts(limit), texts(held_out, seed=1)))
    path = tmp_path / "rows.csv"
    tiny = ["--model", str(save_tiny_bert(tmp_path / "tiny")), "--steps", "20", "--rate", "1e-3", "--samples", "2000"]
    given = [*tiny, "--sentences", "320", "--batch", "16", "--held-out", "40", "--sizes", "1x16", "--output", str(path)]
    measure, made = minilm_controls.measure, []

    def stopped(methods, *rest):
        made.append(",".join(methods))
        if "dense" in methods and len(made) == 2:
            raise KeyboardInterrupt
        return measure(methods, *rest)

    monkeypatch.setattr(minilm_controls, "measure", stopped)
    given += ["--methods", "FFF,FFF int8,dense,dense int8,low rank,pruned,int8,int8 weights"]
    with pytest.raises(KeyboardInterrupt):
        minilm_controls.main(given)
    minilm_controls.main(given)
    with path.open(newline="") as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    assert [*rows] == ["FFF", "FFF int8", "dense", "dense int8", "low rank", "pruned", "int8", "int8 weights"]
    assert made == ["FFF,FFF int8", *["dense,dense int8"] * 2, *[*rows][4:]]  # the row before the interrupt was kept
    assert {(row["tree"], row["device"]) for row in rows.values()} == {("1 x 16", "cpu")}
    assert rows["FFF"]["neurons"] == rows["dense"]["neurons"] == "17"
    for name in ("FFF", "dense", "low rank", "pruned"):
        assert 0 < float(rows[name]["fitted_cosine"]) < float(rows[name]["final_cosine"]) < 1
        assert float(rows[name]["final_lowest"]) < float(rows[name]["final_cosine"])
    assert rows["int8"]["fitted_cosine"] == ""
    assert 0.99 < float(rows["int8"]["final_cosine"]) < float(rows["int8 weights"]["final_cosine"]) < 1
    assert float(rows["FFF int8"]["final_cosine"]) == pytest.approx(float(rows["FFF"]["final_cosine"]), abs=0.02)

    before = path.read_bytes()
    monkeypatch.setattr(minilm_controls, "measure", None)
    minilm_controls.main(given)  # no row is missing
    assert path.read_bytes() == before

    elsewhere = []
    monkeypatch.setattr(minilm_controls, "measure", lambda methods, *rest: elsewhere.extend(methods) or [])
    monkeypatch.setattr(minilm_controls, "prepare", lambda o: o.device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(minilm_controls, "append", lambda path, rows: None)
    minilm_controls.main([*given, "--device", "cuda"])  # rows of a CPU are no rows of a GPU
    assert elsewhere == ["FFF", "dense", "low rank", "pruned"]
    assert "int8 is left out on a GPU" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--methods", "FFF,sparse"], ["--device", "cuda"]])
def test_options_that_cannot_be(wrong, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        minilm_controls.main(wrong)
    assert wrong[0] in capsys.readouterr().err
