import csv
import dataclasses
import io
import json

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
import fastff
from cli_helpers import cells, fastff_
from fastff.bench import Choice


@pytest.mark.slow
def test_the_table_has_what_a_choice_is_made_by_and_csv_has_all():
    command = "plan --in 24 --out 16 --width 64 --neurons 12 --device cpu --deeper 0"
    done = fastff_(command)
    assert done.exit_code == 0, done.output
    assert cells(done.stdout)[0][:4] == ["yes", "8", "3", "11"]
    assert {len(row) for row in cells(done.stdout)} == {6}
    assert "training width" not in done.stdout
    reader = csv.DictReader(io.StringIO(fastff_(f"{command} --format csv").stdout))
    fields = [field.name for field in dataclasses.fields(Choice)]
    assert reader.fieldnames[: len(fields) + 1] == ["recommended", *fields]
    assert reader.fieldnames[len(fields) + 1 :][:3] == ["in_features", "out_features", "width"]
    rows = list(reader)
    assert [row["fits"] for row in rows] == ["True"] * 4 + ["False"] * 2
    assert rows[0]["training_size"] == "71"


@pytest.mark.slow
def test_plan_as_a_table_and_as_json():
    done = fastff_("plan --in 24 --out 16 --width 64 --neurons 12 --device cpu --deeper 0 --all")
    assert done.exit_code == 0, done.output
    rows = cells(done.stdout)
    assert rows[0][:6] == ["yes", "8", "3", "64", "71", "11"]
    assert [row[0] for row in rows] == ["yes"] * 4 + [""] * 2
    *_, why, line = done.stdout.splitlines()
    assert why == "Recommended: the widest leaf that fits the budget."
    assert line == "fastff.FFF(24, 16, depth=3, leaf_width=8)"
    layer = eval(line, {"fastff": fastff})
    assert (layer.depth, layer.leaf_width) == (3, 8)
    done = fastff_("plan --in 24 --out 16 --width 64 --neurons 1 --device cpu --activation silu --dtype bfloat16")
    *_, nothing, why, line = done.stdout.splitlines()
    assert (nothing, why) == ("Nothing fits the budget.", "Recommended: the nearest to the budget.")
    assert line.endswith(', activation="silu", dtype=torch.bfloat16)')
    done = fastff_("plan --in 24 --out 16 --width 64 --regions 5 --device cpu --format json")
    choices = json.loads(done.stdout)
    assert [(choice["leaf_width"], choice["depth"]) for choice in choices] == [(8, 3), (16, 3), (32, 3), (64, 3)]
    for choice in choices:
        assert 0 < choice["p20_us"] <= choice["time_us"] <= choice["p80_us"]
        assert choice["speedup"] > 0
        assert choice["fits"] is None
        assert (choice["in_features"], choice["width"], choice["dtype"]) == (24, 64, "float32")
    assert sum(choice["recommended"] for choice in choices) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "note"),
    [
        ("--in 8 --out 8 --width 16 --batch 100000000000", "a batch of 100000000000 needs"),
        ("--in 1000000 --out 1000000 --width 1000000000", "the layer needs"),
        ("--in 8 --out 8 --width 16 --regions 1099511627776 --neurons 100", "the layer needs"),
    ],
)
def test_a_plan_of_layers_that_cannot_exist_recommends_none(sizes, note):
    """Two ended in a traceback of the dense layer; the third recommended a line to paste that needed 5e5 GiB."""
    for format in ("table", "json", "csv"):
        done = fastff_(f"plan {sizes} --device cpu --format {format}")
        assert done.exit_code == 1, done.output
        assert done.exception is None or isinstance(done.exception, SystemExit)
        assert f"Nothing to recommend: no layer can be measured here: {note}" in done.stderr
        assert "Recommended" not in done.output
        assert "fastff.FFF(" not in done.output
        assert format != "json" or not any(choice["fits"] for choice in json.loads(done.stdout))


@pytest.mark.slow
def test_a_budget_of_neurons_leaves_out_what_cannot_fit():
    """`plan --deeper 16 --neurons 1` built layers of many GiB for minutes, though none could fit the budget."""
    done = fastff_("plan --in 768 --out 768 --width 3072 --deeper 16 --neurons 1 --device cpu --format json")
    assert done.exit_code == 0, done.output
    measured = [choice for choice in json.loads(done.stdout) if choice["note"] != "over the budget"]
    assert {choice["inference_size"] for choice in measured} == {13}
    assert all(choice["time_us"] > 0 for choice in measured)
