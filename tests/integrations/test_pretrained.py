"""Save and load operated models: bit-equal round trips, dtypes and devices."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import fastff
from fastff.surgery import read
from fastff.surgery.history import history_of
from pretrained_models import GPT2, MODELS, TOKENS, VECTORS, assert_same, encoder, make, operated, outputs, pack, unpack

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

from fastff.integrations.transformers import from_pretrained, save_pretrained  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("family", MODELS)
def test_round_trip(family, dtype, tmp_path):
    model = operated(family, dtype)
    save_pretrained(model, tmp_path)
    state = torch.get_rng_state()
    loaded = from_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    assert type(loaded) is type(model)
    assert not loaded.training
    assert loaded.dtype == loaded.config.dtype == dtype
    assert_same(model, loaded)
    assert torch.equal(outputs(loaded), outputs(model))
    assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".safetensors"}

    # What is loaded is remembered, and may be saved again, over what it came from.
    save_pretrained(loaded, tmp_path)
    assert_same(from_pretrained(tmp_path), model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_round_trip_of_any_module(dtype, tmp_path):
    """fastff.save and load_, on an encoder of torch.nn whose fused path must stay off. The dtype is the file's."""
    model = encoder(activation="gelu").to(dtype).eval()
    fastff.replace_(model, depth=2, node_width=3)
    fastff.save(model, tmp_path)
    fresh = encoder(activation="gelu").eval()
    fastff.load_(fresh, str(tmp_path))
    assert_same(fresh, model)
    x = VECTORS.to(dtype)
    with torch.no_grad():
        assert torch.equal(fresh(x), model(x))
    assert history_of(fresh) == history_of(model)
    with pytest.raises(ValueError, match=r"TransformerEncoder has been converted already.* Pass a fresh model"):
        fastff.load_(fresh, tmp_path)  # it is converted already


