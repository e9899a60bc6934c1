import csv
import math
import subprocess
import sys
import time
import types

import pytest
import torch

import fastff
from fastff import bench
from fastff.backends import BACKENDS, available, reference
from fastff.bench import Case, count_visited, floor_bytes, measure, presets
from fastff.bench import rows as store
from fastff.bench.correctness import dense_answer, gate_answer, judge, tree_answer
from fastff.bench.models import Problem, dense, gather, mixture_of_experts, rotation
from fastff.bench.timing import OtherLoad, fastest, free_threads, interleave

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


@pytest.mark.parametrize("broken", ["route", "bias", "nan"])
def test_the_check_sees_what_can_go_wrong(broken):
    """A wrong branch of one sample, a forgotten bias, a NaN: each is far beyond rounding."""
    problem = Problem(SMALL)
    x = problem.inputs[0]
    answer, leaf = tree_answer(x, problem.tree, problem.leaves, "relu")
    with torch.no_grad():
        y = reference.visit(x, leaf, problem.leaves, "relu")
        assert judge(y, answer).right
        if broken == "route":
            row = int(answer.rows[0])
            leaf[row] ^= 1
            y = reference.visit(x, leaf, problem.leaves, "relu")
        elif broken == "bias":
            y = reference.visit(x, leaf, problem.leaves._replace(out_bias=None), "relu")
        else:
            y[int(answer.rows[0]), 0] = math.nan
        assert not judge(y, answer).right


def test_answers_are_those_of_float64_layers():
    """Of the FFF, the dense layer and the mixture of experts, each as a layer of its own."""
    case = Case(20, 12, 4, 3, 33, node_width=2, activation="geglu")
    problem = Problem(case)
    x = problem.inputs[0]
    layer = fastff.FFF(20, 12, depth=3, leaf_width=4, node_width=2, activation="geglu", dtype=torch.float64)
    layer.load_state_dict({name: value.double() for name, value in problem.layer.state_dict().items()})
    answer, leaf = tree_answer(x, problem.tree, problem.leaves, "geglu")
    assert len(answer.rows) > 30
    with torch.no_grad(), fastff.backend("reference"):
        torch.testing.assert_close(answer.output, layer.eval()(x.double())[answer.rows])
        assert torch.equal(leaf, layer.route(x.double()))

        moe = fastff.baselines.MoE(
            20, 12, num_experts=8, expert_width=4, k=1, activation="geglu", dtype=torch.float64
        ).eval()
        moe.gate_weight.copy_(problem.gate)
        for name, value in problem.layer.named_parameters():
            if name.startswith("leaf_"):
                getattr(moe, name.replace("leaf", "expert")).copy_(value)
        answer = gate_answer(x, problem.gate, problem.leaves, "geglu")
        torch.testing.assert_close(answer.output, moe(x.double())[answer.rows])
        assert judge(mixture_of_experts(problem, reference)(x), answer).right

        ff = fastff.baselines.FF(20, 12, width=32, activation="geglu", dtype=torch.float64).eval()
        ff.up.weight.copy_(problem.layer.leaf_in_weight.flatten(0, 1))
        ff.up.bias.copy_(problem.layer.leaf_in_bias.flatten())
        ff.gate.weight.copy_(problem.layer.leaf_gate_weight.flatten(0, 1))
        ff.gate.bias.copy_(problem.layer.leaf_gate_bias.flatten())
        ff.down.weight.copy_(problem.layer.leaf_out_weight.flatten(0, 1).T)
        ff.down.bias.copy_(problem.out_bias)
        answer = dense_answer(x, problem.leaves, "geglu", problem.out_bias)
        torch.testing.assert_close(answer.output, ff(x.double())[answer.rows])


def test_a_decision_within_rounding_is_left_out():
    """An input on the boundary of the root may go either way; a clear one must not."""
    problem = Problem(Case(20, 12, 4, 1, 4))
    weight, bias = problem.layer.node_weight[0].detach(), problem.layer.node_bias[0].detach()
    x = problem.inputs[0]
    x[0] -= weight * (x[0] @ weight + bias) / (weight @ weight)  # onto the plane
    answer, _ = tree_answer(x, problem.tree, problem.leaves, "relu")
    assert 0 not in answer.rows.tolist()
    assert len(answer.rows) == 3


