"""Models for the tests of surgery: one per family, built tiny from a config."""

import warnings

import pytest
import torch
from torch import nn

import fastff

transformers = pytest.importorskip("transformers")


SIZES = {"hidden_size": 16, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TEXT = {"vocab_size": 50, "max_position_embeddings": 40}
IMAGE = {"image_size": 8, "patch_size": 4}
TOKENS = {"input_ids": torch.arange(3, 15).view(2, 6)}


class Mlp(nn.Module):
    """As timm's Mlp: fc1, act, drop1, norm, fc2, drop2."""

    def __init__(self, packed=False, act=nn.GELU, drop=0.0):
        super().__init__()
        self.fc1 = nn.Linear(16, 96 if packed else 48)
        self.act, self.drop1, self.norm = act(), nn.Dropout(drop), nn.Identity()
        self.fc2, self.drop2 = nn.Linear(48, 16), nn.Dropout(drop)
        self.packed = packed

    def forward(self, x):
        x = self.fc1(x)
        if self.packed:  # as timm's GluMlp with gate_last, which eva02 uses
            x, gate = x.chunk(2, dim=-1)
            x = x * self.act(gate)
        else:
            x = self.act(x)
        return self.drop2(self.fc2(self.norm(self.drop1(x))))


class Residual(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(16), mlp

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Functional(nn.Module):
    """A block whose activation no module shows."""

    def __init__(self, drop=0.0, f=nn.functional.silu, drop_out=0.0, drop_rows=False):
        super().__init__()
        self.a, self.b, self.f = nn.Linear(16, 48), nn.Linear(48, 16), f
        self.drop, self.drop_out, self.drop_rows = drop, drop_out, drop_rows

    def forward(self, x):
        hidden, dropout = self.f(self.a(x)), nn.functional.dropout
        if self.drop_rows:
            hidden = hidden * dropout(torch.ones_like(hidden[..., :1]), self.drop, self.training)
        else:
            hidden = dropout(hidden, self.drop, self.training)
        return dropout(self.b(hidden), self.drop_out, self.training)


def stack(*mlps):
    return nn.Sequential(*map(Residual, mlps))


def hf(name, **options):
    config = getattr(transformers, f"{name}Config")(**options)
    return getattr(transformers, "T5EncoderModel" if name == "T5" else f"{name}Model")(config)


def encoder(**options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = nn.TransformerEncoderLayer(16, 2, 48, dropout=0.0, batch_first=True, **options)
        return nn.TransformerEncoder(layer, 2)


VECTORS = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))
PIXELS = {"pixel_values": torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))}
LLAMA = SIZES | TEXT | {"num_key_value_heads": 1, "pad_token_id": 0}
T5 = {"vocab_size": 50, "d_model": 16, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}


