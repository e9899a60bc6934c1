"""Save and load operated models: bit-equal round trips, and files that somebody else wrote."""

import copy
import functools
import gc
import io
import json
import os
import pickle
import re
import struct
import subprocess
import sys
import warnings
import weakref

import pytest
import torch
from torch import nn

import fastff
from fastff.surgery import files
from fastff.surgery.specification import remembered

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")
from safetensors import safe_open  # noqa: E402

from fastff.integrations.transformers import from_pretrained, save_pretrained  # noqa: E402

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
    assert remembered(fresh) == remembered(model)
    with pytest.raises(ValueError, match=r"TransformerEncoder has been operated on already.* Pass a fresh one"):
        fastff.load_(fresh, tmp_path)  # it is operated on already


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
    with files.open_weights(tmp_path) as weights:
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
    with pytest.raises(ValueError, match=r"(?s)would not load again.*lm_head.weight is not in the model, or tied"):
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


def test_several_surgeries_add_up(tmp_path):
    """Of the model and of a part of it, with a copy in between, and with what was changed on the layers since."""
    model = make("bert")
    fastff.replace_(model, depth=2, filter="*.0.*")
    model = copy.deepcopy(model)
    report = fastff.replace_(model.bert.encoder, depth=1, leaf_width=5, transposition=0.1)
    report.specification[0]["depth"] = 7  # the model keeps its own record
    layer = model.bert.encoder.layer[1].intermediate.dense
    layer.decision, layer.dropout = "straight_through", 0.25
    save_pretrained(model, tmp_path)
    loaded = from_pretrained(tmp_path)
    assert_same(loaded, model)
    other = loaded.bert.encoder.layer[1].intermediate.dense
    assert (other.depth, other.leaf_width, other.transposition) == (1, 5, 0.1)
    assert (other.decision, other.dropout) == ("straight_through", 0.25)
    assert [e["depth"] for e in remembered(loaded)] == [2, 1]
    fastff.save(nn.Sequential(model), tmp_path / "wrapped")
    fresh = nn.Sequential(make("bert", seed=1))
    fastff.load_(fresh, tmp_path / "wrapped")
    assert_same(fresh[0], model)


class Feedforward(nn.Module):
    def __init__(self, act=None):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 64), act or nn.GELU(), nn.Linear(64, 16)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


def elu(alpha):
    return functools.partial(nn.functional.elu, alpha=alpha)


def feedforward(act=None, depth=2):
    model = nn.Sequential(Feedforward(act))
    if depth is not None:
        fastff.replace_(model, depth=depth)
    return model.eval()


@pytest.mark.parametrize("act", [None, nn.functional.elu], ids=["named", "callable"])
def test_an_activation_that_was_changed_since_is_saved(act, tmp_path):
    """It came back as the one that the surgery had found: silently another function."""
    model, fresh = feedforward(act), feedforward(act, depth=None)
    model[0].activation = "relu"
    fastff.save(model, tmp_path)
    fastff.load_(fresh, tmp_path)
    assert fresh[0].activation == "relu"
    with torch.no_grad():
        assert torch.equal(fresh(VECTORS), model(VECTORS))


@pytest.mark.parametrize("act", [None, nn.functional.elu], ids=["named", "callable"])
@pytest.mark.parametrize("now", [torch.tanh, nn.PReLU(), lambda x: x.flip(-1)], ids=["tanh", "PReLU", "flip"])
def test_a_function_put_there_by_hand_is_not_saved(act, now, tmp_path):
    model = feedforward(act)
    model[0].activation = now
    with pytest.raises(ValueError, match=r"0 was given the activation (tanh|PReLU|<lambda>) after.* set one of relu, "):
        fastff.save(model, tmp_path / "it")
    assert not (tmp_path / "it").exists()


