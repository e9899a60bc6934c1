import io
import re

import pytest
import torch

pytest.importorskip("matplotlib")
from matplotlib.contour import QuadContourSet

from fastff_reproduce import sketch as module
from fastff_reproduce.sketch import ARMS, panels, sketch, spiral


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(module, "STEPS", 150)
    monkeypatch.setattr(module, "CELLS", 60)


def pixels(figure):
    file = io.BytesIO()
    figure.savefig(file, format="raw")
    return file.getvalue()


def test_spiral_has_all_arms_within_the_map():
    x, arm = spiral(400, torch.Generator().manual_seed(0))
    assert arm.bincount().tolist() == [100] * ARMS
    assert x.abs().max() < module.REACH
    # An arm is the one before, turned: the same share of points in every quarter of the plane.
    quarters = (x > 0).long() @ torch.tensor([1, 2])
    assert quarters.bincount(minlength=4).min() > 70


@pytest.mark.slow
def test_three_models_learn_and_the_figure_shows_where_each_answers(quick):
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    figure = sketch(seed=1)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.get_num_threads() == threads
    panels = figure.axes
    titles = [axes.get_title() for axes in panels]
    assert [title.split(":")[0] for title in titles] == ["FF", "MoE", "FFF"]
    right = [float(re.search(r"([\d.]+)% accuracy on new points", title)[1]) for title in titles]
    assert min(right) > 75  # by chance 25
    lines = [[part for part in axes.collections if isinstance(part, QuadContourSet)] for axes in panels]
    assert [bool(drawn) for drawn in lines] == [False, True, True]
    assert [len(axes.images) for axes in panels] == [1, 1, 2]
    haze = torch.tensor(panels[2].images[1].get_array())[..., 3]  # over the map: as dark as the boundary is soft
    assert haze.shape == (60, 60)
    assert haze.max() > 0.2
    assert haze.median() < 0.1


@pytest.mark.slow
def test_a_seed_is_a_figure(quick):
    first = pixels(sketch(seed=0, depth=2, leaf_width=3))
    assert first == pixels(sketch(seed=0, depth=2, leaf_width=3))
    assert first != pixels(sketch(seed=1, depth=2, leaf_width=3))


@pytest.mark.slow
def test_panels_are_the_sketch_in_three_figures(quick):
    whole, parts = sketch(depth=2, leaf_width=3), panels(depth=2, leaf_width=3)
    assert [part.axes[0].get_title() for part in parts] == [axes.get_title() for axes in whole.axes]
    assert [len(part.axes) for part in parts] == [1, 1, 1]
