"""`fastff reproduce`: flags, formats, and errors in a sentence. Experiments and training are fakes here."""

import csv
import io
import json
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
from fakes import WIDTHS, fastff_, install, store_file, train
from typer.testing import CliRunner

from fastff.cli import main
from fastff_reproduce import data, summary
from fastff_reproduce.__main__ import app
from fastff_reproduce.settings import shortened
from fastff_reproduce.store import Store

LISTS = ("--dataset", "--models", "--widths", "--leaf-widths", "--recipe")  # an empty shell variable is not all


@pytest.fixture(autouse=True)
def _fakes(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path)


@pytest.fixture
def untrained(monkeypatch):
    def never(*_, **__):
        raise AssertionError("it was trained")

    monkeypatch.setitem(sys.modules, "fastff_reproduce.trainer", SimpleNamespace(train=never))


def test_json_alone_is_on_stdout():
    done = fastff_(f"{WIDTHS} --runs 2 --seed 3 --format json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert len(rows) == 2 * 2 * 2 * 2 * 2  # data sets, widths, models, recipes, seeds
    assert all(list(row) == summary.ROW for row in rows)
    assert set(rows[0]) >= {"dataset", "model", "width", "leaf_width", "depth", "recipe", "seed", "M_A", "G_A", "ETT"}
    (row,) = [
        row
        for row in rows
        if (row["dataset"], row["model"], row["width"], row["recipe"], row["seed"]) == ("usps", "FFF", 128, "fastff", 4)
    ]
    assert (row["M_A"], row["G_A"], row["ETT"], row["ETT_M"], row["seconds"]) == (103.0, 96.0, 7, 40, 3.0)
    assert (row["leaf_width"], row["depth"], row["leaves_used"], row["smallest_share"]) == (8, 4, 2, 0.5)
    assert "1 of 32" in done.stderr  # progress


def test_settings_are_part_of_the_case():
    assert (
        fastff_(
            "reproduce table1 --device cpu --runs 1 --epochs 3 --set hardening=inf --set rate=1 --set decision=soft"
        ).exit_code
        == 0
    )
    with Store(store_file()) as store:
        (settings,) = {result.case.settings for result in store.results()}
    assert shortened(settings) == {"epochs": 3, "hardening": float("inf"), "rate": 1.0, "decision": "soft"}


@pytest.mark.slow
def test_nothing_is_trained_twice(request):
    assert fastff_(f"{WIDTHS} --runs 1").exit_code == 0
    request.getfixturevalue("untrained")
    again = fastff_(f"{WIDTHS} --runs 1 --format json")
    assert again.exit_code == 0, again.output
    assert len(json.loads(again.stdout)) == 16
    assert fastff_(f"{WIDTHS} --runs 2").exit_code == 1


def test_ctrl_c_says_how_to_go_on(monkeypatch):
    def train(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "fastff_reproduce.trainer", SimpleNamespace(train=train))
    done = fastff_("reproduce table1 --device cpu --dataset usps --runs 1")
    assert done.exit_code == 130
    assert done.stdout == ""
    assert done.stderr == "Stopped. Results and checkpoints are kept: run the same command to resume.\n"


def test_a_failed_training_is_told_and_the_exit_code_is_1(monkeypatch):
    def partly(cases, **more):
        if cases[0].goal == "M_A":
            raise ArithmeticError("loss is nan")
        return train(cases, **more)

    monkeypatch.setitem(sys.modules, "fastff_reproduce.trainer", SimpleNamespace(train=partly))
    done = fastff_("reproduce table1 --device cpu --dataset usps --runs 1 --recipe paper --format json")
    assert done.exit_code == 1
    rows = json.loads(done.stdout)
    assert [(row["model"], row["M_A"], row["G_A"]) for row in rows] == [("FF", None, 92.0), ("FFF", None, 92.0)]
    assert "usps FFF w=16 l=8 paper M_A seed 0: ArithmeticError: loss is nan" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    "error", [FileNotFoundError("usps needs files:\n  usps.bz2"), ValueError("usps.bz2 is damaged")]
)
def test_data_that_is_missing_or_damaged_is_told_before_any_training(error, untrained, monkeypatch):
    def load(name, root=None, **_):
        if name == "usps":
            raise error

    monkeypatch.setattr(data, "load", load)
    done = fastff_("reproduce table1 --device cpu --dataset digits,usps")
    assert done.exit_code == 1
    assert str(error) in done.stderr
    assert "Traceback" not in done.output
    assert done.stdout == ""


