"""Every family of the installed transformers as a tiny model, built from its config without a download.

A family is a folder of transformers.models with a model that AutoModel knows. Its config is made small by the names of
its fields: what every config calls hidden_size or num_hidden_layers is the same thing. OVERRIDES has what names do not
tell.
"""

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES  # noqa: E402

# The first pattern that fits the whole name of a field says how large its value may be.
SIZES = {
    r"type_vocab_size": 10**9,
    r"(.*_)?vocab_size(_per_layer_input)?": 99,
    r".*(intermediate|ffn|d_ff|n_inner|inner_dim|feedforward|mlp_dim|ff_dim).*": 40,
    r"max_.*positions?|.*max_position_embeddings|n_positions|n_ctx|num_latents|.*_num_positions": 64,
    r"(.*_)?(head_dim|d_kv|kv_channels|d_head|head_size|rotary_dim)": 8,
    r"(.*_)?(hidden_size|d_model|n_embd|dim_model|d_latents|d_embed|dim)": 32,
    r"(.*_)?((model|hidden|embed|emb|proj|projection|output|neck|text|embedding|codebook)_?dim)": 32,
    r"(.*_)?(embedding_size|embed_size|hidden_channels|projection_size|word_embed_proj_dim)": 32,
    r"(.*_)?(num_hidden_layers|n_layers?|num_layers|layers|num_.*_layers|depth|num_blocks)": 2,
    r"(.*_)?(num_(attention_)?heads|n_heads?|attention_heads|num_.*_heads)": 4,
    r"(.*_)?(num_(local_)?experts|n_routed_experts)": 4,
    r"num_experts_per_tok(en)?|.*top_k|moe_k": 2,
    r"(.*_)?(image_size|img_size)": 32,
    r"(.*_)?lora_rank": 16,
    r"window_size": 4,
    r"base_channels": 32,
    r"(.*_)?num_filters": 8,
    r"(.*_)?codebook_size|num_embeddings": 64,
}
STAGES = {"depths": (1, 1), "hidden_sizes": (16, 32), "embed_dims": (16, 32)}  # the first stage, the others
STAGES |= {"num_attention_heads": (2, 2), "num_heads": (2, 2), "num_head": (2, 2), "num_groups": (2, 2)}
STAGES |= {"conv_dim": (32, 32), "embed_dim": (16, 32)}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}
NARROW = {"width_coefficient": 0.5, "depth_coefficient": 0.3}
WINDOWS = {"image_size": 64, "window_size": 2}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
HALF = {"rope_parameters": SECTIONS["rope_parameters"] | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}}
ERNIE = {"rope_parameters": SECTIONS["rope_parameters"] | {"mrope_section": [1, 1, 2]}}
OVERRIDES: dict[str, dict[str, Any]] = {
    "align": {"vision_config": NARROW},
    "efficientnet": NARROW,
    "bamba": MAMBA,
    "cvt": {"depth": [1, 2, 3]},
    "bridgetower": {"hidden_size": 64, "vision_config": {"hidden_size": 64}, "text_config": {"hidden_size": 64}},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4, "visual_embed": False},
    "lilt": {"hidden_size": 48},
    "granitemoehybrid": MAMBA,
    "bit": {"hidden_sizes": [32, 32, 32, 32], "embedding_size": 32},
    "blt": {"encoder_hash_byte_group_vocab": 99},
    "chameleon": {"vocabulary_map": {"<image>": 5, "IMGIMGA": 6}},
    "csm": {"codec_config": {"upsample_groups": 32}},
    "mimi": {"upsample_groups": 32},
    "pocket_tts_audio_tokenizer": {"upsample_groups": 32},
    "donut-swin": WINDOWS,
    "swin": WINDOWS,
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    "esm": {"vocab_size": 99, "pad_token_id": 1, "mask_token_id": 4},
    "emu3": {"vocabulary_map": {"<image>": 5}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite_speech5_ctc": {"encoder_config": {"context_size": 32}},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "muse_spark": {"audio_config": {"num_hidden_layers": 4}},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "perceiver": {"num_latents": 16},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 8]},
    "zamba": {"num_hidden_layers": 3, "layer_types": ["linear_attention", "hybrid", "hybrid"]},
    "zamba2": {"num_hidden_layers": 3, "layer_types": ["linear_attention", "hybrid", "hybrid"]},
    "qwen2_vl": {"text_config": SECTIONS},
    "qwen2_5_vl": {"text_config": SECTIONS},
    "paddleocr_vl": {"text_config": SECTIONS},
    "glm4v": {"text_config": HALF},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "granite4_vision": {"deepstack_layer_map": []},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"]}},
    "ernie4_5_vl_moe": {"text_config": ERNIE},
    "neomme": {"head_dim": 16},
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 40}},
    "lw_detr": {"backbone_config": {"image_size": 64}},
    "tvp": {"max_img_size": 64, "visual_prompt_size": 8},
    "dbrx": {"attn_config": {"rope_theta": 10000.0}},
}
DECODERS = {"musicgen", "musicgen_melody"}  # their models take the config of the decoder
# Neither text, nor vision, nor audio.
OTHER = {"autoformer", "informer", "patchtst", "patchtsmixer", "time_series_transformer", "timesfm", "timesfm2_5"}
OTHER |= {"decision_transformer", "pi0", "evolla"}


