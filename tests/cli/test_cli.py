import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")
from rich.console import Console
from typer.testing import CliRunner

import fastff
from fastff.backends import BACKENDS
from fastff.bench import rows as store
from fastff.cli.commands import app

ROOT = Path(__file__).parents[2]
SIZE = "bench size --in 20 --out 12 --leaf-width 4 --depth 2 --batch 33 --device cpu --budget 0.05 --samples 5"
QUICK = f"{SIZE} --backend reference,auto"


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr("fastff.bench.bandwidth", lambda device: 1e10)


def fastff_(command):
    return CliRunner().invoke(app, command.split() if isinstance(command, str) else command)


def test_a_table_of_all_models():
    done = fastff_(QUICK)
    assert done.exit_code == 0, done.output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if line[:1] == "│"]
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
    done = fastff_(f"{SIZE} --backend reference,wrong --output {file} --commit c0ffee")
    assert done.exit_code == 1
    line = next(line for line in done.stdout.splitlines() if "WRONG" in line and "FFF" in line)
    assert [cell.strip() for cell in line.split("│")[3:-1]] == ["WRONG", "", "", "", "", ""]
    assert "relative error 0.001" in done.stdout
    rows = {(row["model"], row["backend"]): row for row in store.read(file)}
    assert rows["FFF", "wrong"]["status"] == "wrong"
    assert rows["FFF", "wrong"]["median_us"] is None
    assert rows["FFF", "reference"]["median_us"] > 0


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
        ("bench size --threads 100000", f"--threads is from 1 to {os.cpu_count()}, the cores of this machine, or 0"),
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
        ("plan --in 8 --out 8 --width 16 --format xml", "--format is table or json; got 'xml'"),
        ("plan --in 8 --out 8 --width 16 --neurons 0", "neurons must be positive; got 0"),
        ("plan --in 8 --out 8", "Missing option '--width'"),
    ],
)
def test_bad_flags_are_refused_before_any_work(command, error, tmp_path, monkeypatch):
    def never(*_, **__):
        raise AssertionError("it worked")

    monkeypatch.setattr("fastff.bench.measure", never)
    monkeypatch.setattr("fastff.bench.bandwidth", never)
    monkeypatch.setattr("fastff.bench.plan.together", never)
    other, empty = tmp_path / "other.csv", tmp_path / "empty.csv"
    other.write_text("a,b\n1,2\n")
    empty.write_text(",".join(store.COLUMNS) + "\n")
    done = fastff_([word.format(other=other, empty=empty) for word in command.split()])
    assert done.exit_code == 2, done.output
    said = re.sub(r"[\s│]+", "", done.output)  # the box around an error breaks its lines
    assert re.sub(r"\s+", "", error) in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu_is_refused():
    done = fastff_("bench blocks --device cuda")
    assert done.exit_code == 2
    assert "needs a GPU" in done.output


def test_the_tables_of_the_paper_are_beside_ours():
    done = fastff_("bench table3 --backend aten --model FF,FFF --device cpu --budget 5 --samples 5")
    assert done.exit_code == 0, done.output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if line[:1] == "│"]
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
    assert re.search(r"│ +8 │ +[\d.]+x \(1.07x\) │ +- \(1.16x\)", line)


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


def test_plan_as_a_table_and_as_json():
    done = fastff_("plan --in 24 --out 16 --width 64 --neurons 12 --device cpu --deeper 0")
    assert done.exit_code == 0, done.output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if line[:1] == "│"]
    assert rows[0][:6] == ["yes", "8", "3", "64", "71", "11"]
    assert [row[0] for row in rows] == ["yes"] * 4 + [""] * 2
    *_, why, line = done.stdout.splitlines()
    assert why == "To paste: the widest leaf that fits the budget."
    assert line == "fastff.FFF(24, 16, depth=3, leaf_width=8)"
    layer = eval(line)
    assert (layer.depth, layer.leaf_width) == (3, 8)
    done = fastff_("plan --in 24 --out 16 --width 64 --neurons 1 --device cpu --activation silu --dtype bfloat16")
    *_, nothing, why, line = done.stdout.splitlines()
    assert (nothing, why) == ("Nothing fits the budget.", "To paste: the nearest to the budget.")
    assert line.endswith(', activation="silu", dtype=torch.bfloat16)')
    done = fastff_("plan --in 24 --out 16 --width 64 --regions 5 --device cpu --format json")
    choices = json.loads(done.stdout)
    assert [(choice["leaf_width"], choice["depth"]) for choice in choices] == [(8, 3), (16, 3), (32, 3), (64, 3)]
    for choice in choices:
        assert 0 < choice["p20_us"] <= choice["time_us"] <= choice["p80_us"]
        assert choice["speedup"] > 0
        assert choice["fits"] is None


