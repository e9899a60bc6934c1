"""Stored results that are made up, the page of all of them, and a reader of pages: for the tests of the report."""

import functools
import html.parser
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from fastff.bench import presets
from fastff.bench import rows as bench
from fastff_reproduce import html_report, paper, store
from fastff_reproduce.runs import Case, Result
from fastff_reproduce.store import Record

ROOT = Path(__file__).parents[2]
ABOUT = {name: f"some {name}" for name in store.ABOUT} | {"date": "2026-01-02T03:04:05", "machine": "NVIDIA H200"}
ABOUT |= {"device": "cuda", "command": "fastff reproduce table1 --runs 2"}
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Experiment(NamedTuple):
    name: str
    title: str
    about: str
    cases: object


def make(names, models, widths, recipes, seeds, **settings):
    """(model, leaf width) pairs; a leaf width of 0 is a dense layer."""
    return [
        Case(
            name,
            model,
            width,
            leaf or width,
            presets.depth_of(width, leaf) if leaf else 0,
            recipe,
            goal,
            seed,
            tuple(sorted(settings.items())),
        )
        for name in names
        for width in widths
        for model, leaf in models
        for recipe in recipes
        for goal in ("M_A", "G_A")
        for seed in seeds
    ]


def trees(leaves, prefix=""):
    return [(f"{prefix}FF", 0), *((f"{prefix}FFF", leaf) for leaf in leaves)]


CASES = {
    "table1": lambda r, s: make(["usps", "mnist", "fashionmnist"], trees([8, 4, 2, 1]), presets.WIDTHS, r, s, h=3.0),
    "inference_counterparts": lambda r, s: make(["cifar10"], trees([2, 4]), [16, 32], r, s, h=0.0),
    "table2": lambda r, s: make(["cifar10"], [("FF", 0), ("MoE", 16), ("FFF", 32)], [64, 128, 256, 512, 1024], r, s),
    "table3": lambda r, s: [
        case
        for h in (5.0, math.inf)
        for case in make(["cifar10"], trees([32, 16, 8, 4, 2, 1], "ViT-"), [128], r, s, h=h)
    ],
    "entropy_mnist": lambda r, s: make(["mnist"], [("FFF", 8)], [32, 64, 128], r, s, h=3.0),
    "entropy_vit": lambda r, s: make(["cifar10"], [("ViT-FFF", 32)], [128], r, s, h=0.1),
}


def experiments(monkeypatch):
    """Replace the paper's experiments by CASES."""

    def experiment(name):
        return Experiment(
            name, f"The {name}", f"shows {name}", lambda *, recipes, seeds, **_: CASES[name](recipes, seeds)
        )

    made = {name: experiment(name) for name in CASES}
    made |= {
        name: Experiment(name, name.capitalize(), f"shows {name}", lambda **_: []) for name in ("speed", "regions")
    }
    monkeypatch.setitem(sys.modules, "fastff_reproduce.experiments", SimpleNamespace(EXPERIMENTS=made))


def trained(case, **more):
    """A result that is a little better than the paper's best with our recipe, and a little worse with the paper's."""
    theirs = case and paper.beside(case.dataset, case.model, case.width, case.leaf_width)
    shift = (0.5 if case.recipe == "fastff" else -1.5) + 0.2 * (case.seed - 0.5)
    entropy = [[0.69 * math.exp(-epoch / 10 / layer)] for epoch in range(30) for layer in [1]]
    if case.model == "ViT-FFF":
        entropy = [[0.69 * math.exp(-epoch / 10 / layer) for layer in (1, 2, 3, 4)] for epoch in range(30)]
    leaves_used = [[4 - epoch // 10 for _ in layers] for epoch, layers in enumerate(entropy)]
    history = {"epoch": list(range(2, 62, 2)), "entropy": entropy, "leaves_used": leaves_used}
    found = {"inference_size": case.leaf_width + case.depth, "epochs": 60, "seconds": 2.5, "history": history}
    if case.depth:
        found |= {"soft_hard_gap": 0.05, "leaves_used": 2**case.depth, "smallest_share": 0.31}
    if case.goal == "M_A":
        found |= {"M_A": min(100.0, (theirs.M_A or 80.0) + shift), "ETT_M": 50}
    else:
        found |= {"G_A": (theirs.G_A or 70.0) + shift, "ETT": 30}
    return Record(Result(case, **found | more), ABOUT)


def records(*names, recipes=("paper", "fastff"), seeds=(0, 1)):
    made = {case.key: case for name in names for case in CASES[name](recipes, seeds)}
    return [trained(case) for case in made.values()]


def bench_rows():
    return bench.read(ROOT / "results" / "inference.csv")


class Reader(html.parser.HTMLParser):
    """The text of sections, the rows of tables; fails on tags that do not match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.sections, self.rows, self.section, self.svgs = [], {}, {}, "", 0
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "section":
            self.section = attributes["id"]
        if tag == "tr":
            self.rows.setdefault(self.section, []).append([])
        if tag in ("td", "th"):
            self.rows[self.section][-1].append("")
        self.svgs += tag == "svg"

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.sections[self.section] = self.sections.get(self.section, "") + data
        if "td" in self.open or "th" in self.open:
            self.rows[self.section][-1][-1] += data

    def table(self, section):
        return [[" ".join(cell.split()) for cell in row] for row in self.rows[section]]


@functools.cache
def whole():
    """The page of all cases and of the measured rows, made once; `experiments` comes first."""
    return html_report.page(records(*CASES), bench_rows(), regions=False)
