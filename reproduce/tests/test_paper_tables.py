"""The tables of the report: our rows under the paper's, accuracies first."""

import re

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
from pages import ABOUT, Reader, experiments, make, records, trained, whole

from fastff_reproduce import summary
from fastff_reproduce.html_report import BUILDERS, paper_tables
from fastff_reproduce.html_report.entries import NEW, TRAINING, Section
from fastff_reproduce.runs import Case, Result
from fastff_reproduce.store import Record


@pytest.fixture(autouse=True)
def _experiments(monkeypatch):
    experiments(monkeypatch)


def test_table1_is_beside_the_papers():
    rows = Reader(whole()).table("table1")
    start = next(i for i, row in enumerate(rows) if row[:2] == ["l = 8", "published"])
    assert rows[start][2:] == ["92.2", "91.8", "92.3", "92.1", "99.3", "99.2", "99.2", "99.5"]
    assert rows[start + 1][0] == "paper"
    assert rows[start + 1][1] == "90.7 ± 0.1 ▼ -1.5"
    assert rows[start + 2][0] == "fastff"
    assert rows[start + 2][1:5] == [f"{value} ± 0.1 ▲ +0.5" for value in (92.7, 92.3, 92.8, 92.6)]


def test_every_cell_has_its_seeds_gap_and_shares():
    rows = Reader(whole()).table("table1")
    (row,) = [row for row in rows if row[0] == "USPS FFF w = 16, l = 8, fastff"]
    assert row[1:4] == ["92.7 ± 0.1 ▲ +0.5", "92.8", "92.2 ± 0.4"]
    assert row[4:7] == ["99.8 ± 0.1 ▲ +0.5", "99.9", "99.3 ± 0.5"]
    # Epochs, neurons, depth, seeds; gap, leaves, share, time.
    assert row[7:] == ["30", "50", "9", "1", "2", "+0.05", "2 of 2", "0.31", "10 s"]


def test_at_a_glance():
    head, *rows = Reader(whole()).table("glance")
    assert head[1:4] == ["recipe", "on new data (G_A)", "on training data (M_A)"]
    titles = [row[0] for row in rows if row[0].startswith("The ")]
    assert titles == ["The table1", "The table2", "The table3"]
    assert rows[0] == ["The table1", "paper", "0 of 48", "0 of 48", "+0.05", "0.31", "60"]
    assert rows[1] == ["fastff", "48 of 48", "48 of 48", "+0.05", "0.31", "60"]


def test_a_recipe_without_trees_is_not_at_a_glance():
    dense = [trained(case) for case in make(["usps"], [("FF", 0)], [16], ["fastff"], (0, 1))]
    assert paper_tables.glance(Section("table1", "Training counterparts", "", ""), dense) == []


def test_where_the_paper_has_a_figure_alone_nothing_is_compared():
    """A layer of these sizes is in Table 2 too, where it was trained in another way."""
    rows = Reader(whole()).table("inference_counterparts")
    assert len(rows) > 1
    assert not any("▲" in cell or "▼" in cell for row in rows for cell in row)
    cells = summary.cells([trained(case).result for case in make(["cifar10"], [("FFF", 32)], [128], ["paper"], [0])])
    assert cells[0].paper.G_A == 45.5


def test_table2_and_table3():
    reader = Reader(whole())
    rows = reader.table("table2")
    start = next(i for i, row in enumerate(rows) if row[0] == "w = 1024")
    assert " ".join(rows[start][1:]) == "published 41.3 35.2 53.0 96.0 65.3 99.9 9 327 21 180 1575 82"
    assert rows[start + 2][0] == "fastff"
    # G_A, M_A and the epochs of FFF, MoE and FF: here of the first.
    assert rows[start + 2][1::3] == ["41.8 ± 0.1 ▲ +0.5", "96.5 ± 0.1 ▲ +0.5", "30", "50"]
    rows = reader.table("table3")
    start = next(i for i, row in enumerate(rows) if row[0] == "l = 8")
    assert rows[start][1:] == ["published", "82.8", "", "1.9", "4", "143", "12", "3.29x", "", ""]
    names = [row[0] for row in rows[start + 1 : start + 5]]
    assert names == ["paper h=5", "paper h=inf", "fastff h=5", "fastff h=inf"]
    assert rows[start + 3][1] == "83.3 ± 0.1 ▲ +0.5"
    assert rows[start + 3][4:7] == ["4", "143", "12"]
    assert rows[1][:5] == ["FF", "published", "84.7", "", ""]
    assert [row[3] for row in rows[start + 1 : start + 5]] == ["1.90"] * 4  # as far behind it as the paper's


def test_how_far_trees_are_behind_is_told_over_common_seeds():
    accuracies = {"ViT-FF": (75.0, 74.0, 60.0), "ViT-FFF": (73.0, 73.0)}
    some = [
        Record(Result(Case("cifar10", model, 128, leaf, depth, "fastff", "G_A", seed), G_A=value), ABOUT)
        for (model, values), leaf, depth in zip(accuracies.items(), (128, 8), (0, 4), strict=True)
        for seed, value in enumerate(values)
    ]
    some.append(Record(Result(Case("cifar10", "ViT-FFF", 128, 1, 7, "fastff", "G_A", 9), G_A=70.0), ABOUT))
    section = paper_tables.table3(Section("table3", "Transformers", "beside each other", ""), some)
    head = [entry.text for entry in section.tables[0].head[0]]
    ours = [row for row in section.tables[0].rows if any(entry.text == "fastff" for entry in row)]
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
    section = paper_tables.ablation(Section("ablation", "Parts", "what each is worth", ""), some)
    assert [entry.text for entry in section.tables[0].head[0]] == ["recipe", "USPS w = 128, l = 8"]
    assert [[(entry.text, entry.difference) for entry in row] for row in section.tables[0].rows] == [
        [("fastff", None), ("94.5", None)],
        [("with more", None), ("95.5", 1.0)],
        [("without noise", None), ("92.5", -2.0)],
        [("without what does nothing", None), ("94.5", 0.0)],
    ]


@pytest.mark.parametrize("name", ["table1", "table2", "table3", "inference_counterparts"])
def test_accuracies_are_the_first_numbers_of_a_row(name):
    """A phone shows the first columns: names in at most two of them, then G_A, then M_A if there is one."""
    section = BUILDERS[name](Section(name, "The title", "", ""), records(name))
    assert section.tables
    for table in section.tables:
        names = [entry.text for entry in table.head[0] for _ in range(entry.span)]
        start = names.index(NEW)
        assert start <= 2
        accuracies = names[start : start + names.count(NEW) + names.count(TRAINING)]
        assert accuracies == sorted(accuracies)  # new data before training data, and nothing between
        for row in table.rows:
            assert not any(entry.text[:1].isdigit() for entry in row[: start - (not row[0].head)])


def test_every_table_that_a_phone_cannot_show_says_so():
    page = whole()
    wide = [len(re.findall(r"<th[ >]", part.split("<tbody>")[0])) > 5 for part in page.split("<table>")[1:]]
    assert sum(wide) == page.count('<p class="swipe"')
    hint, phone = page.index(".swipe { display: none; }"), page.index("@media (max-width: 40rem)")
    assert hint < phone < page.index(".swipe { display: block;")
    assert page.count('<div class="wide"') == page.count("<table>")
    assert ".wide { overflow-x: auto;" in page
