"""The report: what stands in the page, that it needs nothing else, and that it trusts nothing from the store."""

import html.parser
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
import numpy as np

from fastff.bench import presets
from fastff.bench import rows as bench
from fastff_reproduce import figures, html_report, paper, store, summary
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


@pytest.fixture(autouse=True)
def _experiments(monkeypatch):
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


@pytest.fixture(scope="module")
def rendered():
    return {}


def whole(cache):
    if "page" not in cache:
        cache["page"] = html_report.page(records(*CASES), bench_rows(), regions=False)
    return cache["page"]


def test_table1_is_beside_the_papers(rendered):
    rows = Reader(whole(rendered)).table("table1")
    start = next(i for i, row in enumerate(rows) if row[:2] == ["l = 8", "the paper"])
    assert rows[start][2:] == ["99.3", "99.2", "99.2", "99.5", "92.2", "91.8", "92.3", "92.1"]
    assert rows[start + 1][0] == "recipe paper"
    assert rows[start + 1][5] == "90.7 ± 0.1 ▼ -1.5"
    assert rows[start + 2][0] == "recipe fastff"
    assert rows[start + 2][5:] == [f"{value} ± 0.1 ▲ +0.5" for value in (92.7, 92.3, 92.8, 92.6)]


def test_every_cell_has_its_seeds_gap_and_shares(rendered):
    rows = Reader(whole(rendered)).table("table1")
    (row,) = [row for row in rows if row[:6] == ["usps", "FFF", "16", "8", "1", "9"] and row[6] == "fastff"]
    assert row[7:12] == ["2", "99.8 ± 0.1 ▲ +0.5", "99.9", "99.3 ± 0.5", "50"]
    assert row[12:] == ["92.7 ± 0.1 ▲ +0.5", "92.8", "92.2 ± 0.4", "30", "+0.05", "2 of 2", "0.31", "10 s"]


def test_at_a_glance(rendered):
    rows = {tuple(row[:2]): row[2:] for row in Reader(whole(rendered)).table("")}
    assert rows["The table1", "fastff"] == ["60", "48 of 48", "48 of 48", "+0.05", "0.31"]
    assert rows["The table1", "paper"] == ["60", "0 of 48", "0 of 48", "+0.05", "0.31"]
    assert {name for name, _ in rows} == {"", "The table1", "The table2", "The table3"}


def test_where_the_paper_has_a_figure_alone_nothing_is_compared(rendered):
    """A layer of these sizes is in Table 2 too, where it was trained in another way."""
    rows = Reader(whole(rendered)).table("inference_counterparts")
    assert len(rows) > 1
    assert not any("▲" in cell or "▼" in cell for row in rows for cell in row)
    cells = summary.cells([trained(case).result for case in make(["cifar10"], [("FFF", 32)], [128], ["paper"], [0])])
    assert cells[0].paper.G_A == 45.5


def test_table2_and_table3(rendered):
    reader = Reader(whole(rendered))
    rows = reader.table("table2")
    start = next(i for i, row in enumerate(rows) if row[0] == "w = 1024")
    assert " ".join(rows[start][1:]) == "the paper 99.9 82 53.0 21 65.3 1575 35.2 327 96.0 180 41.3 9"
    assert rows[start + 2][0] == "recipe fastff"
    assert rows[start + 2][-4:] == ["96.5 ± 0.1 ▲ +0.5", "50", "41.8 ± 0.1 ▲ +0.5", "30"]
    rows = reader.table("table3")
    start = next(i for i, row in enumerate(rows) if row[0] == "l = 8")
    assert rows[start][1:7] == ["the paper", "4", "143", "12", "3.29x", "82.8"]
    names = [row[0] for row in rows[start + 1 : start + 5]]
    assert names == ["recipe paper h=5", "recipe paper h=inf", "recipe fastff h=5", "recipe fastff h=inf"]
    assert rows[start + 3][1:4] == ["4", "143", "12"]
    assert rows[start + 3][5] == "83.3 ± 0.1 ▲ +0.5"
    assert rows[1][6:] == ["84.7", "", "", "", ""]  # FF
    assert [row[-3] for row in rows[start + 1 : start + 5]] == ["1.90"] * 4  # as far behind it as the paper's
    assert rows[start][6:] == ["82.8", "", "1.9", "", ""]