def test_a_fresh_model_with_another_function_is_refused(tmp_path):
    """An activation without a name is not in the file: where the fresh model has another one, that is found out."""
    model = feedforward(elu(0.5))
    fastff.save(model, tmp_path)
    same, other = feedforward(elu(0.5), depth=None), feedforward(elu(0.51), depth=None)
    fastff.load_(same, tmp_path)
    with torch.no_grad():
        assert torch.equal(same(VECTORS), model(VECTORS))
    with pytest.raises(ValueError, match=r"activation of 0 was saved as one that is not the function at '0.act'"):
        fastff.load_(other, tmp_path)
    assert isinstance(other[0], Feedforward)
    model[0].activation = elu(0.51)  # by hand, and so not in a model that is built as this one was
    fastff.save(model, tmp_path)
    with pytest.raises(ValueError, match="was changed by hand, or the model is built in another way"):
        fastff.load_(feedforward(elu(0.5), depth=None), tmp_path)


def test_save_pretrained_keeps_the_activation_or_refuses(tmp_path):
    model = operated("clip")
    layer = next(m for m in model.modules() if isinstance(m, fastff.FFF))
    quick = layer.activation
    del layer.activation  # a module, in whose place torch takes no string
    layer.activation = "relu"
    save_pretrained(model, tmp_path / "it")
    loaded = from_pretrained(tmp_path / "it")
    assert [m.activation == "relu" for m in loaded.modules() if isinstance(m, fastff.FFF)] == [True, False]
    assert torch.equal(outputs(loaded), outputs(model))
    layer.activation = lambda x: quick(x) * 1.001
    with pytest.raises(ValueError, match=r"(?s)would not load again.*was saved as one that is not the function at"):
        save_pretrained(model, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_layers_that_no_surgery_made(tmp_path):
    """A copy appended by hand is told of when it is saved, not only when it does not load. But a model may have FFF
    layers by its own code: then it loads."""
    model = feedforward()
    model.append(copy.deepcopy(model[0]))
    with pytest.warns(UserWarning, match=r"no surgery on this model made the FFF layers 1: load_ takes this save only"):
        fastff.save(model, tmp_path)
    fresh = nn.Sequential(Feedforward(), fastff.FFF(16, 16, depth=2, leaf_width=16, activation="gelu")).eval()
    fastff.load_(fresh, tmp_path)
    with torch.no_grad():
        assert torch.equal(fresh(VECTORS), model(VECTORS))
    with pytest.raises(ValueError, match=r"1.up.weight is missing"):
        fastff.load_(nn.Sequential(Feedforward(), Feedforward()), tmp_path)

    twice = feedforward()
    twice.append(twice[0])
    with pytest.raises(ValueError, match="0, replaced in one place, is used in several now"):
        fastff.save(twice, tmp_path / "it")
    assert not (tmp_path / "it").exists()


@pytest.mark.filterwarnings("error")
def test_an_alias_of_a_larger_part_is_no_second_layer(tmp_path):
    def make():
        model = nn.ModuleDict({"a": nn.Sequential(Feedforward())})
        model["b"] = model["a"]
        return model

    model, fresh = make(), make()
    fastff.replace_(model, depth=2)
    fastff.save(model, tmp_path)
    fastff.load_(fresh, tmp_path)
    assert_same(fresh, model)
    assert fresh["a"] is fresh["b"]


def test_a_part_of_an_operated_model_is_told_of(tmp_path):
    """The surgery is remembered by the model that it was done on, which its parts do not know."""
    whole = nn.Sequential(nn.Sequential(Feedforward()))
    fastff.replace_(whole, depth=2)
    told = "has FFF layers ({}), but no surgery on it is known. If it is a part"
    for part, name in ((whole[0], "0"), (whole[0][0], "the model itself")):
        with pytest.raises(ValueError, match=re.escape(told.format(name))):
            fastff.save(part, tmp_path / "it")
    with pytest.raises(ValueError, match=re.escape(told.format("h.0.mlp.fff, h.1.mlp.fff"))):
        save_pretrained(operated("gpt2").transformer, tmp_path / "it")
    assert not (tmp_path / "it").exists()
    part = nn.Sequential(Feedforward())
    fastff.replace_(part, depth=2)
    fastff.save(part, tmp_path / "it")  # as the message says


def test_an_empty_path_is_not_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="the path of the directory is empty"):
        fastff.save(feedforward(), "")
    with pytest.raises(ValueError, match="the path of the directory is empty"):
        save_pretrained(operated("bert"), "")
    assert not list(tmp_path.iterdir())
    fastff.save(feedforward(), ".")
    assert (tmp_path / "fastff.safetensors").exists()


