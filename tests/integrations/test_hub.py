"""Repositories on the Hub: a stand-in for the upload, and huggingface_hub's own local cache for the download."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fastff
from pretrained_models import Feedforward, assert_same, make, operated

pytest.importorskip("transformers")
huggingface_hub = pytest.importorskip("huggingface_hub")

from fastff.integrations import hub  # noqa: E402
from fastff.integrations.transformers import from_pretrained, push_to_hub  # noqa: E402


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A folder in which an upload arrives as the cache of a download: repositories without a connection."""

    class Api:
        def __init__(self, token=None):
            self.token = token

        def create_repo(self, repo_id, private=None, exist_ok=False):
            assert exist_ok
            return SimpleNamespace(repo_id=f"user/{repo_id}" if "/" not in repo_id else repo_id)

        def upload_folder(self, *, repo_id, repo_type, folder_path, **options):
            assert repo_type == "model"
            assert set(options) >= {"commit_message", "revision", "create_pr"}
            place = tmp_path / f"models--{repo_id.replace('/', '--')}"
            shutil.copytree(folder_path, place / "snapshots" / ("a" * 40))
            (place / "refs").mkdir()
            (place / "refs" / "main").write_text("a" * 40)
            return f"https://hub.example/{repo_id}/commit/aaaa"

    monkeypatch.setattr(hub, "HfApi", Api)
    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", Api)
    return tmp_path


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_converted_model_goes_up_and_comes_down(family, cache):
    model = operated(family)
    assert push_to_hub(model, "mine", private=True).endswith("user/mine/commit/aaaa")
    files = {path.name for path in (cache / "models--user--mine" / "snapshots" / ("a" * 40)).iterdir()}
    assert files == {"fastff.safetensors", "config.json", "generation_config.json"}  # no code, no pickle
    loaded = from_pretrained("user/mine", cache_dir=cache, local_files_only=True)
    assert_same(loaded, model)
    assert loaded.name_or_path == "user/mine"


def test_a_repository_that_cannot_be_had(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"user/none is not a directory here, and could not be .*Check"):
        from_pretrained("user/none", cache_dir=tmp_path, local_files_only=True)
    (tmp_path / "file").write_text("")
    for name in ("nowhere", tmp_path / "file", "/none/there", "../a/b"):
        with pytest.raises(FileNotFoundError, match=r"is not a directory, and not the name of a repository"):
            from_pretrained(name)


def test_the_librarys_own_push_is_refused(tmp_path):
    """It would upload a model.safetensors that AutoModel loads with random dense blocks."""
    model = operated("bert")
    refused = r"own push_to_hub does not know the FFF layers.*fastff.integrations.transformers.push_to_hub\(model"
    with pytest.raises(RuntimeError, match=refused):
        model.push_to_hub("user/mine")
    with pytest.raises(RuntimeError, match=refused):
        model.save_pretrained(tmp_path, push_to_hub=True)
    assert not [*tmp_path.iterdir()]
    assert "push_to_hub" not in vars(make("bert"))


class Net(nn.Module, hub.FFFHubMixin):
    def __init__(self, width: int = 3):
        super().__init__()
        self.first, self.block = nn.Linear(width, 16), Feedforward()

    def forward(self, x):
        return self.block(self.first(x))


X = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("converted", [True, False])
def test_a_class_with_the_mixin(converted, cache):
    """A directory, and a repository. from_pretrained takes the arguments of the class from config.json."""
    model = Net(width=5).eval()
    if converted:
        fastff.replace_(model, depth=2, filter="block")
    model.save_pretrained(cache / "saved")
    assert (cache / "saved" / "fastff.safetensors").exists() is converted
    model.push_to_hub("user/net")
    here = Net.from_pretrained(cache / "saved")
    there = Net.from_pretrained("user/net", cache_dir=cache, local_files_only=True)
    for loaded in (here, there):
        assert isinstance(loaded.block, fastff.FFF) is converted
        assert not loaded.training
        assert torch.equal(loaded(X), model(X))


def test_the_mixin_mixes_no_two_saves(tmp_path):
    """A directory with both files would load as the one or the other, by chance."""
    Net().save_pretrained(tmp_path / "dense")
    model = Net()
    fastff.replace_(model, depth=1, filter="block")
    with pytest.raises(FileExistsError, match=r"has a model.safetensors of a model before surgery. Choose an empty"):
        model.save_pretrained(tmp_path / "dense")
    model.save_pretrained(tmp_path / "converted")
    with pytest.raises(FileExistsError, match=r"has a fastff.safetensors of a model after surgery"):
        Net().save_pretrained(tmp_path / "converted")


def test_the_plain_mixin_is_refused_after_surgery(cache):
    """huggingface_hub's own mixin loads into the dense class with strict=False: random blocks, and no error."""

    class Plain(nn.Module, huggingface_hub.PyTorchModelHubMixin):
        def __init__(self):
            super().__init__()
            self.block = Feedforward()

        def forward(self, x):
            return self.block(x)

    model = Plain()
    fastff.replace_(model, depth=1, filter="block")
    with pytest.raises(RuntimeError, match=r"use fastff.integrations.hub.FFFHubMixin instead"):
        model.push_to_hub("user/net")
    with pytest.warns(UserWarning, match=r"own save_pretrained does not know the FFF layers"):
        model.save_pretrained(Path(cache) / "plain")


def test_a_model_that_creates_its_own_layers_needs_only_the_plain_mixin(tmp_path):
    class Own(nn.Module, huggingface_hub.PyTorchModelHubMixin):
        def __init__(self, depth: int = 1):
            super().__init__()
            self.layer = fastff.FFF(5, 3, depth=depth, leaf_width=3)

        def forward(self, x):
            return self.layer(x)

    model = Own(depth=3).eval()
    model.save_pretrained(tmp_path)
    assert torch.equal(Own.from_pretrained(tmp_path, strict=True)(X), model(X))
