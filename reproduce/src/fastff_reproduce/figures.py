"""The figures of the report: inline SVG in the colour of the page's text, light or dark."""

import itertools
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np

from fastff.bench.plots import draw
from fastff.bench.presets import BERT
from fastff.bench.rows import Row

from .runs import Result
from .summary import Cell

INK = "#010203"  # replaced by the colour of the page's text
STYLE: dict[str, Any] = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    "svg.fonttype": "none",
    "svg.hashsalt": "fastff",
    "legend.frameon": False,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
}
HARD = 0.10  # the paper: rounding decisions with entropies below it is nearly free


class Figure(NamedTuple):
    svg: str
    caption: str


@contextmanager
def _style() -> Iterator[Any]:
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        yield plt


def _inline(text: str, label: str) -> str:
    """An SVG file as an element of a page."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    name = re.sub(r"[^\w .,;:=()+-]", " ", label)
    text = text.replace("<svg", f'<svg role="img" aria-label="{name}"', 1)
    return text.replace(INK, "currentColor").replace("#000000", "currentColor")


def _svg(figure: Any, plt: Any, label: str) -> str:
    out = StringIO()
    figure.savefig(out, format="svg")
    plt.close(figure)
    return _inline(out.getvalue(), label)


def plain(text: str) -> str:
    """Text for matplotlib, which reads mathematics between two dollars."""
    return text.replace("$", r"\$")


def counterparts(cells: Sequence[Cell], title: str) -> list[Figure]:
    """G_A and M_A over inference size, a line for each model, depth and recipe: means, with deviations as bars."""
    kinds = list(dict.fromkeys((cell.model, cell.depth) for cell in sorted(cells, key=lambda c: (c.model, c.depth))))
    recipes = sorted({cell.recipe for cell in cells})  # fastff before paper
    drawn = []
    for name, about in (("G_A", "accuracy on new data"), ("M_A", "accuracy on training data")):
        measured = sorted((cell for cell in cells if getattr(cell, name)), key=lambda cell: cell.inference_size)
        if not measured:
            continue
        with _style() as plt:
            figure, axes = plt.subplots(figsize=(6, 4.4), layout="constrained")
            for (i, kind), (j, recipe) in itertools.product(enumerate(kinds), enumerate(recipes)):
                line = [cell for cell in measured if (cell.model, cell.depth, cell.recipe) == (*kind, recipe)]
                if not line:
                    continue
                stats = [getattr(cell, name) for cell in line]
                depth = f", d = {kind[1]}" if kind[1] else ""
                axes.errorbar(
                    [cell.inference_size for cell in line],
                    [stat.mean for stat in stats],
                    [stat.deviation or 0.0 for stat in stats],
                    label=plain(f"{kind[0]}{depth}, {recipe}"),
                    color=f"C{i}",
                    linestyle=("-", "--", ":", "-.")[j % 4],
                    fillstyle=("full", "none")[j % 2],
                    marker="osD^vP*X"[i % 8],
                    markersize=5,
                    linewidth=1.4,
                    capsize=2,
                )
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
            axes.set_xlabel("inference size, neurons")
            axes.set_ylabel(f"{about} ({name}), %")
            figure.legend(loc="outside lower center", ncols=2, fontsize=8)
            svg = _svg(figure, plt, f"{title}: {about} over inference size")
        caption = f"{title}: {about} ({name}) over inference size. Means over seeds; bars: standard deviation."
        drawn.append(Figure(svg, caption))
    return drawn


def entropies(results: Sequence[Result], names: Sequence[str], title: str) -> Figure | None:
    """Mean decision entropy over epochs, as in `_over_epochs`."""
    about = (
        f"One line per seed, at the training temperature. Below {HARD:.2f} (dotted), rounding soft decisions is nearly "
        "free. Straight-through decisions are always rounded."
    )
    return _over_epochs(results, names, title, "entropy", "mean entropy of a decision, nats", about, mark=HARD)


def leaves(results: Sequence[Result], names: Sequence[str], title: str) -> Figure | None:
    """Leaves in use over epochs, as in `_over_epochs`."""
    about = "One line per seed: leaves that validation data reaches. Lines may overlap."
    return _over_epochs(results, names, title, "leaves_used", "leaves in use", about)


def _over_epochs(
    results: Sequence[Result],
    names: Sequence[str],
    title: str,
    what: str,
    unit: str,
    about: str,
    mark: float | None = None,
) -> Figure | None:
    """A quantity of the histories over epochs, a line for each training; several numbers in an epoch are layers.

    Trainings with the same name in `names` share a colour. None if no history has the quantity.
    """
    with _style() as plt:
        figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
        colours: dict[str, str] = {}
        for result, name in zip(results, names, strict=True):
            epochs = result.history.get("epoch", [])
            for label, line in _lines(result.history.get(what, []), name).items():
                new = label not in colours
                colour = colours.setdefault(label, f"C{len(colours)}")
                more = {"label": plain(label)} if new else {}
                axes.plot(epochs, line, color=colour, linewidth=1.2, alpha=0.75, **more)
        if not colours:
            plt.close(figure)
            return None
        if mark is not None:
            axes.axhline(mark, color=INK, linewidth=0.8, linestyle=":")
        axes.set_ylim(bottom=0)
        if what == "leaves_used":
            axes.yaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("epoch")
        axes.set_ylabel(unit)
        axes.legend(fontsize=8)
        svg = _svg(figure, plt, f"{title}: {unit} over epochs")
    return Figure(svg, f"{title}. {about}")


def _lines(found: Sequence[Any], name: str) -> dict[str, list[float]]:
    """Values of epochs as lines: one for plain numbers, one per layer for lists of numbers or of nodes' lists."""
    if not found:
        return {}
    if not isinstance(found[0], Sequence):
        return {name: list(found)}
    layers = len(found[0])
    joined = [[float(np.mean(layer)) for layer in epoch] for epoch in found]
    if layers == 1:
        return {name: [epoch[0] for epoch in joined]}
    return {f"{name}, layer {i + 1}": [epoch[i] for epoch in joined] for i in range(layers)}