def test_data_that_nobody_asked_for_may_be_missing(monkeypatch):
    missing = {"mnist"}

    def load(name, root=None, **_):
        if name in missing:
            raise FileNotFoundError(f"{name} needs files")

    monkeypatch.setattr(data, "load", load)
    command = "reproduce table1 --device cpu --runs 1 --recipe paper --format json"
    done = fastff_(command)
    assert done.exit_code == 0, done.output
    assert {row["dataset"] for row in json.loads(done.stdout)} == {"usps"}
    assert "mnist needs files" in done.stderr
    assert "Skipped: mnist." in done.stderr
    missing.add("usps")  # it has been trained
    assert json.loads(fastff_(command).stdout) == json.loads(done.stdout)
    none = fastff_(f"{command} --seed 1")
    assert none.exit_code == 1
    assert "Skipped: mnist, usps." in none.stderr
    assert none.stdout == ""
    missing.clear()
    assert {row["dataset"] for row in json.loads(fastff_(command).stdout)} == {"usps", "mnist"}


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("reproduce table9", "EXPERIMENT is one of list, table1, speed, regions; got 'table9'"),
        ("reproduce table1 --dataset imagenet", "no data set is called 'imagenet'"),
        ("reproduce table1 --recipe ours", "no recipe is called 'ours'. There are: paper, fastff."),
        ("reproduce table1 --widths 0", "--widths is a list of numbers from 1 up"),
        ("reproduce table1 --leaf-widths x", "--leaf-widths is a list of numbers from 1 up"),
        ("reproduce table1 --set lr", "--set takes name=value"),
        ("reproduce table1 --epochs 2 --set epochs=5", "--epochs and --set epochs set the same length"),
        ("reproduce table1 --set rate=1 --set rate=2", "--set rate is given twice"),
        *((["reproduce", "table1", flag, ""], f"{flag} must name at least one; got ''") for flag in LISTS),
        (["reproduce", "table1", "--models", " , "], "--models must name at least one"),
        (f"reproduce table1 --seed {2**63}", f"--seed plus --runs must be at most {2**40}; got {2**63} and 10"),
        ("reproduce table1 --format xml", "--format is one of table, json, csv; got 'xml'"),
        ("reproduce table1 --engine cloud", "--engine is one of local, ray; got 'cloud'"),
        ("reproduce table1 --device tpu", "--device is one of cpu, cuda; got 'tpu'"),
        ("reproduce table1 --runs 0", "--runs"),
        ("reproduce table1 --device cpu --output a.svg", "--output is the figure of regions"),
        ("reproduce regions --device cpu --output a.txt", "a file that ends in .svg, .png, .pdf"),
        (
            "reproduce regions --device cpu --set x=5 --widths 4",
            "regions is not a sweep of trainings: it takes no --widths, --set",
        ),
        ("report --store {folder}/nothere.sqlite", "nothere.sqlite does not exist"),
    ],
)
def test_bad_flags_are_refused_before_any_work(command, error, untrained, tmp_path):
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    command = command.split() if isinstance(command, str) else command
    done = fastff_([word.format(other=other, folder=tmp_path) for word in command])
    assert done.exit_code == 2, done.output
    said = re.sub(r"[\s│]+", "", done.output)  # the box around an error breaks its lines
    assert re.sub(r"\s+", "", error) in said
    assert other.read_text() == "a,b\n1,2\n"


@pytest.mark.parametrize("command", ["reproduce table1 --device cpu", "reproduce table1 --dry-run", "report"])
@pytest.mark.parametrize(
    ("store", "error"),
    [
        ("other.csv", "other.csv is not a store of results"),
        (".", "is a directory"),
        ("damaged.sqlite", "It is damaged: choose another file, or recover"),
        ("foreign.sqlite", "is a database of another program. Choose another file."),
    ],
)
def test_a_store_that_is_no_use_is_told_in_a_sentence(command, store, error, untrained, tmp_path, monkeypatch, capsys):
    """Not in a traceback; nothing is written to it."""
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (tmp_path / "damaged.sqlite").write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 20)
    with closing(sqlite3.connect(tmp_path / "foreign.sqlite")) as db:
        db.execute("CREATE TABLE results (a)")
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    monkeypatch.setattr(sys, "argv", ["fastff", *command.split(), "--store", str(tmp_path / store)])
    with pytest.raises(SystemExit) as info:
        main()
    assert str(info.value.code).startswith("fastff: ")  # Python prints it, with the exit code 1
    assert error in str(info.value.code)
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_ray_is_an_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    done = fastff_("reproduce table1 --device cpu --engine ray")
    assert done.exit_code == 2
    assert 'pip install "./reproduce[ray]"' in done.output


def test_an_experiment_without_trainings_says_where_its_rows_come_from():
    done = fastff_("reproduce speed --format json")
    assert done.exit_code == 0
    assert json.loads(done.stdout) == []
    assert "run fastff bench blocks" in done.stderr


