"""Rules as text: parsed again, they route as the hard pass does."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastff import FFF
from fastff.regions import export_text, margin, path_text
from helpers import make
from region_helpers import draw_layer

NUMBER = r"[\d.]+(?:e[+-]\d+)?"
TERM = re.compile(rf"(?:(?P<sign> [+-] )|^)(?P<number>-?{NUMBER})\*(?P<name>[^*]+?)(?= [+-] {NUMBER}\*|$)")


def evaluate(rule, names, X):
    """Whether each row of X (batch, in), float64, follows a rule such as "0.5*a - 2*b >= 1"."""
    left, sign, threshold = re.fullmatch(r"(.+) (<|>=) +(\S+)", rule).groups()
    total = torch.zeros(len(X), dtype=torch.float64)
    end = 0
    for term in TERM.finditer(left):
        assert term.start() == end
        end = term.end()
        factor = float(term["number"]) * (-1 if term["sign"] == " - " else 1)
        total += factor * X[:, names.index(term["name"])]
    assert end == len(left)
    return total >= float(threshold) if sign == ">=" else total < float(threshold)


def routed(text, names, X, spacing=3):
    """The leaf of each row by the text alone: (batch,). Every row must arrive at exactly one."""
    followed = [torch.ones(len(X), dtype=torch.bool)]
    leaf = torch.full((len(X),), -1)
    for line in text.splitlines():
        level, rest = 0, line
        while rest.startswith("|" + " " * spacing):
            level, rest = level + 1, rest[spacing + 1 :]
        assert rest.startswith("|" + "-" * spacing + " ")
        rest = rest[spacing + 2 :]
        del followed[level + 1 :]
        if found := re.match(r"leaf (\d+)", rest):
            assert (leaf[followed[level]] == -1).all()
            leaf[followed[level]] = int(found[1])
        else:
            followed.append(followed[level] & evaluate(rest, names, X))
    return leaf


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(0, 5), st.booleans())
def test_the_text_routes_as_the_hard_pass_does(seed, inputs, depth, whole):
    """Inputs of whole numbers may lie on a boundary; others within rounding of one are left out."""
    layer, x = draw_layer(seed, inputs, depth, whole)
    names = ["petal width (cm)", "a - b", "f3", "-", "x 1", "1.5"][:inputs]
    text = export_text(layer, feature_names=names, digits=None, max_terms=None)
    sure = margin(layer, x).distance > (-1 if whole else 1e-5)
    assert torch.equal(routed(text, names, x.double())[sure], layer.route(x)[sure])


def test_rules_are_in_the_units_of_the_data():
    """The layer sees (X - mean) / scale; the text takes X."""
    layer, x = draw_layer(3, 4, 4, dtype=torch.float64)
    mean, scale = torch.tensor([1e3, -5.0, 0.0, 1e-3]), torch.tensor([10.0, 1e-2, 1.0, 1e3])
    X = x * scale + mean
    text = export_text(layer, mean=mean, scale=scale, digits=None, max_terms=None)
    sure = margin(layer, x).distance > 1e-9
    assert sure.sum() > 30
    assert torch.equal(routed(text, ["x0", "x1", "x2", "x3"], X)[sure], layer.route(x)[sure])
    assert int(re.match(r"leaf (\d+)", path_text(layer, X[0], mean=mean, scale=scale))[1]) == layer.route(x[0])


def test_rounded_rules_agree_away_from_boundaries():
    """Also for features whose mean is large beside their spread: the rounded plane is right at the mean."""
    layer, x = draw_layer(5, 4, 4, dtype=torch.float64)
    mean, scale = torch.tensor([1e6, 1e6, -1e6, 0.0]), torch.ones(4)
    text = export_text(layer, mean=mean, scale=scale, digits=4)
    clear = margin(layer, x).distance > 0.02
    assert clear.sum() > 20
    assert torch.equal(routed(text, ["x0", "x1", "x2", "x3"], x + mean)[clear], layer.route(x)[clear])


def tree_by_hand():
    """x0 >= 1 goes right, else x1 decides; the node behind x0 >= 1 has no weights and sends all to leaf 3."""
    layer = make(2, 3, depth=2, scale=0.0)
    with torch.no_grad():
        layer.node_weight[0, 0] = layer.node_weight[1, 1] = 1.0
        layer.node_weight[1, 0] = -0.0625
        layer.node_bias.copy_(torch.tensor([-1.0, -2.0, 0.0]))
        for parameter in layer.leaf_parameters():
            parameter.zero_()
        layer.leaf_out_bias.copy_(torch.eye(4, 3))
    return layer


def test_the_text_line_by_line():
    layer = tree_by_hand()
    assert export_text(layer) == (
        "|--- 1*x0 <  1\n"
        "|   |--- 1*x1 - 0.0625*x0 <  2\n"
        "|   |   |--- leaf 0\n"
        "|   |--- 1*x1 - 0.0625*x0 >= 2\n"
        "|   |   |--- leaf 1\n"
        "|--- 1*x0 >= 1\n"
        "|   |--- leaf 3\n"
    )
    assert export_text(layer, max_terms=1, max_depth=1, spacing=2, feature_names=["a", "b"]) == (
        "|-- 1*a <  1\n|  |-- truncated branch of depth 1\n|-- 1*a >= 1\n|  |-- leaf 3\n"
    )
    assert "|--- 1*x1 + ... (1 smaller) <  2\n" in export_text(layer, max_terms=1)
    assert export_text(make(2, 1, depth=0)) == "|--- leaf 0\n"


def test_leaves_say_what_they_answer():
    layer = tree_by_hand()
    x = torch.tensor([[0.0, 0.0], [0.0, 1.0], [2.0, 0.0]], dtype=torch.float64)
    lines = [line.strip("|- ") for line in export_text(layer, x, class_names=["u", "v", "w"]).splitlines()]
    assert lines[2] == "leaf 0: 2 inputs, class u (100 %)"
    assert lines[4] == "leaf 1: 0 inputs"
    assert lines[6] == "leaf 3: 1 input, class u (100 %)"  # the first of three equal outputs
    assert layer.training
    assert "leaf 0: 2 inputs, mean output 1, 0, 0\n" in export_text(layer, x)


def test_the_way_of_one_input():
    layer = tree_by_hand()
    x = torch.tensor([0.5, 4.0], dtype=torch.float64)
    assert path_text(layer, x) == (
        "leaf 1, 0.5 from its nearest boundary\n"
        "node 0: 1*x0 <  1 (here 0.5, distance 0.5)\n"
        "node 1: 1*x1 - 0.0625*x0 >= 2 (here 3.97, distance 1.96)\n"
    )
    assert path_text(make(2, 1, depth=1, scale=0.0), x).endswith("which has no boundary\n")


def test_what_is_here_can_be_compared_with_the_threshold():
    """With terms left out and a mean far from 0, "here" minus the threshold is the node's logit all the same."""
    layer, x = draw_layer(7, 4, 1, dtype=torch.float64)
    text = path_text(layer, x[0] + 1e6, mean=1e6, max_terms=1, digits=6)
    threshold, here = (float(number) for number in re.search(r"(?:<|>=) +(\S+) \(here (\S+),", text).groups())
    assert here - threshold == pytest.approx(layer.node_logits(x[0]).item(), abs=1e-4)


def test_wrong_arguments_are_named():
    layer = FFF(3, 2, depth=1, leaf_width=1)
    with pytest.raises(ValueError, match="in_features=3 names; got 2"):
        export_text(layer, feature_names=["a", "b"])
    with pytest.raises(TypeError, match="a sequence of names; got the string 'abc'"):
        export_text(layer, feature_names="abc")
    with pytest.raises(ValueError, match="out_features=2 names; got 3"):
        export_text(layer, class_names=["a", "b", "c"])
    with pytest.raises(ValueError, match="digits must be at least 1"):
        export_text(layer, digits=0)
    with pytest.raises(ValueError, match="scale positive"):
        export_text(layer, scale=[1.0, 0.0, 1.0])
    with pytest.raises(ValueError, match=r"one input of shape \(3,\); got \(1, 3\). Pass a row"):
        path_text(layer, torch.zeros(1, 3))
    with pytest.raises(ValueError, match="node_width=1"):
        export_text(FFF(3, 2, depth=1, leaf_width=1, node_width=3))