def regions() -> list[Figure]:
    """The paper's first figure, trained anew: a panel for each layer."""
    from .sketch import panels

    captions = {
        "FF": "Dense layer: all neurons compute everywhere.",
        "MoE": "Mixture of experts: lines mark where the choice of experts changes.",
        "FFF": "Fast feedforward layer: each region has one leaf. Dark: boundaries that are still soft.",
    }
    with _style() as plt:
        drawn = zip(captions, captions.values(), panels(), strict=True)
        return [Figure(_svg(panel, plt, f"{name} on a plane"), caption) for name, caption, panel in drawn]


def speed(rows: Iterable[Row]) -> list[Figure]:
    """The paper's speed figures, for each machine and dtype with rows of `fastff bench blocks`."""
    size: Row = {"in": BERT.in_features, "out": BERT.out_features, "leaf_width": BERT.leaf_width, "batch": BERT.batch}
    size |= {"node_width": 1, "activation": "relu"}
    found = [row for row in rows if all(row[name] == value for name, value in size.items())]
    captions = {
        "blocks": "Time of a forward pass over the number of blocks, as in the paper's figure.",
        "closeup": "Close-up: MoE and FFF alone, on a linear axis.",
        "speedup": "Speed-up of FFF over the dense layer.",
    }
    figures = []
    with _style(), tempfile.TemporaryDirectory() as folder:
        for path in draw(found, Path(folder), kind="svg"):
            what = path.stem.split("-")[0]
            if what == "closeup" and not any(row["model"] == "MoE" for row in found):
                continue  # nothing to compare with
            caption = captions[what]
            figures.append(Figure(_inline(path.read_text(encoding="utf-8"), f"{caption} {path.stem}"), caption))
    return figures
