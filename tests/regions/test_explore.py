"""The data of a page against the statistics, and what may not happen when it is written."""

import base64
import json
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastff
from fastff.regions import explore, path, statistics
from fastff.regions.contents import Contents, token_text
from helpers import make

ROOT = Path(__file__).parents[2]


def losses(output, target):
    return F.cross_entropy(output, target, reduction="none")


def read(path):
    """The JSON in a page."""
    return json.loads(re.search(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"), re.S)[1])


def layer_and_data(depth=3, features=12):
    torch.manual_seed(0)
    layer = make(features, 3, depth=depth)
    x, y = torch.randn(80, features, dtype=torch.float64), torch.randint(3, (80,))
    return layer, (x, y)


def test_the_page_has_the_numbers_of_the_statistics(tmp_path):
    layer, data = layer_and_data()
    file = explore(layer, data, tmp_path / "page.html", loss=losses, class_names=["a", "b", "c"])
    page, found = read(file), statistics(layer, data, loss=losses)
    assert page["count"] == found.count.tolist()
    assert page["dead"] == found.dead_leaves()
    assert page["classes"] == {"0": "a", "1": "b", "2": "c"}
    assert page["features"] == [f"x{i}" for i in range(12)]
    for group in range(15):
        region = found.leaf(group - 7) if group >= 7 else found.node(group)
        assert page["labels"][group] == [list(pair) for pair in region.labels.items()]
        for name in ("entropy", "margin", "purity", "accuracy", "loss"):
            value = getattr(region, name)
            assert page[name][group] == (None if value is None else pytest.approx(value, rel=1e-4))
        for kind, examples in region.examples.items():
            shown = [page["inputs"][i] for i in page["examples"][kind][group]]
            assert [one[0] for one in shown] == [one.index for one in examples]
            for one, example in zip(shown, examples, strict=True):
                assert one[2] == example.leaf
                assert one[3] == pytest.approx(example.margins.tolist(), rel=1e-4)
                assert one[8] == pytest.approx(data[0][example.index].tolist(), rel=1e-4)


def test_text_cannot_become_markup(tmp_path):
    layer, data = layer_and_data()
    evil = "</script><script>alert(1)</script><!-- & \u2028"
    file = explore(layer, data, tmp_path / "page.html", class_names=[evil] * 3, title=evil, feature_names=[evil] * 12)
    text = file.read_text(encoding="utf-8")
    assert text.count("<script") == 2
    assert "alert(1)<" not in text
    assert "\u2028" not in re.search(r'id="data">(.*?)</script>', text, re.S)[1]
    page = read(file)
    assert page["title"] == page["classes"]["0"] == page["features"][0] == evil
    assert "http" not in re.sub(r"http-equiv", "", text)  # nothing to load


def test_images_share_one_scale(tmp_path):
    layer, (x, y) = layer_and_data()
    page = read(explore(layer, (x, y), tmp_path / "page.html", image_shape=(3, 4)))
    assert (page["content"], page["shape"]) == ("image", [3, 4, 1])
    shown = [one[0] for one in page["inputs"]]
    low, high = x[shown].min(), x[shown].max()
    for one in page["inputs"]:
        expected = ((x[one[0]] - low) / (high - low) * 255).round()
        assert list(base64.b64decode(one[8])) == expected.tolist()
    with pytest.raises(ValueError, match="of 12 numbers, the size of an input; got"):
        explore(layer, (x, y), tmp_path / "page.html", image_shape=(5, 4))
    assert read(tmp_path / "page.html") == page  # the old page stays


def test_images_of_torch_and_large_ones():
    example = statistics(make(4, 2, depth=1), torch.randn(3, 4, dtype=torch.float64)).node(0).examples["random"][0]
    for shape, expected in {
        (3, 8, 5): (8, 5, 3),
        (1, 8, 5): (8, 5, 1),
        (8, 5): (8, 5, 1),
        (3, 256, 128): (64, 32, 3),
    }.items():
        changed = type(example)(0, 0, 0, example.margins, torch.rand(shape))
        contents = Contents(changed, image_shape=None, decode=None, tokens=False)
        contents.measure([changed])
        assert contents.shape == expected
        assert len(base64.b64decode(contents.json(changed))) == torch.Size(expected).numel()


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 6, dtype=torch.float64)
        self.mlp = make(6, 5, depth=2)

    def forward(self, input_ids):
        return self.mlp(self.embed(input_ids).cumsum(1))


def test_text_has_its_token_marked(tmp_path):
    torch.manual_seed(0)
    words, tokens = ["a ", "b ", "<c> ", "d ", "e "], torch.randint(5, (4, 9))
    page = read(explore(Tiny(), {"input_ids": tokens}, tmp_path / "page.html", decode=words, context=2))
    assert page["content"] == "text"
    assert page["title"] == "Regions of mlp"
    assert page["tokens"][0] == sorted(
        map(list, enumerate(torch.bincount(tokens.flatten()).tolist())), key=lambda p: (-p[1], p[0])
    )
    assert page["texts"] == {str(i): word for i, word in enumerate(words)}
    for index, position, *_, (offset, *shown) in page["inputs"]:
        start = max(0, position - 2)
        assert shown == [words[token] for token in tokens[index, start : position + 3]]
        assert offset == position - start


def test_token_texts():
    class Tokenizer:
        def decode(self, tokens):
            return f"<{tokens[0]}>"

        def convert_ids_to_tokens(self, tokens):
            raise AssertionError

    for decode, text in (
        (None, "3"),
        ({3: "x"}, "x"),
        (["a"], "3"),
        (lambda token: token + 1, "4"),
        (Tokenizer(), "<3>"),
    ):
        assert token_text(decode)(3) == text
    with pytest.raises(TypeError, match="decode must be a function"):
        token_text(5)


def test_estimators_bring_their_names_and_keep_features_as_given(tmp_path):
    pytest.importorskip("sklearn")
    import numpy as np

    from fastff.integrations.sklearn import FFFClassifier, FFFRegressor

    rng = np.random.default_rng(0)
    X = rng.normal(size=(90, 4)) * [1, 10, 100, 1000] + 7
    y = np.where(X[:, 1] > 7, "high", "low")
    model = FFFClassifier(depth=2, leaf_width=4, epochs=2, random_state=0).fit(X, y)
    page = read(explore(model, (X, y), tmp_path / "page.html", feature_names=["a", "b", "c", "d"]))
    assert page["count"][3:] == np.bincount(model.apply(X), minlength=4).tolist()
    assert page["classes"] == {"0": "high", "1": "low"}
    assert page["accuracy"][0] == pytest.approx(model.score(X, y), rel=1e-4)
    assert page["loss"] is not None
    assert all(one[8] == pytest.approx(X[one[0]].tolist(), rel=1e-4) for one in page["inputs"])
    target = X[:, 0] * 2
    regressor = FFFRegressor(depth=1, leaf_width=4, epochs=2, random_state=0).fit(X, target)
    page = read(explore(regressor, (X, target), tmp_path / "page.html"))
    assert page["target"][0] == pytest.approx(target.mean(), rel=1e-4)
    assert read(explore(regressor, X, tmp_path / "page.html", follow=X[:3]))["inputs"][-1][2] == regressor.apply(X)[2]
    assert read(explore(regressor, X, tmp_path / "page.html"))["target"] is None
    with pytest.raises(ValueError, match="not fitted yet"):
        explore(FFFClassifier(), (X, y), tmp_path / "page.html")
    with pytest.raises(ValueError, match="must have 4 features"):
        explore(model, (X[:, :3], y), tmp_path / "page.html")
    from sklearn.linear_model import LinearRegression

    with pytest.raises(TypeError, match="got LinearRegression"):
        explore(LinearRegression(), X)


def test_a_large_tree_makes_a_bounded_page(tmp_path, monkeypatch):
    layer, data = layer_and_data()
    monkeypatch.setattr(
        sys.modules["fastff.regions.explore"], "PAGE", 15 * 3 * 400
    )  # room for one example of each kind
    page = read(explore(layer, data, tmp_path / "page.html"))
    assert max(len(group) for kind in page["examples"].values() for group in kind) == 1


def test_errors_leave_no_page(tmp_path):
    layer, data = layer_and_data()
    with pytest.raises(ValueError, match="feature_names must name each of the 12 numbers of an input; got 2"):
        explore(layer, data, tmp_path / "page.html", feature_names=["a", "b"])
    with pytest.raises(TypeError, match="expected a model"):
        explore(3, data, tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def test_given_inputs_can_be_followed(tmp_path):
    layer, data = layer_and_data()
    x = torch.randn(5, 12, dtype=torch.float64)
    page = read(explore(layer, data, tmp_path / "page.html", follow=(x, torch.tensor([0, 1, 2, 0, 1]))))
    way = path(layer, x)
    assert page["followed"] == 5
    for i, one in enumerate(page["inputs"][-5:]):
        assert (one[0], one[2], one[4]) == (i, way.leaf[i], i % 3)
        assert one[3] == pytest.approx(way.distance[i].tolist(), rel=1e-4)
    assert page["count"][0] == 80


def test_findings_are_on_the_page(tmp_path):
    layer, data = layer_and_data()
    page = read(explore(layer, data, tmp_path / "page.html"))
    assert [finding["problem"] for finding in page["findings"]] == ["overfragmentation", "soft boundaries"]
    page = read(explore(layer, data, tmp_path / "page.html", batch_size=16))
    assert [finding["problem"] for finding in page["findings"]][1] == "shrinking batches"
    assert fastff.regions.explore is explore


def test_the_page_has_the_colours_of_the_report():
    """Both are pages of one project; the report's style is a template of the experiments."""
    styles = []
    for name in ("src/fastff/regions/page/explore.css", "reproduce/src/fastff_reproduce/html_report/style.css.j2"):
        if not (file := ROOT / name).exists():
            pytest.skip("the experiments are not in this checkout")
        found = re.findall(r"--(page|ink|soft|line|shade|link): (#\w+);", file.read_text())
        styles.append(found)
        assert len(found) == 12  # light and dark
    assert styles[0] == styles[1]
