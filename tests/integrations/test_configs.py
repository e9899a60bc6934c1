"""Configs that somebody else wrote: none opens a connection, takes long, or takes memory."""

import json
import resource
import socket
import threading
import time

import pytest
import torch
from torch import nn

import fastff

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")
import huggingface_hub  # noqa: E402

from fastff.integrations import configs  # noqa: E402
from fastff.integrations.transformers import from_pretrained, save_pretrained  # noqa: E402
from fastff.surgery.read import open_weights  # noqa: E402

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
WITH_BACKBONE = {
    "detr": "DetrForObjectDetection",
    "conditional_detr": "ConditionalDetrForObjectDetection",
    "deformable_detr": "DeformableDetrForObjectDetection",
    "table-transformer": "TableTransformerForObjectDetection",
    "rt_detr": "RTDetrForObjectDetection",
    "dab-detr": "DabDetrForObjectDetection",
    "grounding-dino": "GroundingDinoForObjectDetection",
    "mask2former": "Mask2FormerForUniversalSegmentation",
    "oneformer": "OneFormerForUniversalSegmentation",
    "dpt": "DPTForDepthEstimation",
    "upernet": "UperNetForSemanticSegmentation",
    "zoedepth": "ZoeDepthForDepthEstimation",
    "vitpose": "VitPoseForPoseEstimation",
}


def bert(**options):
    sizes = SIZES | {"vocab_size": 50, "max_position_embeddings": 40} | options
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes))
    fastff.replace_(model, depth=1)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save_pretrained(bert(), folder)
    with open_weights(folder) as file:
        return file.note, safetensors_torch.load_file(folder / "fastff.safetensors")


@pytest.fixture
def with_config(saved, tmp_path):
    """A directory whose save has another config."""

    def write(config):
        note, tensors = saved
        metadata = {"fastff": json.dumps(note | {"config": config})}
        safetensors_torch.save_file(tensors, tmp_path / "fastff.safetensors", metadata=metadata)
        return tmp_path

    return write


@pytest.fixture
def no_sockets(monkeypatch):
    """A list of what was tried to reach."""
    tried = []

    def refuse(*args, **options):
        tried.append(args)
        raise OSError("no connection is allowed here")

    class Refused(socket.socket):
        def __init__(self, *args, **options):
            refuse(*args)

    monkeypatch.setattr(socket, "socket", Refused)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    return tried


@pytest.mark.parametrize("kind", WITH_BACKBONE)
@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("backbone", {"backbone": "evil/repository", "use_timm_backbone": False}),
        ("use_timm_backbone", {"use_timm_backbone": True}),
        ("backbone_kwargs", {"backbone_kwargs": {"out_indices": [1]}}),
        ("backbone", {"backbone_config": {"model_type": "timm_backbone", "backbone": "hf-hub:evil/repository"}}),
        ("architecture", {"backbone_config": {"model_type": "timm_wrapper", "architecture": "local-dir:/tmp/evil"}}),
    ],
    ids=["backbone", "timm", "kwargs", "inner", "architecture"],
)
def test_a_backbone_is_not_fetched(kind, key, values, with_config, no_sockets):
    """transformers asked the Hub for what a config calls its backbone, in 19 of 19 architectures."""
    config = {"model_type": kind, "architectures": [WITH_BACKBONE[kind]], "dtype": "float32"}
    with pytest.raises(ValueError, match=f"config has {key} = .*may fetch code or weights"):
        from_pretrained(with_config(config | values))
    assert not no_sockets