def test_what_cannot_be_saved(tmp_path):
    there = tmp_path / "it"
    with pytest.raises(ValueError, match=r"has had no surgery.*model.save_pretrained"):
        save_pretrained(make("bert"), there)
    with pytest.raises(ValueError, match="has had no surgery"):
        fastff.save(nn.Linear(2, 2), there)
    with pytest.raises(TypeError, match=r"expected a PreTrainedModel; got TransformerEncoder. .*fastff.save"):
        save_pretrained(encoder(), there)

    by_hand = operated("bert")
    by_hand.classifier = nn.Linear(16, 7)
    with pytest.raises(ValueError, match=r"(?s)would not load again.*classifier.weight has the shape \(7, 16\)"):
        save_pretrained(by_hand, there)
    gone = operated("bert")
    gone.bert.encoder.layer[0].intermediate.dense = nn.Linear(16, 16)
    with pytest.raises(ValueError, match=r"layer.0.intermediate.dense was replaced by an FFF of depth 2"):
        save_pretrained(gone, there)
    with pytest.raises(ValueError, match=r"cannot save .*: on the meta device"):
        save_pretrained(operated("bert").to("meta"), there)
    assert not there.exists()

    make("bert").save_pretrained(there)
    with pytest.raises(FileExistsError, match=r"weights of another model: model.safetensors"):
        save_pretrained(operated("bert"), there)


def test_transformers_own_from_pretrained_names_fastff(tmp_path):
    """It would draw the dense blocks at random. It said that there is no model.safetensors, and not why."""
    save_pretrained(operated("bert"), tmp_path)
    code = (
        "import sys, transformers\n"
        "for load in (transformers.BertForSequenceClassification.from_pretrained,"
        " transformers.AutoModel.from_pretrained,"
        " lambda path: transformers.pipeline('text-classification', model=path)):\n"
        "    try: load(sys.argv[1])\n"
        "    except (OSError, ValueError) as error:"
        " assert 'load it with fastff.integrations.transformers.from_pretrained' in str(error), error\n"
        "    else: raise SystemExit('it loaded')\n"
        "assert transformers.AutoConfig.from_pretrained(sys.argv[1]).hidden_size == 16\n"
        "assert 'fastff' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


GUARDED = r"does not know of the FFF layers that fastff has put .*fastff.integrations.transformers.save_pretrained\("


@pytest.mark.parametrize(
    "copied",
    [lambda model: model, copy.deepcopy, lambda m: copy.deepcopy(nn.Sequential(m))[0], lambda m: pickled(m), copy.copy],
    ids=["itself", "deepcopy", "deepcopy of a larger one", "torch.save", "copy"],
)
def test_transformers_own_save_pretrained_warns(copied, tmp_path):
    """What it writes, from_pretrained loads with random dense blocks. It still writes, for a Trainer's checkpoints."""
    first = operated("bert")
    model = copied(first)
    with torch.no_grad():
        model.classifier.bias.fill_(7.0)
    with pytest.warns(UserWarning, match=GUARDED):
        model.save_pretrained(tmp_path)
    state = safetensors_torch.load_file(tmp_path / "model.safetensors")
    assert torch.equal(state["classifier.bias"], torch.full((2,), 7.0))
    assert torch.equal(state[f"{FC1}.node_weight"], first.state_dict()[f"{FC1}.node_weight"])
    save_pretrained(model, tmp_path / "ours")
    assert_same(from_pretrained(tmp_path / "ours"), model)
    loaded = from_pretrained(tmp_path / "ours")
    with pytest.warns(UserWarning, match=GUARDED):
        loaded.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=GUARDED):
        from_pretrained(tmp_path / "ours").save_pretrained(tmp_path)  # nothing refers to the model any more


