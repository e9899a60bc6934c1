import sys
from importlib.metadata import EntryPoint

import pytest

pytest.importorskip("typer")
import typer
from typer.testing import CliRunner

from cli_helpers import QUICK
from fastff.cli import plugins
from fastff.cli.bench_commands import bench


def run(monkeypatch, entries, command):
    """A command line of an app with these entry points: name -> module:function."""
    found = [EntryPoint(name, value, "fastff.commands") for name, value in entries.items()]
    monkeypatch.setattr(plugins, "entry_points", lambda group: found if group == "fastff.commands" else [])
    app = typer.Typer()
    app.add_typer(bench, name="bench")
    plugins.add_commands(app)
    return CliRunner().invoke(app, command.split(), env={"COLUMNS": "400"})


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of another package, with a command."""
    code = 'import typer\n\ndef greet(name: str, loud: bool = False) -> None:\n    """Greet somebody."""\n'
    (tmp_path / "elsewhere.py").write_text(f"{code}    print(f'Hello {{name}}' + '!' * loud)\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "elsewhere"
    sys.modules.pop("elsewhere", None)


def test_an_entry_point_becomes_a_command(module, monkeypatch):
    done = run(monkeypatch, {"greet": f"{module}:greet"}, "greet Ada --loud")
    assert (done.exit_code, done.stdout) == (0, "Hello Ada!\n")
    assert "Greet somebody." in run(monkeypatch, {"greet": f"{module}:greet"}, "--help").stdout


@pytest.mark.parametrize("command", ["reproduce", "reproduce table1 --runs 3", "report --help"])
def test_without_the_package_a_hint_names_what_to_install(command, monkeypatch):
    done = run(monkeypatch, {}, command)
    assert done.exit_code == 2
    name = command.split()[0]
    assert f"`fastff {name}` is in the package fastff-reproduce: pip install ./reproduce in a checkout" in done.stderr
    listed = run(monkeypatch, {}, "--help").stdout
    assert listed.index("reproduce") < listed.index("report")
    assert "Needs the package fastff-reproduce." in listed


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import a_package_that_nobody_has", "ModuleNotFoundError: No module named 'a_package_that_nobody_has'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def f(:", "SyntaxError"),
        ("", "AttributeError: module 'broken' has no attribute 'command'"),
    ],
)
def test_a_plugin_that_fails_to_import_breaks_no_other_command(code, error, tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    entries = {"odd": "broken:command", "reproduce": "broken:command"}
    assert run(monkeypatch, entries, QUICK).exit_code == 0
    for name, remedy in (("odd", "Install its package again."), ("reproduce", "pip install ./reproduce")):
        sys.modules.pop("broken", None)
        done = run(monkeypatch, entries, f"{name} --flag")
        assert done.exit_code == 2
        assert f"`fastff {name}` could not be loaded from broken:command: {error}" in done.stderr
        assert remedy in done.stderr
    sys.modules.pop("broken", None)
