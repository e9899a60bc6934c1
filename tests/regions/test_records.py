"""Records: undone exactly, in any order where that is defined; copied and saved with the model."""

import copy
import pickle

import pytest
import torch
from torch import nn

import fastff
from fastff.regions import edit_, edits, edits_state, load_edits_, records
from fastff.regions.edit_state import PREFIX
from helpers import Block, make, two_layers


def bits(layer):
    return {name: p.detach().clone().view(torch.uint8) for name, p in layer.named_parameters()}


def same(a, b):
    return all(torch.equal(value, b[name]) for name, value in a.items())


def in_leaf(layer, leaf, count=1):
    """Inputs that reach one leaf."""
    x = torch.randn(4000, layer.in_features).to(layer.node_weight)
    return x[layer.route(x) == leaf][:count]


def change(layer, leaf):
    x = in_leaf(layer, leaf)
    return edit_(layer, x, torch.randn(1, layer.out_features), note=f"leaf {leaf}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_hundred_edits_are_undone_bit_by_bit(dtype):
    layer = fastff.FFF(5, 4, depth=3, leaf_width=3, dtype=dtype)
    with torch.no_grad():
        layer.leaf_out_weight[0, 0, 0] = -0.0
    x, before = torch.randn(100, 5), bits(layer)
    for i in range(100):
        edit_(layer, x[i], torch.randn(4))
    assert [edit.number for edit in edits(layer)] == list(range(1, 101))
    assert not same(bits(layer), before)
    for edit in reversed(edits(layer)):
        edit.undo()
    assert same(bits(layer), before)
    assert edits(layer) == []


def test_edits_of_different_leaves_are_undone_in_any_order():
    layer = make(depth=2, scale=3.0)
    start = bits(layer)
    first, second = change(layer, 1), change(layer, 2)
    first.undo()
    assert not first.is_active
    assert second.is_active
    other = copy.deepcopy(layer)
    second.undo()
    assert same(bits(layer), start)
    assert [edit.note for edit in edits(other)] == ["leaf 2"]
    with pytest.raises(ValueError, match=r"edit 1 \(leaf 1\) is not among the edits of this layer"):
        first.undo()


def test_edits_of_one_leaf_are_undone_newest_first():
    layer = make(depth=2, scale=3.0)
    start = bits(layer)
    first = change(layer, 1)
    middle, now = bits(layer), None
    second = change(layer, 1)
    now = bits(layer)
    with pytest.raises(ValueError, match=r"leaves \[1\] have changed since \(edits \[2\] came later: undo them first"):
        first.undo()
    assert same(bits(layer), now)
    second.undo()
    assert same(bits(layer), middle)
    first.undo()
    assert same(bits(layer), start)


def test_force_subtracts_the_change():
    layer = make(depth=2, scale=3.0)
    start = copy.deepcopy(layer)
    first = change(layer, 1)
    second = change(layer, 1)
    now = copy.deepcopy(layer)
    first.undo(force=True)
    wanted = (
        now.leaf_out_weight[1] - (first.change.after["leaf_out_weight"] - first.change.before["leaf_out_weight"])[0]
    )
    torch.testing.assert_close(layer.leaf_out_weight[1], wanted)
    for leaf in (0, 2, 3):
        assert torch.equal(layer.leaf_out_weight[leaf], start.leaf_out_weight[leaf])
    second.undo(force=True)
    torch.testing.assert_close(layer.leaf_out_weight, start.leaf_out_weight)


def test_training_and_conversions_are_noticed():
    layer = make(depth=1, scale=3.0)
    edit = change(layer, 0)
    with torch.no_grad():
        layer.leaf_out_bias[0, 0] += 1
    with pytest.raises(ValueError, match=r"leaves \[0\] have changed since \(training"):
        edit.undo()
    with torch.no_grad():
        layer.leaf_out_bias[0, 0] -= 1
        layer.leaf_out_bias[0].copy_(edit.change.after["leaf_out_bias"][0])
        layer.leaf_out_bias[1] += 1  # another leaf
    layer.float()
    with pytest.raises(ValueError, match=r"had rows of torch.float64"):
        edit.undo(force=True)
    layer.double()


def test_an_error_while_undoing_changes_nothing(monkeypatch):
    layer = make(depth=1, scale=3.0)
    edit, writes, write = change(layer, 0), [], records._write
    now = bits(layer)

    def failing(parameters, index, rows):
        write(parameters, index, rows)
        writes.append(1)
        if len(writes) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(records, "_write", failing)
    with pytest.raises(KeyboardInterrupt):
        edit.undo()
    assert len(writes) == 2
    assert same(bits(layer), now)
    assert edit.is_active


def test_copies_have_their_own_records():
    layer = make(depth=1, scale=3.0)
    start = bits(layer)
    change(layer, 0)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        (edit,) = edits(other)
        edit.undo()
        assert same(bits(other), start)
    assert len(edits(layer)) == 1


def test_a_record_prints_its_facts():
    layer = make(depth=1, scale=3.0)
    edit = edit_(layer, in_leaf(layer, 1, 2), torch.zeros(2, 4), note="a")
    assert repr(edit).startswith("Edit(1 (a): 2 inputs, leaf 1, error ")
    edit.undo()
    assert repr(edit).endswith(", undone)")
    assert "1 (a)" in repr(edit)


def edited():
    model = two_layers()
    start = bits(model)
    change(model[0], 1)
    change(model[2], 3)
    change(model[2], 3)
    return model, start


def test_records_travel_as_tensors():
    model, start = edited()
    state = edits_state(model)
    fresh = two_layers()
    fresh.load_state_dict(model.state_dict())
    load_edits_(fresh, model.state_dict() | state)
    assert [repr(edit) for edit in edits(fresh)] == [repr(edit) for edit in edits(model)]
    for edit in reversed(edits(fresh)):
        edit.undo()
    assert same(bits(fresh), start)
    assert edits_state(fresh) == {} == edits_state(nn.Linear(2, 2))
    load_edits_(fresh, fresh.state_dict())  # none
    with pytest.raises(ValueError, match="0, 2 has edits already"):
        load_edits_(model, state)


def text(state, old, new):
    raw = bytes(state[f"{PREFIX}json"].tolist())
    assert old in raw
    state[f"{PREFIX}json"] = torch.tensor(list(raw.replace(old, new)), dtype=torch.uint8)


def spoil(state, how):
    if how == "layer":
        text(state, b'"layer": "0"', b'"layer": "7"')
    elif how == "leaf":
        text(state, b'"leaves": [3]', b'"leaves": [9]')
    elif how == "type":
        text(state, b'"inputs": 1', b'"inputs": true')
    elif how == "field":
        text(state, b'"inputs"', b'"others"')
    elif how == "parameter":
        text(state, b'"leaf_out_bias"', b'"node_bias"')
    elif how == "json":
        state[f"{PREFIX}json"] = state[f"{PREFIX}json"][:-1]
    elif how == "no json":
        del state[f"{PREFIX}json"]
    elif how == "shape":
        state[f"{PREFIX}0.after.leaf_out_bias"] = torch.zeros(2, 6)
    elif how == "missing":
        del state[f"{PREFIX}0.after.leaf_out_bias"]
    elif how == "extra":
        state[f"{PREFIX}9.after.leaf_out_bias"] = torch.zeros(1, 6)


@pytest.mark.parametrize(
    "how", ["layer", "leaf", "type", "field", "parameter", "json", "no json", "shape", "missing", "extra"]
)
def test_records_from_elsewhere_are_checked(how):
    state = edits_state(edited()[0])
    spoil(state, how)
    fresh = two_layers()
    with pytest.raises(ValueError, match="the records are invalid"):
        load_edits_(fresh, state)
    assert edits(fresh) == []


def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 48, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def test_records_are_saved_with_a_converted_model(tmp_path):
    pytest.importorskip("safetensors")
    model = encoder()
    fastff.replace_(model, depth=2)
    (name, layer), *_ = fastff.layer.fff_layers(model).items()
    start = bits(layer)
    for leaf in layer.route(torch.randn(99, 16)).unique().tolist()[:2]:
        change(layer, leaf)
    fastff.save(model, tmp_path)
    fresh = encoder()
    fastff.load_(fresh, tmp_path)
    assert [edit.note for edit in edits(fresh)] == [edit.note for edit in edits(model)]
    assert same(bits(fresh), bits(model))
    for edit in edits(fresh):  # different leaves
        edit.undo()
    assert same(bits(fresh.get_submodule(name)), start)
    fastff.save(fresh, tmp_path)
    last = encoder()
    fastff.load_(last, tmp_path)
    assert edits(last) == []


def test_a_save_with_broken_records_loads_nothing(tmp_path):
    pytest.importorskip("safetensors")
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    model = encoder()
    fastff.replace_(model, depth=1)
    layer = next(iter(fastff.layer.fff_layers(model).values()))
    change(layer, int(layer.route(torch.randn(1, 16))))
    fastff.save(model, tmp_path)
    path = tmp_path / "fastff.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    spoil(tensors, "json")
    save_file(tensors, path, metadata=metadata)
    fresh = encoder()
    before = bits(fresh)
    with pytest.raises(ValueError, match="the records are invalid"):
        fastff.load_(fresh, tmp_path)
    assert same(bits(fresh), before)


def test_edits_of_a_model_come_by_layer():
    model = nn.Sequential(Block(), Block())
    change(model[1].fff, 0)
    change(model[0].fff, 2)
    assert [(edit.layer is model[0].fff, edit.note) for edit in edits(model)] == [(True, "leaf 2"), (False, "leaf 0")]


@pytest.mark.slow
def test_records_are_saved_with_a_hugging_face_model(tmp_path):
    pytest.importorskip("transformers")
    from fastff.integrations.transformers import from_pretrained, save_pretrained
    from pretrained_models import make as pretrained

    model = pretrained("gpt2")
    fastff.replace_(model, depth=1)
    name, layer = next(iter(fastff.layer.fff_layers(model).items()))
    start = bits(layer)
    change(layer, int(layer.route(torch.randn(1, 16))))
    save_pretrained(model, tmp_path)
    loaded = from_pretrained(tmp_path)
    assert same(bits(loaded), bits(model))
    (edit,) = edits(loaded)
    edit.undo()
    assert same(bits(loaded.get_submodule(name)), start)
    (converted,) = edits(from_pretrained(tmp_path, dtype="bfloat16"))
    with pytest.raises(ValueError, match=r"had rows of torch.float32"):
        converted.undo()
