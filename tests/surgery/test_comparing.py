"""compare: rows beside each other, resumed after an interrupt, with the model unchanged."""

import copy
import json
import sys

import pytest
import torch
from torch import nn

import fastff
from fastff.surgery import comparison_rows
from fastff.surgery.controls import METHODS
from surgery_models import Mlp, stack

X = torch.randn(900, 16, generator=torch.Generator().manual_seed(1)) * torch.linspace(2, 0.1, 16)
DATA, HELD_OUT = list(X[:700].split(35)), list(X[700:].split(50))
QUICK = {"held_out": HELD_OUT, "budget": 0.02, "progress": False}


def small():
    torch.manual_seed(0)
    return stack(Mlp(), Mlp()).train()


def state(model):
    return copy.deepcopy(model.state_dict()), [m.training for m in model.modules()], [type(m) for m in model.modules()]


@pytest.mark.slow
def test_rows_and_the_model_unchanged():
    model = small()
    before, rng = state(model), torch.get_rng_state()
    found = fastff.surgery.compare(model, [(2, 6), (2, 22)], DATA, steps=30, rate=3e-3, **QUICK)
    assert torch.equal(torch.get_rng_state(), rng)
    after = state(model)
    assert after[1:] == before[1:]
    torch.testing.assert_close(after[0], before[0], rtol=0, atol=0)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())

    rows = {(row.method, row.size): row for row in found.rows}
    original = rows["original", "48"]
    assert original.quality == 1.0
    assert original.block_speedup == original.model_speedup == 1.0
    assert original.parameters == sum(p.numel() for p in model.parameters())
    for method, sizes in {"FFF": ("2 x 6", "2 x 22"), "dense": ("8", "24")}.items():
        few, many = (rows[method, size] for size in sizes)
        assert few.fitted_quality < few.quality < many.quality < 1
        assert few.parameters < many.parameters
    assert rows["low rank", "rank 5"].quality > rows["low rank", "rank 1"].quality
    assert 0.99 < rows["int8", "48"].quality < 1
    assert "by torch" in rows["int8", "48"].note
    assert abs(rows["FFF int8", "2 x 22"].quality - rows["FFF", "2 x 22"].quality) < 0.02
    for row in found.rows:
        assert min(row.block_us, row.block_us_original, row.model_us, row.model_us_original) > 0
    assert original in found.front


