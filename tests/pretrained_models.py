"""Hugging Face models for the tests of saves, built tiny from a config."""

import json

import pytest
import torch
from torch import nn

import fastff

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")
from safetensors import safe_open  # noqa: E402

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50, "pad_token_id": 0}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 40}
WIDTH = {"intermediate_size": 48}
GPT2 = {"vocab_size": 50, "n_positions": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 1}
T5 = {"vocab_size": 50, "d_model": 16, "d_ff": 48, "d_kv": 8, "num_layers": 1, "num_heads": 2}
MODELS = {
    "bert": ("BertForSequenceClassification", SIZES | WIDTH),
    "gpt2": ("GPT2LMHeadModel", GPT2 | {"eos_token_id": 2}),
    "llama": ("LlamaForCausalLM", SIZES | WIDTH),
    "t5": ("T5ForConditionalGeneration", T5 | {"decoder_start_token_id": 0}),
    "modernbert": ("ModernBertForMaskedLM", SIZES | WIDTH | {"cls_token_id": 1, "sep_token_id": 2}),
    "opt": ("OPTForCausalLM", SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 16}),
    "clip": ("CLIPTextModel", SIZES | WIDTH),  # its activation has no name: {"at": ...}
}
FC1 = "bert.encoder.layer.0.intermediate.dense"
TOKENS = torch.arange(3, 15).view(2, 6)
VECTORS = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))


def make(family, dtype=torch.float32, seed=0):
    name, options = MODELS[family]
    kind = getattr(transformers, name)
    torch.manual_seed(seed)
    return kind._from_config(kind.config_class(**options), dtype=dtype)


def operated(family, dtype=torch.float32):
    """A model with FFF layers whose trees and temperatures are not those of a fresh one."""
    model = make(family, dtype)
    fastff.replace_(model, depth=2)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, fastff.FFF):
                layer.node_weight.normal_()
                layer.temperature = 3.0
    return model.eval()


def encoder(layers=2, **options):
    layer = nn.TransformerEncoderLayer(16, 2, 48, batch_first=True, **options)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def outputs(model):
    options = {"decoder_input_ids": TOKENS} if "T5" in type(model).__name__ else {}
    with torch.no_grad():
        return model(input_ids=TOKENS, **options)[0]


def assert_same(model, other):
    """The state dicts, and the buffers that are not in them, bit for bit."""
    ours = model.state_dict() | dict(model.named_buffers())
    theirs = other.state_dict() | dict(other.named_buffers())
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


def unpack(folder):
    """The note and the tensors of a save."""
    path = folder / "fastff.safetensors"
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["fastff"]), safetensors_torch.load_file(path)


def pack(folder, note, tensors):
    metadata = {"fastff": note if isinstance(note, str) else json.dumps(note)}
    safetensors_torch.save_file(tensors, folder / "fastff.safetensors", metadata=metadata)


class Feedforward(nn.Module):
    def __init__(self, act=None):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 64), act or nn.GELU(), nn.Linear(64, 16)

    def forward(self, x):
        return self.down(self.act(self.up(x)))
