"""Draw a part of the plane: a layer's answer at each point, where its regions meet, and how softly."""

import colorsys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colour-blind safe set.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
LINE = "#222222"  # dark on the maps, which are light on any page


def palette(size: int) -> tuple[str, ...]:
    """Colours for `size` classes."""
    if size <= len(COLORS):
        return COLORS[:size]
    hues = (colorsys.hsv_to_rgb(i / size, 0.75, 0.6 + 0.3 * (i % 2)) for i in range(size))
    return tuple(f"#{round(255 * r):02x}{round(255 * g):02x}{round(255 * b):02x}" for r, g, b in hues)


def rgb(colors: Sequence[str]) -> Tensor:
    """Colours as numbers from 0 to 1: (colours, 3)."""
    return torch.tensor([[int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)] for color in colors])


class Plane(NamedTuple):
    """A rectangle of the plane, with `cells` points each way."""

    left: float
    right: float
    bottom: float
    top: float
    cells: int = 300

    def grid(self) -> Tensor:
        """The points, (cells, cells, 2); rows go up."""
        across = torch.linspace(self.left, self.right, self.cells)
        up = torch.linspace(self.bottom, self.top, self.cells)
        return torch.stack(torch.meshgrid(across, up, indexing="xy"), -1)

    def fill(self, axes: "Axes", logits: Tensor, colors: Sequence[str]) -> None:
        """The colour of the class with the highest logit (cells, cells, classes), paler where it is less sure."""
        share, answer = logits.softmax(-1).max(-1)
        classes = logits.shape[-1]
        strength = 0.15 + 0.4 * ((share - 1 / classes) / (1 - 1 / classes)).unsqueeze(-1)  # (cells, cells, 1)
        self.show(axes, 1 - strength * (1 - rgb(colors)[answer]))
        axes.set(xlim=(self.left, self.right), ylim=(self.bottom, self.top), xticks=[], yticks=[], aspect="equal")
        axes.grid(False)

    def boundaries(self, axes: "Axes", chosen: Tensor) -> None:
        """The edges of regions with the same chosen blocks: chosen (cells, cells, blocks) is 1 for a chosen one."""
        across = torch.linspace(self.left, self.right, self.cells).tolist()
        up = torch.linspace(self.bottom, self.top, self.cells).tolist()
        for block in chosen.unbind(-1):
            if 0 < block.sum() < block.numel():
                axes.contour(across, up, block.tolist(), levels=[0.5], colors=[LINE], linewidths=1.1)

    def haze(self, axes: "Axes", soft: Tensor) -> None:
        """Dark where the leaves mix in training: soft (cells, cells), 0 where one leaf is alone."""
        shade = torch.cat([rgb((LINE,)).expand(self.cells, self.cells, 3), 0.7 * soft.unsqueeze(-1)], -1)
        self.show(axes, shade)

    def show(self, axes: "Axes", image: Tensor) -> None:
        """An image (cells, cells, 3 or 4) over the whole rectangle."""
        edges = (self.left, self.right, self.bottom, self.top)
        axes.imshow(image.numpy(), origin="lower", extent=edges, interpolation="bilinear")
