"""An example's content on a page: an image, a text with one token marked, or a row of numbers.

Contents become plain JSON: an image is base64 of its bytes, a text a list of tokens, a row a list of numbers.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .collect import Example

LARGEST = 64  # pixels of an image, each way
COLUMNS = 100  # numbers of a row

Decode = Callable[[int], str] | Mapping[int, str] | Sequence[str]


class Contents:
    """Turns examples into JSON. All examples of one data set have the same kind of content."""

    def __init__(self, first: Example | None, *, image_shape: Sequence[int] | None, decode: Any, tokens: bool) -> None:
        content = None if first is None else first.content
        self.kind, self.shape = "none", (0, 0, 1)
        self._given = None if image_shape is None else tuple(image_shape)
        self._low, self._high = 0.0, 1.0
        self._decode = token_text(decode)
        if content is None:
            return
        if tokens:
            self.kind = "text"
        elif self._given is not None or content.dim() >= 2:
            self.kind, self.shape = "image", tuple(self._image(content).shape)  # type: ignore[assignment]
        else:
            self.kind = "row"

    @property
    def size(self) -> int:
        """The rough bytes of one content in a page."""
        height, width, channels = self.shape
        return {"image": height * width * channels * 4 // 3, "text": 120}.get(self.kind, 400)

    def measure(self, examples: Sequence[Example]) -> None:
        """Find the darkest and the brightest value over all images, so that they share one scale."""
        found = [one.content.double() for one in examples if one.content is not None]
        if self.kind == "image" and found:
            finite = [content[content.isfinite()] for content in found]
            finite = [content for content in finite if content.numel()]
            self._low = min((float(content.min()) for content in finite), default=0.0)
            self._high = max((float(content.max()) for content in finite), default=1.0)

    def json(self, example: Example) -> Any:
        """The content of one example."""
        content = example.content
        if content is None:
            return None
        if self.kind == "text":
            return [example.offset, *(self._decode(int(token)) for token in content)]
        if self.kind == "row":
            return [short(float(value)) for value in content.reshape(-1)[:COLUMNS]]
        data = (self.pixels(example) * 255).round().to(torch.uint8)
        return base64.b64encode(bytes(data.flatten().tolist())).decode()

    def pixels(self, example: Example) -> Tensor:
        """An image with values from 0 to 1: (height, width, 1 or 3)."""
        assert example.content is not None
        image = (self._image(example.content) - self._low) / max(self._high - self._low, 1e-30)
        return image.nan_to_num().clamp(0, 1)

    def _image(self, content: Tensor) -> Tensor:
        """A content as an image (height, width, 1 or 3), in float64, no side longer than LARGEST."""
        image = content.double()
        if self._given is not None:
            wanted = torch.Size(self._given)
            if len(wanted) not in (2, 3) or wanted.numel() != image.numel():
                raise ValueError(
                    f"image_shape must be (height, width) or (height, width, 3) of {image.numel()} numbers, the size "
                    f"of an input; got {self._given}."
                )
            image = image.reshape(wanted)
        elif image.dim() > 2:
            image = image.reshape(-1, *image.shape[-2:]).movedim(0, -1)  # torch's (channels, height, width)
        image = image if image.dim() == 3 else image.unsqueeze(-1)
        image = image if image.shape[-1] in (1, 3) else image[..., :3] if image.shape[-1] > 3 else image[..., :1]
        if max(image.shape[:2]) > LARGEST:
            scale = LARGEST / max(image.shape[:2])
            size = [max(1, round(side * scale)) for side in image.shape[:2]]
            image = F.interpolate(image.movedim(-1, 0).unsqueeze(0), size, mode="area")[0].movedim(0, -1)
        return image


def token_text(decode: Any) -> Callable[[int], str]:
    """A token's text: from a function, a list or mapping of texts, or a tokenizer with `decode`; else its number."""
    if decode is None:
        return str
    if hasattr(decode, "convert_ids_to_tokens") and hasattr(decode, "decode"):
        return lambda token: str(decode.decode([token]))
    if callable(decode):
        return lambda token: str(decode(token))
    if isinstance(decode, Mapping):
        return lambda token: str(decode.get(token, token))
    if isinstance(decode, Sequence):
        return lambda token: str(decode[token]) if 0 <= token < len(decode) else str(token)
    raise TypeError(f"decode must be a function, a list, a mapping or a tokenizer; got {type(decode).__name__}.")


def short(value: float | None) -> float | None:
    """A number with five digits; None if it is not finite, which JSON cannot hold."""
    return None if value is None or not -1e300 < value < 1e300 else float(f"{value:.5g}")


def label_name(names: Sequence[str] | Mapping[int, str] | None, label: int) -> str:
    """The name of a label; its number if it has none."""
    if isinstance(names, Mapping):
        return str(names.get(label, label))
    return str(names[label]) if names is not None and 0 <= label < len(names) else str(label)
