"""transformers' own save_pretrained and from_pretrained warn about FFF layers."""

import copy
import gc
import io
import subprocess
import sys
import warnings
import weakref

import pytest
import torch
from torch import nn

import fastff
from pretrained_models import FC1, Feedforward, assert_same, make, operated

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

from fastff.integrations.transformers import from_pretrained, save_pretrained  # noqa: E402


@pytest.mark.slow
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


GUARDED = r"does not know the FFF layers that fastff put .*fastff.integrations.transformers.save_pretrained\("


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
    monkeypatch.setattr("fastff.surgery.outputs.OutputCheck.check", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fastff.replace_(model, depth=1)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.save_pretrained(tmp_path)


@pytest.mark.slow
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
