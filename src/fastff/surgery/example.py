"""A batch for a whole model, made from its config, for replace_ if no example= is given.

In Hugging Face models, the config gives the size of a vocabulary, an image or a spectrogram, and the forward's
arguments say which of these it takes. A few batches are tried, smallest first; the first that the model runs on is the
example. A model without a config, or one that needs something else, has none.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .trace import run_example, tensors_of

_TOKENS = 8
_FRAMES = (64, 256)  # of a spectrogram, if the config does not say
_SAMPLES = (2048, 16000)  # of a waveform


def example_of(model: nn.Module) -> dict[str, Tensor] | None:
    """A batch of two that `model` runs on, in evaluation and in training; None if none is found."""
    config = getattr(model, "config", None)
    if config is None or next(model.parameters(), None) is None or next(model.parameters()).is_meta:
        return None
    for batch in _batches(model, config):
        try:
            output = run_example(model, batch, training=False)[0]
            run_example(model, batch, training=True)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # foreign code, which rejects a batch in many ways
            continue
        # If the model gives NaN, no comparison can say anything.
        if not any(t.is_floating_point() and t.isnan().any() for t in tensors_of(output)):
            return batch
    return None


def _batches(model: nn.Module, config: Any) -> Iterator[dict[str, Tensor]]:
    """Batches to try: the main input alone, then with decoder inputs, then everything that the forward takes."""
    takes = inspect.signature(model.forward).parameters
    values = {name: list(make(config, model)) for name, make in _INPUTS.items() if name in takes}
    main = getattr(model, "main_input_name", "")
    main = main if isinstance(main, str) else ""  # OneFormer names several
    together = [name for name in values if name != "inputs_embeds"]
    orders = [[main], [main, "decoder_input_ids"], together, ["input_ids"], ["inputs_embeds"]]
    tried: list[list[str]] = []
    for names in orders:
        present = [name for name in names if values.get(name)]
        if not present or present in tried or (names[0] == main and main not in present):
            continue
        tried.append(present)
        for i in range(max(len(values[name]) for name in present)):
            yield {name: values[name][min(i, len(values[name]) - 1)] for name in present}


def _tokens(config: Any, model: nn.Module) -> Iterator[Tensor]:
    """Ordinary tokens: none that have a special meaning in the config."""
    vocabulary = size_in(config, "vocab_size")
    if vocabulary is None:
        return
    special = {
        token
        for part in _parts(config)
        for name, value in vars(part).items()
        if name.endswith(("token_id", "token_index"))
        for token in (value if isinstance(value, list | tuple) else [value])
    }
    ordinary = [token for token in range(vocabulary) if token not in special][: 2 * _TOKENS]
    if len(ordinary) == 2 * _TOKENS:
        yield torch.tensor(ordinary).view(2, _TOKENS)


def _pixels(config: Any, model: nn.Module) -> Iterator[Tensor]:
    channels = size_in(config, "num_channels", "in_channels", "in_chans") or 3
    given = size_in(config, "image_size", "img_size")
    for side in [*([given] if given else []), 64, 224]:
        high, wide = side if isinstance(side, tuple | list) else (side, side)
        frames = size_in(config, "num_frames", "frames_per_clip")
        if frames:
            yield _noise(model, 2, frames, channels, high, wide)
        yield _noise(model, 2, channels, high, wide)


def _spectrogram(config: Any, model: nn.Module) -> Iterator[Tensor]:
    bins = size_in(config, "num_mel_bins", "n_mels", "feature_size", "input_feat_per_channel", "input_dim")
    if bins is None:
        return
    given = size_in(config, "max_source_positions", "max_length")
    for frames in [*([2 * given, given] if given else []), *_FRAMES]:  # two frames a position, as in Whisper
        yield _noise(model, 2, bins, frames)
        yield _noise(model, 2, frames, bins)


def _waveform(config: Any, model: nn.Module) -> Iterator[Tensor]:
    for samples in _SAMPLES:
        yield _noise(model, 2, samples)
        yield _noise(model, 2, 1, samples)
    yield from _spectrogram(config, model)


def _embeddings(config: Any, model: nn.Module) -> Iterator[Tensor]:
    hidden = size_in(config, "hidden_size", "d_model")
    if hidden:
        yield _noise(model, 2, _TOKENS, hidden)


def _boxes(config: Any, model: nn.Module) -> Iterator[Tensor]:
    """Where each token stands on a page: all in one corner."""
    yield torch.zeros(2, _TOKENS, 4, dtype=torch.long)


def _noise(model: nn.Module, *shape: int) -> Tensor:
    like = next(model.parameters())
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(like.dtype)


_INPUTS = {
    "input_ids": _tokens,
    "decoder_input_ids": _tokens,
    "bbox": _boxes,
    "pixel_values": _pixels,
    "pixel_values_videos": _pixels,
    "input_features": _spectrogram,
    "input_values": _waveform,
    "inputs_embeds": _embeddings,
}


def size_in(config: Any, *names: str) -> Any:
    """The first of these sizes that a config, or one of the configs inside it, has."""
    for name in names:
        for part in _parts(config):
            value = getattr(part, name, None)
            if isinstance(value, int | tuple | list) and not isinstance(value, bool) and value:
                return value
    return None


def _parts(config: Any) -> list[Any]:
    """A config and the configs inside it, from the outside in."""
    found = [config]
    for part in found:
        if hasattr(part, "to_dict"):
            found += [value for value in vars(part).values() if hasattr(value, "to_dict") and value not in found]
    return found
