"""A data set as a training sees it: on its device, scaled, and split for each seed.

Nine tenths of the training file train and one tenth validates, drawn by the seed. The order of an epoch follows from
the seed and the number of the epoch alone, so a resumed training continues exactly.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .build import is_transformer
from .data import Dataset
from .readers import Part
from .runs import Case
from .settings import Settings


class Samples:
    """The samples of all seeds ("members") of a case."""

    def __init__(self, cases: Sequence[Case], settings: Settings, dataset: Dataset, device: torch.device) -> None:
        self.seeds = [case.seed for case in cases]
        self.image = dataset.train.x.shape[1:]
        self.x, self.y = prepare(dataset.train, dataset, device, cases[0])
        self.test = prepare(dataset.test, dataset, device, cases[0])
        if settings.standardise:
            standardise(self.x, self.test[0], by_pixel=settings.by_pixel)
        orders = [torch.randperm(len(self.x), generator=generator(seed)) for seed in self.seeds]
        count = len(self.x) // 10
        self.validation = torch.stack([order[:count] for order in orders]).to(device)  # (members, samples): indices
        self.training = torch.stack([order[count:] for order in orders]).to(device)

    def order(self, epoch: int, count: int) -> Tensor:
        """The positions in `training` of the first `count` samples of an epoch, in order: (members, count)."""
        size = self.training.shape[1]
        return torch.stack([torch.randperm(size, generator=generator(seed, epoch))[:count] for seed in self.seeds])


def prepare(part: Part, dataset: Dataset, device: torch.device, case: Case) -> tuple[Tensor, Tensor]:
    """Inputs in [0, 1], flattened unless the model needs images; and labels."""
    x = part.x.to(device).float() / dataset.largest
    return x if is_transformer(case) else x.flatten(1), part.y.to(device)


def standardise(x: Tensor, test: Tensor, *, by_pixel: bool) -> None:
    """Mean 0 and standard deviation 1 over the training file, in place: per channel of images, or per pixel.

    Flat inputs lose the mean of each pixel and share one standard deviation: pixels that hardly ever change, such as
    the corners of MNIST, stay small.
    """
    flat, dims = x.dim() == 2, (0, 2, 3)
    mean = x.mean((0,) if by_pixel or flat else dims, keepdim=True)
    for inputs in (x, test):
        inputs.sub_(mean)
    std = x.std((0,) if by_pixel else None if flat else dims, keepdim=True)
    for inputs in (x, test):
        inputs.div_(torch.where(std > 0, std, 1))


def generator(seed: int, epoch: int = -1) -> torch.Generator:
    """The same numbers for the same seed and epoch, on every device."""
    return torch.Generator().manual_seed(1_000_003 * (seed + 1) + epoch)
