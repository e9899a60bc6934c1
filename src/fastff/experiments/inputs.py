"""A data set as a training sees it."""

import torch
from torch import Tensor

from . import data
from .case import Case
from .models import is_transformer


def prepare(part: data.Part, dataset: data.Dataset, device: torch.device, case: Case) -> tuple[Tensor, Tensor]:
    """Inputs in [0, 1], flattened unless the model needs images."""
    x = part.x.to(device).float() / dataset.largest
    return x if is_transformer(case) else x.flatten(1), part.y.to(device)


def standardise(x: Tensor, test: Tensor, *, by_pixel: bool) -> None:
    """Mean 0 and deviation 1 over the training file, in place: of each pixel, by channel of images, or over all."""
    dims = (0,) if by_pixel else (0, 2, 3) if x.dim() == 4 else None
    mean, std = x.mean(dims, keepdim=True), x.std(dims, keepdim=True)
    for inputs in (x, test):
        inputs.sub_(mean).div_(torch.where(std > 0, std, 1))