def test_how_far_trees_are_behind_is_told_over_common_seeds():
    accuracies = {"ViT-FF": (75.0, 74.0, 60.0), "ViT-FFF": (73.0, 73.0)}
    some = [
        Record(Result(Case("cifar10", model, 128, leaf, depth, "fastff", "G_A", seed), G_A=value), ABOUT)
        for (model, values), leaf, depth in zip(accuracies.items(), (128, 8), (0, 4), strict=True)
        for seed, value in enumerate(values)
    ]
    some.append(Record(Result(Case("cifar10", "ViT-FFF", 128, 1, 7, "fastff", "G_A", 9), G_A=70.0), ABOUT))
    section = html_report._table3(html_report.Section("table3", "Transformers", "beside each other", ""), some)
    head = [entry.text for entry in section.tables[0].head[0]]
    ours = [row for row in section.tables[0].rows if any(entry.text == "recipe fastff" for entry in row)]
    from_the_end = head.index("behind FF") - len(head)
    assert [row[from_the_end].text for row in ours] == ["", "1.50", ""]  # FF, leaves of 8, and of 1: of another seed


def test_an_ablation_says_what_each_part_is_worth():
    accuracies = {"fastff": (94.0, 95.0), "without noise": (92.0, 93.0), "with more": (95.0, 96.0)}
    accuracies["without what does nothing"] = (93.98, 94.98)
    some = [
        Record(Result(Case("usps", "FFF", 128, 8, 4, recipe, "G_A", seed), G_A=value), ABOUT)
        for recipe, values in accuracies.items()
        for seed, value in enumerate(values)
    ]
    # A seed that some do not have is left out for all.
    some.append(Record(Result(Case("usps", "FFF", 128, 8, 4, "fastff", "G_A", 2), G_A=50.0), ABOUT))
    section = html_report._ablation(html_report.Section("ablation", "Parts", "what each is worth", ""), some)
    assert [entry.text for entry in section.tables[0].head[0]] == ["recipe", "USPS w = 128, l = 8"]
    assert [[(entry.text, entry.difference) for entry in row] for row in section.tables[0].rows] == [
        [("fastff", None), ("94.5", None)],
        [("with more", None), ("95.5", 1.0)],
        [("without noise", None), ("92.5", -2.0)],
        [("without what does nothing", None), ("94.5", 0.0)],
    ]


def test_figures_are_redrawn(rendered):
    page = whole(rendered)
    parts = dict(re.findall(r'<section id="(\w+)">(.*?)</section>', page, re.S))
    counts = {name: part.count("<svg") for name, part in parts.items()}
    assert counts["inference_counterparts"] == 2  # M_A and G_A
    assert counts["entropy_mnist"] == 2 * 2  # entropies and leaves, a recipe each
    assert counts["entropy_vit"] == 2 * 2
    assert parts["entropy_mnist"].count("leaves in use over epochs") == 2
    assert counts["speed"] >= 3
    assert "d = 4" in parts["entropy_mnist"]
    assert "layer 4" in parts["entropy_vit"]
    assert all(count == 0 for name, count in counts.items() if name.startswith("table"))


def test_commands_and_machines_stand_under_results(rendered):
    text = " ".join(Reader(whole(rendered)).sections["table1"].split())
    assert "NVIDIA H200 (cuda), torch some torch, Python some python, fastff some fastff at some commit: 480" in text
    assert "fastff reproduce table1 --runs 2" in text