def test_opponents_share_the_storage_of_the_layer():
    problem = Problem(SMALL)
    shared, own = dense(problem)
    for model in (shared, own):
        assert model.up.weight.data_ptr() == problem.layer.leaf_in_weight.data_ptr()
        assert model.width == problem.layer.training_width == 32
    assert shared.down.weight.data_ptr() == problem.layer.leaf_out_weight.data_ptr()
    assert own.down.weight.is_contiguous()
    with torch.no_grad():
        torch.testing.assert_close(own(problem.inputs[0]), shared(problem.inputs[0]))
        torch.testing.assert_close(gather(problem)(problem.inputs[0]), problem.layer(problem.inputs[0]))


def test_floor_by_hand():
    """Three samples, two in leaf 0 and one in leaf 3 of a tree of depth 2: 2 leaves and all 3 nodes."""
    leaf = torch.tensor([0, 3, 0])
    assert count_visited(leaf, 2) == (2, 3)
    assert count_visited(torch.tensor([0, 1]), 2) == (2, 2)
    assert count_visited(torch.tensor([5]), 3) == (1, 3)
    assert count_visited(torch.tensor([0, 0]), 0) == (1, 0)
    case = Case(in_features=10, out_features=7, leaf_width=3, depth=2, batch=3)
    one_leaf = 3 * 10 + 3 + 3 * 7 + 7
    one_node = 10 + 1
    assert floor_bytes(case, 2, 3) == 4 * (2 * one_leaf + 3 * one_node + 3 * (10 + 7))
    gated = Case(10, 7, 3, 2, 3, "bfloat16", activation="swiglu", node_width=5)
    one_leaf, one_node = 2 * (3 * 10 + 3) + 3 * 7 + 7, 5 * 10 + 5 + 5 + 1
    assert floor_bytes(gated, 1, 2) == 2 * (one_leaf + 2 * one_node + 3 * (10 + 7))
    for size in (case, gated):
        layer = Problem(size).layer
        assert size.parameter_bytes == sum(p.numel() * p.element_size() for p in layer.parameters())


def test_floor_of_a_measurement():
    found = quick(Case(20, 12, 4, 3, 1), backends=["reference"], bandwidth=2e9)
    assert (found.leaves, found.nodes) == (1, 3)
    assert found.floor_us == pytest.approx(4 * (4 * 20 + 4 + 4 * 12 + 12 + 3 * 21 + 32) / 2e9 * 1e6)
    (fff,) = [result for result in found.results if result.model == "FFF"]
    assert found.times_floor(fff) == pytest.approx(fff.times.median / found.floor_us)


def test_speedups_compare_with_the_same_leaf_kernel():
    """MoE of the same backend; against auto the fastest MoE."""
    times = {("FF", ""): 100, ("MoE", "a"): 40, ("MoE", "b"): 20, ("FFF", "a"): 10, ("FFF", "auto"): 5}
    results = [bench.Result(*name, times=bench.Times(t, t, t, 9)) for name, t in times.items()]
    found = bench.Measurement(SMALL, results)
    slow, auto = results[3], results[4]
    assert found.speedup(slow, "FF") == 10
    assert found.speedup(slow, "MoE") == 4
    assert found.speedup(auto, "MoE") == 4
    assert found.speedup(auto, "gather") is None


class Clock:
    """A runner whose calls take what it says, and that tells when it ran."""

    def __init__(self, name, us, log):
        self.name, self.us, self.log = name, us, log

    def __len__(self):
        return 10

    def sample(self, calls):
        self.log.append(self.name)
        return self.us


def test_of_two_layouts_the_faster_counts():
    slow, fast = Clock("slow", 50.0, []), Clock("fast", 40.0, [])
    assert fastest([slow, fast]) is fast
    assert fastest([fast, slow]) is fast


def test_models_take_turns_and_slow_ones_are_left_out():
    log = []
    runners = {name: Clock(name, us, log) for name, us in (("a", 100.0), ("b", 4000.0), ("c", 1e7))}
    times, skipped = interleave(runners, budget=20.0, samples=10)
    assert list(skipped) == ["c"]
    assert "10 s a call: 5 calls pass the budget of 20 s" in skipped["c"]
    assert times["a"].median == 100
    assert times["b"].samples == 10
    assert times["a"].samples == 80  # a fast one gets more samples a turn
    turns = log[6:]
    runs = [name for i, name in enumerate(turns) if i == 0 or turns[i - 1] != name]
    assert 10 <= len(runs) <= 20  # neither does all its work before the other; the order changes
    assert runs.count("a") >= 5