@pytest.mark.parametrize("kind", WITH_BACKBONE)
def test_a_backbone_by_default_is_not_fetched_either(kind, with_config, no_sockets):
    """Some classes have a default that is looked for on the Hub. There is no key to be named then: it is offline."""
    config = {"model_type": kind, "architectures": [WITH_BACKBONE[kind]], "dtype": "float32", "backbone_config": None}
    with pytest.raises(ValueError, match=r"does not make a|has no"):
        from_pretrained(with_config(config))
    assert not no_sockets


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("auto_map", {"AutoModel": "evil.Model"}),
        ("trust_remote_code", True),
        ("quantization_config", {"quant_method": "torchao"}),
        ("compression_config", {"a": 1}),
        ("attn_implementation", "kernels-community/flash-attn"),
        ("_attn_implementation_internal", "kernels-community/flash-attn"),
        ("experts_implementation", "evil/experts"),
        ("_name_or_path", "evil/repository"),
        ("encoder_name_or_path", "evil/repository"),
        ("use_kernels", True),
        ("kernel_config", {"a": "evil/kernel"}),
        ("transformers_weights", "evil.safetensors"),
        ("model_args", {"checkpoint_path": "/tmp/evil.pt"}),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_names_that_lead_elsewhere(key, value, nested, saved, with_config, no_sockets):
    config = saved[0]["config"]
    config = config | ({"id2label": [{"inner": {key: value}}]} if nested else {key: value})
    with pytest.raises(ValueError, match=f"the config has {key} = .*fastff neither saves nor loads such models"):
        from_pretrained(with_config(config))
    assert not no_sockets