def needs_nothing(page):
    assert not re.search(r"https?:|//[a-z]", re.sub(r'href="data:[^"]*"', "", page))
    assert not re.search(r"<(script|link|iframe|img)\b|@import|url\((?!#)", page)
    targets = re.findall(r'(?:href|src)="([^"]*)"', page)
    assert len(targets) > 1
    assert all(target.startswith(("#", "data:image/png;base64,")) for target in targets)
    assert figures.INK not in page


def test_the_page_needs_nothing_else(rendered):
    needs_nothing(whole(rendered))
    assert len(whole(rendered)) < 2_000_000


def test_without_results_the_page_says_how_to_make_them():
    reader = Reader(html_report.page([], [], regions=False))
    for name in CASES:
        assert f"The {name}: shows {name}fastff reproduce {name}" in reader.sections["missing"]
    assert "fastff bench blocks" in reader.sections["missing"]
    assert "Regions: shows regionsfastff report" in reader.sections["missing"]
    assert set(reader.sections) == {"", "missing"}
    assert reader.svgs == 0


def test_a_store_of_digits_alone():
    """What `make demo` ends in: data and settings that no experiment of the paper has."""
    cases = make(["digits"], [("FF", 0), ("MoE", 8), ("FFF", 8)], [32, 64], ["fastff"], (0, 1, 2), steps=50)
    reader = Reader(html_report.page([trained(case) for case in cases], [], regions=False))
    head, *rows = reader.table("data-digits")
    assert ["digits", "FFF", "64", "8", "3", "11", "fastff", "3"] in [row[:8] for row in rows]
    assert "paper" not in head  # which has no digits, so that nothing is compared
    assert "" not in reader.rows  # nor at a glance
    assert reader.svgs == 2
    assert "fastff reproduce table1" in reader.sections["missing"]


def test_trainings_with_other_settings_are_not_mixed_with_the_papers():
    """A short trial of a cell of Table 1 must not spoil its mean."""
    trial = make(["usps"], [("FFF", 8)], [16], ["fastff"], (0, 1), h=3.0, epochs=1)
    made = [*records("table1"), *(trained(case, **{case.goal: 11.0}) for case in trial)]
    reader = Reader(html_report.page(made, [], regions=False))
    assert "92.7 ± 0.1 ▲ +0.5" in [cell for row in reader.table("table1") for cell in row]
    (row,) = reader.table("data-usps")[1:]
    assert "11.0 ± 0.0 ▼ -81.2" in row


def test_what_comes_from_the_store_is_text():
    bad = '<script>alert("$x")</script>&'
    case = Case(bad, f"FFF{bad}", 16, 8, 1, bad, "G_A", 0, ((bad, bad),))
    other = Case(bad, f"FFF{bad}", 32, 8, 2, bad, "G_A", 0, ((bad, bad),))
    about = dict.fromkeys(store.ABOUT, bad)
    made = [
        Record(Result(case, G_A=90.0, inference_size=9), about),
        Record(Result(other, G_A=91.0, inference_size=10), about),
    ]
    page = html_report.page(made, [], regions=False)
    assert "<script" not in page
    reader = Reader(page)
    assert reader.svgs == 1
    assert any(row[:2] == [bad, f"FFF{bad}"] for row in reader.table("data-script-alert-x-script"))


def test_signs_do_not_depend_on_colour():
    made = [trained(case) for case in make(["usps"], [("FFF", 8)], [16], ["paper"], (0,), h=3.0) if case.goal == "G_A"]
    made[0].result.G_A = 92.2
    page = html_report.page(made, [], regions=False)
    assert '<td class="up">92.2 <small>one seed</small> <b>=&nbsp;+0.0</b>' in page


def test_the_regions_are_drawn_with_the_page(monkeypatch):
    from matplotlib.figure import Figure

    def sketch():
        figure = Figure()
        figure.subplots().imshow(np.eye(3))
        return figure

    monkeypatch.setitem(sys.modules, "fastff_reproduce.sketch", SimpleNamespace(sketch=sketch))
    page = html_report.page([], [])
    assert Reader(page).svgs == 1
    assert "data:image/png;base64," in page.split('id="regions"')[1]
    needs_nothing(page)


