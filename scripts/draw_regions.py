"""The pictures of the quickstart: a trained tree, and the regions of the input plane that its leaves own.

python scripts/draw_regions.py      # trains for a few seconds, writes docs/pictures/tree.svg and regions.svg
"""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from svg import Picture

import fastff

FOLDER = Path(__file__).parent.parent / "docs" / "pictures"
DEPTH, LEAF_WIDTH, EDGE = 3, 8, 2.2
LIGHT_LEAVES = ("cfe8ff", "a5d4ff", "c9f0d4", "94dcae", "ffe7b3", "ffd073", "f5d0f5", "e5a7e8")
DARK_LEAVES = ("12395c", "1d5687", "164429", "22693f", "54400c", "7d6014", "4d2450", "75377a")
LIGHT = {f"leaf{i}": f"#{colour}" for i, colour in enumerate(LIGHT_LEAVES)}
DARK = {f"leaf{i}": f"#{colour}" for i, colour in enumerate(DARK_LEAVES)}
LIGHT |= {"one": "#cf222e", "two": "#0a3069", "path": "#cf222e"}
DARK |= {"one": "#ff7b72", "two": "#c9e2ff", "path": "#ff7b72"}
Polygon = list[tuple[float, float]]


def train() -> tuple[fastff.FFF, torch.Tensor, torch.Tensor]:
    """Two spirals, which no line separates."""
    torch.manual_seed(3)
    turn = torch.rand(600).sqrt() * 2.6 * math.pi
    label = torch.arange(600) % 2
    angle, radius = turn + math.pi * label, 0.12 + turn / 4.4
    x = torch.stack([radius * angle.cos(), radius * angle.sin()], -1) + 0.05 * torch.randn(600, 2)
    layer = fastff.FFF(2, 2, depth=DEPTH, leaf_width=LEAF_WIDTH)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    recipe = fastff.Recipe(layer, x, steps=3000, noise=0.1)
    for _ in range(3000):
        batch = torch.randint(600, (256,))
        loss = F.cross_entropy(layer(x[batch]), label[batch]) + recipe.loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recipe.step()
    layer.eval()
    print(f"accuracy {(layer(x).argmax(-1) == label).float().mean():.1%}, {fastff.usage(layer, x)['']}")
    return layer, x, label


def clip(polygon: Polygon, weight: list[float], bias: float) -> Polygon:
    """The part of a convex polygon where weight @ x + bias >= 0."""
    kept: Polygon = []
    for a, b in zip(polygon, polygon[1:] + polygon[:1], strict=True):
        va, vb = (weight[0] * x + weight[1] * y + bias for x, y in (a, b))
        if va >= 0:
            kept.append(a)
        if va * vb < 0:
            t = va / (va - vb)
            kept.append((a[0] + t * (b[0] - a[0]), a[1] + t * (b[1] - a[1])))
    return kept


def regions(layer: fastff.FFF) -> list[Polygon]:
    """The polygon of every leaf: the square, cut by the nodes above it."""
    level = [[(-EDGE, -EDGE), (EDGE, -EDGE), (EDGE, EDGE), (-EDGE, EDGE)]]
    for depth in range(DEPTH):
        cut = []
        for node, polygon in enumerate(level, start=2**depth - 1):
            weight, bias = layer.node_weight[node].tolist(), layer.node_bias[node].item()
            cut += [clip(polygon, [-w for w in weight], -bias), clip(polygon, weight, bias)]  # left, right
        level = cut
    return level


