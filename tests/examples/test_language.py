import csv
import importlib
import json
import math
from pathlib import Path

import pytest
import torch

for needed in ("matplotlib", "rich", "transformers"):
    pytest.importorskip(needed)

FOLDER = Path(__file__).parents[2] / "examples"
TINY = "--dim 64 --layers 1 --vocabulary 400 --context 64 --batch 8 --rate 1e-2 --limit 700000 --budget 3"
TINY += " --dense 128 --sizes 2x32"


@pytest.fixture(scope="module")
def language():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield importlib.import_module("language")


@pytest.fixture(scope="module")
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def done(language, threads, tmp_path_factory):
    folder = tmp_path_factory.mktemp("language")
    o = language.options(
        [*TINY.split(), "--steps", "120", "--rows", f"{folder}/rows.csv", "--output", f"{folder}/a.png"]
    )
    rows = language.run(o, language.Console(quiet=True))
    return o, rows


@pytest.fixture(scope="module")
def text(language, done):
    o, _ = done
    return language.read_text(o.text, o.limit, o.vocabulary, o.context)


@pytest.mark.slow
def test_dense_and_fff_learn_more_than_frequencies(done, text):
    o, rows = done
    assert text.unigram_loss() < math.log(o.vocabulary)
    names = ["dense 128", "FFF, 4 leaves of 32"]
    assert [(row["model"], row["name"]) for row in rows] == [(m, n) for m in ("gpt2", "llama") for n in names]
    for row in rows:
        first = json.loads(row["curve"])[0][-1]
        assert first == pytest.approx(math.log(o.vocabulary), abs=1.0)
        assert row["loss"] < text.unigram_loss() - 0.1, row["name"]
        assert row["neurons"] == {"dense 128": 128, "FFF, 4 leaves of 32": 34}[row["name"]]


def test_the_rows_in_the_file_are_whole(language, done):
    o, rows = done
    with o.rows.open(newline="") as file:
        written = list(csv.DictReader(file))
    assert len(written) == len(rows)
    only_fff = {"depth", "leaf_width", "soft_loss", "leaves_used", "smallest_share"}
    for row in written:
        empty = {name for name, value in row.items() if value == ""}
        assert empty - {"commit", "other_load", "tf32"} == (set() if row["depth"] else only_fff)
        assert float(row["perplexity"]) == pytest.approx(math.exp(float(row["loss"])), rel=1e-4)
        assert "examples/language.py --dim 64" in row["command"]
        assert json.loads(row["curve"])[-1][0] == o.steps
    assert o.output.stat().st_size > 5000

    # The same training takes the place of its row; another one is added.
    language.save(o.rows, [rows[0] | {"loss": 1.5}, rows[1] | {"seed": 7}])
    with o.rows.open(newline="") as file:
        again = list(csv.DictReader(file))
    assert len(again) == len(rows) + 1
    assert again[0]["loss"] == "1.5"


def test_losses_are_of_the_hard_pass(language, done, text):
    """A leaf that no token reaches does not matter to eval(), and does to train(); one that is reached matters."""
    o, _ = done
    model = language.build("gpt2", o.blocks[-1], o.vocabulary, o)
    layer = language.feedforward(model)[0]
    layer = next(part for part in layer.modules() if isinstance(part, language.fastff.FFF))
    with torch.no_grad():
        layer.node_weight.zero_()
        layer.node_bias.fill_(1.0)  # always to the right: to the last leaf
    hard, soft = (language.evaluate(model, text.validation, soft=soft) for soft in (False, True))
    with torch.no_grad():
        layer.leaf_out_weight[0].normal_()
    assert language.evaluate(model, text.validation) == hard
    assert language.evaluate(model, text.validation, soft=True) != pytest.approx(soft, abs=1e-4)
    with torch.no_grad():
        layer.leaf_out_weight[-1].normal_()
    assert language.evaluate(model, text.validation) != pytest.approx(hard, abs=1e-4)


def test_models_of_a_family_differ_in_their_feedforward_blocks_alone(language, done):
    o, _ = done
    dense, fff = (
        language.build("llama", blocks, o.vocabulary, o).state_dict() for blocks in (o.blocks[0], o.blocks[-1])
    )
    common = dense.keys() & fff.keys()
    assert len(common) >= 6 + 2
    assert not any(".mlp." in name for name in common)
    assert all(torch.equal(dense[name], fff[name]) for name in common)


@pytest.mark.slow
def test_held_out_files_are_held_out_and_too_little_text_is_an_error(language, tmp_path):
    read_files = importlib.import_module("language_text").read_files
    sets = read_files(None, 1_000_000)
    assert [len(one) > 1 for one in sets] == [True] * 3
    assert not set(sets[0]) & {*sets[1], *sets[2]}
    assert sets == read_files(None, 1_000_000)
    (tmp_path / "short.txt").write_text("too little")
    with pytest.raises(SystemExit, match="--text"):
        read_files(tmp_path, 1_000_000)


@pytest.mark.parametrize("wrong", [["--models", "bert"], ["--sizes", "3"], ["--steps", "0"], ["--context", "8"]])
def test_wrong_options_are_refused_at_once(language, wrong, capsys):
    with pytest.raises(SystemExit):
        language.options(wrong)
    assert "error: --" in capsys.readouterr().err