# The paper's numbers


def test_rows_of_the_tables_sum_to_what_they_do_in_the_paper():
    """Sums over the widths, from the paper's text: M_A and G_A in Table 1, in the appendix, its deviations."""
    sums = {
        "USPS": {
            0: (400.0, 375.1, 400.0, 375.1, 0.0, 1.4),
            8: (397.2, 368.4, 397.2, 368.4, 2.2, 2.1),
            4: (386.0, 358.0, 386.0, 358.0, 7.5, 5.3),
            2: (370.3, 344.4, 370.3, 344.4, 35.5, 29.8),
            1: (321.3, 306.1, 321.3, 306.1, 35.2, 31.5),
        },
        "MNIST": {
            0: (398.0, 387.6, 398.0, 387.6, 0.9, 1.0),
            8: (388.1, 376.1, 388.1, 376.1, 27.1, 20.8),
            4: (382.1, 370.8, 382.1, 370.8, 55.2, 52.2),
            2: (377.5, 366.2, 377.5, 366.2, 11.9, 8.4),
            1: (374.7, 365.3, 374.7, 365.3, 13.6, 11.3),
        },
        "FashionMNIST": {
            0: (383.6, 352.8, 383.6, 352.8, 2.8, 1.2),
            8: (353.8, 340.7, 353.8, 340.7, 37.0, 31.8),
            4: (351.1, 338.3, 349.2, 338.0, 37.8, 33.9),
            2: (344.4, 334.3, 341.5, 331.0, 41.7, 27.1),
            1: (317.7, 313.4, 324.4, 318.3, 23.3, 21.0),
        },
    }
    assert paper.TABLE1.keys() == paper.TABLE1_MEANS.keys() == sums.keys()
    for name, rows in sums.items():
        assert paper.TABLE1[name].keys() == paper.TABLE1_MEANS[name].keys() == rows.keys()
        for leaf, expected in rows.items():
            best, spread = paper.TABLE1[name][leaf], paper.TABLE1_MEANS[name][leaf]
            found = [sum(best.M_A), sum(best.G_A)]
            found += [sum(pair[i] for pair in row) for i in (0, 1) for row in (spread.M_A, spread.G_A)]
            assert found == pytest.approx(expected), (name, leaf)
    assert [sum(column) for column in zip(*paper.TABLE2["FF"].values(), strict=True)] == pytest.approx(
        [482.4, 779, 258.2, 201]
    )
    assert [sum(column) for column in zip(*paper.TABLE2["MoE"].values(), strict=True)] == pytest.approx(
        [312.9, 18838, 166.6, 6832]
    )
    assert [sum(column) for column in zip(*paper.TABLE2["FFF"].values(), strict=True)] == pytest.approx(
        [459.3, 1206, 220.8, 80]
    )
    assert sum(row.G_A for row in paper.TABLE3.values()) == pytest.approx(575.8)
    for leaf, row in paper.TABLE3.items():
        assert row.depth == (presets.depth_of(128, leaf) if leaf else 0)
        assert (row.training_size, row.inference_size) == (128 + 2**row.depth - 1, leaf + row.depth if leaf else 128)


