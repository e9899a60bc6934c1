"""The pictures of the README: speed-up over depth, and accuracy cost. Made from results/*.csv.

python scripts/draw_overview.py         # writes docs/pictures/speed.svg and accuracy.svg
python scripts/draw_overview.py --check # exits 1 if the committed pictures are out of date
"""

import csv
import math
import statistics
import sys
from pathlib import Path

from svg import Picture

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "pictures"
CPU, GPU = "AMD EPYC", "NVIDIA H200"
LIGHT = {"cpu1": "#8250df", "cpu": "#0969da", "gpu": "#1a7f37", "ours": "#0969da", "paper": "#b6bec7"}
DARK = {"cpu1": "#bc8cff", "cpu": "#58a6ff", "gpu": "#3fb950", "ours": "#58a6ff", "paper": "#596472"}

# Test accuracy of the FFF and of the dense layer of its training width in the paper's Tables 1 and 2.
PAPER = {"usps": (92.1, 94.2), "mnist": (94.9, 98.1), "fashionmnist": (86.1, 89.6), "cifar10": (41.3, 53.0)}
SIZES = {"usps": (128, 8), "mnist": (128, 8), "fashionmnist": (128, 8), "cifar10": (1024, 32)}  # training, leaf width
NAMES = {"usps": "USPS", "mnist": "MNIST", "fashionmnist": "FashionMNIST", "cifar10": "CIFAR10"}


def rows(name: str) -> list[dict[str, str]]:
    with open(ROOT / "results" / name, newline="") as file:
        return list(csv.DictReader(file))


def speedups(machine: str, batch: int, command: str) -> dict[int, float]:
    """Speed-up of `auto` over the dense layer by depth, float32, 768 -> 768, leaves of 32 neurons."""
    fixed = {"machine": machine, "model": "FFF", "backend": "auto", "dtype": "float32", "status": "ok"}
    fixed |= {"in": "768", "out": "768", "leaf_width": "32", "batch": str(batch)}
    chosen = [row for row in rows("inference.csv") if fixed.items() <= row.items()]
    chosen = [row for row in chosen if row["speedup_dense"] and row["command"].startswith(f"fastff bench {command}")]
    return dict(sorted((int(row["depth"]), float(row["speedup_dense"])) for row in chosen))


def accuracy(dataset: str, model: str, width: int, leaf_width: int) -> float:
    """Mean test accuracy over ten seeds by recipe `fastff`."""
    fixed = {"dataset": dataset, "model": model, "width": str(width), "leaf_width": str(leaf_width)}
    fixed |= {"recipe": "fastff", "goal": "G_A"}
    # The inference counterparts of CIFAR10 have the same columns, other sizes and three seeds.
    found = [float(row["G_A"]) for row in rows("learning.csv") if fixed.items() <= row.items()]
    assert len(found) == 10, f"{dataset}, {model} {width}/{leaf_width}: {len(found)} rows, not 10"
    return statistics.mean(found)


def draw_speed() -> Picture:
    picture = Picture(440, 350, "Speed-up over the dense layer by depth", LIGHT, DARK, shown=362)
    left, right, top, bottom = 62, 420, 62, 300
    lines = [
        ("CPU, batch 1", "cpu1", speedups(CPU, 1, "regimes")),
        ("CPU, batch 256", "cpu", speedups(CPU, 256, "regimes")),
        ("H200, batch 256", "gpu", speedups(GPU, 256, "blocks")),
    ]

    def place(depth: int, times: float) -> tuple[float, float]:
        return left + (right - left) * depth / 15, bottom - (bottom - top) * math.log10(times) / 4

    picture.text(20, 30, "Speed-up over the dense layer", "title")
    picture.text(20, 48, "log scale; 768 → 768, leaves of 32, float32, random weights", "small")
    for power in range(5):
        _, y = place(0, 10**power)
        picture.line(left, y, right, y)
        picture.text(left - 8, y + 4, f"{10**power:,}x", "small end")
    for depth in (1, 3, 5, 8, 10, 13, 15):
        x, _ = place(depth, 1)
        picture.text(x, bottom + 18, str(depth), "small middle")
    for index, (label, colour, found) in enumerate(lines):
        points = [place(depth, times) for depth, times in found.items()]
        picture.path(points, colour)
        for x, y in points:
            picture.add(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="var(--{colour})"/>')
        words = f"{label}: up to {max(found.values()):,.0f}x"
        picture.text(left + 150, bottom - 41 + 17 * index, words, "bold", colour)
    for depth, words in ((3, "35 of 256"), (8, "40 of 8,192"), (15, "47 of 1,048,576")):
        x, _ = place(depth, 1)
        picture.text(x, bottom + 36, words, "small end" if depth == 15 else "small middle")
    picture.text(20, bottom + 36, "neurons used", "small")
    picture.text(20, bottom + 18, "depth", "small")
    return picture


def draw_accuracy() -> Picture:
    picture = Picture(440, 350, "Accuracy behind the dense layer of the training width", LIGHT, DARK, shown=362)
    left, scale, top = 145, 17.5, 70
    picture.text(20, 30, "Accuracy cost", "title")
    picture.text(20, 48, "points below a dense layer with all the neurons; shorter is better", "small")
    for index, (dataset, (width, leaf_width)) in enumerate(SIZES.items()):
        y = top + index * 59
        tree = accuracy(dataset, "FFF", width, leaf_width)
        dense = accuracy(dataset, "FF", width, width)
        depth = (width // leaf_width).bit_length() - 1
        picture.text(20, y + 14, NAMES[dataset], "bold")
        picture.text(20, y + 31, f"{depth + leaf_width} of {width:,} neurons", "small")
        for shift, colour, ours, theirs in ((0, "ours", tree, dense), (19, "paper", *PAPER[dataset])):
            gap = round(theirs, 1) - round(ours, 1)  # of the numbers shown beside it
            bar = f'x="{left}" y="{y + shift}" width="{scale * gap:.1f}" height="16" rx="2"'
            picture.add(f'<rect {bar} fill="var(--{colour})"/>')
            words, kind = f"{gap:.1f}", "bold" if colour == "ours" else "soft"
            if colour == "ours":
                words += f'<tspan class="small plain" dx="6">{ours:.1f} % vs {theirs:.1f} %</tspan>'
            picture.text(left + scale * gap + 6, y + shift + 12.5, words, kind)
    y = top + 4 * 59 + 3
    for x, colour, words in ((20, "ours", "fastff, mean of ten seeds"), (210, "paper", "paper, best of ten")):
        picture.add(f'<rect x="{x}" y="{y - 10}" width="11" height="11" rx="2" fill="var(--{colour})"/>')
        picture.text(x + 17, y, words, "small")
    return picture


if __name__ == "__main__":
    for path, picture in ((FOLDER / "speed.svg", draw_speed()), (FOLDER / "accuracy.svg", draw_accuracy())):
        if "--check" not in sys.argv:
            picture.save(path)
        elif path.read_text() != str(picture):
            sys.exit(f"{path.relative_to(ROOT)} is out of date: run python scripts/draw_overview.py")
