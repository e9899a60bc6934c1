"""A data set as a training sees it."""

import torch
from torch import Tensor

from . import data
from .build import is_transformer
from .runs import Case


def prepare(part: data.Part, dataset: data.Dataset, device: torch.device, case: Case) -> tuple[Tensor, Tensor]:
    """Inputs in [0, 1], flattened unless the model needs images."""
    x = part.x.to(device).float() / dataset.largest
    return x if is_transformer(case) else x.flatten(1), part.y.to(device)


def standardise(x: Tensor, test: Tensor, *, by_pixel: bool) -> None:
    """Mean 0 and deviation 1 over the training file, in place: by channel of images, or of each pixel by itself.

    Flat inputs have the mean of each pixel taken off, and the deviation of all of them is 1: pixels that hardly ever
    change, as in the corners of MNIST, stay small.
    """
    flat, dims = x.dim() == 2, (0, 2, 3)
    mean = x.mean((0,) if by_pixel or flat else dims, keepdim=True)
    for inputs in (x, test):
        inputs.sub_(mean)
    std = x.std((0,) if by_pixel else None if flat else dims, keepdim=True)
    for inputs in (x, test):
        inputs.div_(torch.where(std > 0, std, 1))
