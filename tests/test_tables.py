"""The tables in README.md and docs/ are those that results/*.csv make."""

import importlib
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tables():
    pytest.importorskip("fastff_reproduce")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        yield importlib.import_module("tables")


@pytest.mark.slow
def test_no_table_has_drifted_from_its_rows(tables, capsys):
    assert tables.main(["--check"]) == 0, capsys.readouterr().out


def test_every_table_can_be_made(tables):
    for name in tables.TABLES:
        header, rule, *body = tables.made(name).splitlines()
        assert body, name
        assert len({line.count("|") for line in (header, rule, *body)}) == 1, name


def test_a_changed_number_is_found_and_mended(tables, tmp_path, monkeypatch, capsys):
    page = tmp_path / "README.md"
    text = f"# Title\n\n<!-- table: speed-cpu -->\n{tables.made('speed-cpu')}\n<!-- end -->\n\nText.\n"
    right, wrong = re.search(r"\| 5 \| 37 of 1024 \| [\d.]+x", text)[0], "| 5 | 37 of 1024 | 0.01x"
    page.write_text(text.replace(right, wrong))
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    assert tables.main(["--check"]) == 1
    assert f"-{wrong}" in capsys.readouterr().out
    assert tables.main([]) == 0
    assert page.read_text() == text
    assert tables.main(["--check"]) == 0


@pytest.mark.parametrize(
    "text", ["<!-- table: speed -->\nno end\n", "<!-- end -->\n", "<!-- table: x -->\n<!-- end -->\n"]
)
def test_marks_that_cannot_be_filled_are_named(tables, text):
    with pytest.raises(SystemExit, match=r"page.md: (every|there is no table)"):
        tables.filled(text, "page.md")


def test_every_file_of_results_has_its_command():
    """results/README.md names each file of the folder, and no file that is gone."""
    text = (ROOT / "results" / "README.md").read_text()
    named = set(re.findall(r"^\| `?([\w]+\.(?:csv|txt))", text, re.M))
    assert named == {path.name for path in (ROOT / "results").iterdir()} - {"README.md"}
