"""CIFAR images as lossless WebP tile sheets: half the size of the published archives, and the same pixels.

A sheet is a picture of 25 rows and 40 columns of images; image i is at sheet i // 1000, row by row. Labels are uint8
arrays in .npy files. What was decoded is checked by its md5: the bytes of a WebP file depend on the encoder.
"""

import hashlib
import io
from collections.abc import Sequence

import torch
from torch import Tensor

from .readers import Contents, Part, Reader, needs

ROWS, COLUMNS, SIZE = 25, 40, 32
SHEETS = {"train": 50, "test": 10}
NAMES = tuple(
    name
    for part, count in SHEETS.items()
    for name in (*(f"{part}_{i:02}.webp" for i in range(count)), f"{part}_labels.npy")
)


def read_sheets(*md5s: str) -> Reader:
    """Read the sheets and labels of a data set. `md5s`: training pixels, training labels, test pixels, test labels."""

    def read(contents: Contents) -> tuple[Part, Part]:
        train, test = (_part(name, contents, md5s[i : i + 2]) for name, i in (("train", 0), ("test", 2)))
        return train, test

    return read


def _part(name: str, contents: Contents, md5s: Sequence[str]) -> Part:
    numpy = needs("numpy", "numpy", "a tile sheet")
    sheets = [tiles(data) for file, data in contents.items() if file.startswith(name) and file.endswith(".webp")]
    x = torch.cat(sheets)
    y = torch.from_numpy(numpy.load(io.BytesIO(contents[f"{name}_labels.npy"]), allow_pickle=False))
    for what, tensor, expected in zip((f"{name}_*.webp", f"{name}_labels.npy"), (x, y), md5s, strict=True):
        found = hashlib.md5(tensor.numpy().tobytes(), usedforsecurity=False).hexdigest()
        if found != expected:
            raise ValueError(
                f"{what}: {len(tensor)} decoded samples have md5 {found}, expected {expected}. "
                "Replace these files, or remove them and use another form of the data set."
            )
    return Part(x, y.long())


def tiles(data: bytes) -> Tensor:
    """The images of a sheet, row by row: (rows * columns, 3, SIZE, SIZE) uint8."""
    numpy, pictures = needs("numpy", "numpy", "a tile sheet"), needs("PIL.Image", "pillow", "a tile sheet")
    sheet = torch.from_numpy(numpy.array(pictures.open(io.BytesIO(data)).convert("RGB")))  # (height, width, 3)
    cut = sheet.unflatten(1, (-1, SIZE)).unflatten(0, (-1, SIZE))  # (rows, SIZE, columns, SIZE, 3)
    return cut.permute(0, 2, 4, 1, 3).flatten(0, 1).contiguous()


def sheet(images: Tensor, columns: int = COLUMNS) -> bytes:
    """The reverse of `tiles`: images (n, 3, SIZE, SIZE) uint8, row by row."""
    pictures = needs("PIL.Image", "pillow", "a tile sheet")
    if images.shape[1:] != (3, SIZE, SIZE) or len(images) % columns:
        expected = f"(a multiple of {columns}, 3, {SIZE}, {SIZE})"
        raise ValueError(f"a sheet takes images of shape {expected}; got {tuple(images.shape)}. Choose other columns.")
    laid = images.unflatten(0, (-1, columns)).permute(0, 3, 1, 4, 2)  # (rows, SIZE, columns, SIZE, 3)
    out = io.BytesIO()
    picture = pictures.fromarray(laid.flatten(2, 3).flatten(0, 1).contiguous().numpy())
    picture.save(out, "WEBP", lossless=True, quality=100, method=6)
    return out.getvalue()