@pytest.mark.parametrize(
    ("cell", "numbers"),
    [
        (("mnist", "FFF", 128, 8), (99.3, 94.9, None, None)),
        (("fashionmnist", "FFF", 16, 1), (79.7, 78.4, None, None)),
        (("usps", "FF", 64, 64), (100.0, 94.1, None, None)),
        (("cifar10", "MoE", 64, 16), (57.8, 29.4, 5354, 4880)),
        (("cifar10", "FFF", 1024, 32), (96.0, 41.3, 180, 9)),
        (("cifar10", "FF", 128, 128), (95.5, 51.5, 200, 46)),
        (("cifar10", "ViT-FFF", 128, 1), (None, 79.8, None, None)),
        (("cifar10", "ViT-FF", 128, 128), (None, 84.7, None, None)),
        (("cifar10", "FFF", 64, 16), (None,) * 4),
        (("mnist", "FFF", 256, 8), (None,) * 4),
        (("mnist", "MoE", 16, 8), (None,) * 4),
        (("digits", "FFF", 16, 8), (None,) * 4),
    ],
)
def test_the_papers_number_of_a_cell(cell, numbers):
    assert paper.beside(*cell) == numbers


def test_the_appendix_has_deviations():
    assert paper.deviation("mnist", "FFF", 16, 4, "M_A") == 29.3
    assert paper.deviation("usps", "FF", 128, 128, "G_A") == 0.3
    assert paper.deviation("cifar10", "FFF", 64, 32, "G_A") is None
    assert paper.deviation("mnist", "MoE", 16, 8, "G_A") is None


def test_seeds_are_joined_and_summed_up():
    """M_A and G_A come from two trainings of a seed; their settings differ, and they are one row all the same."""

    def result(goal, seed, h, **found):
        settings = (("decay", 0.0 if goal == "M_A" else 1.0), ("h", h))
        return Result(Case("usps", "FFF", 16, 8, 1, "fastff", goal, seed, settings), **found)

    memory = {"ETT_M": 9, "seconds": 1.0, "soft_hard_gap": -0.3, "smallest_share": 0.5, "leaves_used": 2}
    made = [result("M_A", seed, 3.0, M_A=99.0 + seed, **memory) for seed in (0, 1)]
    general = {"seconds": 2.0, "soft_hard_gap": 0.1, "smallest_share": 0.7, "leaves_used": 1}
    made += [result("G_A", seed, 3.0, G_A=92.0 + seed, ETT=4 + seed, **general) for seed in (0, 1, 2)]
    (cell,) = summary.cells(made)
    assert (cell.recipe, cell.seeds, cell.seconds) == ("fastff", 3, 8.0)
    assert summary.Stat(99.5, pytest.approx(math.sqrt(0.5)), 100.0, 2) == cell.M_A
    assert summary.Stat(93.0, 1.0, 94.0, 3) == cell.G_A
    assert (cell.ETT, cell.ETT_M) == (5.0, 9.0)
    # Of the two trees of a seed a row tells the worse.
    assert (cell.soft_hard_gap, cell.smallest_share, cell.leaves_used) == (-0.3, 0.5, 1)
    assert [row["soft_hard_gap"] for row in summary.rows(made)] == [-0.3, -0.3, 0.1]
    assert cell.difference("G_A") == 0.8
    assert [row["M_A"] for row in summary.rows(made)] == [99.0, 100.0, None]
    # Another h is another cell, and both say which, by as little as tells them apart.
    made += [result("M_A", 0, 5.0, M_A=50.0), result("G_A", 0, 5.0, G_A=40.0)]
    cells = {cell.recipe: cell for cell in summary.cells(made)}
    assert set(cells) == {"fastff h=3", "fastff h=5"}
    assert (cells["fastff h=5"].M_A.mean, cells["fastff h=5"].G_A.mean) == (50.0, 40.0)


def test_a_tree_that_does_not_train_has_an_infinite_h():
    def case(hardening, frozen):
        settings = (("decision", "hard" if frozen else "soft"), ("frozen", frozen), ("hardening", hardening))
        return Case("cifar10", "ViT-FFF", 128, 8, 4, "paper", "G_A", 0, settings)

    cases = [case(5.0, False), case(10.0, False), case(0.0, True)]
    assert [summary.naming(cases)(each) for each in cases] == ["paper h=5", "paper h=10", "paper h=inf"]
    assert summary.naming(cases[:1])(cases[0]) == "paper"
