"""The traffic of an edit: counted against the model itself, before and after."""

import copy

import pytest
import torch
from torch import nn

import fastff
from fastff.regions import edit_
from helpers import make


class Mixed(nn.Module):
    """Sequences (batch, tokens, 6): an FFF for each token, then attention spreads it."""

    def __init__(self, merged=False):
        super().__init__()
        self.fff = fastff.FFF(6, 6, depth=3, leaf_width=4)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.merged = merged

    def forward(self, x):
        y = self.fff(x.flatten(0, 1)).view(x.shape) if self.merged else self.fff(x)
        return self.attention(y, y, y, need_weights=False)[0]


@pytest.mark.parametrize("merged", [False, True])
def test_attention_spreads_an_edit_within_its_sequence_only(merged):
    model = Mixed(merged)
    data = torch.randn(30, 4, 6)
    before = copy.deepcopy(model).eval()
    record = edit_(model.fff, data[0, 0], torch.randn(6))
    state = {name: p.clone() for name, p in model.state_dict().items()}
    report = record.traffic(list(data.split(8)), model)
    assert model.training
    assert all(torch.equal(p, state[name]) for name, p in model.state_dict().items())
    model.eval()
    seen = torch.isin(model.fff.route(data), torch.tensor(record.leaves))  # (30, 4)
    with torch.no_grad():
        old, new = before(data), model(data)
        change = (model.fff(data) - before.fff(data))[seen].norm(dim=-1)
    assert (report.samples, report.inputs) == (30, 120)
    assert report.touched == int(seen.sum()) == sum(report.by_leaf.values())
    assert 0 < report.untouched_samples == int((~seen.any(1)).sum()) < 30
    assert report.untouched_share == report.untouched_samples / 30
    assert report.moved_samples == int((old != new).flatten(1).any(1).sum())
    assert torch.equal(old[~seen.any(1)], new[~seen.any(1)])
    assert (report.answers, report.changed_answers) == (120, int((old.argmax(-1) != new.argmax(-1)).sum()))
    # The report's passes visit the leaves by another kernel, which adds in another order.
    assert report.mean_change == pytest.approx(float(change.mean()), rel=1e-4)
    assert report.max_change == pytest.approx(float(change.max()), rel=1e-4)
    assert report.max_output_change == pytest.approx(float((old - new).abs().max()), rel=1e-3)
    record.undo()
    assert record.traffic(list(data.split(8)), model) == report  # what the edit did, not what the layer is now


def test_a_layer_alone_and_its_text():
    layer = make(depth=2, scale=3.0)
    x = torch.randn(50, 5, dtype=torch.float64)
    record = edit_(layer, x[:1], torch.zeros(1, 4))
    report = record.traffic(x)
    count = int((layer.route(x) == record.leaves[0]).sum())
    assert (report.inputs, report.touched, report.untouched_samples) == (50, count, 50 - count)
    assert f"inputs in touched leaves           {count} of 50 ({2 * count:.2f} %)" in str(report)


def test_other_models_and_no_data_are_errors():
    layer = make(depth=1)
    record = edit_(layer, torch.randn(1, 5), torch.zeros(1, 4))
    with pytest.raises(ValueError, match="does not have the layer"):
        record.traffic(torch.randn(3, 5), nn.Linear(5, 5))
    with pytest.raises(ValueError, match="data has no sample"):
        record.traffic(iter([]))
    model = nn.Sequential(nn.Linear(5, 4))
    model.unused, model.forward = layer, lambda x: model[0](x)
    with pytest.raises(ValueError, match="reaches the layer"):
        record.traffic(torch.randn(3, 5), model)


@pytest.mark.parametrize("shape", [(), (3,), (3, 1)])
def test_models_with_one_number_for_each_sample_or_for_all(shape):
    class Score(nn.Module):
        def __init__(self):
            super().__init__()
            self.fff = make(depth=1, scale=5.0)

        def forward(self, x):
            y = self.fff(x).sum(-1)
            return {"score": y.sum() if shape == () else y.reshape(shape)}

    model, x = Score().eval(), torch.randn(3, 5, dtype=torch.float64)
    before = copy.deepcopy(model)
    record = edit_(model.fff, x[:1], torch.ones(1, 4))
    report = record.traffic(x, model)
    old, new = before(x)["score"].detach(), model(x)["score"].detach()
    assert report.samples == (1 if shape == () else 3)
    assert report.moved_samples == int((old != new).sum())
    assert report.max_output_change == pytest.approx(float((old - new).abs().max()))
    assert (report.inputs, report.touched) == (3, int((model.fff.route(x) == record.leaves[0]).sum()))


def test_a_layer_that_is_used_twice():
    """The second call sees other inputs once the first has changed: its touched inputs were compared with others."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fff = make(5, 5, depth=2, scale=5.0)

        def forward(self, x):
            return self.fff(self.fff(x))

    model, x = Twice().eval(), torch.randn(40, 5, dtype=torch.float64)
    before = copy.deepcopy(model)
    record = edit_(model.fff, x[:1], 3 * torch.ones(1, 5))
    report = record.traffic(x, model)
    with torch.no_grad():
        inputs = torch.cat([x, model.fff(x)])
        seen = torch.isin(model.fff.route(inputs), torch.tensor(record.leaves))
        change = (model.fff(inputs) - before.fff(inputs))[seen].norm(dim=-1)
        moved = (model(x) != before(x)).any(1)
    assert (report.samples, report.inputs, report.touched) == (40, 80, int(seen.sum()))
    assert report.mean_change == pytest.approx(float(change.mean()))
    assert report.moved_samples == int(moved.sum())
    assert report.untouched_samples == int((~seen.view(2, 40).any(0)).sum())
