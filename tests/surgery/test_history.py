"""What a save records about an operated model: changes after the surgery, layers that no surgery made."""

import copy
import functools
import re

import pytest
import torch
from torch import nn

import fastff
from fastff.surgery.history import history_of
from pretrained_models import VECTORS, Feedforward, assert_same, encoder, make, operated, outputs

safetensors_torch = pytest.importorskip("safetensors.torch")

from fastff.integrations.transformers import from_pretrained, save_pretrained  # noqa: E402


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
    assert [e["depth"] for e in history_of(loaded)] == [2, 1]
    fastff.save(nn.Sequential(model), tmp_path / "wrapped")
    fresh = nn.Sequential(make("bert", seed=1))
    fastff.load_(fresh, tmp_path / "wrapped")
    assert_same(fresh[0], model)


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
    with pytest.raises(ValueError, match=r"saved activation of 0 differs from the function at '0.act'"):
        fastff.load_(other, tmp_path)
    assert isinstance(other[0], Feedforward)
    model[0].activation = elu(0.51)  # by hand, and so not in a model that is built as this one was
    fastff.save(model, tmp_path)
    with pytest.raises(ValueError, match="was changed by hand, or the model was built differently"):
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
    with pytest.raises(ValueError, match=r"(?s)would not load again.*differs from the function at"):
        save_pretrained(model, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_layers_that_no_surgery_made(tmp_path):
    """A copy appended by hand is told of when it is saved, not only when it does not load. But a model may have FFF
    layers by its own code: then it loads."""
    model = feedforward()
    model.append(copy.deepcopy(model[0]))
    with pytest.warns(
        UserWarning, match=r"no surgery on this model created the FFF layers 1: load_ needs a fresh model"
    ):
        fastff.save(model, tmp_path)
    fresh = nn.Sequential(Feedforward(), fastff.FFF(16, 16, depth=2, leaf_width=16, activation="gelu")).eval()
    fastff.load_(fresh, tmp_path)
    with torch.no_grad():
        assert torch.equal(fresh(VECTORS), model(VECTORS))
    with pytest.raises(ValueError, match=r"1.up.weight is missing"):
        fastff.load_(nn.Sequential(Feedforward(), Feedforward()), tmp_path)

    twice = feedforward()
    twice.append(twice[0])
    with pytest.raises(ValueError, match="0 was replaced in one place and is now used in several"):
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
    told = "has FFF layers ({}), but replace_ and apply_ were not called on it. If they"
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
        r"classifier.weight is a Quantized, a quantised .* Save the model before quantising it, and quantise it again"
    )
    for save in (fastff.save, save_pretrained):
        with pytest.raises(TypeError, match=told):
            save(model, tmp_path / "it")
    assert not (tmp_path / "it").exists()