# name: the model, an input, the form, the activation, where the first FFF is
FAMILIES = {
    "bert": (lambda: hf("Bert", **SIZES, **TEXT, **OFF), TOKENS, "split", "gelu", "encoder.layer.0.intermediate.dense"),
    "roberta": (
        lambda: hf("Roberta", **SIZES, **TEXT, **OFF),
        TOKENS,
        "split",
        "gelu",
        "encoder.layer.0.intermediate.dense",
    ),
    "vit": (lambda: hf("ViT", **SIZES, **IMAGE, **OFF), PIXELS, "plain", "gelu", "layers.0.mlp"),
    "clip": (lambda: hf("CLIPVision", **SIZES, **IMAGE), PIXELS, "plain", "QuickGELUActivation", "layers.0.mlp"),
    "dinov2": (
        lambda: hf("Dinov2", **{k: v for k, v in SIZES.items() if k != "intermediate_size"}, mlp_ratio=3, **IMAGE),
        PIXELS,
        "plain",
        "gelu",
        "layer.0.mlp",
    ),
    "gpt2": (
        lambda: hf(
            "GPT2",
            vocab_size=50,
            n_positions=40,
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_inner=48,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
        ),
        TOKENS,
        "plain",
        "gelu_tanh",
        "h.0.mlp",
    ),
    "llama": (lambda: hf("Llama", **LLAMA), TOKENS, "gated", "swiglu", "layers.0.mlp"),
    "qwen2": (lambda: hf("Qwen2", **LLAMA), TOKENS, "gated", "swiglu", "layers.0.mlp"),
    "mistral": (lambda: hf("Mistral", **LLAMA), TOKENS, "gated", "swiglu", "layers.0.mlp"),
    "modernbert": (
        lambda: hf("ModernBert", **SIZES, **TEXT, pad_token_id=0, bos_token_id=1, cls_token_id=1, sep_token_id=2),
        TOKENS,
        "packed",
        "geglu",
        "layers.0.mlp",
    ),
    "distilbert": (
        lambda: hf(
            "DistilBert", vocab_size=50, dim=16, hidden_dim=48, n_layers=2, n_heads=2, dropout=0, attention_dropout=0
        ),
        TOKENS,
        "plain",
        "gelu",
        "transformer.layer.0.ffn",
    ),
    "t5": (lambda: hf("T5", **T5), TOKENS, "plain", "relu", "encoder.block.0.layer.1.DenseReluDense"),
    "t5-gated": (
        lambda: hf("T5", **T5, feed_forward_proj="gated-silu"),
        TOKENS,
        "gated",
        "swiglu",
        "encoder.block.0.layer.1.DenseReluDense",
    ),
    "t5-1.1": (
        lambda: hf("T5", **T5, feed_forward_proj="gated-gelu"),
        TOKENS,
        "gated",
        "geglu_tanh",
        "encoder.block.0.layer.1.DenseReluDense",
    ),
    "gemma": (lambda: hf("Gemma", **LLAMA, head_dim=8), TOKENS, "gated", "geglu_tanh", "layers.0.mlp"),
    "falcon": (
        lambda: hf(
            "Falcon", vocab_size=50, hidden_size=16, ffn_hidden_size=48, num_hidden_layers=2, num_attention_heads=2
        ),
        TOKENS,
        "plain",
        "gelu",
        "h.0.mlp",
    ),
    "gpt-neox": (
        lambda: hf("GPTNeoX", **SIZES, **TEXT),
        TOKENS,
        "plain",
        "gelu",
        "layers.0.mlp",
    ),
    "opt": (
        lambda: hf(
            "OPT",
            vocab_size=50,
            hidden_size=16,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            word_embed_proj_dim=16,
            max_position_embeddings=40,
            dropout=0,
        ),
        TOKENS,
        "in-layer",
        "relu",
        "decoder.layers.0.fc1",
    ),
    "encoder": (encoder, VECTORS, "in-layer", "relu", "layers.0.linear1"),
    "encoder-gelu-first": (
        lambda: encoder(activation="gelu", norm_first=True),
        VECTORS,
        "in-layer",
        "gelu",
        "layers.0.linear1",
    ),
    "timm": (lambda: stack(Mlp(), Mlp()), VECTORS, "plain", "gelu", "0.mlp"),
    "eva02": (lambda: stack(Mlp(True, nn.SiLU), Mlp(True, nn.SiLU)), VECTORS, "packed", "swiglu", "0.mlp"),
    "functional": (lambda: stack(Functional(), Functional()), VECTORS, "plain", "silu", "0.mlp"),
    "sequential": (
        lambda: stack(*(nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 16)) for _ in "ab")),
        VECTORS,
        "plain",
        "tanh",
        "0.mlp",
    ),
    "ff": (
        lambda: stack(*(fastff.baselines.FF(16, 16, width=48, activation="geglu", bias=False) for _ in "ab")),
        VECTORS,
        "gated",
        "geglu",
        "0.mlp",
    ),
}
families = pytest.mark.parametrize("family", FAMILIES)


def build(family, seed=0):
    """The model, with biases and norms drawn too, so that nothing is zero or one by chance; and its input."""
    torch.manual_seed(seed)
    make, batch, *_ = FAMILIES[family]
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    return model, batch


def output(model, batch):
    with torch.no_grad():
        y = model(**batch) if isinstance(batch, dict) else model(batch)
    return y if isinstance(y, torch.Tensor) else y[0]


def snapshot(model):
    return list(map(str, model.modules())), {name: t.clone() for name, t in model.state_dict().items()}


def assert_untouched(model, before):
    modules, state = snapshot(model)
    assert modules == before[0]
    assert list(state) == list(before[1])
    assert all(torch.equal(state[name], value) for name, value in before[1].items())


class Wrong(Mlp):
    """Not what its weights say."""

    def forward(self, x):
        return 2 * super().forward(x)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(16, 2), nn.ModuleList([Mlp(), Mlp()])

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        return sum(weights[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


def between(*modules, linear=nn.Linear):
    return lambda: nn.Sequential(nn.Sequential(linear(16, 48), *modules, linear(48, 16)))


def varied(model, samples=4000):
    """Inputs of 16 features that vary in few directions, as those of a trained model do."""
    torch.manual_seed(3)
    return torch.randn(samples, 16) * torch.linspace(3, 0.1, 16)
