"""`fastff compare` on tiny models in a folder: a sentence encoder and a language model."""

import csv
import io
import json

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from cli_helpers import fastff_  # noqa: E402
from fastff.provenance import checkout  # noqa: E402
from fastff.surgery.controls import METHODS  # noqa: E402

WORDS = [f"w{i}" for i in range(44)]
SIZES = {"hidden_size": 16, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {"vocab_size": 50, "max_position_embeddings": 40, "pad_token_id": 0}
QUICK = "--batch 8 --tokens 9 --steps 4 --samples 200 --budget 0.02 --device cpu"


def folder(path, model):
    """A model and a tokenizer of whole words, as transformers saves them."""
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]")
    made.save_pretrained(path)
    model.save_pretrained(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    place = tmp_path_factory.mktemp("compare")
    torch.manual_seed(0)
    folder(place / "bert", transformers.BertModel(transformers.BertConfig(**SIZES, **TEXT)))
    llama = transformers.LlamaConfig(**SIZES, **TEXT, num_key_value_heads=1)
    folder(place / "llama", transformers.LlamaForCausalLM(llama))
    draw = torch.Generator().manual_seed(0)
    lines = [" ".join(WORDS[i] for i in torch.randint(44, (3 + n % 9,), generator=draw)) for n in range(90)]
    (place / "text.txt").write_text("\n".join(lines) + "\n\n")
    (place / "held.txt").write_text("\n".join(lines[:12]))
    (place / "empty.txt").write_text("\n\n")
    (place / "short.txt").write_text("w1\nw2\n")
    return place


@pytest.mark.slow
def test_an_encoder_by_cosine_and_rows_that_are_kept(files, tmp_path):
    rows, plot = tmp_path / "rows.json", tmp_path / "front.svg"
    command = f"compare {files}/bert --sizes 2x6 --data {files}/text.txt {QUICK} --rows {rows}"
    before = {path: path.read_bytes() for path in (files / "bert").iterdir()}
    done = fastff_(f"{command} --plot {plot}")
    assert done.exit_code == 0, done.output
    table = [line.split() for line in done.stdout.splitlines()]
    assert table[0][5:7] == ["fitted", "cosine"]
    assert [line[0] for line in table[1:10]] == [
        "original",
        "FFF",
        "FFF",
        "dense",
        "dense",
        "low",
        "pruned",
        "int8",
        "int8",
    ]
    assert "cosine (higher is better)" in plot.read_text()
    assert {path: path.read_bytes() for path in (files / "bert").iterdir()} == before

    kept = rows.read_bytes()
    again = fastff_(f"{command} --format json")
    assert again.exit_code == 0, again.output
    assert rows.read_bytes() == kept
    found = json.loads(again.stdout)
    assert [row["method"] for row in found] == ["original", *METHODS]
    assert found[0]["quality"] == pytest.approx(1, abs=1e-6)
    assert found[0]["quality_name"] == "cosine"
    assert found[1]["steps"] == 4
    assert (found[1]["depth"], found[1]["leaf_width"], found[1]["neurons"]) == (2, 6, 8)


@pytest.mark.slow
def test_a_language_model_by_perplexity_as_csv(files):
    command = (
        f"compare {files}/llama --sizes 1x5,2x6 --data {files}/text.txt --held-out {files}/held.txt --timed 1x1 {QUICK}"
    )
    done = fastff_(f"{command} --method FFF --format csv --filter *.0.mlp")
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [(row["method"], row["size"]) for row in rows] == [("original", "48"), ("FFF", "1 x 5"), ("FFF", "2 x 6")]
    assert {row["quality_name"] for row in rows} == {"perplexity"}
    assert {row["blocks"] for row in rows} == {"1"}
    assert all(row["command"] and row["date"] and row["machine"] for row in rows)
    assert {row["commit"] for row in rows} == {checkout()}  # empty where there is no checkout
    assert all(20 < float(row["quality"]) < 200 for row in rows)  # an untrained model of 50 tokens


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("{0}/none --data {0}/text.txt --sizes 2x6", "MODEL must be a folder of transformers"),
        ("{0} --data {0}/text.txt --sizes 2x6", "transformers cannot load"),
        ("{0}/bert --data {0}/none.txt --sizes 2x6", "--data must be a text file"),
        ("{0}/bert --data {0}/empty.txt --sizes 2x6", "--data must hold text, one a line"),
        ("{0}/bert --data {0}/short.txt --sizes 2x6", "--data needs at least 10 lines to hold some out; got 2"),
        ("{0}/bert --data {0}/text.txt --sizes 2-6", "--sizes must be depth x leaf width, such as 4x192"),
        ("{0}/bert --data {0}/text.txt --sizes 2x6 --timed 1", "--timed must be sequences x tokens, such as 1x1"),
        ("{0}/bert --data {0}/text.txt --sizes 2x6 --timed 1x0", "--timed is one shape of at least 1 x 1"),
        ("{0}/bert --data {0}/text.txt --sizes 2x600", "at most the 48 neurons"),
        ("{0}/bert --data {0}/text.txt --sizes 2x6 --method pruning", "--method is a list of FFF, FFF int8, dense"),
        ("{0}/bert --data {0}/text.txt --sizes 2x6 --rows {0}/text.txt", "--rows and --data are the same file"),
        ("{0}/none --data {0}/text.txt --sizes 2x6 --plot {0}/front.word", "the suffix of a picture must be one of"),
        ("{0}/none --data {0}/text.txt --sizes 2x6 --plot {0}/text.txt/a.svg", "text.txt is a file"),
        ("{0}/llama --data {0}/text.txt --held-out {0}/short.txt --sizes 2x6", "--held-out: a text of 2 tokens"),
    ],
)
def test_wrong_flags(files, flags, said):
    done = fastff_(f"compare {flags.format(files)} {QUICK}")
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.output.replace("│", " ").split())
