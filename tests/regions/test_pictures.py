"""Pictures hold the numbers that they should: lines, images and texts are read back from the figures."""

import io
import sys

import pytest
import torch

pytest.importorskip("matplotlib")
from matplotlib.patches import Rectangle

import fastff
from fastff.regions import History, pictures, statistics
from fastff.regions.plane import COLORS, Plane, palette, rgb
from helpers import make, two_layers


def texts(axes):
    return [text.get_text() for text in axes.texts]


@pytest.fixture(scope="module")
def digits():
    torch.manual_seed(0)
    layer = make(12, 3, depth=3)
    x, y = torch.randn(90, 12, dtype=torch.float64), torch.randint(3, (90,))
    return layer, x, y, statistics(layer, (x, y))


def test_the_tree_has_thick_lines_where_inputs_go(digits):
    _, x, _, found = digits
    axes = pictures.draw_tree(found, image_shape=(3, 4), class_names=["a", "b", "c"]).axes[0]
    widths = [line.get_linewidth() for line in axes.lines]
    shares = found.count[1:].double() / 90
    assert widths == pytest.approx((0.5 + 11 * shares).tolist())
    captions = [
        f"{name}: {int(n)}" for name, n in zip(["root", *(f"node {i}" for i in range(1, 7))], found.count, strict=False)
    ]
    captions += [f"leaf {j}: {n}" for j, n in enumerate(found.leaf_count.tolist())]
    assert [text for text in texts(axes) if ": " in text] == captions
    root = max(found.node(0).labels.values()) / 90
    assert f"{'abc'[next(iter(found.node(0).labels))]} {root:.0%}" in texts(axes)
    shown = [group for group in range(15) if found.count[group]]
    assert len(axes.images) == len(shown)
    kept = torch.stack([x[found.examples["typical"][group][0].index] for group in shown])
    expected = (kept - kept.min()) / (kept.max() - kept.min())
    for image, pixels in zip(axes.images, expected, strict=True):
        torch.testing.assert_close(torch.tensor(image.get_array()), pixels.reshape(3, 4))
    assert sum(isinstance(patch, Rectangle) for patch in axes.patches) == 15


def test_a_deep_tree_is_drawn_in_part_and_without_labels(digits):
    layer, x, *_ = digits
    axes = pictures.draw_tree(statistics(layer, x), levels=1).axes[0]
    assert [text.split(":")[0] for text in texts(axes)] == ["root", "node 1", "node 2"]
    assert "entropy" in axes.get_title()
    assert not axes.images


def test_prototypes_are_the_means(digits):
    layer, x, _, found = digits
    leaf = layer.route(x)
    used = leaf.unique().tolist()
    figure = pictures.draw_prototypes(found, image_shape=(3, 4))
    images = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    assert len(images) == len(used)
    for image, j in zip(images, used, strict=True):
        torch.testing.assert_close(torch.tensor(image), x[leaf == j].mean(0).reshape(3, 4), rtol=1e-6, atol=1e-7)
    axes = pictures.draw_prototypes(found, feature_names=[f"f{i}" for i in range(12)]).axes[0]
    rows = torch.tensor(axes.images[0].get_array())
    torch.testing.assert_close(rows[0], x[leaf == used[0]].mean(0) - x.mean(0), rtol=1e-6, atol=1e-7)
    assert [label.get_text() for label in axes.get_xticklabels()] == [f"f{i}" for i in range(12)]
    two = pictures.draw_prototypes(found, leaves=2).axes[0]
    fullest = sorted(torch.argsort(found.leaf_count, descending=True, stable=True)[:2].tolist())
    assert [label.get_text().split(":")[0] for label in two.get_yticklabels()] == [f"leaf {j}" for j in fullest]
    with pytest.raises(ValueError, match="must have 12 numbers"):
        pictures.draw_prototypes(found, image_shape=(3, 3))
    with pytest.raises(ValueError, match="each of the 12 inputs; got 1"):
        pictures.draw_prototypes(found, feature_names=["a"])


