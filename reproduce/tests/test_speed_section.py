"""The section on speed."""

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
from pages import bench_rows

from fastff_reproduce.html_report import speed_section
from fastff_reproduce.html_report.entries import Section


@pytest.fixture(scope="module")
def tables():
    return speed_section.speed(Section("speed", "Speed", "", ""), bench_rows()).tables


@pytest.mark.slow
def test_speed_ups_by_depth_and_batch_are_those_of_the_rows(tables):
    table = tables[0]
    assert "768 → 768, leaf width 32" in table.caption
    head = [entry.text for entry in table.head[0]]
    assert (head[0], head[-1]) == ("leaves", "neurons")
    place, by_size = next(iter(speed_section.trees(bench_rows()).items()))
    assert table.caption.endswith(speed_section.name_of(place))
    shown = 0
    for line in table.rows:
        leaves = int(line[0].text.replace(",", ""))
        depth = leaves.bit_length() - 1
        assert line[-1].text == f"{32 + depth} of {32 * leaves:,}"
        for name, entry in zip(head[1:-1], line[1:-1], strict=True):
            size = (768, 768, 32, depth, int(name.removeprefix("batch ").replace(",", "")))
            assert entry.text == (speed_section.times(by_size[size]) if size in by_size else "-")
            shown += size in by_size
    assert shown == sum(map(speed_section.is_bert, by_size))


@pytest.mark.slow
def test_a_cpu_comes_first_and_other_machines_are_folded(tables):
    assert next(iter(speed_section.trees(bench_rows()).values())).popitem()[1]["device"] == "cpu"
    assert [table.folded for table in tables] == [False, *[True] * (len(tables) - 1)]


def test_the_papers_speed_ups_stand_in_brackets(tables):
    (table,) = [table for table in tables if "the paper's in brackets" in table.caption]
    lines = {line[0].text: line[1:] for line in table.rows}
    assert [entry.note for entry in lines["MNIST, l = 8"]] == ["(1.13x)", "(1.50x)", "(2.20x)", "(3.39x)"]
    assert lines["ViT, l = 8"][0].note == "(3.29x)"
