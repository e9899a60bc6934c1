"""benchmarks/int8_accuracy.py: what its rows say of int8 leaves, right and broken, on small models."""

import copy
import csv
import importlib
from pathlib import Path

import int8_accuracy
import pytest
import torch

import fastff
from fastff.surgery import quantize

pytest.importorskip("safetensors")
FOLDER = Path(__file__).parents[2] / "examples"


def rows_in(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def digits(output, *given):
    pytest.importorskip("sklearn")
    pytest.importorskip("fastff_reproduce")
    small = ["--dataset", "digits", "--widths", "16", "--leaf-widths", "4", "--steps", "60", "--commit", "abc"]
    int8_accuracy.main(["mnist", *small, "--output", str(output), *given])
    return rows_in(output)


def layer_and_data():
    torch.manual_seed(0)
    return fastff.FFF(24, 10, depth=3, leaf_width=8).eval(), torch.randn(4000, 24)


def compared(layer, x):
    model, fresh = int8_accuracy.converted(layer)
    before = int8_accuracy.logits(model, [x])
    score = int8_accuracy.accuracy_for(before.argmax(-1))
    return int8_accuracy.compare(model, fresh, x.split(1000), int8_accuracy.logits, score, int8_accuracy.agreement)


quantize_rows = quantize.quantize_rows


def coarse(weight):
    """Rows of -1, 0 and 1: a quantisation that loses most of the weights."""
    scale = weight.detach().abs().amax(-1)
    return (weight.detach() / scale.unsqueeze(-1)).round().to(torch.int8), scale


def unscaled(weight):
    numbers, scale = quantize_rows(weight)
    return numbers, torch.ones_like(scale)


def test_the_converted_model_is_the_trained_layer():
    layer, x = layer_and_data()
    model, fresh = int8_accuracy.converted(layer)
    assert torch.equal(model(x), layer(x))
    assert not any(isinstance(module, fastff.FFF) for module in fresh.modules())


def test_int8_leaves_predict_the_same():
    row = compared(*layer_and_data())
    assert row["float32"] == 100.0
    assert row["int8"] > 98.5  # random logits are close to each other
    assert row["changed"] == pytest.approx((100 - row["int8"]) / 100)
    assert row["difference"] == pytest.approx(row["int8"] - 100)
    # Uniform weights: rounding errs by 1/127/sqrt(12) of the largest, which is sqrt(3) of a typical one; two layers.
    assert 0 < row["output_error"] < 0.01
    assert (row["rerouted"], row["same_after_loading"]) == (0, "yes")
    assert row["bytes_int8"] < 0.6 * row["bytes_float32"]


@pytest.mark.parametrize("broken", [coarse, unscaled])
def test_a_broken_quantisation_shows(broken, monkeypatch):
    monkeypatch.setattr(quantize, "quantize_rows", broken)
    row = compared(*layer_and_data())
    assert row["int8"] < 95
    assert row["output_error"] > 0.1


def test_a_changed_node_counts_as_rerouted():
    layer, x = layer_and_data()
    other = copy.deepcopy(layer)
    assert int8_accuracy.rerouted(layer, other, [x]) == (0, 0)
    other.node_weight.data[0] *= -1  # the root sends every input to the other half
    other.node_bias.data[0] *= -1
    assert int8_accuracy.rerouted(layer, other, [x]) == (len(x), 0)


def test_a_tie_is_told_apart():
    layer, x = layer_and_data()
    layer.node_weight.data[0], layer.node_bias.data[0] = 0, 1e-9
    layer.node_weight.data[0, :2] = torch.tensor([1.0, -1.0])  # the root's logit: x[0] - x[1] + 1e-9
    x[:, 0], x[:, 1] = 1, 0
    x[0, 1] = 1
    other = copy.deepcopy(layer)
    other.node_bias.data[0] = -1e-9
    assert int8_accuracy.rerouted(layer, other, [x]) == (1, 1)


def test_a_save_that_changes_a_weight_is_found(monkeypatch):
    model, fresh = int8_accuracy.converted(layer_and_data()[0])
    fastff.quantize_(model)
    x = torch.randn(9, 24)
    assert int8_accuracy.same_after_loading(model, copy.deepcopy(fresh), x, int8_accuracy.logits)
    load_ = fastff.load_

    def spoiled(model, folder):
        load_(model, folder)
        model[0].leaf_out_weight.data[0, 0, 0] += 1

    monkeypatch.setattr(fastff, "load_", spoiled)
    assert not int8_accuracy.same_after_loading(model, fresh, x, int8_accuracy.logits)


@pytest.mark.slow
def test_digits_keep_their_accuracy_and_rows_are_made_once(tmp_path, capsys):
    output = tmp_path / "rows.csv"
    (row,) = digits(output)
    assert float(row["float32"]) > 60
    assert abs(float(row["difference"])) < 1  # of 359 images, three
    assert float(row["changed"]) < 0.01
    assert (row["rerouted"], row["same_after_loading"], row["commit"]) == ("0", "yes", "abc")
    said = capsys.readouterr().out
    assert "mnist, 4 leaves of 4, seed 0" in said
    assert digits(output) == [row]
    assert capsys.readouterr().out == said
    assert [one["seed"] for one in digits(output, "--seeds", "0,1")] == ["0", "1"]


@pytest.mark.slow
def test_minilm_keeps_its_cosine(tmp_path, monkeypatch):
    """A small encoder with random weights in place of MiniLM, and random tokens in place of text."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(FOLDER)
    minilm = importlib.import_module("minilm")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    dense = transformers.BertModel(transformers.BertConfig(vocab_size=50, initializer_range=0.3, **sizes)).eval()

    def prepare(o):
        ids = torch.randint(50, (o.sentences + o.held_out, 8), generator=torch.Generator().manual_seed(0)).tolist()
        return dense, minilm.Text(ids[: o.sentences], ids[o.sentences :], pad=0)

    monkeypatch.setattr(minilm, "prepare", prepare)
    output = tmp_path / "rows.csv"
    digits(output)
    small = ["--sizes", "2x24", "--sentences", "256", "--samples", "2048", "--held-out", "40", "--commit", "abc"]
    for _ in range(2):
        int8_accuracy.main(["minilm", *small, "--output", str(output)])
    _, row = rows_in(output)  # both parts write into one file: they have the same columns
    assert 0.5 < float(row["float32"]) < 0.9999
    assert abs(float(row["difference"])) < 0.002
    assert 0 < float(row["output_error"]) < 0.02
    assert (row["rerouted"], row["same_after_loading"], row["inputs"]) == ("0", "yes", "40")