@pytest.mark.parametrize(
    ("sizes", "note"),
    [
        ("--in 8 --out 8 --width 16 --batch 100000000000", "a batch of 100000000000 needs"),
        ("--in 1000000 --out 1000000 --width 1000000000", "the layer needs"),
        ("--in 8 --out 8 --width 16 --regions 1099511627776 --neurons 100", "the layer needs"),
    ],
)
def test_a_plan_of_layers_that_cannot_exist_recommends_none(sizes, note):
    """Two ended in a traceback of the dense layer; the third recommended a line to paste that needed 5e5 GiB."""
    for format in ("table", "json"):
        done = fastff_(f"plan {sizes} --device cpu --format {format}")
        assert done.exit_code == 1, done.output
        assert done.exception is None or isinstance(done.exception, SystemExit)
        assert f"Nothing to recommend: no layer can be measured here: {note}" in done.stderr
        assert "To paste" not in done.output
        assert "fastff.FFF(" not in done.output
        assert format == "table" or not any(choice["fits"] for choice in json.loads(done.stdout))


def test_a_batch_that_does_not_fit_the_memory_is_skipped():
    done = fastff_(QUICK.replace("--batch 33", "--batch 100000000000"))
    assert done.exit_code == 0, done.output
    assert "skipped: a batch of 100000000000 needs" in " ".join(done.stdout.split())


def test_a_budget_of_neurons_leaves_out_what_cannot_fit():
    """`plan --deeper 16 --neurons 1` built layers of many GiB for minutes, though none could fit the budget."""
    done = fastff_("plan --in 768 --out 768 --width 3072 --deeper 16 --neurons 1 --device cpu --format json")
    assert done.exit_code == 0, done.output
    measured = [choice for choice in json.loads(done.stdout) if choice["note"] != "over the budget"]
    assert {choice["inference_size"] for choice in measured} == {13}
    assert all(choice["time_us"] > 0 for choice in measured)


def test_long_work_is_told_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setattr("fastff.cli.commands.QUIET_SECONDS", -1.0)
    done = fastff_("plan --in 8 --out 8 --width 4 --device cpu --deeper 0")
    assert [line for line in done.stderr.splitlines() if " of " in line and "sizes" in line] == [
        "1 of 2 sizes",
        "2 of 2 sizes",
    ]
    assert "1 of 1 cases" in fastff_(QUICK).stderr.splitlines()


def test_help_lists_what_the_docs_say():
    """Every command and flag in a shell block of docs/speed.md exists."""
    text = (ROOT / "docs" / "speed.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if "fastff " in line]
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


@pytest.mark.parametrize("command", ["", "bench", "bench size", "bench table1", "plan", "reproduce", "report"])
def test_help_is_short_for_every_command(command):
    short, long = fastff_(f"{command} -h"), fastff_(f"{command} --help")
    assert short.exit_code == 0
    assert short.stdout == long.stdout
    assert "-h" in short.stdout


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_narrow_terminal_shows_every_number(width, monkeypatch):
    """At 60 columns models lost their names, and times their digits: 65.5 to …"""
    narrow = Console(width=width)
    monkeypatch.setattr("fastff.cli.commands.console", narrow)
    for command in (QUICK, "plan --in 24 --out 16 --width 64 --neurons 12 --device cpu --deeper 0"):
        with narrow.capture() as seen:
            assert fastff_(command).exit_code == 0
        assert "…" not in seen.get()
    assert "leaf width depth training width" in re.sub(" +", " ", seen.get())


def test_the_version():
    done = fastff_("--version")
    assert (done.exit_code, done.stdout) == (0, f"fastff {fastff.__version__}\n")


def test_the_module_is_the_command():
    run = subprocess.run([sys.executable, "-m", "fastff", "--help"], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "fastff [OPTIONS] COMMAND" in run.stdout
    assert 'fastff = "fastff.cli:main"' in (ROOT / "pyproject.toml").read_text()


def test_without_typer_one_line_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; import fastff.cli; fastff.cli.main()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 1
    assert run.stderr == 'The command line of fastff needs typer: pip install ".[cli]" in a checkout of fastff\n'


def test_importing_the_layers_imports_no_command_line():
    code = "import sys, fastff; print([n for n in ('typer', 'rich', 'matplotlib', 'fastff.bench') if n in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.stdout == "[]\n", run.stderr
    assert fastff.__version__