@pytest.mark.slow
def test_a_fresh_process_loads_it(tmp_path):
    model = operated("llama")
    save_pretrained(model, tmp_path)
    torch.save(outputs(model), tmp_path / "outputs.pt")
    code = (
        "import sys, torch; from fastff.integrations.transformers import from_pretrained\n"
        "y = from_pretrained(sys.argv[1])(torch.arange(3, 15).view(2, 6)).logits\n"
        "assert torch.equal(y, torch.load(sys.argv[1] + '/outputs.pt')), 'not equal'"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("model_class", ["GPT2LMHeadModel", "AutoModelForCausalLM", None])
def test_tied_weights_stay_tied_and_train(model_class, tmp_path):
    model = operated("gpt2")
    model.generation_config.top_k = 7
    save_pretrained(model, tmp_path)
    with read.open_weights(tmp_path) as weights:
        assert "transformer.wte.weight" in weights.header
        assert "lm_head.weight" not in weights.header
    loaded = from_pretrained(tmp_path, model_class and getattr(transformers, model_class))
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert loaded.generation_config.top_k == 7
    before = copy.deepcopy(loaded.state_dict())
    optimizer = torch.optim.SGD(loaded.parameters(), lr=0.1)
    loaded.train()(input_ids=TOKENS, labels=TOKENS).loss.backward()
    assert all(p.requires_grad and p.grad is not None for p in loaded.parameters())
    optimizer.step()
    assert not torch.equal(loaded.lm_head.weight, before["lm_head.weight"])
    # The file is not what the model trains in.
    assert torch.equal(from_pretrained(tmp_path).lm_head.weight, before["lm_head.weight"])


def test_untied_against_the_config_is_refused_when_saving(tmp_path):
    model = operated("gpt2")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(ValueError, match=r"(?s)would not load again.*lm_head.weight is not in the model, or is tied"):
        save_pretrained(model, tmp_path / "it")
    assert not (tmp_path / "it").exists()
    model.config.tie_word_embeddings = False
    save_pretrained(model, tmp_path / "it")
    assert_same(from_pretrained(tmp_path / "it"), model)


def test_transposed_tensors_and_views(tmp_path):
    """A file has neither; the values come back, and what a fresh model does not tie is not tied."""
    model = encoder()
    fastff.replace_(model, depth=1)
    whole = torch.randn(2, 16)
    with torch.no_grad():
        first, second = model.layers[0].norm1, model.layers[1].norm1
        first.weight, second.weight = nn.Parameter(whole[0]), nn.Parameter(whole[1])
        first.bias.data = second.weight.data[:]  # one memory, two parameters
        model.layers[0].self_attn.in_proj_weight.data = torch.randn(16, 48).T
    fastff.save(model, tmp_path)
    fresh = encoder()
    fastff.load_(fresh, tmp_path)
    assert_same(fresh, model)
    with torch.no_grad():
        fresh.layers[0].norm1.bias += 1
    assert torch.equal(fresh.layers[1].norm1.weight, whole[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", torch.float64, "float16"])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_dtype(family, dtype, tmp_path):
    """As a model of that dtype, its rotary frequencies and temperatures in float32 at least."""
    model = operated(family)
    save_pretrained(model, tmp_path)
    loaded = from_pretrained(tmp_path, dtype=dtype)
    wanted = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
    assert loaded.dtype == loaded.config.dtype == wanted
    assert outputs(loaded).dtype == wanted
    for name, tensor in loaded.state_dict().items():
        wide = name.endswith("temperature_tensor") and wanted in (torch.float16, torch.bfloat16)
        assert tensor.dtype == (torch.float32 if wide else wanted), name
        assert torch.equal(tensor, model.state_dict()[name].to(tensor.dtype)), name
    if family == "llama":
        assert loaded.model.rotary_emb.inv_freq.dtype == torch.float32
    if family == "gpt2":
        assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert from_pretrained(tmp_path, dtype="auto").dtype == torch.float32


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu"), {"": "cpu"}])
def test_device_map(device, tmp_path):
    model = operated("bert")
    save_pretrained(model, tmp_path)
    assert_same(from_pretrained(tmp_path, device_map=device), model)


@pytest.mark.gpu
def test_device_map_of_a_gpu(tmp_path):
    model = operated("llama")
    save_pretrained(model, tmp_path)
    for device in ("cuda", "cuda:0", 0, {"": 0}):
        loaded = from_pretrained(tmp_path, dtype="bfloat16", device_map=device)
        assert {tensor.device.type for tensor in [*loaded.parameters(), *loaded.buffers()]} == {"cuda"}


def test_values_that_dtype_and_device_map_do_not_take(tmp_path):
    save_pretrained(operated("bert"), tmp_path)
    for dtype in ("int8", torch.int8, "load", None, 16):
        with pytest.raises(
            ValueError, match=r'dtype must be "auto", .* or one of float64, float32, float16, bfloat16; got'
        ):
            from_pretrained(tmp_path, dtype=dtype)
    for device in ("auto", "balanced", {"bert": 0, "classifier": "cpu"}, {"bert": "cpu"}, "cuda:99", 1.5):
        with pytest.raises(ValueError, match=r"device_map must be one device for the whole model.*dispatch_model"):
            from_pretrained(tmp_path, device_map=device)
    with pytest.raises(ValueError, match=r"got \{'bert': 'cpu'\} \(it maps bert\)"):
        from_pretrained(tmp_path, device_map={"bert": "cpu"})
    with pytest.raises(ValueError, match="device_map must not be the meta device"):
        from_pretrained(tmp_path, device_map="meta")


class GPT2LMHeadModel(transformers.GPT2LMHeadModel):
    """A class of one's own, under a name that transformers has too."""


def test_a_class_of_ones_own(tmp_path):
    model = GPT2LMHeadModel(transformers.GPT2Config(**GPT2, eos_token_id=2))
    fastff.replace_(model, depth=1)
    save_pretrained(model, tmp_path)
    with pytest.raises(
        ValueError,
        match=r"architectures in the config must be one model class .*got \['.*GPT2LMHeadModel'\]. Pass the class",
    ):
        from_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path, GPT2LMHeadModel)
    assert type(loaded) is GPT2LMHeadModel
    assert_same(loaded, model)
    told = r"does not fit AutoModel: it has \['.*GPT2LMHeadModel'\]. Pass that class.* has no 'transformer.h.0.mlp"
    with pytest.raises(ValueError, match=told):
        from_pretrained(tmp_path, transformers.AutoModel)  # without the head all names are others


def test_a_tokenizer_saves_itself_beside(tmp_path):
    from tokenizers import Tokenizer, models

    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?")
    model = operated("bert")
    save_pretrained(model, tmp_path)
    tokenizer.save_pretrained(tmp_path)
    save_pretrained(model, tmp_path)
    assert_same(from_pretrained(tmp_path), model)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)("b").input_ids == [1]


@pytest.mark.parametrize("renamed", [0, 1, 2])
def test_a_save_that_fails_between_renamings_leaves_the_old_one(renamed, tmp_path, monkeypatch):
    """config.json and generation_config.json may be new then. They are not read."""
    old, new = operated("gpt2"), make("gpt2", seed=5)
    old.generation_config.top_k, new.generation_config.top_k = 7, 8
    fastff.replace_(new, depth=1)
    save_pretrained(old, tmp_path)
    calls = []

    def replace(*paths, real=os.replace):
        calls.append(paths)
        if len(calls) > renamed:
            raise OSError("power cut")
        real(*paths)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(OSError, match=r"cannot save into .*power cut"):
            save_pretrained(new, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "fastff.safetensors", "generation_config.json"]
    loaded = from_pretrained(tmp_path)
    assert_same(loaded, old)
    assert loaded.generation_config.top_k == 7
    save_pretrained(new, tmp_path)
    assert_same(from_pretrained(tmp_path), new)
    save_pretrained(operated("bert"), tmp_path)
    assert not (tmp_path / "generation_config.json").exists()  # that of another model


def test_a_config_that_asks_for_large_buffers(tmp_path):
    """GPT-J computes its positions and does not save them: 2**36 of them are not found out by comparing tensors."""
    sizes = {"vocab_size": 50, "n_embd": 16, "n_layer": 1, "n_head": 2, "rotary_dim": 4, "n_positions": 40}
    model = transformers.GPTJForCausalLM(transformers.GPTJConfig(**sizes, bos_token_id=1, eos_token_id=2))
    fastff.replace_(model, depth=1)
    save_pretrained(model, tmp_path)
    assert_same(from_pretrained(tmp_path), model)
    note, tensors = unpack(tmp_path)
    for values, told in (
        ({"n_positions": 2**36}, "n_positions = 68719476736; with a file of"),
        ({"n_positions": 2**20, "rotary_dim": 512}, r"asks for transformer.h.0.attn.embed_positions of \d+ bytes"),
    ):
        pack(tmp_path, note | {"config": note["config"] | values}, tensors)
        with pytest.raises(ValueError, match=told):
            from_pretrained(tmp_path)


def test_nan_is_a_number_like_any_other(tmp_path):
    model = operated("bert")
    with torch.no_grad():
        model.classifier.bias.fill_(float("nan"))
    save_pretrained(model, tmp_path)
    assert from_pretrained(tmp_path).classifier.bias.isnan().all()