def test_the_hub_is_offline_while_a_model_is_built(no_sockets, monkeypatch):
    """And online again afterwards, whatever happened; with several threads at once as well."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    offline = []

    def fetch():
        try:
            with configs.guarded(1):
                huggingface_hub.HfApi().repo_exists("evil/repository")
        except huggingface_hub.errors.OfflineModeIsEnabled as error:
            offline.append(error)

    threads = [threading.Thread(target=fetch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(offline) == 4
    assert not no_sockets
    assert not huggingface_hub.constants.HF_HUB_OFFLINE


LARGE = {
    "labels": {"num_labels": 10**9},
    "labels as a float": {"num_labels": 1e9},
    "labels, few enough for the check": {"num_labels": 1010},
    "layers": {"num_hidden_layers": 10**9},
    "layers as a float": {"num_hidden_layers": 1e9},
    "layers, few enough for the check": {"num_hidden_layers": 1020},
    "heads": {"num_attention_heads": 10**9},
    "vocabulary": {"vocab_size": 10**12},
    "vocabulary, small enough for the check": {"vocab_size": 2**20},
    "negative": {"vocab_size": -(10**12)},
    "positions": {"max_position_embeddings": 10**12},
    "hidden size": {"hidden_size": 2**31},
    "hidden size, small enough for the check": {"hidden_size": 2**20},
    "unknown number": {"whatever": 10**12},
    "number inside": {"id2label": {"a": {"b": [[10**12]]}}},
    "list": {"architectures_of_others": [0] * 10**5},
    "string": {"problem_type": "a" * 10**6},
    "not a number": {"num_hidden_layers": float("nan")},
    "infinite": {"num_hidden_layers": float("inf")},
    "deep": {"id2label": json.loads("[" * 500 + "]" * 500)},
    "deep objects": {"id2label": json.loads('{"a":' * 500 + "1" + "}" * 500)},
}
SWIN = {"model_type": "swin", "architectures": ["SwinForImageClassification"], "dtype": "float32"}
OTHERS = {
    "depths": SWIN | {"depths": [10**8]},
    "depths as a float": SWIN | {"depths": [1e8]},
    "depths, few enough for the check": SWIN | {"depths": [1000, 1000, 1000, 1000]},
    "window": SWIN | {"window_size": 2**20},
    "block sizes": {
        "model_type": "funnel",
        "architectures": ["FunnelModel"],
        "dtype": "float32",
        "block_sizes": [2**20],
    },
}


@pytest.mark.parametrize("case", [*LARGE, *OTHERS])
def test_large_numbers_take_neither_time_nor_memory(case, saved, with_config):
    """A billion labels became a dict of a billion entries, and depths of 10**8 as many layers: hours and terabytes."""
    folder = with_config(OTHERS[case] if case in OTHERS else saved[0]["config"] | LARGE[case])
    memory, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(ValueError, match=r"the config (has|does|is)|do not fit the model|asks for|this model has"):
        from_pretrained(folder)
    assert time.process_time() - begin < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 500_000  # KiB


def test_the_key_is_named(saved, with_config):
    config = saved[0]["config"]
    for key, value in (("num_labels", 10**9), ("num_hidden_layers", 10**9), ("vocab_size", 10**12)):
        with pytest.raises(ValueError, match=f"the config has {key} = {value}; with a file of .* it may be at most"):
            from_pretrained(with_config(config | {key: value}))
    with pytest.raises(ValueError, match=r"the config has depths = 100000000; with a file of"):
        from_pretrained(with_config(OTHERS["depths"]))


@pytest.mark.parametrize("key", ["to_dict", "__class__", "from_dict", "sub_configs", "attribute_map"])
def test_what_a_config_class_has_for_itself(key, saved, with_config):
    with pytest.raises(ValueError, match=f"the config has {key} = 'a', which BertConfig does not have"):
        from_pretrained(with_config(saved[0]["config"] | {key: "a"}))


def test_attributes_of_ones_own(tmp_path):
    """Words and numbers come back; what could be an address does not, and is in config.json alone. So is a tokenizer's
    length without limit, 10**30, which many configs have."""
    model = bert(mine=3, word="a word", listed=[1, 2], teacher="them/model", more={"a": 1}, name_or_path="them/model")
    model.config.model_max_length = int(1e30)
    save_pretrained(model, tmp_path)
    config = from_pretrained(tmp_path).config
    assert (config.mine, config.word, config.listed) == (3, "a word", [1, 2])
    assert not hasattr(config, "teacher")
    assert not hasattr(config, "more")
    assert json.loads((tmp_path / "config.json").read_text())["teacher"] == "them/model"


class OwnConfig(transformers.BertConfig):
    model_type = "own"

    def __init__(self, table=None, **options):
        super().__init__(**options)
        self.table = table or {"a": 1}


class OwnModel(transformers.BertForSequenceClassification):
    config_class = OwnConfig


def test_a_config_class_of_ones_own(tmp_path):
    """What its __init__ takes is a field, a table as well."""
    model = OwnModel(OwnConfig(**SIZES, vocab_size=50, max_position_embeddings=40, table={"b": 2}))
    fastff.replace_(model, depth=1)
    save_pretrained(model, tmp_path)
    assert from_pretrained(tmp_path, OwnModel).config.table == {"b": 2}


def test_numbers_that_only_look_large(tmp_path):
    """Rotary bases, token ids of a larger vocabulary and long contexts in a small model."""
    sizes = SIZES | {"vocab_size": 50, "max_position_embeddings": 2**20, "bos_token_id": 151643, "eos_token_id": 151645}
    options = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000}}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **options))
    fastff.replace_(model, depth=1)
    save_pretrained(model, tmp_path)
    assert from_pretrained(tmp_path).config.rope_parameters["rope_theta"] == 10_000_000


def test_configs_inside_of_configs_load(tmp_path):
    """CLIP has one for text and one for images; a DETR one for its backbone, here a ResNet of transformers."""
    text = SIZES | {"vocab_size": 50, "max_position_embeddings": 40, "bos_token_id": 1, "eos_token_id": 2}
    image = SIZES | {"image_size": 16, "patch_size": 8}
    clip = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=image, projection_dim=8))
    stages = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "layer_type": "basic"}
    backbone = transformers.ResNetConfig(**stages, out_features=["stage2"])
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    sizes |= {
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "num_queries": 3,
        "dropout": 0.0,
        "activation_dropout": 0.0,
    }
    detr = transformers.DetrForObjectDetection(transformers.DetrConfig(backbone_config=backbone, **sizes))
    for model in (clip, detr):
        folder = tmp_path / type(model).__name__
        fastff.replace_(model.eval(), depth=1)
        save_pretrained(model, folder)
        loaded = from_pretrained(folder)
        assert loaded.config.to_dict().keys() == model.config.to_dict().keys()
        assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())


def test_other_threads_may_make_modules_meanwhile():
    """They are not counted."""
    made = []

    def make():
        made.extend(nn.Linear(1, 1) for _ in range(2000))

    with configs.guarded(1):
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
    assert len(made) == 2000
