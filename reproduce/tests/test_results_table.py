"""Our results beside the paper's, in a terminal."""

import os
import pickle
import subprocess
import sys

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
from fakes import WIDTHS, cells, fastff_, install, train

from fastff_reproduce.store import ABOUT, Store


@pytest.fixture(autouse=True)
def _fakes(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path)


def test_our_numbers_stand_beside_the_papers():
    done = fastff_(f"{WIDTHS} --runs 2 --recipe paper")
    assert done.exit_code == 0, done.output
    rows = cells(done.stdout)
    assert rows[0][:6] == ["FF", "16", "16", "9", "paper", "2"]
    # M_A: mean ± deviation (best), the paper's best, the difference of our mean to it; then the same for G_A.
    assert rows[1][:6] == ["FFF", "16", "8", "9", "paper", "2"]
    assert rows[1][6:12] == ["99.5 ± 0.7 (100.0)", "99.3", "+0.2", "92.5 ± 0.7 (93.0)", "92.2", "+0.3"]
    assert rows[1][12:] == ["7", "-0.25", "0.50"]
    assert rows[0][9:12] == ["92.5 ± 0.7 (93.0)", "93.1", "-0.6"]
    assert rows[5][6:] == ["99.5 ± 0.7 (100.0)", "92.5 ± 0.7 (93.0)", "7", "-0.25", "0.50"]  # not in the paper
    assert "Table 1: usps" in done.stdout
    assert "Table 1: digits" in done.stdout


def test_a_narrow_terminal_shows_every_number(monkeypatch):
    from rich.console import Console

    monkeypatch.setattr("fastff_reproduce.results_table.console", Console(width=80))
    done = fastff_("reproduce table1 --device cpu --dataset digits --widths 128 --runs 2")
    assert done.exit_code == 0, done.output
    assert "…" not in done.stdout
    (row, more) = cells(done.stdout)[4:6]
    assert row == ["FFF", "128", "8", "9", "paper", "2", "99.5 ± 0.7", "92.5 ± 0.7", "7", "-0.25", "0.50"]
    assert more[6:8] == ["(100.0)", "(93.0)"]


@pytest.mark.slow
def test_a_table_prints_where_the_encoding_has_no_plus_minus(tmp_path):
    """PYTHONIOENCODING=ascii ended in a UnicodeEncodeError after the training."""
    with Store(tmp_path / "results.sqlite") as store:
        command = "reproduce table1 --device cpu --dataset digits --widths 16 --leaf-widths 8 --runs 2 --recipe paper"
        store.put_all(train(real_cases(), device="cpu", root=None), dict.fromkeys(ABOUT, ""))
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    words = [sys.executable, "-m", "fastff", *command.split()]
    run = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment)
    assert run.returncode == 0, run.stderr
    assert "92.5 ? 0.7 (93.0)" in run.stdout


def real_cases():
    code = "from fastff_reproduce.experiments import EXPERIMENTS as e; import pickle, sys; sys.stdout.buffer.write("
    code += "pickle.dumps(e['table1'].cases(['digits'], [16], [8], ['paper'], range(2))))"
    return pickle.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
