"""benchmarks/cpu_layers.py: its sizes, its models and its rows, on small layers."""

import csv

import cpu_layers
import pytest
import torch

from fastff.bench import Case
from fastff.bench.models import Problem
from fastff.bench.workbench import Workbench


def run_main(monkeypatch, *given):
    threads = torch.get_num_threads()
    monkeypatch.setattr("sys.argv", ["cpu_layers.py", "--tiny", "--samples", "5", "--budget", "0.2", *given])
    try:
        cpu_layers.main()
    finally:
        torch.set_num_threads(threads)


def test_the_sizes():
    titles = [cell.title for cell in cpu_layers.cells(cpu_layers.arguments([]))]
    assert len(titles) == len(set(titles)) == 3 + 2 * 2 * 4 + 2 * 2


@pytest.mark.slow
def test_rows_and_ratios(monkeypatch, tmp_path, capsys):
    output = tmp_path / "rows.csv"
    for match in ("dense: 768 -> 768, l=32, d=5", "int8: 768 -> 768, l=32, d=8, batch 256"):
        run_main(monkeypatch, "--threads", "1", "--match", match, "--output", str(output))
    with output.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["model"] for row in rows] == ["FF", "FFF", "same neurons", "FFF", "FFF int8", "FFF bfloat16"]
    assert {row["status"] for row in rows} == {"ok"}
    assert all(float(row["error"]) <= float(row["allowed_error"]) for row in rows)
    assert {row["threads"] for row in rows} == {"1"}
    ratio = float(rows[0]["median_us"]) / float(rows[1]["median_us"])
    assert float(rows[1]["over_dense"]) == pytest.approx(ratio, rel=0.01)
    assert rows[4]["over_float32"]
    assert not rows[1]["over_float32"]
    assert "FFF int8" in capsys.readouterr().out


def test_int8_is_checked_against_its_own_weights():
    """Not against the weights before rounding, from which they differ by more than rounding errors."""
    with torch.inference_mode():
        workbench = Workbench(Problem(Case(24, 16, 5, 3, 65)), None, 1.0)
        plain, int8, _ = cpu_layers.int8_entries(workbench)
        assert workbench.prepare(*int8) is not None
        assert workbench.prepare(plain.result, int8.calls) is None
        assert plain.result.status == "wrong"


@pytest.mark.parametrize(("given", "said"), [(["--threads", "0"], "--threads must be at least 1; got 0")])
def test_bad_arguments_are_refused(given, said, capsys):
    with pytest.raises(SystemExit):
        cpu_layers.arguments(given)
    assert said in capsys.readouterr().err


def test_a_match_without_sizes_is_named(monkeypatch):
    with pytest.raises(SystemExit, match="no size has 'nothing'"):
        run_main(monkeypatch, "--match", "nothing")
