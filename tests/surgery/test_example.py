"""A batch for the whole model, made from its config."""

import copy

import pytest
import torch
from torch import nn

import fastff
from fastff.surgery.example import example_of, size_in
from surgery_models import IMAGE, LLAMA, OFF, SIZES, TEXT, Mlp, hf, stack

TINY = {"d_model": 16, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_layers": 1, "decoder_layers": 1}
TINY |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 50}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
WHISPER = TINY | TOKENS | {"num_mel_bins": 6, "max_source_positions": 10, "max_target_positions": 20}
CASES = {
    "text": (lambda: hf("Llama", **LLAMA), {"input_ids": (2, 8)}),
    "encoder and decoder": (lambda: hf("Bart", **TINY, **TOKENS, max_position_embeddings=40), {"input_ids": (2, 8)}),
    "image": (lambda: hf("ViT", **SIZES, **IMAGE, **OFF), {"pixel_values": (2, 3, 8, 8)}),
    "spectrogram": (
        lambda: hf("Whisper", **WHISPER),
        {"input_features": (2, 6, 20), "decoder_input_ids": (2, 8)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_made_from_the_config(case):
    make, shapes = CASES[case]
    model = make()
    state = copy.deepcopy(model.state_dict())
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    assert {name: tuple(value.shape) for name, value in example_of(model).items()} == shapes
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.training


def test_special_tokens_are_left_out():
    config = SIZES | TEXT | {"pad_token_id": 0, "bos_token_id": 4, "eos_token_id": [5, 6]}
    tokens = example_of(hf("Llama", **config, num_key_value_heads=1))["input_ids"]
    assert not set(tokens.flatten().tolist()) & {0, 4, 5, 6}
    assert int(tokens.max()) < 50


def test_none_without_a_config_or_on_the_meta_device():
    assert example_of(stack(Mlp())) is None
    with torch.device("meta"):
        assert example_of(hf("Llama", **LLAMA)) is None


class Config:
    vocab_size = 30


class Broken(nn.Module):
    """Its output is NaN, with which nothing can be compared."""

    config, main_input_name = Config(), "input_ids"

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 4)

    def forward(self, input_ids):
        return self.embed(input_ids) * torch.nan


def test_none_where_the_model_gives_nan():
    assert example_of(Broken()) is None


def test_sizes_are_found_in_inner_configs():
    transformers = pytest.importorskip("transformers")
    config = transformers.CLIPConfig()
    assert size_in(config, "image_size") == config.vision_config.image_size
    assert size_in(config, "num_mel_bins", "vocab_size") == config.text_config.vocab_size
    assert size_in(config, "num_mel_bins") is None


def test_a_layer_that_does_not_run_alone_needs_no_example():
    """ConvNeXt's layers take images (batch, channels, height, width); the config says how large they are."""
    sizes = {"hidden_sizes": [16, 16], "depths": [1, 1], "num_stages": 2, "image_size": 16}
    model = hf("ConvNext", **sizes)
    report = fastff.replace_(model, depth=1)
    assert {r.form for r in report.replaced} == {"in-layer"}
    assert not report.skipped