def test_transformers_own_save_pretrained_keeps_out_of_a_directory_of_ours(tmp_path):
    """A Trainer wrote into it: config.json no longer named fastff, and AutoModel drew the dense blocks at random."""
    model = operated("bert")
    save_pretrained(model, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for call in (lambda: model.save_pretrained(tmp_path), lambda: model.save_pretrained(save_directory=str(tmp_path))):
        with pytest.raises(ValueError, match=r"has a fastff.safetensors, which fastff wrote: .*another directory"):
            call()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def pickled(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


def test_a_surgery_that_was_undone_leaves_no_warning(tmp_path, monkeypatch):
    model = make("bert")
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    monkeypatch.setattr("fastff.surgery.outputs.Answers.check", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fastff.replace_(model, depth=1)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.save_pretrained(tmp_path)


def test_the_warning_keeps_no_model_in_memory():
    """A reference to the model from itself would keep it, and its GPU memory, until the collector comes by."""
    gc.collect()
    gc.disable()
    try:
        model = type("Kind", (nn.Sequential,), {"save_pretrained": lambda self, path: None})(Feedforward())
        fastff.replace_(model, depth=1)
        gone = weakref.ref(model)
        del model
        assert gone() is None
    finally:
        gc.enable()


class Quantized(torch.Tensor):
    """As torchao makes them: a tensor that has its numbers in another one, and no storage of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(f"{function} on a quantised tensor")


def test_quantised_tensors_are_named(tmp_path):
    """torchao's quantize_ changes the linear layers and leaves the FFF layers; saving died deep inside safetensors."""
    model = operated("bert")
    model.classifier.weight = nn.Parameter(Quantized(model.classifier.weight.detach()), requires_grad=False)
    told = (
        r"classifier.weight is a Quantized, a quantised .* Save the model before it is quantised, and quantise it again"
    )
    for save in (fastff.save, save_pretrained):
        with pytest.raises(TypeError, match=told):
            save(model, tmp_path / "it")
    assert not (tmp_path / "it").exists()


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
    with pytest.raises(ValueError, match="device_map is the meta device"):
        from_pretrained(tmp_path, device_map="meta")


class GPT2LMHeadModel(transformers.GPT2LMHeadModel):
    """A class of one's own, under a name that transformers has too."""


def test_a_class_of_ones_own(tmp_path):
    model = GPT2LMHeadModel(transformers.GPT2Config(**GPT2, eos_token_id=2))
    fastff.replace_(model, depth=1)
    save_pretrained(model, tmp_path)
    with pytest.raises(ValueError, match=r"names \['.*GPT2LMHeadModel'\] as architectures.* Pass the class"):
        from_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path, GPT2LMHeadModel)
    assert type(loaded) is GPT2LMHeadModel
    assert_same(loaded, model)
    told = r"does not fit AutoModel: it is of \['.*GPT2LMHeadModel'\]. Pass that class.* has no 'transformer.h.0.mlp"
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


# Files that somebody else wrote. Each case changes what was saved, and says what must be told.


def unpack(folder):
    """The note and the tensors of a save."""
    path = folder / "fastff.safetensors"
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["fastff"]), safetensors_torch.load_file(path)


def pack(folder, note, tensors):
    metadata = {"fastff": note if isinstance(note, str) else json.dumps(note)}
    safetensors_torch.save_file(tensors, folder / "fastff.safetensors", metadata=metadata)


def reweigh(change):
    def edit(folder, note, tensors):
        change(tensors)

    return edit


def note(**values):
    return lambda folder, note, tensors: note.update(values)


def entry(**values):
    return lambda folder, note, tensors: note["specification"][0].update(values)


def configured(**values):
    return lambda folder, note, tensors: note["config"].update(values)


def bytes_of(change):
    """What is done to the file when it has been written again."""

    def after(folder):
        path = folder / "fastff.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return lambda folder, note, tensors: after


class Trap:
    """What a pickle can do."""

    def __reduce__(self):
        return (os.mkdir, ("sprung",))


def only_pickle(folder, note, tensors):
    def after(folder):
        (folder / "fastff.safetensors").rename(folder / "pytorch_model.bin")
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))

    return after


def twice(folder, note, tensors):
    note["specification"].append(note["specification"][0])


