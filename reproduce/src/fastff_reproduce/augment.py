"""Random flips, shifts and affine maps of images, for a whole batch at once on its device.

Nothing here waits for the device or depends on the drawn values, so a CUDA graph can record it.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def augment(
    x: Tensor,
    generator: torch.Generator | None = None,
    *,
    strength: float = 1.0,
    horizontal: bool = True,
    vertical: bool = True,
    translate: float = 0.1,
    rotate: float = 15.0,
    scale: float = 0.1,
) -> Tensor:
    """The images x (n, c, h, w), each changed at random. Pixels from beyond the edge are 0.

    Drawn for each image, in this order, from `generator` (None: the device's default one):

    - a flip left to right and one upside down, each with probability 1/2
    - the angle, uniform in +-`rotate` degrees
    - the scale factor, uniform in 1 +- `scale`
    - the shift in each direction, uniform in +-`translate` times the width or height

    `strength` is a factor on `translate`, `rotate` and `scale`.

    All are drawn whatever the options, so that an option does not change the effect of another. Flips only move pixels;
    the rest is one bilinear sampling, skipped if all three ranges are 0.
    """
    if x.dim() != 4 or not x.is_floating_point():
        got = f"{tuple(x.shape)} {x.dtype}"
        raise ValueError(
            f"augment expects a float batch of shape (n, c, h, w); got {got}. Convert it first: x.float()."
        )
    translate, rotate, scale = strength * translate, strength * rotate, strength * scale
    if not 0 <= scale < 1:
        raise ValueError(f"scale must be in [0, 1), for a factor in 1 +- scale; got {scale}. Lower scale or strength.")
    drawn = torch.rand(6, len(x), device=x.device, generator=generator)
    flips = (drawn[:2] < 0.5)[..., None, None, None]
    if horizontal:
        x = torch.where(flips[0], x.flip(-1), x)
    if vertical:
        x = torch.where(flips[1], x.flip(-2), x)
    if not len(x) or not (translate or rotate or scale):
        return x
    signed = 2 * drawn[2:] - 1
    return warp(x, math.radians(rotate) * signed[0], 1 + scale * signed[1], translate * signed[2:])


def shift(x: Tensor, most: float, generator: torch.Generator | None = None) -> Tensor:
    """The images x (n, c, h, w), each moved by whole pixels: rows and columns uniform in +-round(most * h) and
    +-round(most * w). Pixels from beyond the edge are 0. Whole pixels blur nothing, and take one gather.
    """
    height, width = x.shape[2:]
    drawn = torch.rand(2, len(x), 1, device=x.device, generator=generator)
    rows, columns = (_moved(size, round(most * size), d) for size, d in zip((height, width), drawn, strict=True))
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None]
    place = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None]  # (n, h, w)
    moved = x.flatten(2).gather(2, place.flatten(1)[:, None].expand(-1, x.shape[1], -1)).view_as(x)
    return moved.masked_fill(~inside[:, None], 0.0)


def _moved(size: int, most: int, drawn: Tensor) -> Tensor:
    """Where the places 0 to size - 1 come from: (n, size), for numbers `drawn` (n, 1) in [0, 1)."""
    by = (drawn * (2 * most + 1)).long() - most  # uniform in -most to most
    return torch.arange(size, device=drawn.device) - by


def warp(x: Tensor, angle: Tensor, factor: Tensor, shift: Tensor) -> Tensor:
    """Rotate the images (n, c, h, w) about their centres, clockwise by `angle` (n,) in radians, scale them by `factor`
    (n,), and shift them right and down by `shift` (2, n), a share of the width and of the height.
    """
    height, width = x.shape[2:]
    # A pixel of the output comes from A (output - shift), A turning back and shrinking. Coordinates run from -1 to 1 in
    # both directions; in an image that is not square, a step of x is then not as long as a step of y.
    cos, sin = angle.cos() / factor, angle.sin() / factor
    right, down = 2 * shift
    tall = height / width
    rows = (
        torch.stack([cos, tall * sin, -cos * right - tall * sin * down], dim=1),
        torch.stack([-sin / tall, cos, sin / tall * right - cos * down], dim=1),
    )
    wide = torch.promote_types(x.dtype, torch.float32)  # half precision cannot tell pixels apart
    grid = F.affine_grid(torch.stack(rows, dim=1).to(wide), list(x.shape), align_corners=False)
    return F.grid_sample(x.to(wide), grid, align_corners=False).to(x.dtype)
