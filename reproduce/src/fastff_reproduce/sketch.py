"""The paper's first figure: how FF, MoE and FFF divide a plane among their neurons.

The three layers have the same number of hidden neurons and learn to classify the arms of a spiral. An FF computes with
all neurons everywhere, a MoE with the experts that its gate prefers, an FFF with the one leaf whose region holds the
point.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastff.baselines import FF, MoE, importance_loss, load_loss
from fastff.layer import FFF
from fastff.regions.plane import Plane, palette, rgb
from fastff.training.recipe import Recipe

from .threads import one_thread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ARMS = 4
COLORS = palette(ARMS)
SAMPLES, STEPS, RATE = 1024, 600, 2e-2
REACH, CELLS = 1.15, 300  # the map: from -REACH to REACH, CELLS each way

Loss = Callable[[], Tensor | float]


def spiral(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points in arms that wind half a turn around the centre, and the arm of each: (samples, 2), (samples,)."""
    arm = torch.arange(samples) % ARMS
    along = torch.rand(samples, generator=generator).sqrt()  # from the centre to the end, evenly over the plane
    angle = math.pi * along + 2 * math.pi * arm / ARMS + 0.12 * torch.randn(samples, generator=generator) / along
    return along.unsqueeze(-1) * torch.stack([angle.cos(), angle.sin()], -1), arm


class Layers(NamedTuple):
    """Three trained layers with the same number of hidden neurons, and points that they have not seen."""

    ff: FF
    moe: MoE
    fff: FFF
    test: tuple[Tensor, Tensor]


def sketch(seed: int = 0, depth: int = 3, leaf_width: int = 4) -> "Figure":
    """Train the three layers and draw them side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    _draw(_layers(seed, depth, leaf_width), figure.subplots(1, 3, sharex=True, sharey=True))
    return figure


def panels(seed: int = 0, depth: int = 3, leaf_width: int = 4) -> "list[Figure]":
    """The same as three figures, which a page can put side by side or below each other."""
    from matplotlib.figure import Figure

    figures = [Figure(figsize=(4, 4.7), layout="constrained") for _ in range(3)]
    _draw(_layers(seed, depth, leaf_width), [figure.subplots() for figure in figures])
    return figures


def _layers(seed: int, depth: int, leaf_width: int) -> Layers:
    generator = torch.Generator().manual_seed(seed)
    train, test = spiral(SAMPLES, generator), spiral(SAMPLES, generator)
    with torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(seed)
        ff = FF(2, ARMS, width=leaf_width << depth)
        moe = MoE(2, ARMS, num_experts=2**depth, expert_width=leaf_width, k=min(2, 2**depth))
        fff = FFF(2, ARMS, depth=depth, leaf_width=leaf_width)
        _train(ff, train, lambda: 0.0, lambda: None)
        _train(moe, train, lambda: 0.1 * (importance_loss(moe) + load_loss(moe)), lambda: None)
        # A low last temperature leaves the boundaries a little soft, so that the figure can show it.
        recipe = Recipe(fff, train[0], steps=STEPS, noise=0.3, final_temperature=3.0)
        _train(fff, train, recipe.loss, recipe.step)
    return Layers(ff, moe, fff, test)


def _draw(layers: Layers, axes: "Sequence[Axes]") -> None:
    """What each layer answers where, with the regions of the experts and of the leaves."""
    ff, moe, fff, test = layers
    plane = Plane(-REACH, REACH, -REACH, REACH, CELLS)
    grid = plane.grid()  # (CELLS, CELLS, 2): rows go up
    titles = {
        ff: f"FF: all {ff.width} neurons compute",
        moe: f"MoE: {moe.k} of {moe.num_experts} experts of {moe.expert_width} compute",
        fff: f"FFF: one of {fff.num_leaves} leaves of {fff.leaf_width} computes",
    }
    by_layer: dict[nn.Module, Axes] = dict(zip(titles, axes, strict=True))
    with torch.no_grad():
        for layer, panel in by_layer.items():
            right = (layer(test[0]).argmax(-1) == test[1]).float().mean().item()
            panel.set_title(f"{titles[layer]}\n{100 * right:.1f}% accuracy on new points", fontsize=10)
            _map(panel, plane, layer(grid.view(-1, 2)).view(CELLS, CELLS, ARMS), test)
        by_layer[ff].set_xlabel("no regions: one layer everywhere", fontsize=9)
        experts = F.linear(grid, moe.gate_weight).topk(moe.k, -1).indices  # (CELLS, CELLS, k)
        plane.boundaries(by_layer[moe], torch.zeros(CELLS, CELLS, moe.num_experts).scatter(-1, experts, 1.0))
        by_layer[moe].set_xlabel("lines: where the choice of experts changes", fontsize=9)
        plane.boundaries(by_layer[fff], F.one_hot(fff.route(grid), fff.num_leaves).float())
        soft = 1 - fff.mixture(grid).amax(-1)  # (CELLS, CELLS): 0 where one leaf is alone
        plane.haze(by_layer[fff], soft)
        by_layer[fff].set_xlabel("lines: regions of leaves; dark: soft boundaries", fontsize=9)


def _train(model: nn.Module, data: tuple[Tensor, Tensor], loss: Loss, step: Callable[[], None]) -> None:
    x, y = data
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    model.train()
    for _ in range(STEPS):
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) + loss()).backward()
        optimizer.step()
        schedule.step()
        step()
    model.eval()


def _map(axes: "Axes", plane: Plane, logits: Tensor, test: tuple[Tensor, Tensor]) -> None:
    """The class that a model chooses at each point, and some samples."""
    plane.fill(axes, logits, COLORS)
    x, y = (part[:300] for part in test)
    colors = rgb(COLORS)[y].tolist()
    axes.scatter(x[:, 0].tolist(), x[:, 1].tolist(), c=colors, s=9, edgecolors="white", linewidths=0.3)