def test_the_regions_are_a_figure_of_their_own(monkeypatch, tmp_path):
    figure = pytest.importorskip("matplotlib.figure")
    seeds = []

    def sketch(seed):
        seeds.append(seed)
        return figure.Figure()

    monkeypatch.setitem(sys.modules, "fastff_reproduce.sketch", SimpleNamespace(sketch=sketch))
    monkeypatch.chdir(tmp_path)
    assert fastff_("reproduce regions --device cpu --dry-run").exit_code == 0
    assert not seeds
    done = fastff_("reproduce regions --device cpu")
    assert done.exit_code == 0, done.output
    assert "<svg" in (tmp_path / "regions.svg").read_text()
    assert "regions.svg" in done.stderr
    done = fastff_("reproduce regions --device cpu --seed 3 --output new/a.png --format json")
    assert json.loads(done.stdout) == []
    assert (tmp_path / "new" / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert seeds == [0, 3]


def test_the_readme_names_commands_flags_and_columns_that_exist():
    """In shell blocks of reproduce/README.md, and in its tables of flags and of columns."""
    text = (Path(__file__).parents[1] / "README.md").read_text()
    lines = [line for block in re.findall(r"```bash\n(.*?)```", text, re.S) for line in block.splitlines()]
    used = {"reproduce": set(), "report": set()}
    for line in lines:
        if line.startswith("fastff "):
            used[line.split()[1]] |= set(re.findall(r"--[a-z-]+", line.split("#")[0]))
    used["reproduce"] |= set(re.findall(r"--[a-z][a-z-]+", text.split("| flag |")[1].split("\n\n")[0]))
    for command, flags in used.items():
        shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
        assert flags
        assert flags <= set(re.findall(r"(?<=[│ ])--[a-z-]+", shown)), command
    columns = re.findall(r"`(\w+)`", text.split("| column |")[1].split("\n\n")[0])
    assert columns
    assert set(columns) <= set(summary.ROW)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("noise=1e39", "noise must be finite, and 0 or more, and at most 3.403e+38; got 1e+39"),
        (
            "final_temperature=1e39",
            "final_temperature must be finite, and 1.17549e-38 or more, and at most 3.403e+38; got 1e+39",
        ),
        ("final_temperature=1e-45", "final_temperature must be finite, and 1.17549e-38 or more; got 1e-45"),
        ("logit_std=1e39", "logit_std must be finite, and 1.17549e-38 or more, and at most 3.403e+38; got 1e+39"),
        ("rate=nan", "rate must be finite, and 1.17549e-38 or more; got nan"),
        ("rate=-inf", "rate must be finite, and 1.17549e-38 or more; got -inf"),
        ("batch=-1", "batch must be at least 1; got -1"),
        ("batch=0", "batch must be at least 1; got 0"),
        ("epochs=-1", "epochs must be at least 0; got -1"),
    ],
)
def test_settings_that_float32_does_not_have_are_refused(change, error):
    """They ended in tracebacks of torch, in the training. `rate=nan` was said to be of another type than float."""
    code = "from fastff.cli import main; main()"
    command = ["reproduce", "table1", "--device", "cpu", "--dataset", "digits", "--dry-run", "--set", change]
    run = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, timeout=120)
    assert run.returncode == 2, run.stderr
    assert re.sub(r"\s+", "", error) in re.sub(r"[\s│]+", "", run.stderr)


def test_csv_has_the_rows_of_json():
    command = f"{WIDTHS} --runs 2 --recipe paper --format"
    found = list(csv.DictReader(io.StringIO(fastff_(f"{command} csv").stdout)))
    expected = json.loads(fastff_(f"{command} json").stdout)
    assert list(found[0]) == summary.ROW
    for row, wanted in zip(found, expected, strict=True):
        for name, value in wanted.items():
            assert (float(row[name]) if isinstance(value, int | float) else row[name]) == (
                "" if value is None else value
            )


def test_csv_without_rows_has_its_columns():
    assert fastff_("reproduce speed --format csv").stdout == ",".join(summary.ROW) + "\n"


@pytest.mark.slow
def test_fastff_has_both_commands_when_the_package_is_installed():
    """By entry points: `fastff` knows nothing of this package."""
    found = {entry.name: entry for entry in entry_points(group="fastff.commands")}
    if not found:
        pytest.skip("fastff-reproduce is on the path and not installed")
    assert {name: entry.value for name, entry in found.items()} == {
        "reproduce": "fastff_reproduce.cli:reproduce",
        "report": "fastff_reproduce.cli:report",
    }
    for name in found:
        run = subprocess.run([sys.executable, "-m", "fastff", name, "--help"], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        assert "--store" in run.stdout


@pytest.mark.slow
def test_the_module_has_both_commands(tmp_path):
    """`python -m fastff_reproduce` works without an installation; errors about files are a sentence."""
    module = [sys.executable, "-m", "fastff_reproduce"]
    shown = subprocess.run([*module, "--help"], capture_output=True, text=True, check=True).stdout
    assert re.search(r"\breproduce\b", shown)
    assert re.search(r"\breport\b", shown)
    command = [*module, "reproduce", "table1", "--device", "cpu", "--dataset", "digits", "--store", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.startswith("fastff_reproduce: ")
    assert "is a directory" in run.stderr
    assert "Traceback" not in run.stderr
