import csv
import io
import json
import re

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")
from cli_helpers import QUICK, SIZE, cells, fastff_
from fastff import bench
from fastff.backends import BACKENDS, available
from fastff.bench import rows as store


def test_the_table_has_FF_and_FFF_and_the_rest_needs_all():
    done = fastff_(SIZE)
    assert done.exit_code == 0, done.output
    rows = cells(done.stdout)
    assert [(row[0], len(row)) for row in rows] == [("FF", 4), ("FFF", 4)]
    assert rows[0][3] == "1.00x"
    assert "speed-up over FF" in done.stdout
    named = cells(fastff_(QUICK).stdout)
    assert [row[:2] for row in named] == [["FF", ""], ["FFF", "reference"], ["FFF", "auto"]]  # as asked for by name
    moe = cells(fastff_(f"{SIZE} --model MoE,FFF").stdout)
    assert {row[0] for row in moe} == {"MoE", "FFF"}
    assert ["MoE", "reference"] in [row[:2] for row in moe]


def test_a_file_gets_the_rows_that_the_table_leaves_out(tmp_path):
    """A published command with --output gives the same rows as before --all existed."""
    file = tmp_path / "rows.csv"
    done = fastff_(f"{SIZE} --output {file} --commit c0ffee")
    assert [row[0] for row in cells(done.stdout)] == ["FF", "FFF"]
    pairs = [(row["model"], row["backend"]) for row in store.read(file)]
    assert pairs == bench.planned(bench.MODELS, [*available(), "auto"])


@pytest.mark.slow
@pytest.mark.parametrize("command", [SIZE, "bench table3 --depth 7 --device cpu --budget 0.3 --samples 5"])
def test_json_and_csv_have_all_columns(command):
    done = fastff_(f"{command} --format json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [row["model"] for row in found] == ["FF", "FFF"]
    assert all(list(row) == store.COLUMNS for row in found)
    assert found[1]["speedup_dense"] > 0
    done = fastff_(f"{command} --format csv --all --backend auto")
    reader = csv.DictReader(io.StringIO(done.stdout))
    assert reader.fieldnames == store.COLUMNS
    assert [row["model"] for row in reader] == ["FF", "gather", "FFF"]
    assert "\r" not in done.stdout


def test_a_table_of_all_models():
    done = fastff_(f"{QUICK} --all")
    assert done.exit_code == 0, done.output
    rows = cells(done.stdout)
    assert [row[:2] for row in rows] == [
        ["FF", ""],
        ["gather", ""],
        ["MoE", "reference"],
        ["FFF", "reference"],
        ["FFF", "auto"],
    ]
    assert all(float(row[2]) > 0 for row in rows)
    assert rows[0][4] == "1.00x"
    assert rows[-1][6].endswith("x")
    assert rows[-1][7].endswith("x")
    assert "10 GB/s measured" in done.stdout
    assert "in 20, out 12, leaf_width 4, depth 2" in done.stdout


def test_rows_are_appended_and_resumed(tmp_path, monkeypatch):
    file = tmp_path / "results" / "inference.csv"
    command = f"{QUICK} --output {file} --commit c0ffee"
    assert fastff_(command).exit_code == 0
    first = store.read(file)
    assert len(first) == 5
    assert {row["commit"] for row in first} == {"c0ffee"}
    assert fastff_(f"{command} --resume --depth 2,3").exit_code == 0
    second = store.read(file)
    assert second[:5] == first
    assert {row["depth"] for row in second[5:]} == {3}
    assert len(second) == 10

    def never(*_, **__):
        raise AssertionError("measured again")

    monkeypatch.setattr("fastff.bench.measure", never)
    again = fastff_(f"{command} --resume")
    assert again.exit_code == 0, again.output
    assert store.read(file) == second
    assert "auto" in again.stdout  # the table shows the rows that were there


def test_a_wrong_backend_prints_wrong_and_fails(tmp_path, monkeypatch):
    good = BACKENDS["reference"]

    class Wrong:
        def __getattr__(self, name):
            return getattr(good, name)

        @staticmethod
        def visit(x, leaf, leaves, activation):
            return good.visit(x, leaf, leaves, activation) * 1.001

        @classmethod
        def hard(cls, x, tree, leaves, activation):
            leaf = good.route(x, tree, activation)
            return cls.visit(x, leaf, leaves, activation), leaf

    monkeypatch.setitem(BACKENDS, "wrong", Wrong())
    file = tmp_path / "rows.csv"
    done = fastff_(f"{SIZE} --backend reference,wrong --output {file} --commit c0ffee --all")
    assert done.exit_code == 1
    line = next(line for line in done.stdout.splitlines() if "WRONG" in line and "FFF" in line)
    assert [cell.strip() for cell in line.split("│")[3:-1]] == ["WRONG", "", "", "", "", ""]
    assert "relative error 0.001" in done.stdout
    rows = {(row["model"], row["backend"]): row for row in store.read(file)}
    assert rows["FFF", "wrong"]["status"] == "wrong"
    assert rows["FFF", "wrong"]["median_us"] is None
    assert rows["FFF", "reference"]["median_us"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu_is_refused():
    done = fastff_("bench blocks --device cuda")
    assert done.exit_code == 2
    assert "needs a GPU" in done.output


@pytest.mark.slow
def test_the_tables_of_the_paper_are_beside_ours():
    done = fastff_("bench table3 --backend aten --model FF,FFF --device cpu --budget 5 --samples 5")
    assert done.exit_code == 0, done.output
    rows = cells(done.stdout)
    ours = [row for row in rows if len(row) == 5]
    assert [row[:3] for row in ours] == [
        ["32", "2", "34"],
        ["16", "3", "19"],
        ["8", "4", "12"],
        ["4", "5", "9"],
        ["2", "6", "8"],
        ["1", "7", "8"],
    ]
    assert [row[4] for row in ours] == ["2.44x", "2.80x", "3.29x", "3.39x", "3.47x", "3.93x"]
    assert all(float(row[3].rstrip("x")) > 0 for row in ours)
    done = fastff_("bench table1 --backend aten --model FF,FFF --depth 1 --device cpu --budget 5 --samples 5")
    line = next(line for line in done.stdout.splitlines() if "USPS" in line)
    assert len(cells(done.stdout)) == 12  # this table alone
    assert re.search(r"│ +8 │ +[\d.]+x \(1.07x\) │ +- \(1.16x\)", line)


@pytest.mark.slow
def test_figures(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "rows.csv"
    command = f"{QUICK} --depth 1-3 --output {file} --commit c0ffee"
    assert fastff_(command).exit_code == 0
    done = fastff_(f"bench plot {file} --output {tmp_path / 'figures'}")
    assert done.exit_code == 0, done.output
    assert sorted(path.name.split("-")[0] for path in (tmp_path / "figures").iterdir()) == [
        "blocks",
        "closeup",
        "speedup",
    ]


def test_a_batch_that_does_not_fit_the_memory_is_skipped():
    done = fastff_(QUICK.replace("--batch 33", "--batch 100000000000"))
    assert done.exit_code == 0, done.output
    assert "skipped: a batch of 100000000000 needs" in " ".join(done.stdout.split())