def families() -> dict[str, list[str]]:
    """The model types of each family, the shortest name first: it is the whole model, others are parts of it."""
    found: dict[str, list[str]] = {}
    for kind in sorted(MODEL_MAPPING_NAMES, key=lambda kind: (len(kind), kind)):
        if kind in CONFIG_MAPPING:
            found.setdefault(CONFIG_MAPPING[kind].__module__.split(".")[2], []).append(kind)
    return {family: found[family] for family in sorted(found)}


def build(kind: str) -> nn.Module:
    """A tiny model. Its weights are so large that no activation is a straight line, and nothing is 0 or 1 by chance."""
    torch.manual_seed(0)
    name = MODEL_MAPPING_NAMES[kind]
    config = tiny_config(kind)
    config = config.decoder if kind in DECODERS else config
    config._experts_implementation = "eager"  # torch's grouped product has no float64
    model = getattr(transformers, name if isinstance(name, str) else name[0])(config).float()
    with torch.no_grad():
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                if isinstance(module, nn.Linear) and parameter.dim() == 2:
                    parameter.normal_(std=parameter.shape[1] ** -0.5)
                elif parameter.numel() == max(parameter.shape, default=0) or not parameter.any():
                    parameter += 0.2 * torch.randn_like(parameter)
    return model.eval()


def tiny_config(kind: str) -> Any:
    return _tiny(CONFIG_MAPPING[kind](), OVERRIDES.get(kind, {}))


def _tiny(config: Any, overrides: dict[str, Any]) -> Any:
    """A config of the same class, small. What the class computes from other fields is computed again."""
    fields = {field.name: field for field in dataclasses.fields(config)}
    values = {name: value for name in fields if (value := _value(config, name)) is not None}
    parts = {name: value for name, value in values.items() if isinstance(value, transformers.PreTrainedConfig)}
    options = {name: _tiny(part, overrides.get(name, {})) for name, part in parts.items()}
    for name in values.keys() - parts.keys():
        if fields[name].default is not None and (small := _small(name, values[name])) != values[name]:
            options[name] = small
    heads, pairs = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(pairs, int):
        options["num_key_value_heads"] = 4 if pairs == heads else min(pairs, 2)
    kinds = list(dict.fromkeys(values.get("layer_types", [])))
    if len(kinds) > 1 and "num_hidden_layers" in values:  # one layer of each kind
        options |= {"layer_types": kinds, "num_hidden_layers": len(kinds)}
    return type(config)(**options | {name: value for name, value in overrides.items() if name not in parts})


def _value(config: Any, name: str) -> Any:
    """The value of a field; None where it differs from layer to layer, which transformers reports as an error."""
    try:
        return getattr(config, name)
    except (AttributeError, ValueError, RuntimeError):
        return None


def _small(name: str, value: Any) -> Any:
    if isinstance(value, list | tuple) and name in STAGES and all(isinstance(v, int) for v in value):
        return type(value)(STAGES[name][min(i, 1)] for i in range(len(value)))
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if name.endswith("token_id") and value >= 99:
        return 3 + sum(map(ord, name)) % 90
    return min(value, next((most for pattern, most in SIZES.items() if re.fullmatch(pattern, name)), value))
