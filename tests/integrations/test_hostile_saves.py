"""Saves that somebody else wrote: refused, with the reason, and the model is unchanged."""

import copy
import os
import pickle
import struct

import pytest
import torch

import fastff
from fastff.surgery import read
from fastff.surgery.history import history_of
from pretrained_models import FC1, encoder, operated, pack, unpack

safetensors_torch = pytest.importorskip("safetensors.torch")

from fastff.integrations.transformers import from_pretrained, save_pretrained  # noqa: E402

# Files that somebody else wrote. Each case changes what was saved, and says what must be told.


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


ACT = "bert.encoder.layer.0.intermediate.intermediate_act_fn"
FC2 = "bert.encoder.layer.0.output.dense"
HOSTILE = {
    "a pickle under our name": (bytes_of(lambda b: pickle.dumps(Trap())), "not a complete safetensors file"),
    "only a pickle": (only_pickle, r"does not exist: the directory has pytorch_model.bin. .* never a pickle"),
    "truncated": (bytes_of(lambda b: b[:-1]), "not a complete safetensors file"),
    "truncated header": (bytes_of(lambda b: b[:20]), "not a complete safetensors file"),
    "empty": (bytes_of(lambda b: b""), "not a complete safetensors file"),
    "header of 2**60 bytes": (bytes_of(lambda b: struct.pack("<Q", 2**60) + b[8:]), "not a complete safetensors file"),
    "something behind the end": (bytes_of(lambda b: b + b"x"), "not a complete safetensors file"),
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
    "unknown version": (note(version=3), "format version 3; this fastff reads version 2"),
    "version of another type": (note(version=True), "format version True"),
    "unknown key": (note(run="rm"), "note that fastff did not write: .*run"),
    "no config": (note(config=None), r"has no config: fastff.save wrote it. .*fastff.load_\(model, "),
    "config that is no object": (note(config=[1]), "has no config"),
    "generation config that is no object": (note(generation_config=[1]), "generation config must be a JSON object"),
    "generation config with code": (note(generation_config={"custom_generate": "e/c"}), "has custom_generate = 'e/c'"),
    "specification that is no list": (note(specification={"a": 1}), "must be a list of dicts"),
    "specification of strings": (note(specification=["a"]), "must be a list of dicts"),
    "empty specification": (note(specification=[]), "empty specification"),
    "unknown key in an entry": (entry(hook="os.system"), "not an entry of a specification by replace_: hook"),
    "duplicate entry": (twice, "the same block more than once"),
    "depth 40": (entry(depth=40), r"the specification wants .*node_weight of shape \(1099511627775, 16\)"),
    "depth 60": (entry(depth=60, leaf_width=2**31), "the specification is invalid at"),
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
    "another form": (entry(form="plain"), "linears in a specification must be inside "),
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
    "identity without the last": (entry(identity=[ACT]), "identity in a specification must be paths of which the last"),
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
        "differs from the function at",
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
    "architecture elsewhere": (configured(architectures=["pipeline"]), "must be one model class of transformers"),
    "architecture as a path": (configured(architectures=["os.system"]), "must be one model class of transformers"),
    "no architecture": (configured(architectures=None), "must be one model class of transformers"),
    "another architecture": (
        configured(architectures=["GPT2LMHeadModel"]),
        "for model type 'bert'; GPT2LMHeadModel has another",
    ),
    "unknown model type": (configured(model_type="evil"), "for model type 'evil'"),
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
    with pytest.raises(ValueError, match=r"that fastff did not write: it is nested too deeply\."):
        from_pretrained(tmp_path)


@pytest.mark.parametrize("text", ["[]", "1", "{", '{"version": 2, "version": 2}', "[" * 100000, "9" * 5000, ""])
def test_a_note_that_is_no_object(text, saved, tmp_path):
    pack(tmp_path, text, unpack(saved)[1])
    with pytest.raises(ValueError, match=r"note that fastff did not write|must have a JSON object"):
        from_pretrained(tmp_path)


def test_where_there_is_nothing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere is not a directory, and not the name of a repository"):
        from_pretrained("nowhere")
    with pytest.raises(FileNotFoundError, match=r"fastff.safetensors does not exist: .* has no save by fastff"):
        from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"fastff.safetensors does not exist"):
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
        assert history_of(fresh) == []
        fastff.replace_(fresh, depth=1)  # it is still a model like any other


def test_an_error_while_reading_leaves_the_model_as_it_was(tmp_path, monkeypatch):
    model = encoder()
    fastff.replace_(model, depth=2)
    fastff.save(model, tmp_path)
    real = read.Saved.tensors

    def some(self, fresh):
        for count, pair in enumerate(real(self, fresh)):
            if count == 5:
                raise OSError("disk")
            yield pair

    monkeypatch.setattr(read.Saved, "tensors", some)
    fresh = encoder()
    before, keys = copy.deepcopy(fresh.state_dict()), list(fresh.state_dict())
    with pytest.raises(OSError, match="disk"):
        fastff.load_(fresh, tmp_path)
    assert list(fresh.state_dict()) == keys
    assert all(torch.equal(tensor, before[name]) for name, tensor in fresh.state_dict().items())