FC1 = "bert.encoder.layer.0.intermediate.dense"
ACT = "bert.encoder.layer.0.intermediate.intermediate_act_fn"
FC2 = "bert.encoder.layer.0.output.dense"
HOSTILE = {
    "a pickle under our name": (bytes_of(lambda b: pickle.dumps(Trap())), "not a whole safetensors file"),
    "only a pickle": (only_pickle, r"not there: there is pytorch_model.bin. .* never a pickle"),
    "truncated": (bytes_of(lambda b: b[:-1]), "not a whole safetensors file"),
    "truncated header": (bytes_of(lambda b: b[:20]), "not a whole safetensors file"),
    "empty": (bytes_of(lambda b: b""), "not a whole safetensors file"),
    "header of 2**60 bytes": (bytes_of(lambda b: struct.pack("<Q", 2**60) + b[8:]), "not a whole safetensors file"),
    "something behind the end": (bytes_of(lambda b: b + b"x"), "not a whole safetensors file"),
    "wrong shape": (
        reweigh(lambda t: t.update({"classifier.weight": torch.ones(16, 2)})),
        r"classifier.weight has the",
    ),
    "wrong shape in an FFF": (
        reweigh(lambda t: t.update({f"{FC1}.node_bias": torch.ones(4)})),
        r"node_bias of shape \(3,",
    ),
    "wrong dtype": (
        reweigh(lambda t: t.update({"classifier.bias": torch.ones(2).int()})),
        "classifier.bias has the dtype",
    ),
    "mixed dtypes": (
        reweigh(lambda t: t.update({f"{FC1}.node_bias": torch.ones(3).double()})),
        "has parameters of several dtypes: F32, F64",
    ),
    "missing tensor": (reweigh(lambda t: t.pop("classifier.bias")), "classifier.bias is missing"),
    "missing leaf": (
        reweigh(lambda t: t.pop(f"{FC1}.leaf_in_bias")),
        r"leaf_in_bias of shape \(4, 12\); the file has none",
    ),
    "additional tensor": (reweigh(lambda t: t.update(more=torch.ones(1))), "more is not in the model"),
    "no surgery": (lambda folder, note, tensors: note.clear(), "has no note of a surgery"),
    "unknown version": (note(version=3), "format version 3; this is fastff for version 2"),
    "version of another type": (note(version=True), "format version True"),
    "unknown key": (note(run="rm"), "note of a surgery that fastff did not write: .*run"),
    "no config": (note(config=None), r"has no config: fastff.save wrote it. .*fastff.load_\(model, "),
    "config that is no object": (note(config=[1]), "has no config"),
    "generation config that is no object": (note(generation_config=[1]), "generation config must be a JSON object"),
    "generation config with code": (note(generation_config={"custom_generate": "e/c"}), "has custom_generate = 'e/c'"),
    "specification that is no list": (note(specification={"a": 1}), "a list of dicts"),
    "specification of strings": (note(specification=["a"]), "a list of dicts"),
    "empty specification": (note(specification=[]), "replaces nothing"),
    "unknown key in an entry": (entry(hook="os.system"), "not an entry of a specification by replace_: hook"),
    "duplicate entry": (twice, "the same block more than once"),
    "depth 40": (entry(depth=40), r"the specification wants .*node_weight of shape \(1099511627775, 16\)"),
    "depth 60": (entry(depth=60, leaf_width=2**31), "the specification is wrong at"),
    "depth 10**9": (entry(depth=10**9), "depth in a specification must be an integer from 0 to 60"),
    "negative depth": (entry(depth=-1), "depth in a specification must be"),
    "leaf width 0": (entry(leaf_width=0), "leaf_width in a specification must be"),
    "another leaf width": (
        entry(leaf_width=13),
        r"leaf_in_weight of shape \(4, 13, 16\); the file has the shape \(4, 12, 16\)",
    ),
    "float depth": (entry(depth=2.0), "depth in a specification must be an integer"),
    "text as depth": (entry(depth="2"), "depth in a specification must be an integer"),
    "true as node width": (entry(node_width=True), "node_width in a specification must be an integer"),
    "number as bias": (entry(bias=1), "bias in a specification must be true or false"),
    "dropout 1": (entry(dropout=1.0), r"dropout in a specification must be a number in \[0, 1\)"),
    "dropout NaN": (entry(dropout=float("nan")), "dropout in a specification must be"),
    "decision": (entry(decision=["soft"]), "decision in a specification must be a string"),
    "form": (entry(form="magic"), "form in a specification must be one of plain"),
    "another form": (entry(form="plain"), "linears in a specification must be inside of"),
    "name of another type": (entry(name=["a"]), "name in a specification must be a string"),
    "the model itself": (entry(name=""), "name in a specification must be the name of a module"),
    "name elsewhere": (entry(name="bert.embeddings"), "linears in a specification must be the module that is replaced"),
    "dots": (entry(name="..", linears=["..", FC2]), r"wants \.\..*the file has none"),
    "identity of a method": (entry(identity=["bert.encoder.forward", FC2]), "has no 'bert.encoder.forward'"),
    "identity of a class": (entry(identity=["bert.__class__", FC2]), "has no 'bert.__class__'"),
    "identity of a property": (entry(identity=["base_model.embeddings", FC2]), "has no 'base_model.embeddings'"),
    "identity of embeddings": (entry(identity=["bert.embeddings", FC2]), "'bert.embeddings' is an activation; in this"),
    "identity of a method with act in its name": (
        entry(identity=["deactivate", FC2]),
        "has no 'deactivate'",
    ),
    "identity without the last": (entry(identity=[ACT]), "identity in a specification must be paths that end with"),
    "activation unknown": (entry(activation="os.system"), "activation in a specification must be one of"),
    "activation gated": (entry(activation="swiglu"), "activation in a specification must be one of"),
    "activation of a list": (entry(activation=["relu"]), "activation in a specification must be one of"),
    "activation at a method": (entry(activation={"at": "bert.forward"}), "has no 'bert.forward'"),
    "activation at a method of act": (entry(activation={"at": "active_adapters"}), "has no 'active_adapters'"),
    "activation at a linear layer": (entry(activation={"at": "classifier"}), "'classifier' is an activation; in this"),
    "activation at globals": (
        entry(activation={"at": "forward.__globals__.act"}),
        "has no 'forward.__globals__.act'",
    ),
    "activation with few values": (
        entry(activation={"at": ACT, "values": [0.0]}),
        "activation in a specification must be",
    ),
    "activation with other values": (
        entry(activation={"at": ACT, "values": [0.0] * 7}),
        "saved as one that is not the function at",
    ),
    "activation with more": (entry(activation={"at": ACT, "call": "x"}), "activation in a specification must be"),
    "dropout after the classifier": (
        entry(dropout_after="classifier"),
        "dropout_after in a specification must be empty",
    ),
    "config with code": (configured(auto_map={"AutoModel": "evil.Model"}), "auto_map = .*fetch code"),
    "config with code inside": (configured(text_config={"auto_map": {"AutoConfig": "e.C"}}), "auto_map = "),
    "config with a kernel": (configured(_attn_implementation="evil/kernel"), "_attn_implementation = 'evil/kernel'"),
    "config with a quantiser": (configured(quantization_config={"quant_method": "x"}), "quantization_config = "),
    "architecture elsewhere": (configured(architectures=["pipeline"]), "one model class of transformers is expected"),
    "architecture as a path": (configured(architectures=["os.system"]), "one model class of transformers is expected"),
    "no architecture": (configured(architectures=None), "one model class of transformers is expected"),
    "another architecture": (
        configured(architectures=["GPT2LMHeadModel"]),
        "for a 'bert', which GPT2LMHeadModel is",
    ),
    "unknown model type": (configured(model_type="evil"), "for a 'evil'"),
    "dtype": (configured(dtype="load"), "must have a floating-point dtype; got 'load'"),
    "larger config": (configured(hidden_size=2**40), "hidden_size = 1099511627776; with a file of"),
    "large vocabulary": (
        configured(vocab_size=2**40),
        r"vocab_size = 1099511627776; with a file of 47 tensors and \d+",
    ),
    "larger vocabulary": (
        configured(vocab_size=2**19),
        r"word_embeddings.weight has the shape \(50, 16\), in the model",
    ),
    "a billion layers": (configured(num_hidden_layers=10**9), "num_hidden_layers = 1000000000; with a file of"),
    "text as a size": (configured(hidden_size="x"), "the config does not make a Bert"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save_pretrained(operated("bert"), folder)
    return folder


@pytest.mark.parametrize("case", HOSTILE)
def test_refused(case, saved, tmp_path, monkeypatch):
    folder = tmp_path / "saved"
    folder.mkdir()
    note, tensors = unpack(saved)
    change, told = HOSTILE[case]
    after = change(folder, note, tensors)
    pack(folder, note, tensors)
    if after is not None:
        after(folder)
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=told) as caught:
        from_pretrained(folder)
    assert type(caught.value) in (ValueError, TypeError, FileNotFoundError)
    assert not (tmp_path / "sprung").exists()


def test_a_note_that_is_nested_too_deeply_is_told_in_our_words(saved, tmp_path):
    """It said "maximum recursion depth exceeded while decoding a JSON array from a unicode string"."""
    pack(tmp_path, "[" * 100000, unpack(saved)[1])
    with pytest.raises(ValueError, match=r"is not JSON as fastff writes it: it is nested too deeply\."):
        from_pretrained(tmp_path)


@pytest.mark.parametrize("text", ["[]", "1", "{", '{"version": 2, "version": 2}', "[" * 100000, "9" * 5000, ""])
def test_a_note_that_is_no_object(text, saved, tmp_path):
    pack(tmp_path, text, unpack(saved)[1])
    with pytest.raises(ValueError, match=r"is not JSON as fastff writes it|must have a JSON object"):
        from_pretrained(tmp_path)


def test_where_there_is_nothing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere is not a directory.*snapshot_download"):
        from_pretrained("nowhere")
    with pytest.raises(FileNotFoundError, match=r"fastff.safetensors is not there: .* is no directory into which"):
        from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"fastff.safetensors is not there"):
        fastff.load_(encoder(), tmp_path)
    save_pretrained(operated("bert"), tmp_path)
    with pytest.raises(TypeError, match="model_class must be a model class of transformers"):
        from_pretrained(tmp_path, "BertModel")


