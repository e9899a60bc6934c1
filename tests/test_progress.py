import re
import subprocess
import sys

import pytest

from fastff import progress as bars


def use(total, *, steps=(1,), **options):
    with bars.progress("working", total, **options) as advance:
        for step in steps:
            advance(step, text="now")


def test_without_a_terminal_a_unit_asks_for_lines(monkeypatch, capsys):
    """Nothing for a minute looks like a hang; a line for each step of a fast loop fills a log."""
    monkeypatch.setattr(bars, "QUIET_SECONDS", -1.0)
    use(3, steps=[1, 0, 2], unit="cases")
    assert capsys.readouterr().err == "1 of 3 cases\n3 of 3 cases\n"
    use(None, unit="cases")
    assert capsys.readouterr().err == "1 cases\n"
    use(3)
    use(3, unit="cases", show=False)
    monkeypatch.setattr(bars, "QUIET_SECONDS", 60.0)
    use(3, unit="cases")
    assert capsys.readouterr() == ("", "")


def test_a_total_that_is_known_later_counts(monkeypatch, capsys):
    monkeypatch.setattr(bars, "QUIET_SECONDS", -1.0)
    with bars.progress("working", None, unit="sizes") as advance:
        advance(total=7)
        advance()
    assert capsys.readouterr().err == "1 of 7 sizes\n2 of 7 sizes\n"


def test_without_rich_the_work_goes_on(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    monkeypatch.setattr(bars, "QUIET_SECONDS", -1.0)
    assert bars.make_bar() is None
    use(2, steps=[1, 1])
    use(2, unit="cases")
    assert capsys.readouterr().err == "1 of 2 cases\n"


def test_a_terminal_gets_a_bar(monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes any stream for a terminal
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with bars.progress("working", 2, unit="cases") as advance:
        advance(text="first")
        advance(text="last", total=4)
    seen = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert "working" in seen
    assert "2/4" in seen
    assert "last" in seen
    assert "2 of 4" not in seen


def test_own_columns_take_the_place_of_the_count():
    rich = pytest.importorskip("rich.progress")
    bar = bars.make_bar(rich.DownloadColumn())
    assert isinstance(bar.columns[-1], rich.DownloadColumn)
    assert len(bar.columns) == 3


@pytest.mark.slow
def test_importing_it_imports_no_rich():
    code = "import sys, fastff.progress; print('rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n", done.stderr
