"""benchmarks/large_layers.py: its sizes, its peers and its rows, on small layers."""

import csv
import warnings

import large_cells
import large_eager
import large_layers
import large_skew
import large_sweep
import large_table
import pytest
import torch
from large_cells import Cell

from fastff import functional
from fastff.backends import reference
from fastff.bench import Case, Result
from fastff.bench.correctness import judge
from fastff.bench.models import Problem
from fastff.bench.workbench import Workbench
from helpers import ACTIVATIONS

SMALL = Case(24, 16, 5, 3, 65)


def options(part="table", *given):
    return large_layers.arguments([part, "--device", "cpu", "--tiny", *given])


def rows_in(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def run_main(monkeypatch, *given):
    monkeypatch.setattr("sys.argv", ["large_layers.py", *given, "--device", "cpu", "--tiny"])
    large_layers.main()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["table", "--resume"], "--resume needs --output"),
        (["sweep", "--sizes", "0"], "--sizes must be at least 1; got 0"),
        (["tables"], "invalid choice: 'tables'"),
    ],
)
def test_bad_arguments_are_refused(given, said, capsys):
    with pytest.raises(SystemExit):
        large_layers.arguments(["--device", "cpu", *given])
    assert said in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_missing_is_named(capsys):
    with pytest.raises(SystemExit):
        large_layers.arguments(["table"])
    assert "--device cuda needs a GPU that torch can use" in capsys.readouterr().err


def test_the_sweep_draws_the_same_sizes_from_the_same_seed():
    wanted = large_layers.arguments(["sweep", "--device", "cpu", "--sizes", "300"])
    sizes = large_sweep.cases(wanted)
    assert sizes == large_sweep.cases(wanted)
    assert len(set(sizes)) == 300
    wanted.seed = 1
    assert sizes != large_sweep.cases(wanted)


