"""Fakes of experiments and training, for the tests of the command line."""

import os
import sys
from types import SimpleNamespace
from typing import NamedTuple

from typer.testing import CliRunner

from fastff_reproduce import data
from fastff_reproduce.__main__ import app
from fastff_reproduce.runs import Case, Result
from fastff_reproduce.settings import completed

WIDTHS = "reproduce table1 --device cpu --dataset usps,digits --widths 16,128 --leaf-widths 8"


class Experiment(NamedTuple):
    name: str
    title: str
    about: str
    cases: object


def table1(
    datasets=None,
    widths=None,
    leaf_widths=None,
    recipes=("paper", "fastff"),
    seeds=range(10),
    changes=None,
    models=None,
):
    if wrong := set(recipes) - {"paper", "fastff"}:
        raise ValueError(f"no recipe is called {wrong.pop()!r}. There are: paper, fastff.")
    for name in datasets or []:
        if name not in data.NAMES:
            raise ValueError(f"no data set is called {name!r}.")
    settings = completed({"rate": 0.2} | (changes or {}))
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


def install(monkeypatch, tmp_path):
    """Put the fakes in the place of the real modules, and the store into tmp_path."""
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


def fastff_(command):
    return CliRunner().invoke(app, command.split() if isinstance(command, str) else command)


def cells(text):
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line[:1] == "│"]


def store_file():
    return os.environ["FASTFF_STORE"]
