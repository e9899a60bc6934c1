"""What examples/minilm.py needs on another machine: no package with the weights, no tokenizer and no docstrings there.

`--pack FOLDER` writes a folder, and `--model FOLDER` runs from it. It holds

    config.json     the model's configuration, for transformers
    weights.npz     its weights, unchanged
    text.npz        token ids: training sentences, and all sentences that held-out ones are drawn from
    pack.json       the model's name, the padding token and the number of training sentences; written last

A run from it on the same machine gives the same numbers. To be small, it leaves out the embeddings of tokens that no
sentence has: they are NaN in the model. The bytes of all numbers are stored by their place, since the ones with the
exponents compress.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from minilm_text import Sentences, Text, held_out_of
from torch import Tensor, nn

ABOUT, WEIGHTS, TEXT = "pack.json", "weights.npz", "text.npz"
PARTS = ("train", "held_out")


def is_packed(path: Path | None) -> bool:
    return path is not None and (path / ABOUT).exists()


def name_of(path: Path | None) -> str:
    """The model's name in rows: the same from a packed folder and from what was packed."""
    if path is None:
        return "all-MiniLM-L6-v2"
    return _about(path)["model"] if is_packed(path) else path.name


def pack(folder: Path, model: nn.Module, name: str, text: Text, sentences: int) -> str:
    """Write a folder; returns what it holds, in words. text: all sentences that held-out ones are drawn from."""
    kinds = {x.dtype for x in model.state_dict().values() if x.is_floating_point()}
    if kinds != {torch.float32}:
        found = ", ".join(sorted(map(str, kinds)))
        raise SystemExit(f"only float32 weights can be packed; these are {found}. Save the model in float32 first.")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ABOUT).unlink(missing_ok=True)  # a folder that is half written is not taken for a packed one
    words, used = _embedding(model), _used(text)
    state = {key: x[used] if key == words else x for key, x in model.state_dict().items()}
    np.savez_compressed(folder / WEIGHTS, **{key: _planes(x) for key, x in state.items()})
    np.savez_compressed(folder / TEXT, **_arrays(text))
    model.config.save_pretrained(folder)
    about = {"model": name, "pad": text.pad, "sentences": sentences}
    (folder / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    size = sum(path.stat().st_size for path in folder.iterdir()) / 2**20
    rows = len(model.get_submodule(words.rpartition(".")[0]).weight)
    return (
        f"{folder}: {size:.1f} MiB. Text: {len(text.train):,} training sentences, {len(text.held_out):,} to draw "
        f"held-out ones from. Weights: float32, with the embeddings of {len(used):,} of {rows:,} tokens."
    )


def unpack(folder: Path, sentences: int, held_out: int, seed: int) -> tuple[nn.Module, Text]:
    """The encoder, in eval(), and the text of a run with these options."""
    from transformers import AutoConfig, AutoModel

    about = _about(folder)
    if sentences > about["sentences"]:
        raise SystemExit(
            f"{folder} was packed with --sentences {about['sentences']}; a run from it may take at most as many, and "
            f"--sentences is {sentences}. Pass fewer, or pack again with more."
        )
    with np.load(folder / TEXT) as arrays:
        train, library = (_sentences(arrays[part], arrays[f"{part}_lengths"]) for part in PARTS)
    if held_out > len(library):
        raise SystemExit(f"{folder} has {len(library)} sentences to draw from; --held-out {held_out} is more.")
    model = AutoModel.from_config(AutoConfig.from_pretrained(folder)).float()
    words, used, state = _embedding(model), _used(Text(train, library, about["pad"])), model.state_dict()
    with np.load(folder / WEIGHTS) as planes:
        for key, like in state.items():
            part = _numbers(planes[key], like.dtype)
            state[key] = part.view(like.shape) if key != words else _spread(part, used, like)
    model.load_state_dict(state)
    return model.eval(), Text(train[:sentences], held_out_of(library, held_out, seed), about["pad"])


def _about(folder: Path) -> dict[str, Any]:
    return json.loads((folder / ABOUT).read_text(encoding="utf-8"))


def _embedding(model: Any) -> str:
    """The key of the tokens' embeddings in the state dict."""
    words = model.get_input_embeddings()
    return next(f"{name}.weight" for name, module in model.named_modules() if module is words)


def _used(text: Text) -> Tensor:
    """The tokens that occur, in order."""
    return torch.tensor(sorted({text.pad}.union(*text.train, *text.held_out)))


def _spread(rows: Tensor, used: Tensor, like: Tensor) -> Tensor:
    """The embeddings of all tokens; NaN for those that no sentence has, so that a use of them shows."""
    found = torch.full_like(like, torch.nan)
    found[used] = rows.view(len(used), like.shape[1])
    return found


def _planes(x: Tensor) -> Any:
    """The bytes of numbers: the first of all numbers, then the second, and on."""
    return x.contiguous().view(-1).view(torch.uint8).view(-1, x.element_size()).T.contiguous().numpy()


def _numbers(planes: Any, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(planes).T.contiguous().view(-1).view(dtype)


def _arrays(text: Text) -> dict[str, Any]:
    """Sentences as two arrays each: all tokens, and the lengths."""
    made = {}
    for part, sentences in zip(PARTS, (text.train, text.held_out), strict=True):
        tokens = np.array([token for one in sentences for token in one])
        made[part] = tokens.astype(np.uint16 if tokens.max() < 2**16 else np.uint32)
        made[f"{part}_lengths"] = np.array([len(one) for one in sentences], dtype=np.uint16)
    return made


def _sentences(tokens: Sequence[int], lengths: Iterable[int]) -> Sentences:
    ends = np.cumsum(lengths)[:-1]
    return [one.tolist() for one in np.split(np.asarray(tokens), ends)]
