"""Seeds of a cell, joined."""

import math

import pytest

from fastff_reproduce import summary
from fastff_reproduce.runs import Case, Result


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
