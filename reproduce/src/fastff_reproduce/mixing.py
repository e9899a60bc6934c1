"""Mix each image of a batch with another one, and its label with the other's: cutmix and mixup, on the device.

The other image is the one at the mirrored place in the batch, so no index is drawn. Both are one formula with a share
s in [0, 1] for every pixel, of which the label takes the mean:

    image <- s image + (1 - s) other        label <- mean(s) label + (1 - mean(s)) label of the other

- cutmix: s = 0 in a box and 1 around it. The box has the proportions of the image and the area 1 - u, u uniform; its
  centre is uniform over the image, and what lies beyond the edge is cut off.
- mixup: s = u, uniform, everywhere.

Nothing here waits for the device or depends on the drawn values, so a CUDA graph can record it.
"""

import torch
from torch import Tensor


def own_shares(
    shape: tuple[int, ...],
    size: tuple[int, int],
    generator: torch.Generator | None = None,
    *,
    cutmix: float,
    mixup: float,
    device: torch.device | str = "cpu",
) -> Tensor:
    """How much of each pixel an image keeps: (*shape, height, width), for a batch of this shape and images of `size`.

    An image is cut with probability `cutmix`, and otherwise blended with probability `mixup`. Drawn for each image, in
    this order, from `generator` (None: the device's default one): whether it is cut, whether it is blended, u, and the
    row and column of the box's centre.
    """
    drawn = torch.rand(5, *shape, 1, 1, device=device, generator=generator)
    cut, blended, u = drawn[0] < cutmix, drawn[1] < mixup, drawn[2]
    half = (1 - u).sqrt() / 2
    rows, columns = ((torch.arange(n, device=device) + 0.5) / n for n in size)  # centres of pixels, from 0 to 1
    around = ((rows[:, None] - drawn[3]).abs() >= half) | ((columns - drawn[4]).abs() >= half)
    # Not where(blended, u, 1.0): torch copies such a number to the device, and a CUDA graph cannot record that.
    return torch.where(cut, around.float(), u.masked_fill(~blended, 1.0))


def mix(images: Tensor, labels: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Mix images (members, batch, channels, height, width) and their labels, as probabilities (members, batch,
    classes), within each member; `own` (members, batch, height, width) comes from `own_shares`."""
    x = torch.lerp(images.flip(1), images, own.to(images.dtype).unsqueeze(2))
    return x, torch.lerp(labels.flip(1), labels, own.mean((-2, -1)).unsqueeze(-1))


def probabilities(labels: Tensor, classes: int, smoothing: float = 0.0) -> Tensor:
    """Labels as class probabilities (..., classes). A share `smoothing` is spread evenly over all classes."""
    hit = labels.unsqueeze(-1) == torch.arange(classes, device=labels.device)
    return hit.float() * (1 - smoothing) + smoothing / classes
