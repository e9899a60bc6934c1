"""benchmarks/minilm_controls.py: rows of a tiny BERT, each made once."""

import csv

import minilm_controls
import pytest

from bert_helpers import save_tiny_bert, texts

for needed in ("rich", "transformers", "tokenizers"):
    pytest.importorskip(needed)


@pytest.mark.slow
def test_rows(tmp_path, monkeypatch):
    minilm = minilm_controls.examples()
    monkeypatch.setattr(minilm, "read_text", lambda limit, held_out, seed: (texts(limit), texts(held_out, seed=1)))
    path = tmp_path / "rows.csv"
    given = ["--model", str(save_tiny_bert(tmp_path / "tiny")), "--steps", "20", "--rate", "1e-3", "--samples", "2000"]
    given += [
        "--sentences",
        "320",
        "--batch",
        "16",
        "--held-out",
        "40",
        "--sizes",
        "1x16",
        "--methods",
        "FFF,dense,int8",
        "--output",
        str(path),
    ]
    minilm_controls.main(given)
    with path.open(newline="") as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    assert [*rows] == ["FFF", "dense", "int8"]
    assert {row["tree"] for row in rows.values()} == {"1 x 16"}
    assert rows["FFF"]["neurons"] == rows["dense"]["neurons"] == "17"
    for name in ("FFF", "dense"):
        assert 0 < float(rows[name]["fitted_cosine"]) < float(rows[name]["final_cosine"]) < 1
        assert float(rows[name]["final_lowest"]) < float(rows[name]["final_cosine"])
    assert rows["int8"]["fitted_cosine"] == ""
    assert float(rows["int8"]["final_cosine"]) > 0.99

    before = path.read_bytes()
    monkeypatch.setattr(minilm_controls, "measure", None)
    minilm_controls.main(given)  # no row is missing
    assert path.read_bytes() == before
