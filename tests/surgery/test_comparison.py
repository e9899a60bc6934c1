"""The result of compare: the front, the table, the exports, the picture."""

import csv
import io
import json

import pytest

from fastff.surgery import Compared, Comparison
from fastff.surgery.comparison import check_picture
from fastff.surgery.report import Skipped


def row(method, size, quality, speedup, **more):
    times = {"block_us": 10.0, "block_us_original": 20.0, "model_us": 100.0, "model_us_original": 100.0 * speedup}
    return Compared(method, size, None, None, 8, 640, 1000, quality=quality, **(times | more))


ROWS = [
    row("original", "48", 1.0, 1.0),
    row("FFF", "2 x 6", 0.9, 3.0),
    row("dense", "8", 0.8, 3.0),
    row("low rank", "rank 2", 0.7, 0.9),
    row("int8", "48", 0.99, 1.5, note="by torch, dynamic"),
]


def test_the_front():
    found = Comparison(ROWS, "match")
    assert [r.method for r in found.front] == ["original", "FFF", "int8"]
    turned = Comparison(ROWS, "perplexity", lower_is_better=True)
    assert [r.method for r in turned.front] == ["dense", "low rank"]


def test_rows_without_a_time_or_quality_are_not_on_the_front():
    rows = [*ROWS, row("FFF", "3 x 9", None, 9.0), row("FFF", "3 x 8", 2.0, 1.0, model_us=None)]
    assert {r.size for r in Comparison(rows, "match").front} == {"48", "2 x 6"}


def test_the_table():
    lines = str(Comparison(ROWS, "match")).splitlines()
    assert lines[0].split()[:6] == ["method", "size", "neurons", "FLOPs", "parameters", "match"]
    assert "0.9" in lines[2]
    assert "3.00x" in lines[2]
    assert lines[2].endswith("*")
    assert not lines[3].endswith("*")
    assert "int8 48: by torch, dynamic" in lines
    busy = Comparison([row("original", "48", 1.0, 1.0, other_load=1.5)], "match")
    assert "kept up to 1.5 cores busy" in str(busy)


def test_blocks_that_were_left_out_are_named():
    """A comparison of half a model looked like one of the whole."""
    skipped = [Skipped(f"layers.{i}.mlp", "excluded by the filter") for i in range(5)]
    skipped.append(Skipped("head", "too narrow"))
    found = Comparison(ROWS, "match", skipped=skipped)
    assert "left out: head (too narrow)." in str(found)
    assert "left out: layers.0.mlp, layers.1.mlp, layers.2.mlp, ... (excluded by the filter)." in str(found)
    assert len(json.loads(found.to_json())["skipped"]) == 6


def test_exports_have_every_column():
    found = Comparison(ROWS, "match", settings={"steps": 5})
    made = json.loads(found.to_json())
    assert made["settings"] == {"steps": 5}
    assert [r["front"] for r in made["rows"]] == [True, True, False, False, True]
    table = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert [*table[0]] == [*made["rows"][0]]
    assert table[1]["model_speedup"] == "3.0"


@pytest.mark.slow
def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = Comparison([*ROWS, row("FFF", "3 x 9", None, 9.0)], "match").plot(tmp_path / "new" / "front.svg")
    text = path.read_text()
    for word in ("FFF", "low rank", "int8", "match (higher is better)", "time of a block", "time of the model"):
        assert word in text
    assert "3 x 9" not in text
    assert path.read_bytes() == Comparison(ROWS, "match").plot(tmp_path / "again.svg").read_bytes()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("front", "must be one of .*; got .*front. Try front.svg"),
        ("front.word", "the suffix of a picture"),
        ("a.svg", "a.svg is a folder"),
        ("file/new/front.svg", "file is a file"),
    ],
)
def test_pictures_that_cannot_be_drawn(path, said, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "a.svg").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=said):
        check_picture(tmp_path / path)
    check_picture(tmp_path / "new" / "front.PNG")