@pytest.mark.slow
def test_an_interrupted_comparison_goes_on(tmp_path, monkeypatch):
    """Rows that are done are not run again, and the result is that of one run: every row starts from the seed."""
    path, model = tmp_path / "rows.json", small()
    make, count = comparison_rows.Rows.row, []

    def interrupted(self, task, advance):
        if len(count) == 2:
            raise KeyboardInterrupt
        count.append(task[:2])
        return make(self, task, advance)

    monkeypatch.setattr(comparison_rows.Rows, "row", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fastff.surgery.compare(model, [(2, 6)], DATA, steps=5, rows=path, **QUICK)
    kept = json.loads(path.read_text())["rows"]
    assert [row["method"] for row in kept] == ["original", "FFF"]  # FFF int8 is next
    monkeypatch.setattr(comparison_rows.Rows, "row", lambda *a: (count.append(a[1][:2]), make(*a))[1])
    count.clear()
    second = fastff.surgery.compare(model, [(2, 6)], DATA, steps=5, rows=path, **QUICK)
    assert [method for method, _ in count] == [*METHODS[1:]]
    whole = fastff.surgery.compare(model, [(2, 6)], DATA, steps=5, **QUICK)
    assert [(r.method, r.quality) for r in second.rows] == [(r.method, r.quality) for r in whole.rows]
    count.clear()
    wider = fastff.surgery.compare(model, [(2, 6), (1, 9)], DATA, steps=5, rows=path, **QUICK)
    assert count == [
        ("FFF", "1 x 9"),
        ("FFF int8", "1 x 9"),
        ("dense", "10"),
        ("dense int8", "10"),
        ("low rank", "rank 2"),
        ("pruned", "10"),
    ]
    assert len(wider.rows) == 15
    with pytest.raises(ValueError, match=r"rows of another comparison: steps 5 there, 6 now\. Choose another file"):
        fastff.surgery.compare(model, [(2, 6)], DATA, steps=6, rows=path, **QUICK)
    other = small()
    nn.init.zeros_(other[0].mlp.fc1.bias)
    with pytest.raises(ValueError, match="rows of another comparison: model"):
        fastff.surgery.compare(other, [(2, 6)], DATA, steps=5, rows=path, **QUICK)


@pytest.mark.slow
def test_all_methods_read_the_same_batches():
    """A loader that shuffles, or an iterator that ends, is read once."""
    model = small()
    loader = torch.utils.data.DataLoader(X[:700], batch_size=35, shuffle=True)
    torch.manual_seed(3)
    found = fastff.surgery.compare(model, [(2, 6)], iter(loader), steps=40, methods=["FFF", "dense"], **QUICK)
    assert all(row.quality > 0.5 for row in found.rows)


@pytest.mark.slow
def test_quality_and_its_direction():
    def error(model, held_out):
        return sum(model(batch).square().mean() for batch in held_out)

    found = fastff.surgery.compare(
        small(), [(2, 6)], DATA, steps=0, quality=error, lower_is_better=True, methods=["FFF"], **QUICK
    )
    assert found.quality == "error"
    assert [row.fitted_quality for row in found.rows] == [None, None]
    assert "error: on held-out data, lower is better" in str(found)
    bad = fastff.surgery.compare(
        small(), [(2, 6)], DATA, steps=0, quality=lambda *_: float("nan"), methods=["FFF"], **QUICK
    )
    assert bad.rows[1].quality is None
    assert bad.rows[1].note == "the quality is nan"
    assert bad.front == []
    with pytest.raises(TypeError, match="quality must return a number; got 'good'"):
        fastff.surgery.compare(small(), [(2, 6)], DATA, steps=0, quality=lambda *_: "good", **QUICK)


@pytest.mark.slow
def test_int8_that_cannot_run_says_why(monkeypatch):
    """A quantised copy that fails in its forward is a row with a note, and the other rows are there."""

    class Broken(nn.Module):
        def forward(self, x):
            raise RuntimeError("no kernel")

    def broken(method, original, blocks):
        made = copy.deepcopy(original)
        made[0].mlp.act = Broken()
        return made, method

    monkeypatch.setattr("fastff.surgery.controls.int8_copy", broken)
    found = fastff.surgery.compare(small(), [(2, 6)], DATA, steps=0, methods=["FFF", "int8"], **QUICK)
    assert [(row.method, row.quality is None) for row in found.rows] == [
        ("original", False),
        ("FFF", False),
        ("int8", True),
    ]
    assert found.rows[2].note.startswith("the int8 model does not run on data=: no kernel")
    assert found.rows[2].note in str(found)


@pytest.mark.slow
def test_rows_without_a_tool_are_made_again_with_it(tmp_path, monkeypatch):
    """Their model is bfloat16, which torch's own int8 does not take."""
    pytest.importorskip("torchao")
    model = nn.Sequential(*small(), nn.Linear(16, 16)).bfloat16()
    data = {"data": [x.bfloat16() for x in DATA], **QUICK, "held_out": [x.bfloat16() for x in HELD_OUT]}
    wanted = {"methods": ["FFF", "FFF int8", "dense int8"], "rows": tmp_path / "rows.json", "steps": 0}
    with monkeypatch.context() as patch:
        for name in ("torchao", "torchao.quantization"):
            patch.setitem(sys.modules, name, None)
        _, tree, small_tree, dense = fastff.surgery.compare(model, [(2, 6)], **data, **wanted).rows
    assert "the leaves alone: torch's own dynamic quantisation takes float32" in small_tree.note
    assert "torchao is not installed" in dense.note
    assert dense.quality is None
    assert dense.parameters < tree.parameters
    _, again, small_tree, dense = fastff.surgery.compare(model, [(2, 6)], **data, **wanted).rows
    assert again == tree
    assert (small_tree.note, dense.note) == ("by fastff and torchao", "by torchao")
    assert dense.quality is not None


def never():
    raise AssertionError("data was read")
    yield


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"sizes": [(4, 45)]}, ValueError, r"at most the 48 neurons of 0\.mlp; 4 x 45 uses 49\. Choose a smaller"),
        ({"sizes": []}, ValueError, "sizes is empty"),
        ({"sizes": 3}, TypeError, r"pairs \(depth, leaf_width\), such as \[\(4, 192\), \(4, 376\)\]; got 3"),
        ({"sizes": [(1, 2, 3)]}, TypeError, "sizes must be pairs"),
        ({"sizes": [(-1, 2)]}, ValueError, "depth must be at least 0; got -1"),
        (
            {"methods": ["FFF", "pruning"]},
            ValueError,
            "some of FFF, FFF int8, dense, dense int8, low rank, pruned, int8, int8 weights; got",
        ),
        ({"methods": "FFF"}, ValueError, "methods must be"),
        ({"steps": -1}, ValueError, "steps must be at least 0"),
        ({"rate": 0}, ValueError, "rate must be finite and positive"),
        ({"budget": 0}, ValueError, "budget must be finite and positive"),
        ({"quality": 3}, TypeError, "quality must be a function; got 3"),
        ({"held_out": []}, ValueError, "empty list"),
        ({"held_out": [torch.randn(5, 3)], "data": never()}, ValueError, "the model does not run on held_out=: Given"),
        ({"timed": torch.randn(5, 3), "data": never()}, ValueError, "the model does not run on timed=: Given"),
        ({"filter": "nothing"}, ValueError, "the filter excludes all 2"),
    ],
)
def test_errors_come_before_any_work(change, error, said):
    options = {"model": small(), "sizes": [(2, 6)], "data": DATA, **QUICK, **change}
    with pytest.raises(error, match=said):
        fastff.surgery.compare(**options)


def test_blocks_that_the_filter_leaves_out():
    options = {"steps": 0, "methods": ["FFF"], "filter": "0.mlp", **QUICK}
    found = fastff.surgery.compare(small(), [(2, 6)], DATA, **options)
    assert [one.name for one in found.skipped] == ["1.mlp"]
    assert "left out: 1.mlp" in str(found)


def test_float16_cannot_be_distilled():
    with pytest.raises(ValueError, match="Adam overflows in float16"):
        fastff.surgery.compare(small().half(), [(2, 6)], [x.half() for x in DATA], **QUICK)