def test_the_sweep_covers_what_it_says():
    sizes = large_sweep.cases(large_layers.arguments(["sweep", "--device", "cpu", "--sizes", "300"]))
    ranges = {"in_features": (64, 8192), "out_features": (64, 8192), "leaf_width": (1, 1024)}
    for name, (low, high) in (ranges | {"depth": (1, 12), "batch": (1, 16384)}).items():
        values = [getattr(case, name) for case in sizes]
        assert low <= min(values) <= 2 * low
        assert high / 2 <= max(values) <= high
    assert {case.activation for case in sizes} == set(ACTIVATIONS)
    assert {case.dtype for case in sizes} == {"bfloat16", "float16", "float32"}
    assert {case.in_features % 2 for case in sizes} == {0, 1}
    assert all(case.parameter_bytes <= 12e9 for case in sizes)
    assert all(large_sweep.dense_us(case) <= 20e3 for case in sizes)


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_a_skewed_problem_reaches_the_leaves_that_were_drawn(depth):
    case = Case(64, 8, 2, depth, 4096, "bfloat16")
    leaves = 1 << depth
    counts = {
        spread: problem.layer.route(problem.inputs[0]).bincount(minlength=leaves)
        for spread in large_skew.SPREADS
        for problem in [large_skew.skewed(case, spread)]
    }
    assert counts["even"].tolist() == [4096 // leaves] * leaves
    assert counts["one leaf"].max() == 4096
    shares = 1 / torch.arange(1, leaves + 1)
    expected = 4096 * shares / shares.sum()
    # Counts of a multinomial: within five standard deviations, which are at most the square root of what is expected.
    assert (counts["zipf"].sort(descending=True).values[0] - expected[0]).abs() < 5 * expected[0].sqrt()
    assert counts["zipf"].sum() == 4096


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_the_path_matrix_finds_the_leaf_of_the_walk(depth):
    logits = torch.randn(257, (1 << depth) - 1)
    turns, lefts = large_cells.path_matrix(depth, logits)
    taken = (logits >= 0).float() @ turns.T + lefts
    assert (taken.max(-1).values == depth).all()
    assert torch.equal(taken.argmax(-1), reference.walk(logits))


@pytest.mark.parametrize("activation", ["relu", "tanh", "swiglu"])
@pytest.mark.parametrize("leaf_width", [5, 8])
def test_grouped_mm_is_the_hard_pass(activation, leaf_width):
    """In both layouts, and with leaves that are padded to a multiple of 8."""
    problem = Problem(Case(24, 16, leaf_width, 3, 65, activation=activation))
    with torch.inference_mode():
        workbench = Workbench(problem, None, 1.0)
        calls = large_cells.grouped_mm(problem)
        assert len(calls) == 2
        for call in calls:
            verdict = judge(torch.cat([call(x) for x in problem.inputs[: workbench.checked]]), workbench.answers["FFF"])
            assert verdict.right, verdict


def test_peers_are_checked_before_they_are_timed():
    problem = Problem(SMALL)
    with torch.inference_mode():
        workbench = Workbench(problem, None, 1.0)
        for make in (large_cells.moe_entry, large_cells.grouped_entry):
            entry = make(workbench)
            assert large_cells.prepare(workbench, entry) is not None
            assert entry.result.status == "ok"
            spoiled = entry._replace(
                result=Result("spoiled", ""), calls=[lambda x, call=entry.calls[0]: call(x) + 0.01]
            )
            assert large_cells.prepare(workbench, spoiled) is None
            assert spoiled.result.status == "wrong"


def test_a_model_that_raises_does_not_stop_the_others():
    def broken(x):
        raise KeyError("as a compiler might")

    with torch.inference_mode():
        workbench = Workbench(Problem(SMALL), None, 1.0)
        entries = [large_cells.Entry(Result("broken", ""), [broken]), large_cells.Entry(Result("FFF", "auto"))]
        found = large_cells.time_all(workbench, entries, options())
    assert [result.status for result in found.results] == ["raised", "ok"]
    assert "KeyError" in found.results[0].note


def test_a_cell_that_raises_gets_a_row():
    def broken():
        raise RuntimeError("no memory\nand more")

    rows = large_layers.run("table", [Cell("one", broken)], {}, {"machine": "m"}, lambda fresh: None)
    assert [(row["cell"], row["status"], row["note"]) for row in rows] == [("one", "raised", "RuntimeError: no memory")]


def test_a_fallback_counts_as_raised(monkeypatch):
    hard = functional.hard

    def warned(*args, **given):
        warnings.warn("the triton kernel failed", RuntimeWarning, stacklevel=2)
        return hard(*args, **given)

    monkeypatch.setattr(functional, "hard", warned)
    rows = large_sweep.measure(Case(9, 7, 3, 2, 5, "float16"), options("sweep"))
    by = {row["model"]: row for row in rows}
    assert by["FFF"]["status"] == "raised"
    assert "the triton kernel failed" in by["FFF"]["note"]
    assert by["FF"]["status"] == "ok"
    assert "1 that raised" in large_sweep.summary(rows)


def test_the_paper_is_the_larger_of_two_numbers_for_one_shape():
    assert large_eager.paper(Case(784, 10, 8, 4, 2048)) == 3.78  # FashionMNIST; MNIST has 3.39
    assert large_eager.paper(Case(256, 10, 1, 4, 2048)) == 0.85
    assert large_eager.paper(Case(128, 128, 1, 7, 2048)) == 3.93


@pytest.mark.slow
def test_the_table_has_all_models_and_resumes(monkeypatch, tmp_path, capsys):
    given = ["table", "--match", "8192", "--output", str(tmp_path / "rows.csv"), "--commit", "abc"]
    run_main(monkeypatch, *given)
    said = capsys.readouterr().out
    rows = rows_in(tmp_path / "rows.csv")
    assert [row["model"] for row in rows] == ["FF", "FFF", "same neurons", "MoE", "grouped_mm"]
    assert {row["status"] for row in rows} == {"ok"}
    assert rows[1]["target_us"] == "42"
    assert all(float(row["median_us"]) > 0 and float(row["error"]) <= float(row["allowed_error"]) for row in rows)
    run_main(monkeypatch, *given, "--resume")
    assert rows_in(tmp_path / "rows.csv") == rows
    assert capsys.readouterr().out == said
    run_main(monkeypatch, *given)
    assert len(rows_in(tmp_path / "rows.csv")) == 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "match", "rows"),
    [("sweep", "l=", 9 * 3), ("skew", "l=100, d=5, gelu, batch 512", 4), ("eager", "l=1, d=7, batch 2048", 6)],
)
def test_other_parts_run(part, match, rows, monkeypatch, tmp_path, capsys):
    output = tmp_path / "rows.csv"
    run_main(monkeypatch, part, "--match", match, "--sizes", "9", "--output", str(output))
    found = rows_in(output)
    assert len(found) == rows
    assert {row["part"] for row in found} == {part}
    assert {row["status"] for row in found} == {"ok"}
    assert "FFF" in capsys.readouterr().out or part == "skew"


@pytest.mark.slow
def test_llama_runs(monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    output = tmp_path / "rows.csv"
    run_main(monkeypatch, "llama", "--match", "16 x 1 tokens, eager", "--output", str(output))
    rows = rows_in(output)
    assert [(row["model"], row["spread"]) for row in rows] == [("FF", ""), ("FFF", "even"), ("FFF", "one leaf")]
    assert {row["status"] for row in rows} == {"ok"}


def test_tables_have_every_layer_of_the_table():
    assert len(large_table.cells(options())) == 17
    assert len(large_skew.cells(options("skew"))) == 18
    assert len(large_eager.cells(options("eager"))) == 38
