"""The report: the content of the page, that it loads nothing, and that it trusts nothing from the store."""

import re
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
import numpy as np
from pages import CASES, Reader, experiments, make, records, trained, whole

from fastff_reproduce import figures, html_report, store
from fastff_reproduce.runs import Case, Result
from fastff_reproduce.store import Record


@pytest.fixture(autouse=True)
def _experiments(monkeypatch):
    experiments(monkeypatch)


@pytest.mark.slow
def test_figures_are_redrawn():
    page = whole()
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


def test_commands_and_machines_stand_under_results():
    text = " ".join(Reader(whole()).sections["table1"].split())
    assert "NVIDIA H200 (cuda), torch some torch, Python some python, fastff some fastff at some commit: 480" in text
    assert "fastff reproduce table1 --runs 2" in text


def needs_nothing(page):
    assert not re.search(r"https?:|//[a-z]", re.sub(r'href="data:[^"]*"', "", page))
    assert not re.search(r"<(script|link|iframe|img)\b|@import|url\((?!#)", page)
    targets = re.findall(r'(?:href|src)="([^"]*)"', page)
    assert len(targets) > 1
    assert all(target.startswith(("#", "data:image/png;base64,")) for target in targets)
    assert figures.INK not in page


def test_the_page_needs_nothing_else():
    needs_nothing(whole())
    assert len(whole()) < 2_000_000


def test_without_results_the_page_says_how_to_make_them():
    reader = Reader(html_report.page([], [], regions=False))
    for name in CASES:
        assert f"The {name}: shows {name}fastff reproduce {name}" in reader.sections["missing"]
    assert "fastff bench blocks" in reader.sections["missing"]
    assert "Regions: shows regionsfastff report" in reader.sections["missing"]
    assert set(reader.sections) == {"", "words", "missing"}
    assert reader.svgs == 0


def test_a_store_of_digits_alone():
    """What `make demo` ends in: data and settings that no experiment of the paper has."""
    cases = make(["digits"], [("FF", 0), ("MoE", 8), ("FFF", 8)], [32, 64], ["fastff"], (0, 1, 2), steps=50)
    reader = Reader(html_report.page([trained(case) for case in cases], [], regions=False))
    _, head, *rows = reader.table("data-digits")
    assert head == ["mean", "best", "mean", "best", "G_A", "M_A"]  # the paper has no digits: nothing is compared
    # Neurons, depth, seeds.
    assert ["11", "3", "3"] in [row[7:10] for row in rows if row[0] == "digits FFF w = 64, l = 8, fastff"]
    assert "glance" not in reader.sections
    assert reader.svgs == 2
    assert "fastff reproduce table1" in reader.sections["missing"]


@pytest.mark.slow
def test_trainings_with_other_settings_are_not_mixed_with_the_papers():
    """A short trial of a cell of Table 1 must not spoil its mean."""
    trial = make(["usps"], [("FFF", 8)], [16], ["fastff"], (0, 1), h=3.0, epochs=1)
    made = [*records("table1"), *(trained(case, **{case.goal: 11.0}) for case in trial)]
    reader = Reader(html_report.page(made, [], regions=False))
    assert "92.7 ± 0.1 ▲ +0.5" in [cell for row in reader.table("table1") for cell in row]
    (row,) = reader.table("data-usps")[2:]
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
    assert any(row[0].startswith(f"{bad} FFF{bad} w = 16") for row in reader.table("data-script-alert-x-script"))


def test_signs_do_not_depend_on_colour():
    made = [trained(case) for case in make(["usps"], [("FFF", 8)], [16], ["paper"], (0,), h=3.0) if case.goal == "G_A"]
    made[0].result.G_A = 92.2
    page = html_report.page(made, [], regions=False)
    assert '<td class="up">92.2 <small>one seed</small> <b>=&nbsp;+0.0</b>' in page


def test_the_regions_are_drawn_with_the_page(monkeypatch):
    from matplotlib.figure import Figure

    def panels():
        figures = [Figure() for _ in range(3)]
        for figure in figures:
            figure.subplots().imshow(np.eye(3))
        return figures

    monkeypatch.setitem(sys.modules, "fastff_reproduce.sketch", SimpleNamespace(panels=panels))
    page = html_report.page([], [])
    assert Reader(page).svgs == 3
    assert page.split('id="regions"')[1].split("</section>")[0].count("data:image/png;base64,") == 3
    needs_nothing(page)


def test_the_page_starts_with_numbers_and_explains_abbreviations_once_after_them():
    page = whole()
    places = [page.index(text) for text in ('class="cards"', 'id="glance"', 'id="words"', 'id="table1"')]
    assert places == sorted(places)
    assert page.count("<dt>G_A</dt>") == 1
    assert re.findall(r'<p class="number">(.*?)</p>', page)[1] == "12 of 128"