def draw_tree(layer: fastff.FFF, x: torch.Tensor, route: int) -> Picture:
    picture = Picture(440, 385, "A trained tree of depth 3", LIGHT, DARK, shown=404)
    share = torch.bincount(layer.route(x), minlength=2**DEPTH) / len(x)
    picture.text(20, 30, "The tree", "title")
    picture.text(20, 48, f"{2**DEPTH - 1} nodes decide, {2**DEPTH} leaves of {LEAF_WIDTH} neurons answer", "small")

    def place(depth: int, index: int) -> tuple[float, float]:
        return 20 + 400 * (index + 0.5) / 2**depth, 84 + 64 * depth

    way = [(depth, route >> (DEPTH - depth)) for depth in range(DEPTH + 1)]
    for depth in range(1, DEPTH + 1):
        for index in range(2**depth):
            more = 'style="stroke:var(--path);stroke-width:3"' if (depth, index) in way else ""
            picture.line(*place(depth - 1, index // 2), *place(depth, index), "ink", more)
    for depth in range(DEPTH):
        for index in range(2**depth):
            a, b = place(depth, index)
            edge = "path" if (depth, index) in way else "ink"
            picture.add(
                f'<circle cx="{a:.1f}" cy="{b}" r="9" fill="var(--card)" stroke="var(--{edge})" stroke-width="2"/>'
            )
    for leaf in range(2**DEPTH):
        a, b = place(DEPTH, leaf)
        edge, thick = ("path", 3) if leaf == route else ("grid", 1)
        picture.add(
            f'<rect x="{a - 20:.1f}" y="{b - 14}" width="40" height="30" rx="5" fill="var(--leaf{leaf})" '
            f'stroke="var(--{edge})" stroke-width="{thick}"/>'
        )
        picture.text(a, b + 6, str(leaf), "bold middle")
        picture.text(a, b + 34, f"{share[leaf]:.0%}", "small middle")
    a, b = place(0, 0)
    picture.text(a + 18, b + 4, "w · x + b ≥ 0: go right, else left", "small")
    picture.text(20, b + 250, f"One input takes the red path. {DEPTH} nodes and 1 leaf:", "small")
    neurons = f"{DEPTH} + {LEAF_WIDTH} = {layer.inference_size} neurons instead of {layer.training_width}."
    picture.text(20, b + 267, neurons, "small")
    picture.text(20, b + 284, "Below each leaf: its share of the data.", "small")
    return picture


def draw_plane(layer: fastff.FFF, x: torch.Tensor, label: torch.Tensor, shown: int) -> Picture:
    picture = Picture(340, 385, "The regions of its eight leaves", LIGHT, DARK, shown=312)
    left, top, side = 20, 64, 300

    def place(a: float, b: float) -> tuple[float, float]:
        return left + side * (a + EDGE) / (2 * EDGE), top + side * (EDGE - b) / (2 * EDGE)

    picture.text(left, 30, "Its regions", "title")
    picture.text(left, 48, "one per leaf; circled: the input of the red path", "small")
    for leaf, polygon in enumerate(regions(layer)):
        corners = " ".join(f"{a:.1f},{b:.1f}" for a, b in (place(*corner) for corner in polygon))
        picture.add(f'<polygon points="{corners}" fill="var(--leaf{leaf})" stroke="var(--card)" stroke-width="1.5"/>')
    for point in range(0, len(x), 3):
        a, b = place(*x[point].tolist())
        colour = ("one", "two")[int(label[point])]
        picture.add(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.4" fill="var(--{colour})"/>')
    for leaf, polygon in enumerate(regions(layer)):
        a, b = place(sum(p[0] for p in polygon) / len(polygon), sum(p[1] for p in polygon) / len(polygon))
        picture.add(f'<text x="{a:.1f}" y="{b:.1f}" class="bold middle halo" stroke="var(--leaf{leaf})">{leaf}</text>')
    a, b = place(*x[shown].tolist())
    picture.add(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="7" fill="none" stroke="var(--path)" stroke-width="3"/>')
    return picture


if __name__ == "__main__":
    layer, x, label = train()
    distance = (layer.node_logits(x) / layer.node_weight.norm(dim=-1)).abs().amin(-1)
    shown = int(distance.argmax())  # far from every boundary
    draw_tree(layer, x, int(layer.route(x[shown]))).save(FOLDER / "tree.svg")
    draw_plane(layer, x, label, shown).save(FOLDER / "regions.svg")
