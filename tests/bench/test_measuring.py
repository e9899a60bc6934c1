import types

import pytest
import torch

from fastff import bench
from fastff.backends import BACKENDS, available, reference
from fastff.bench import Case, measure
from fastff.bench import rows as store

SMALL = Case(in_features=20, out_features=12, leaf_width=4, depth=3, batch=33)
ODD = [
    SMALL,
    Case(7, 5, 1, 0, 9),
    Case(7, 5, 3, 1, 1, activation="gelu"),
    Case(20, 12, 4, 6, 65, node_width=3, activation="swiglu"),
    Case(20, 12, 4, 3, 33, "bfloat16"),
]
cases = pytest.mark.parametrize("case", ODD, ids=str)


def quick(case, **options):
    return measure(case, **{"budget": 0.05, "samples": 5, "bandwidth": 1e10} | options)


@cases
def test_all_models_are_right_and_have_times(case):
    found = quick(case)
    assert [(r.model, r.backend) for r in found.results] == bench.planned(bench.MODELS, [*available(), "auto"])
    for result in found.results:
        if result.status == "skipped":  # a backend that cannot serve the case says why
            assert result.note
            assert result.backend not in ("", "reference", "aten", "auto")
            continue
        assert result.status == "ok", f"{result.model} {result.backend}: {result.note}"
        assert result.error <= result.allowed
        assert 0 < result.times.p20 <= result.times.median <= result.times.p80
        assert result.times.samples >= 5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size", [(7, 5, 1, 0, 9), (64, 48, 16, 3, 1), (64, 48, 8, 5, 257)], ids=str)
def test_all_models_are_right_on_a_gpu(size, dtype):
    """Each as a replayed CUDA graph, which is what is checked and timed."""
    found = quick(Case(*size, dtype, "cuda"))
    wrong = [f"{r.model} {r.backend}: {r.note}" for r in found.results if r.status == "wrong"]
    assert not wrong
    by = {(r.model, r.backend): r for r in found.results}
    for name in (("FF", ""), ("gather", ""), ("FFF", "auto")):
        assert by[name].times.median > 0
    assert bench.bandwidth("cuda", size=2**26) > 1e10


@pytest.fixture
def wrong(monkeypatch):
    """A backend that is right but for one value of one leaf, which it forgets."""
    module = types.ModuleType("wrong")
    module.__dict__.update({name: value for name, value in vars(reference).items() if not name.startswith("__")})

    def visit(x, leaf, leaves, activation):
        y = reference.visit(x, leaf, leaves, activation)
        y[leaf == leaf[0], -1] = 0
        return y

    module.visit = visit

    def hard(x, tree, leaves, activation):
        leaf = reference.route(x, tree, activation)
        return visit(x, leaf, leaves, activation), leaf

    module.hard = hard
    monkeypatch.setitem(BACKENDS, "wrong", module)
    return "wrong"


def test_a_wrong_backend_is_caught_and_gets_no_time(wrong):
    found = quick(SMALL, backends=["reference", wrong])
    by = {(r.model, r.backend): r for r in found.results}
    for model in ("MoE", "FFF"):
        assert by[model, wrong].status == "wrong"
        assert by[model, wrong].times is None
        assert "relative error" in by[model, wrong].note
        assert by[model, "reference"].status == "ok"
    rows = store.rows_of(found, store.about("cpu", "test", "c0ffee"))
    (row,) = [row for row in rows if (row["model"], row["backend"]) == ("FFF", wrong)]
    assert row["median_us"] is None
    assert row["speedup_dense"] is None
    assert row["times_floor"] is None


def test_a_backend_that_raises_is_wrong_and_the_others_go_on(wrong, monkeypatch):
    def fail(*_):
        raise RuntimeError("no such kernel\nmore")

    monkeypatch.setattr(BACKENDS[wrong], "visit", fail)
    monkeypatch.setattr(BACKENDS[wrong], "hard", fail)
    by = {(r.model, r.backend): r for r in quick(SMALL, backends=[wrong, "auto"]).results}
    assert by["FFF", wrong].status == "wrong"
    assert by["FFF", wrong].note == "RuntimeError: no such kernel"
    assert by["FFF", "auto"].status == "ok"


def test_measuring_leaves_the_random_numbers_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    quick(SMALL, backends=["reference"])
    assert torch.equal(torch.rand(3), expected)


def test_floor_of_a_measurement():
    found = quick(Case(20, 12, 4, 3, 1), backends=["reference"], bandwidth=2e9)
    assert (found.leaves, found.nodes) == (1, 3)
    assert found.floor_us == pytest.approx(4 * (4 * 20 + 4 + 4 * 12 + 12 + 3 * 21 + 32) / 2e9 * 1e6)
    (fff,) = [result for result in found.results if result.model == "FFF"]
    assert found.times_floor(fff) == pytest.approx(fff.times.median / found.floor_us)


def test_what_does_not_fit_is_said_and_not_tried(monkeypatch):
    monkeypatch.setattr("fastff.bench.hardware.free_memory", lambda device: 4000)
    found = quick(SMALL, backends=["reference"])
    assert {result.status for result in found.results} == {"skipped"}
    assert all("the layer needs" in result.note for result in found.results)
    monkeypatch.setattr("fastff.bench.hardware.free_memory", lambda device: 13800)  # all but the hidden layer of FF
    found = quick(SMALL, backends=["aten"])
    by = {result.model: result for result in found.results}
    assert by["FF"].status == "skipped"
    assert "GiB are free" in by["FF"].note
    assert by["FFF"].status == "ok"
    assert found.speedup(by["FFF"], "FF") is None