def test_a_refused_load_leaves_the_model_as_it_was(tmp_path):
    """A file for more layers than the model has, or for fewer."""
    model = encoder()
    fastff.replace_(model, depth=2, filter="layers.0.*")
    fastff.save(model, tmp_path)
    for fresh, told in (
        (encoder(3), "layers.2.self_attn.in_proj_weight is missing"),
        (encoder(1), "layers.1.norm1.weight is not in the model"),
    ):
        before, modules = copy.deepcopy(fresh.state_dict()), dict(fresh.named_modules())
        with pytest.raises(ValueError, match=told):
            fastff.load_(fresh, tmp_path)
        assert dict(fresh.named_modules()) == modules
        assert all(torch.equal(tensor, before[name]) for name, tensor in fresh.state_dict().items())
        assert remembered(fresh) == []
        fastff.replace_(fresh, depth=1)  # it is still a model like any other


def test_an_error_while_reading_leaves_the_model_as_it_was(tmp_path, monkeypatch):
    model = encoder()
    fastff.replace_(model, depth=2)
    fastff.save(model, tmp_path)
    real = files.Saved.tensors

    def some(self, fresh):
        for count, pair in enumerate(real(self, fresh)):
            if count == 5:
                raise OSError("disk")
            yield pair

    monkeypatch.setattr(files.Saved, "tensors", some)
    fresh = encoder()
    before, keys = copy.deepcopy(fresh.state_dict()), list(fresh.state_dict())
    with pytest.raises(OSError, match="disk"):
        fastff.load_(fresh, tmp_path)
    assert list(fresh.state_dict()) == keys
    assert all(torch.equal(tensor, before[name]) for name, tensor in fresh.state_dict().items())


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
