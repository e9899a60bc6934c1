"""export_text and path_text of the scikit-learn estimators: in the units of their data."""

import re

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")
from fastff.integrations.sklearn import FFFClassifier, FFFRegressor
from fastff.integrations.standardize import standardized
from fastff.regions import margin


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(120, 3)) * [1.0, 1e3, 1e-3] + [5.0, -1e4, 0.0]
    return X, (X[:, 0] > 5) * 1 + (X[:, 1] > -1e4)


def by_text(text, X):
    """The leaf of each sample by the text, for names x0, x1, x2 and spacing 3."""
    leaf = np.full(len(X), -1)
    for i, row in enumerate(X):
        lines, level = iter(text.splitlines()), 0
        for line in lines:
            depth = line.index("|---") // 4
            if depth != level:
                continue  # behind a turn that was not taken
            rest = line[4 * depth + 5 :]
            if found := re.match(r"leaf (\d+)", rest):
                leaf[i] = int(found[1])
                break
            rule = re.sub(r"x(\d)", r"row[\1]", rest)
            level += bool(eval(rule, {"row": row}))
    return leaf


@pytest.mark.parametrize("standardize", [True, False])
def test_the_text_routes_as_apply_does(data, standardize):
    X, y = data
    X = X if standardize else standardized(X, X.mean(0), X.std(0))
    model = FFFClassifier(depth=2, leaf_width=2, epochs=2, standardize=standardize, random_state=0).fit(X, y)
    sure = margin(model.layer_, torch.tensor((X - model.mean_) / model.scale_, dtype=torch.float32)).distance > 1e-5
    text = model.export_text(digits=None, max_terms=None)
    assert np.array_equal(by_text(text, X)[sure], model.apply(X)[sure])
    assert sure.sum() > 110
    first = model.path_text(X[7], digits=None)
    assert first.startswith(f"leaf {model.apply(X[7:8])[0]}, ")
    assert first == model.path_text(X[7:8], digits=None)
    rules = [line.split(": ", 1)[1].split(" (here")[0] for line in first.splitlines()[1:]]
    assert len(rules) == 2
    assert all(rule in text for rule in rules)
    assert all(eval(re.sub(r"x(\d)", r"row[\1]", rule), {"row": X[7]}) for rule in rules)


def test_leaves_say_what_they_predict(data):
    X, y = data
    words = np.array(["no", "one", "two"])[y]
    model = FFFClassifier(depth=1, leaf_width=2, epochs=2, random_state=0).fit(X, words)
    text = model.export_text(X, class_names=["none", "half", "both"], feature_names=["a", "b", "c"])
    leaf, predicted = model.apply(X), model.predict(X)
    for number in range(2):
        names, count = np.unique(predicted[leaf == number], return_counts=True)
        word = {"no": "none", "one": "half", "two": "both"}[names[count.argmax()]]
        share = 100 * count.max() / count.sum()
        assert f"leaf {number}: {count.sum()} inputs, class {word} ({share:.0f} %)" in text
    assert "*a" in text
    assert f"class {names[count.argmax()]} " in model.export_text(X)


def test_a_regressor_has_rules_too(data):
    X, y = data
    model = FFFRegressor(depth=1, leaf_width=2, epochs=2, random_state=0).fit(X, y.astype(float))
    leaf, predicted = model.apply(X), model.predict(X)
    for number in range(2):
        mean = predicted[leaf == number].mean()
        assert f"leaf {number}: {(leaf == number).sum()} inputs, mean output {mean:.3g}" in model.export_text(X)
    with pytest.raises(ValueError, match="only a classifier has classes"):
        model.export_text(class_names=["a"])
    with pytest.raises(ValueError, match="one sample; got 120"):
        model.path_text(X)
