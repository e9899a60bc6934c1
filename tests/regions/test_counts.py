"""Collectors of a stream against the same computation on all of it at once."""

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastff import tree
from fastff.regions.counts import Histogram, Lowest, path_groups


def test_path_groups_are_the_path():
    leaf = torch.arange(8)
    groups = path_groups(leaf, 3)
    for j in range(8):
        assert groups[j].tolist() == [*(node for node, _ in tree.path(j, 3)), 7 + j]
    assert path_groups(torch.zeros(2, dtype=torch.int64), 0).tolist() == [[0], [0]]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 5)), max_size=40), st.integers(1, 7))
def test_histogram_counts_as_a_counter_does(pairs, batch):
    histogram = Histogram(2)
    for start in range(0, len(pairs), batch):
        leaf, value = torch.tensor(pairs[start : start + batch]).T
        histogram.add(leaf, value)
    for group in range(7):
        below = [j for j in range(4) if group in path_groups(torch.tensor(j), 2).tolist()]
        expected = Counter(value for leaf, value in pairs if leaf in below and value >= 0)
        assert list(histogram.of(group).items()) == sorted(expected.items(), key=lambda one: (-one[1], one[0]))
        purity = histogram.purity()[group]
        assert purity.isnan() if not expected else purity == max(expected.values()) / expected.total()
    assert histogram.values == sorted({value for _, value in pairs if value >= 0})


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=40), st.integers(0, 3), st.integers(1, 7))
def test_lowest_keeps_the_first_of_a_sorted_list(offers, size, batch):
    lowest = Lowest(3, size)
    for start in range(0, len(offers), batch):
        group, score = torch.tensor(offers[start : start + batch]).T
        lowest.add(group, score, torch.arange(start, start + len(group)))
    for group in range(3):
        mine = [(score, number) for number, (g, score) in enumerate(offers) if g == group]
        assert lowest.of(group) == [number for _, number in sorted(mine)[:size]]