def test_what_does_not_fit_is_said_and_not_tried(monkeypatch):
    monkeypatch.setattr("fastff.bench.case.free_memory", lambda device: 4000)
    found = quick(SMALL, backends=["reference"])
    assert {result.status for result in found.results} == {"skipped"}
    assert all("the layer needs" in result.note for result in found.results)
    monkeypatch.setattr("fastff.bench.case.free_memory", lambda device: 13800)  # all but the hidden layer of FF
    found = quick(SMALL, backends=["aten"])
    by = {result.model: result for result in found.results}
    assert by["FF"].status == "skipped"
    assert "GiB are free" in by["FF"].note
    assert by["FFF"].status == "ok"
    assert found.speedup(by["FFF"], "FF") is None


def test_inputs_rotate_enough_that_caches_do_not_flatter():
    """The leaves that a rotation visits at batch 1 fill the largest caches; inputs alone never fill the memory."""
    case = Case(768, 768, 32, 13, 1)
    assert rotation(case) * case.leaf_numel * 4 > 2**27
    assert rotation(Case(768, 768, 32, 5, 2**17)) == 4


def test_cases_of_the_paper():
    blocks = presets.blocks()
    assert [case.depth for case in blocks] == list(range(1, 16))
    assert {(c.in_features, c.out_features, c.leaf_width, c.batch) for c in blocks} == {(768, 768, 32, 256)}
    table1 = presets.table1()
    assert len(table1) == 2 * 4 * 4
    assert {case.training_width for case in table1} == {16, 32, 64, 128}
    assert {(case.in_features, case.out_features, case.batch) for case in table1} == {(256, 10, 2048), (784, 10, 2048)}
    table3 = presets.table3()
    assert [(case.leaf_width, case.depth) for case in table3] == [(32, 2), (16, 3), (8, 4), (4, 5), (2, 6), (1, 7)]
    assert {case.training_width for case in table3} == {128}
    regimes = [(case.depth, case.batch) for case in presets.regimes()]
    assert len(regimes) == 14
    assert (13, 2048) not in regimes


def test_rows_survive_a_file(tmp_path):
    path = tmp_path / "new" / "rows.csv"
    about = store.about("cpu", 'fastff bench size, "quoted"', "0123456")  # a commit that looks like a number
    rows = store.rows_of(quick(SMALL, backends=["reference", "auto"]), about)
    store.append(path, rows)
    store.append(path, rows)
    found = store.read(path)
    assert len(found) == 2 * len(rows)
    for row, back in zip(rows, found, strict=False):
        assert list(row) == list(back) == store.COLUMNS
        for name, value in row.items():
            if isinstance(value, float):
                assert back[name] == pytest.approx(value, rel=1e-5)
            else:
                assert back[name] == (str(value) if name in store.WORDS else value)
    assert [path.name for path in path.parent.iterdir()] == ["rows.csv"]
    assert found[0]["machine"]
    assert found[0]["commit"] == "0123456"
    (auto,) = [row for row in rows if row["backend"] == "auto"]
    with torch.inference_mode():
        said = str(fastff.explain(Problem(SMALL).layer, Problem(SMALL).inputs[0]))
    assert auto["note"] == " ".join(said.split())


