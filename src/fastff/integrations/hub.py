"""The Hugging Face Hub: what fastff saves goes up and comes down as one folder, by the Hub's own conventions.

    push_to_hub(model, "user/model")       # a converted transformers model; pretrained.py has both functions
    model = from_pretrained("user/model")

    class Net(nn.Module, FFFHubMixin): ...  # any other model
    fastff.replace_(net, depth=4)
    net.push_to_hub("user/net")
    net = Net.from_pretrained("user/net")

A repository holds fastff.safetensors, and no code: the weights load into a class that is installed, or that you have.
PyTorchModelHubMixin alone loads a converted model into a fresh dense one without an error, its blocks at random.
"""

import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, PyTorchModelHubMixin, snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from torch import nn

from ..surgery.checkpoint import load_, save
from ..surgery.files import WEIGHTS
from ..surgery.history import HISTORY

_PLAIN_WEIGHTS = "model.safetensors"
_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def upload(save: Callable[[Path], Any], repo_id: str, **options: Any) -> str:
    """Create a repository if there is none, and upload the folder that `save` writes. Returns the commit's address."""
    token, private = options.pop("token"), options.pop("private")
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id=repo_id, private=private, exist_ok=True).repo_id
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder))
        return str(api.upload_folder(repo_id=repo_id, repo_type="model", folder_path=folder, **options))


def fetch(name: str | os.PathLike[str], patterns: list[str], **options: Any) -> Path:
    """A directory itself; the local copy of these files for the name of a repository."""
    folder = Path(name)
    if folder.is_dir():
        return folder
    if not isinstance(name, str) or not _REPOSITORY.fullmatch(name) or folder.exists():
        raise FileNotFoundError(
            f"{folder} is not a directory, and not the name of a repository on the Hub. Pass one of them, such as "
            '"user/model".'
        )
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, **options))
    except (HfHubHTTPError, OSError) as error:  # not found, not allowed, no connection
        told = str(error).strip().splitlines()[0]
        raise FileNotFoundError(
            f"{name} is not a directory here, and could not be downloaded from the Hub: {told} Check the name, the "
            "token and the connection."
        ) from error


class FFFHubMixin(PyTorchModelHubMixin):
    """huggingface_hub's PyTorchModelHubMixin, for models that `replace_` may convert.

    Use it in its place: class Net(nn.Module, FFFHubMixin). save_pretrained, push_to_hub and from_pretrained keep the
    surgery. A model without surgery is saved as by PyTorchModelHubMixin.
    """

    _keeps_surgery = True  # replace_ puts no guard before save_pretrained

    def _save_pretrained(self, save_directory: Path) -> None:
        converted = bool(vars(self).get(HISTORY))
        other = _PLAIN_WEIGHTS if converted else WEIGHTS
        if (save_directory / other).exists():
            raise FileExistsError(
                f"{save_directory} has a {other} of a model {'before' if converted else 'after'} surgery. Choose an "
                "empty directory."
            )
        if not isinstance(self, nn.Module):
            raise TypeError(f"FFFHubMixin needs an nn.Module; {type(self).__name__} is none. Derive it from nn.Module.")
        if converted:
            save(self, save_directory)
        else:
            super()._save_pretrained(save_directory)

    @classmethod
    def _from_pretrained(
        cls, *, model_id: str, map_location: str = "cpu", strict: bool = True, **options: Any
    ) -> "FFFHubMixin":
        names = ("revision", "cache_dir", "force_download", "local_files_only", "token")
        where = {name: options.pop(name, None) for name in names}
        switches = {name: bool(where[name]) for name in ("force_download", "local_files_only")}
        folder = fetch(model_id, [WEIGHTS, _PLAIN_WEIGHTS], **where | switches)
        if not (folder / WEIGHTS).exists():
            found: FFFHubMixin = super()._from_pretrained(
                model_id=str(folder), map_location=map_location, strict=strict, **where | switches, **options
            )
            return found
        model: Any = cls(**options)
        load_(model, folder)
        return model.to(map_location).eval()