def test_the_plane_shows_answers_regions_and_softness():
    torch.manual_seed(1)
    layer = fastff.FFF(2, 3, depth=2, leaf_width=4).train()
    x, y = torch.randn(200, 2), torch.randint(3, (200,))
    fastff.initialize_tree_(layer, x)
    figure = pictures.draw_plane(layer, x, y, cells=40, class_names=["a", "b", "c"])
    assert layer.training
    axes = figure.axes[0]
    rim = 0.08 * (x.amax(0) - x.amin(0))
    plane = Plane(
        *(x.amin(0) - rim)[:1].tolist(),
        *(x.amax(0) + rim)[:1].tolist(),
        *(x.amin(0) - rim)[1:].tolist(),
        *(x.amax(0) + rim)[1:].tolist(),
        40,
    )
    layer.eval()
    soft = 1 - layer.mixture(plane.grid()).amax(-1)
    haze = torch.tensor(axes.images[1].get_array())[..., 3]
    torch.testing.assert_close(haze, 0.7 * soft.detach(), rtol=1e-4, atol=1e-4)
    assert sorted(texts(axes)) == [str(j) for j in layer.route(plane.grid()).unique().tolist()]
    points = [part.get_offsets() for part in axes.collections if type(part).__name__ == "PathCollection"]
    assert [len(part) for part in points] == y.bincount().tolist()
    assert [text.get_text() for text in figure.legends[0].texts] == ["a", "b", "c"]
    one = pictures.draw_plane(fastff.FFF(2, 1, depth=1, leaf_width=2), x, cells=10)
    assert not one.legends
    with pytest.raises(ValueError, match="a plane needs two inputs; got in_features=12"):
        pictures.draw_plane(make(12, 3), x)


def test_boundaries_follow_the_regions():
    """Blocks that are chosen everywhere or nowhere have no boundary; another block's is where it stops."""
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    left = torch.zeros(60, 60)
    left[:, :30] = 1
    Plane(-1.5, 1.5, -2.0, 2.0, 60).boundaries(axes, torch.stack([left, torch.ones(60, 60), torch.zeros(60, 60)], -1))
    (line,) = axes.collections
    (path,) = line.get_paths()
    assert abs(path.vertices[:, 0]).max() < 1e-6  # x = 0
    assert path.vertices[:, 1].min() == pytest.approx(-2)


def test_palettes_have_distinct_colours():
    assert palette(3) == COLORS[:3]
    assert len(set(palette(40))) == 40
    assert rgb(("#ff0033",)).tolist()[0] == pytest.approx([1, 0, 0.2])


def test_history_records_the_last_forward_or_data():
    model = two_layers()
    x = torch.randn(50, 5, dtype=torch.float64)
    history = History()
    model.train()(x)
    history.record(model)
    history.record(model, iter(x.split(20)), step=7)
    used, entropy = fastff.usage(model, x), fastff.training.entropies(model)
    assert history.steps == [1, 7]
    for name in ("0", "2"):
        lines = history.layers[name]
        assert lines.entropy[0] == pytest.approx(entropy[name].mean().item())
        assert lines.leaves == len(used[name].leaf_count)
        assert lines.leaves_used[1] == used[name].leaves_used
        assert lines.smallest_share[1] == used[name].smallest_share
    assert history.layers["0"].entropy[1] == pytest.approx(entropy["0"].mean().item())  # the same input in both modes
    figure = pictures.draw_training(history, label="epoch")
    drawn = [[line.get_ydata().tolist() for line in axes.lines[:2]] for axes in figure.axes]
    assert drawn[2] == [history.layers[name].entropy for name in ("0", "2")]
    assert drawn[0] == [
        [n / history.layers[name].leaves for n in history.layers[name].leaves_used] for name in ("0", "2")
    ]
    assert [text.get_text() for text in figure.legends[0].texts] == ["0", "2"]
    figure.savefig(io.BytesIO(), format="svg")
    with pytest.raises(ValueError, match="history has the layers"):
        history.record(make(5, 3), x)
    with pytest.raises(ValueError, match="history is empty"):
        pictures.draw_training(History())


def test_without_matplotlib_the_error_says_what_to_install(digits, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"pictures need matplotlib: pip install"):
        pictures.draw_prototypes(digits[3])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pictures need matplotlib: pip install"):
        pictures.draw_tree(digits[3])