def test_a_file_is_never_half_written(tmp_path, monkeypatch):
    path = tmp_path / "rows.csv"
    row = dict.fromkeys(store.COLUMNS, "") | SMALL.columns | {"model": "FFF", "status": "ok"}
    store.append(path, [row])
    before = path.read_bytes()

    def stop(self, rows):
        self.writerow(next(iter(rows)))
        raise KeyboardInterrupt

    monkeypatch.setattr(csv.DictWriter, "writerows", stop)
    with pytest.raises(KeyboardInterrupt):
        store.append(path, [row])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_done_is_known_by_size_and_commit():
    about = store.about("cpu", "test", "c0ffee")
    pairs = bench.planned(["FF", "FFF"], ["reference"])
    rows = [about | SMALL.columns | {"model": model, "backend": name, "status": "ok"} for model, name in pairs]
    done = store.finished(rows)
    assert store.is_done(SMALL, pairs, about, done)
    assert store.is_done(SMALL, pairs, about | {"date": "later", "command": "other"}, done)
    assert not store.is_done(SMALL, pairs, about | {"commit": "decaf"}, done)
    assert not store.is_done(Case(20, 12, 4, 3, 34), pairs, about, done)
    assert not store.is_done(SMALL, [*pairs, ("FFF", "auto")], about, done)
    rows[-1]["status"] = "wrong"
    assert not store.is_done(SMALL, pairs, about, store.finished(rows))


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="it has other columns"):
        store.append(path, [])
    assert path.read_text() == "a,b\n1,2\n"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"depth": -1}, "depth must be at least 0; got -1"),
        ({"batch": 0}, "batch must be at least 1; got 0"),
        ({"dtype": "int8"}, "dtype must be one of float32, .*; got 'int8'"),
        ({"device": "tpu"}, "device must be one of cpu, cuda; got 'tpu'"),
        ({"activation": "sine"}, "activation must be one of .*; got 'sine'"),
    ],
)
def test_bad_cases(options, error):
    size = {"in_features": 5, "out_features": 5, "leaf_width": 2, "depth": 1, "batch": 3}
    with pytest.raises(ValueError, match=error):
        Case(**size | options)


def test_other_processes_are_noticed():
    """One that never rests is seen; this one is not counted."""
    if OtherLoad().cores() is None:
        pytest.skip("the system does not say")
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.2)
        load = OtherLoad()
        end = time.perf_counter() + 1.0
        while time.perf_counter() < end:
            pass
        assert load.cores() > 0.2
    finally:
        busy.kill()
        busy.wait()
    load = OtherLoad()
    load.start = (load.start[0] - 10, load.start[1] - 12, load.start[2] - 12)
    assert load.cores() < 0.2  # 12 of 12 seconds were our own


def test_threads_that_have_no_core_are_left_out(monkeypatch):
    """A thread that waits for its core made a call of 20 us one of 18 ms."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)), raising=False)
    for busy, free in ((None, 4), (0.1, 4), (0.9, 3), (1.1, 3), (2.5, 1), (9.0, 1)):
        monkeypatch.setattr(OtherLoad, "cores", lambda _, busy=busy: busy)
        assert free_threads(0.0) == free


def test_a_pause_of_the_machine_leaves_no_model_out():
    """The first sample decided; one that fell into a pause left its model out."""
    pauses = [0.0, 41e6]

    class Paused(Clock):
        def sample(self, calls):
            return (pauses.pop(0) if pauses else 0.0) + super().sample(calls)

    times, skipped = interleave({"paused": Paused("paused", 100.0, [])}, budget=200.0, samples=10)
    assert not skipped
    assert times["paused"].median == 100.0


def test_bandwidth_is_plausible():
    assert 1e8 < bench.bandwidth("cpu", size=2**24) < 1e13


def test_figures_are_drawn_from_rows(tmp_path):
    """Figures of the size that has three depths, of its last rows; the other size has too few."""
    pytest.importorskip("matplotlib")
    from fastff.bench import plots

    rows = []
    for case in (*presets.blocks(depths=range(1, 5)), SMALL):
        for model, name, us in (("FF", "", 9.0), ("MoE", "aten", 8.0), ("MoE", "native", 4.0), ("FFF", "auto", 2.0)):
            times = {"median_us": us, "p20_us": us - 1, "p80_us": us + 1, "speedup_dense": 9 / us}
            row = store.about("cpu", "test", "c0ffee") | case.columns | times
            rows.append(row | {"model": model, "backend": name, "status": "ok"})
    kept = plots._latest([*rows, rows[0] | {"median_us": 5.0}, rows[0] | {"status": "wrong", "median_us": None}])
    assert len(kept) == 5 * 3
    assert kept[0]["median_us"] == 5.0
    assert {row["backend"] for row in kept if row["model"] == "MoE"} == {"native"}
    written = plots.draw(rows, tmp_path / "figures")
    assert [path.name.split("-")[0] for path in written] == ["blocks", "closeup", "speedup"]
    for path in written:
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
