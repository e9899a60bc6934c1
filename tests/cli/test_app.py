import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
from rich.console import Console
from typer.testing import CliRunner

import fastff
from cli_helpers import QUICK, ROOT, fastff_
from fastff.bench import rows as store
from fastff.cli.app import app


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("bench size --depth x", "--depth is a list of numbers from 0 up, such as 3,5 or 1-8; got 'x'"),
        ("bench size --depth 5-3", "got '5-3'"),
        ("bench size --batch 0", "--batch is a list of numbers from 1 up"),
        ("bench size --depth 1-99999999", "--depth is a list of numbers up to 62; got '1-99999999'"),
        ("bench table1 --depth 63", "--depth is a list of numbers up to 62; got '63'"),
        ("bench size --batch 1-99999999", "--batch is a list of at most 1000 numbers; got '1-99999999'"),
        ("bench size --batch 1-40 --leaf-width 1-40", "bench size measures at most 1000 cases"),
        (f"bench size --batch {'9' * 5000}", "got one of more than 18 digits"),
        (
            "bench size --threads 100000",
            f"--threads must be 0 (torch's default) to {os.cpu_count()}, the cores of this machine",
        ),
        ("bench size --threads -1", "got -1"),
        ("plan --in 8 --out 8 --width 16 --threads 100000", "got 100000"),
        (f"plan --in 8 --out 8 --width {10**30}", f"must be at most {2**62}"),
        (f"plan --in 8 --out 8 --width 8 --regions {2**70}", "depth must be at most 62; got 70"),
        ("bench size --dtype float32,int8", "--dtype is a list of float32, bfloat16, float16, float64; got"),
        ("bench size --device tpu", "--device is one of cpu, cuda; got 'tpu'"),
        ("bench size --backend tpu --device cpu", "backend='tpu' is not available here. Available: auto, reference"),
        ("bench size --activation sine", "activation must be one of relu"),
        ("bench size --model FF", "--model needs FFF"),
        ("bench size --budget 0", "--budget is a time in seconds and must be positive; got 0"),
        ("bench size --resume", "Add --output"),
        ("bench size --output {other}", "it has other columns"),
        ("bench table3 --batch 7", "bench table3 has no case of these depths and batches"),
        ("bench plot {empty}", "nothing to draw"),
        ("bench plot {other}", "it has other columns"),
        ("bench plot nothere.csv", "does not exist"),
        ("plan --in 8 --out 8 --width 16 --latency 20", "--latency is a time with its unit, such as 20us"),
        ("plan --in 8 --out 8 --width 16 --format xml", "--format is one of table, json, csv; got 'xml'"),
        ("bench size --format xml", "--format is one of table, json, csv; got 'xml'"),
        ("plan --in 8 --out 8 --width 16 --neurons 0", "neurons must be positive; got 0"),
        ("plan --in 8 --out 8", "Missing option '--width'"),
    ],
)
def test_bad_flags_are_refused_before_any_work(command, error, tmp_path, monkeypatch):
    def never(*_, **__):
        raise AssertionError("it worked")

    monkeypatch.setattr("fastff.bench.measure", never)
    monkeypatch.setattr("fastff.bench.bandwidth", never)
    monkeypatch.setattr("fastff.bench.planning.together", never)
    other, empty = tmp_path / "other.csv", tmp_path / "empty.csv"
    other.write_text("a,b\n1,2\n")
    empty.write_text(",".join(store.COLUMNS) + "\n")
    done = fastff_([word.format(other=other, empty=empty) for word in command.split()])
    assert done.exit_code == 2, done.output
    said = re.sub(r"[\s│]+", "", done.output)  # the box around an error breaks its lines
    assert re.sub(r"\s+", "", error) in said


def test_long_work_is_told_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setattr("fastff.progress.QUIET_SECONDS", -1.0)
    done = fastff_("plan --in 8 --out 8 --width 4 --device cpu --deeper 0")
    assert [line for line in done.stderr.splitlines() if " of " in line and "sizes" in line] == [
        "1 of 2 sizes",
        "2 of 2 sizes",
    ]
    assert "1 of 1 cases" in fastff_(QUICK).stderr.splitlines()


def test_help_lists_what_the_docs_say():
    """Every bench or plan command in a shell block of the docs exists, with its flags."""
    pages = [path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts]
    text = "\n".join(path.read_text() for path in [ROOT / "README.md", *pages])
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
    lines = [
        line
        for block in blocks
        for line in block.replace("\\\n", " ").splitlines()
        if re.search("fastff (bench|plan) ", line)
    ]
    told = set()
    assert len(lines) >= 8
    for line in lines:
        if "pip install" in line or "bench --help" in line:
            continue
        words = line.split("#")[0].split("fastff ")[1].split()
        command = words[:2] if words[0] == "bench" else words[:1]
        told.add(" ".join(command))
        done = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200"})
        assert done.exit_code == 0, f"{line}: {done.output}"
        for flag in [word for word in words if word.startswith("--")]:
            assert flag in done.output, f"{line}: no {flag}"
    experiments = re.findall(r"^│ (\w+) ", fastff_("bench --help").stdout, re.M)
    assert set(experiments) == {"blocks", "table1", "table3", "regimes", "size", "plot"}
    assert told == {"plan", *(f"bench {name}" for name in experiments)}


PLUGINS = ["reproduce", "report"] if find_spec("fastff_reproduce") else []


@pytest.mark.parametrize("command", ["", "bench", "bench size", "bench table1", "plan", *PLUGINS])
def test_help_is_short_for_every_command(command):
    short, long = fastff_(f"{command} -h"), fastff_(f"{command} --help")
    assert short.exit_code == 0
    assert short.stdout == long.stdout
    assert "-h" in short.stdout


@pytest.mark.slow
@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_narrow_terminal_shows_every_number(width, monkeypatch):
    """At 60 columns models lost their names, and times their digits: 65.5 to …"""
    narrow = Console(width=width)
    monkeypatch.setattr("fastff.cli.printing.console", narrow)
    plan = "plan --in 24 --out 16 --width 64 --neurons 12 --device cpu --deeper 0"
    for command in (QUICK, f"{QUICK} --all", plan, f"{plan} --all"):
        with narrow.capture() as seen:
            assert fastff_(command).exit_code == 0
        assert "…" not in seen.get()
    assert "leaf width depth training width" in re.sub(" +", " ", seen.get())


def test_the_version():
    done = fastff_("--version")
    assert (done.exit_code, done.stdout) == (0, f"fastff {fastff.__version__}\n")


@pytest.mark.slow
def test_the_module_is_the_command():
    run = subprocess.run([sys.executable, "-m", "fastff", "--help"], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "fastff [OPTIONS] COMMAND" in run.stdout
    assert 'fastff = "fastff.cli:main"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.slow
def test_without_typer_one_line_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; import fastff.cli; fastff.cli.main()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 1
    assert run.stderr == 'The command line of fastff needs typer: pip install ".[cli]" in a checkout of fastff\n'


@pytest.mark.slow
def test_importing_the_layers_imports_no_command_line():
    code = "import sys, fastff; print([n for n in ('typer', 'rich', 'matplotlib', 'fastff.bench') if n in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.stdout == "[]\n", run.stderr
    assert fastff.__version__
