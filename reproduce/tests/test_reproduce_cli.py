"""`fastff reproduce`: flags, tables, JSON. Experiments and training are fakes here; they have tests of their own."""

import errno
import json
import os
import pickle
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
from typer.testing import CliRunner

from fastff.bench import rows
from fastff.cli import main
from fastff.cli.app import app
from fastff_reproduce import data, summary
from fastff_reproduce.runs import Case, Result
from fastff_reproduce.settings import completed, shortened
from fastff_reproduce.store import ABOUT, Store

LISTS = ("--dataset", "--models", "--widths", "--leaf-widths", "--recipe")  # an empty shell variable is not all
WIDTHS = "reproduce table1 --device cpu --dataset usps,digits --widths 16,128 --leaf-widths 8"


class Experiment(NamedTuple):
    name: str
    title: str
    about: str
    cases: object


def table1(*, datasets, widths, leaf_widths, recipes, seeds, changes, models=None):
    if wrong := set(recipes) - {"paper", "fastff"}:
        raise ValueError(f"no recipe is called {wrong.pop()!r}. There are: paper, fastff.")
    for name in datasets or []:
        if name not in data.NAMES:
            raise ValueError(f"no data set is called {name!r}.")
    settings = completed({"rate": 0.2} | changes)
    return [
        Case(name, model, width, leaf, (width // leaf).bit_length() - 1, recipe, goal, seed, settings)
        for name in datasets or ["usps", "mnist"]
        for width in widths or [16]
        for model, leaf in [("FF", width), *(("FFF", leaf) for leaf in leaf_widths or [8])]
        if model in (models or [model])
        for recipe in recipes
        for goal in ("M_A", "G_A")
        for seed in seeds
    ]


def train(cases, *, device, root, checkpoint=None, report=None):
    made = []
    for case in cases:
        found = {"M_A": 99.0 + case.seed, "ETT_M": 40} if case.goal == "M_A" else {"G_A": 92.0 + case.seed, "ETT": 7}
        found |= {"soft_hard_gap": -0.25 + case.seed / 10, "smallest_share": 0.5, "leaves_used": 2}
        made.append(Result(case, seconds=1.5, inference_size=9, **found))
    return made


@pytest.fixture(autouse=True)
def _fakes(monkeypatch, tmp_path):
    experiments = {
        "table1": Experiment("table1", "Table 1", "the training counterparts", table1),
        "speed": Experiment("speed", "Speed", "run fastff bench blocks", lambda **_: []),
        "regions": Experiment("regions", "Regions", "the first figure", lambda **_: []),
    }
    monkeypatch.setitem(sys.modules, "fastff_reproduce.experiments", SimpleNamespace(EXPERIMENTS=experiments))
    monkeypatch.setitem(sys.modules, "fastff_reproduce.trainer", SimpleNamespace(train=train))
    monkeypatch.setattr(data, "load", lambda name, root=None, **_: None)
    monkeypatch.setenv("FASTFF_STORE", str(tmp_path / "results.sqlite"))
    monkeypatch.delenv("FASTFF_DATA", raising=False)


@pytest.fixture
def untrained(monkeypatch):
    def never(*_, **__):
        raise AssertionError("it was trained")

    monkeypatch.setitem(sys.modules, "fastff_reproduce.trainer", SimpleNamespace(train=never))


def fastff_(command):
    return CliRunner().invoke(app, command.split() if isinstance(command, str) else command)


def cells(text):
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line[:1] == "│"]


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


def store_file():
    return os.environ["FASTFF_STORE"]


def test_nothing_is_trained_twice(request):
    assert fastff_(f"{WIDTHS} --runs 1").exit_code == 0
    request.getfixturevalue("untrained")
    again = fastff_(f"{WIDTHS} --runs 1 --format json")
    assert again.exit_code == 0, again.output
    assert len(json.loads(again.stdout)) == 16
    assert fastff_(f"{WIDTHS} --runs 2").exit_code == 1


def test_a_dry_run_says_what_is_stored_and_what_is_not(untrained, monkeypatch):
    done = fastff_("reproduce table1 --device cpu --dataset usps --runs 4 --recipe paper --dry-run")
    assert done.exit_code == 0, done.output
    assert not os.path.exists(store_file())
    assert "0 trainings are stored, 16 are to do" in done.stdout
    monkeypatch.setitem(sys.modules, "fastff_reproduce.trainer", SimpleNamespace(train=train))
    assert fastff_("reproduce table1 --device cpu --dataset usps --runs 2 --recipe paper").exit_code == 0
    done = fastff_("reproduce table1 --device cpu --dataset usps --runs 4 --recipe paper --dry-run --format json")
    rows = json.loads(done.stdout)
    assert [(row["model"], row["goal"], row["stored"], row["to_train"]) for row in rows] == [
        (model, goal, [0, 1], [2, 3]) for model in ("FF", "FFF") for goal in ("M_A", "G_A")
    ]
    table = fastff_("reproduce table1 --device cpu --dataset usps --runs 9 --recipe paper --dry-run")
    assert cells(table.stdout)[1] == ["usps", "FF", "16", "16", "0", "paper", "G_A", "2", "7"]  # and no seeds


def test_ctrl_c_says_how_to_go_on(monkeypatch):
    def train(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "fastff_reproduce.trainer", SimpleNamespace(train=train))
    done = fastff_("reproduce table1 --device cpu --dataset usps --runs 1")
    assert done.exit_code == 130
    assert done.stdout == ""
    assert done.stderr == "Stopped. Results and checkpoints are kept: the same command goes on from there.\n"


def test_a_dry_run_looks_for_the_data(untrained, monkeypatch):
    def load(name, root=None, **_):
        assert str(root) == "/nodata"
        raise FileNotFoundError(f"{name} needs files")

    monkeypatch.setattr("fastff_reproduce.data.load", load)
    done = fastff_("reproduce table1 --device cpu --dataset usps --dry-run --data /nodata --format json")
    assert done.exit_code == 0
    assert done.stderr == "usps: not here, in /nodata. Training downloads what it can.\n"
    assert json.loads(done.stdout)


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
    assert "Left out: mnist." in done.stderr
    missing.add("usps")  # it has been trained
    assert json.loads(fastff_(command).stdout) == json.loads(done.stdout)
    none = fastff_(f"{command} --seed 1")
    assert none.exit_code == 1
    assert "Left out: mnist, usps." in none.stderr
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
        ("reproduce table1 --set lr", "--set is name=value"),
        ("reproduce table1 --epochs 2 --set epochs=5", "--epochs and --set epochs are the same"),
        ("reproduce table1 --set rate=1 --set rate=2", "--set rate is there twice"),
        *((["reproduce", "table1", flag, ""], f"{flag} is a list with something in it; got ''") for flag in LISTS),
        (["reproduce", "table1", "--models", " , "], "--models is a list with something in it"),
        (f"reproduce table1 --seed {2**63}", f"--seed and --runs are at most {2**40} together; got {2**63} and 10"),
        ("reproduce table1 --format xml", "--format is one of table, json; got 'xml'"),
        ("reproduce table1 --engine cloud", "--engine is one of local, ray; got 'cloud'"),
        ("reproduce table1 --device tpu", "--device is one of cpu, cuda; got 'tpu'"),
        ("reproduce table1 --runs 0", "--runs"),
        ("reproduce table1 --device cpu --output a.svg", "--output is the figure of regions"),
        ("reproduce regions --device cpu --output a.txt", "a file that ends in .svg, .png, .pdf"),
        (
            "reproduce regions --device cpu --set x=5 --widths 4",
            "regions is no sweep of trainings, and has no --widths, --set",
        ),
        ("report --store {folder}/nothere.sqlite", "nothere.sqlite is not there"),
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


def test_ray_is_an_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    done = fastff_("reproduce table1 --device cpu --engine ray")
    assert done.exit_code == 2
    assert 'pip install ".[ray]"' in done.output


def test_list_tells_what_there_is(monkeypatch):
    def load(name, root=None, *, download=True, **_):
        assert not download
        if name == "mnist":
            raise FileNotFoundError

    monkeypatch.setattr(data, "load", load)
    done = fastff_("reproduce list --format json")
    assert json.loads(done.stdout) == [
        {
            "experiment": "table1",
            "title": "Table 1",
            "about": "the training counterparts",
            "trainings": 2 * 2 * 2 * 2 * 10,
            "data": {"usps": "here", "mnist": "not here"},
        },
        {"experiment": "speed", "title": "Speed", "about": "run fastff bench blocks", "trainings": 0, "data": {}},
        {"experiment": "regions", "title": "Regions", "about": "the first figure", "trainings": 0, "data": {}},
    ]
    table = fastff_("reproduce list").stdout
    assert ["table1", "Table 1", "160", "usps"] in cells(table)
    assert "mnist: not here" in table


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


def test_a_narrow_terminal_shows_every_number(monkeypatch):
    from rich.console import Console

    monkeypatch.setattr("fastff_reproduce.cli.console", Console(width=80))
    done = fastff_("reproduce table1 --device cpu --dataset digits --widths 128 --runs 2")
    assert done.exit_code == 0, done.output
    assert "…" not in done.stdout
    (row, more) = cells(done.stdout)[4:6]
    assert row == ["FFF", "128", "8", "9", "paper", "2", "99.5 ± 0.7", "92.5 ± 0.7", "7", "-0.25", "0.50"]
    assert more[6:8] == ["(100.0)", "(93.0)"]


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
    assert "nothere.csvisnotthere" in re.sub(r"[\s│]", "", missing.output)  # in a box, which breaks lines
    assert not (tmp_path / "other.sqlite").exists()


def test_the_docs_tell_commands_and_flags_that_exist():
    """In shell blocks of docs/cli.md, and in its table of flags: all that there are, but --help."""
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    lines = [line for block in re.findall(r"```bash\n(.*?)```", text, re.S) for line in block.splitlines()]
    used = {"reproduce": set(), "report": set()}
    for line in lines:
        if line.startswith("fastff "):
            used[line.split()[1]] |= set(re.findall(r"--[a-z-]+", line.split("#")[0]))
    used["reproduce"] |= set(re.findall(r"--[a-z][a-z-]+", text.split("| flag |")[1].split("\n\n")[0]))
    for command, flags in used.items():
        shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
        assert flags == set(re.findall(r"(?<=[│ ])--[a-z-]+", shown)) - {"--help"}, command
    columns = re.findall(r"`(\w+)`", text.split("| column |")[1].split("\n\n")[0])
    assert set(columns) - {"recipe"} == set(summary.ROW) - {"recipe"}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("noise=1e39", "noise must be finite, and 0 or more, and at most 3.403e+38; got 1e+39"),
        ("final_temperature=1e39", "hard must be finite, and 1.17549e-38 or more, and at most 3.403e+38; got 1e+39"),
        ("final_temperature=1e-45", "hard must be finite, and 1.17549e-38 or more; got 1e-45"),
        ("logit_std=1e39", "std must be finite, and 1.17549e-38 or more, and at most 3.403e+38; got 1e+39"),
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
