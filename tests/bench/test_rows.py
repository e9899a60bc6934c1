import csv

import pytest
import torch

import fastff
from fastff import bench
from fastff.bench import Case, measure
from fastff.bench import rows as store
from fastff.bench.models import Problem

SMALL = Case(in_features=20, out_features=12, leaf_width=4, depth=3, batch=33)


def test_rows_survive_a_file(tmp_path):
    path = tmp_path / "new" / "rows.csv"
    about = store.about("cpu", 'fastff bench size, "quoted"', "0123456")  # a commit that looks like a number
    rows = store.rows_of(measure(SMALL, backends=["reference", "auto"], budget=0.05, samples=5, bandwidth=1e10), about)
    store.append(path, rows)
    store.append(path, rows)
    found = store.read(path)
    assert len(found) == 2 * len(rows)
    for row, back in zip(rows, found, strict=False):
        assert list(row) == list(back) == store.COLUMNS
        for name, value in row.items():
            if isinstance(value, float):
                assert back[name] == pytest.approx(value, rel=1e-5)
            else:
                assert back[name] == (str(value) if name in store.WORDS else value)
    assert [path.name for path in path.parent.iterdir()] == ["rows.csv"]
    assert found[0]["machine"]
    assert found[0]["commit"] == "0123456"
    (auto,) = [row for row in rows if row["backend"] == "auto"]
    with torch.inference_mode():
        said = str(fastff.explain(Problem(SMALL).layer, Problem(SMALL).inputs[0]))
    assert auto["note"] == "; ".join(said.splitlines())


def test_a_file_is_never_half_written(tmp_path, monkeypatch):
    path = tmp_path / "rows.csv"
    row = dict.fromkeys(store.COLUMNS, "") | SMALL.columns | {"model": "FFF", "status": "ok"}
    store.append(path, [row])
    before = path.read_bytes()

    def stop(self, rows):
        self.writerow(next(iter(rows)))
        raise KeyboardInterrupt

    monkeypatch.setattr(csv.DictWriter, "writerows", stop)
    with pytest.raises(KeyboardInterrupt):
        store.append(path, [row])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_done_is_known_by_size_and_commit():
    about = store.about("cpu", "test", "c0ffee")
    pairs = bench.planned(["FF", "FFF"], ["reference"])
    rows = [about | SMALL.columns | {"model": model, "backend": name, "status": "ok"} for model, name in pairs]
    done = store.finished(rows)
    assert store.is_done(SMALL, pairs, about, done)
    assert store.is_done(SMALL, pairs, about | {"date": "later", "command": "other"}, done)
    assert not store.is_done(SMALL, pairs, about | {"commit": "decaf"}, done)
    assert not store.is_done(Case(20, 12, 4, 3, 34), pairs, about, done)
    assert not store.is_done(SMALL, [*pairs, ("FFF", "auto")], about, done)
    rows[-1]["status"] = "wrong"
    assert not store.is_done(SMALL, pairs, about, store.finished(rows))


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="it has other columns"):
        store.append(path, [])
    assert path.read_text() == "a,b\n1,2\n"
