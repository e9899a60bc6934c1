"""The paper's numbers, checked by their sums."""

import pytest

from fastff.bench import presets
from fastff_reproduce import paper


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
