"""Every family of the installed transformers: its blocks are replaced and its outputs stay, or it is refused.

results/families.csv has a row for each, which `python scripts/families.py` writes; these tests repeat it. With another
transformers than the one in the file a family may fare differently, but no model may ever change its outputs.
"""

import csv
from pathlib import Path

import pytest
import torch

import fastff

pytest.importorskip("transformers")
import transformers

from family_check import assert_same, attempt, double, outputs, row, tried_families
from family_models import build
from fastff.surgery.example import example_of

PATH = Path(__file__).parents[2] / "results" / "families.csv"
with PATH.open(newline="", encoding="utf-8") as file:
    ROWS = {cells["family"]: cells for cells in csv.DictReader(file)}
SAME_VERSION = {cells["transformers"] for cells in ROWS.values()} == {transformers.__version__}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", [name for name, cells in ROWS.items() if cells["outcome"] != "not built"])
def test_replaced_exactly_or_refused_with_a_reason(family):
    now = row(family, [ROWS[family]["kind"]])
    assert now["outcome"] in ("replaced", "mixture", "refused", "none", "not built")
    assert now["outcome"] == "replaced" or now["reason"]
    if SAME_VERSION:
        assert now == ROWS[family]


@pytest.mark.skipif(not SAME_VERSION, reason="the rows are of another transformers")
def test_no_family_is_left_out():
    assert list(ROWS) == tried_families()


def test_nine_in_ten_families_with_a_block_are_replaced():
    """Mixtures of experts included: they count as not replaced."""
    outcomes = [cells["outcome"] for cells in ROWS.values()]
    count = {name: outcomes.count(name) for name in set(outcomes)}
    assert count["replaced"] >= 0.9 * (count["replaced"] + count["refused"] + count["mixture"])


def test_the_readme_has_the_count():
    outcomes = [cells["outcome"] for cells in ROWS.values()]
    replaced = outcomes.count("replaced")
    blocks = replaced + outcomes.count("refused") + outcomes.count("mixture")
    text = " ".join((PATH.parents[1] / "README.md").read_text(encoding="utf-8").split())
    assert f"Of the {blocks} model families" in text
    assert f"`replace_` converts {replaced} " in text
    assert f"lists {len(ROWS)} families" in (PATH.parents[1] / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("change", ["weights", "activation"])
def test_a_wrong_replacement_is_noticed(change):
    """The check can fail: by a hundredth of one leaf's weights, or by the other form of gelu."""
    model = build("bert")
    example = example_of(model)
    dense, exact = outputs(model, example), outputs(double(model), double(example))
    report = fastff.replace_(model, depth=1)
    assert_same(dense, exact, outputs(model, example))
    layer = model.get_submodule(report.replaced[0].name)
    with torch.no_grad():
        if change == "weights":
            layer.leaf_out_weight[0] *= 1.01
        else:
            layer.activation = "gelu_tanh"
    with pytest.raises(AssertionError):
        assert_same(dense, exact, outputs(model, example))


def test_a_mixture_of_experts_says_so():
    outcome = attempt(build("mixtral"))
    assert outcome.outcome == "mixture"
    assert outcome.reason.startswith("it is a mixture of experts with 3-D weights")
