"""`fastff report`: pages and rows, and files that are never written over."""

import errno
import re
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
from fakes import WIDTHS, fastff_, install, store_file

from fastff.bench import rows
from fastff.cli import main
from fastff_reproduce.store import Store


@pytest.fixture(autouse=True)
def _fakes(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path)


@pytest.mark.slow
def test_a_page_that_cannot_be_written_is_told(monkeypatch, tmp_path):
    assert fastff_("reproduce table1 --device cpu --dataset usps --runs 1 --recipe paper").exit_code == 0
    monkeypatch.setattr(sys, "argv", ["fastff", "report", "--output", "/dev/null/report.html"])
    with pytest.raises(SystemExit, match=r"/dev/null/report.html: File exists\. Allow writing there, or choose an"):
        main()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    page = tmp_path / "report.html"
    page.write_text("the old one")
    monkeypatch.setattr(sys, "argv", ["fastff", "report", "--output", str(page)])
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(
        SystemExit, match=r"report.html: No space left on device\. Make room, and run the command again"
    ):
        main()
    assert page.read_text() == "the old one"
    assert not list(tmp_path.glob(".report*"))


@pytest.mark.parametrize("flag", ["--output", "--export"])
@pytest.mark.parametrize("target", ["results.sqlite", "link.sqlite", "other.sqlite", "rows.csv", "bench.csv"])
def test_a_report_overwrites_nothing_that_it_reads(flag, target, tmp_path):
    """`report --store a.sqlite --output a.sqlite` put a page over the store: all results were lost."""
    assert fastff_("reproduce table1 --device cpu --dataset usps --runs 1 --recipe paper").exit_code == 0
    with Store(store_file()) as store:
        store.export(tmp_path / "rows.csv")
    (tmp_path / "link.sqlite").symlink_to("results.sqlite")
    with closing(sqlite3.connect(tmp_path / "other.sqlite")) as db:
        db.execute("CREATE TABLE results (a)")
    (tmp_path / "bench.csv").write_text(",".join(rows.COLUMNS) + "\n")
    before = {path: path.read_bytes() for path in tmp_path.glob("*") if path.is_file()}
    files = f"--rows {tmp_path}/rows.csv --bench {tmp_path}/bench.csv --output {tmp_path}/new.html"
    done = fastff_(f"report {files} {flag} {tmp_path / target}")
    assert done.exit_code == 2, done.output
    said = re.sub(r"[\s│]+", "", done.output)
    assert ("arethesamefile" if target != "other.sqlite" else "isanSQLitedatabaseandmustnotbeoverwritten") in said
    assert {path: path.read_bytes() for path in tmp_path.glob("*") if path.is_file()} == before


def test_a_page_and_rows_in_one_file_are_refused(tmp_path):
    assert fastff_("reproduce table1 --device cpu --dataset usps --runs 1 --recipe paper").exit_code == 0
    done = fastff_(f"report --output {tmp_path}/a --export {tmp_path}/b/../a")
    assert done.exit_code == 2, done.output
    assert not (tmp_path / "a").exists()
    (tmp_path / "regions.svg").write_bytes(Path(store_file()).read_bytes())
    done = fastff_(f"reproduce regions --device cpu --output {tmp_path}/regions.svg")
    assert done.exit_code == 2, done.output
    assert (tmp_path / "regions.svg").read_bytes() == Path(store_file()).read_bytes()


@pytest.mark.parametrize("flag", ["--output", "--export"])
def test_a_device_that_takes_nothing_is_named(flag, tmp_path, monkeypatch):
    """ "No space left on device" did not say where."""
    assert fastff_("reproduce table1 --device cpu --dataset usps --runs 1 --recipe paper").exit_code == 0
    monkeypatch.setattr("fastff_reproduce.html_report.page", lambda *_: "a page")
    monkeypatch.setattr(sys, "argv", ["fastff", "report", "--output", f"{tmp_path}/page.html", flag, "/dev/full"])
    with pytest.raises(SystemExit, match=r"/dev/full: No space left on device\. Make room"):
        main()


@pytest.mark.slow
def test_a_report_from_a_file_of_rows(tmp_path):
    assert fastff_(f"{WIDTHS} --runs 2 --recipe paper").exit_code == 0
    first, again = tmp_path / "first.csv", tmp_path / "again.csv"
    assert fastff_(f"report --export {first} --output {tmp_path}/a.html").exit_code == 0
    done = fastff_(f"report --store {tmp_path}/new.sqlite --rows {first} --export {again} --output {tmp_path}/b.html")
    assert done.exit_code == 0, done.output
    assert again.read_text() == first.read_text()
    assert "92.5" in (tmp_path / "b.html").read_text()
    missing = fastff_(f"report --store {tmp_path}/other.sqlite --rows {tmp_path}/nothere.csv")
    assert missing.exit_code == 2
    assert "nothere.csvdoesnotexist" in re.sub(r"[\s│]", "", missing.output)  # in a box, which breaks lines
    assert not (tmp_path / "other.sqlite").exists()


def test_rows_that_cannot_be_read_leave_no_store(tmp_path, monkeypatch):
    """An empty store stayed behind, and the next report was a page of nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "garbage.csv").write_text("garbage\n")
    done = fastff_("report --rows garbage.csv --store new.sqlite --output page.html")
    assert done.exit_code == 2, done.output
    assert not list(tmp_path.glob("new.sqlite*"))
    assert "does not exist" in fastff_("report --store new.sqlite --output page.html").output
