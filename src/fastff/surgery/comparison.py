"""The result of `compare`: rows as data, as a table and as a picture.

A row is on the front if no other row is at least as good and faster. The times of a row are compared with the
original's times from the same loop, so the front is decided by this ratio.
"""

import csv
import dataclasses
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .controls import ORIGINAL
from .report import Skipped, table

# Of each method, in the order of legends.
COLORS = {ORIGINAL: "#000000", "FFF": "#1b6ca8", "FFF int8": "#56b4e9", "dense": "#7f7f7f", "dense int8": "#bdbdbd"}
COLORS |= {"low rank": "#d95f02", "pruned": "#8e6bb0", "int8": "#4a8c3f", "int8 weights": "#a6c96a"}
MARKERS = dict(zip(COLORS, "*oPsX^vDd", strict=True))
SHIFTS = {"FFF": 10, "FFF int8": -8, "dense int8": -18}  # of labels, up: points of the same size lie close together


@dataclass(frozen=True)
class Compared:
    """One model of a comparison.

    neurons, flops: of a block, for one token; means over the blocks. parameters: of the whole model. fitted_quality:
    before distillation. block_us, model_us: median times of a block (the mean over the blocks) and of the model;
    `..._original`: the original's, from the same loop. other_load: the cores that other processes kept busy while it
    was timed. seconds: to fit and distil it. date, commit: when it was made, and by which checkout of fastff. None: not
    measured; `note` says why.
    """

    method: str
    size: str
    depth: int | None
    leaf_width: int | None
    neurons: float
    flops: float
    parameters: int
    quality: float | None = None
    fitted_quality: float | None = None
    block_us: float | None = None
    block_us_original: float | None = None
    model_us: float | None = None
    model_us_original: float | None = None
    other_load: float | None = None
    seconds: float | None = None
    note: str = ""
    date: str = ""
    commit: str = ""

    @property
    def block_speedup(self) -> float | None:
        """How many times faster than the original's block."""
        return _ratio(self.block_us_original, self.block_us)

    @property
    def model_speedup(self) -> float | None:
        """How many times faster than the original model."""
        return _ratio(self.model_us_original, self.model_us)


COLUMNS = [f.name for f in dataclasses.fields(Compared)]


@dataclass(frozen=True)
class Comparison:
    """The rows of a comparison; str() gives a table, `plot` a picture.

    quality: the name of the quality measure. lower_is_better: whether lower values of it are better. settings: how
    the rows were made, as plain numbers and strings. skipped: blocks that are left out, and why.
    """

    rows: list[Compared]
    quality: str
    lower_is_better: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    skipped: Sequence[Skipped] = ()

    @property
    def front(self) -> list[Compared]:
        """The rows that no other row beats: none is faster and at least as good, or better and as fast."""
        rows = [row for row in self.rows if row.quality is not None and row.model_speedup is not None]
        return [row for row in rows if not any(self._beats(other, row) for other in rows)]

    def _beats(self, one: Compared, other: Compared) -> bool:
        sign = -1 if self.lower_is_better else 1
        a, b = ((sign * (row.quality or 0.0), row.model_speedup or 0.0) for row in (one, other))
        return a[0] >= b[0] and a[1] >= b[1] and a != b

    def __str__(self) -> str:
        distilled = any(row.fitted_quality is not None for row in self.rows)
        head = ["method", "size", "neurons", "FLOPs", "parameters", *(["fitted"] if distilled else []), self.quality]
        lines = [(*head, "block", "speed-up", "model", "speed-up", "front")]
        front = self.front
        for row in self.rows:
            quality = [row.fitted_quality, row.quality] if distilled else [row.quality]
            cells = [row.method, row.size, f"{row.neurons:,.0f}", f"{row.flops:,.0f}", f"{row.parameters:,}"]
            cells += ["" if q is None else f"{q:.4g}" for q in quality]
            cells += [_us(row.block_us), _times(row.block_speedup), _us(row.model_us), _times(row.model_speedup)]
            lines.append((*cells, "*" if row in front else ""))
        said = table(lines)
        notes = [f"{row.method} {row.size}: {row.note}" for row in self.rows if row.note]
        return "\n".join([*said, "", *notes, *self._legend(distilled)])

    def _legend(self, distilled: bool) -> list[str]:
        better = "lower" if self.lower_is_better else "higher"
        said = [f"{self.quality}: on held-out data, {better} is better." + " fitted: before distillation." * distilled]
        said.append("neurons, FLOPs: of a block, for one token. block, model: time of the timed batch.")
        for why in dict.fromkeys(one.why for one in self.skipped):
            names = [one.name for one in self.skipped if one.why == why]
            said.append(f"left out: {', '.join(names[:3])}{', ...' * (len(names) > 3)} ({why}).")
        said.append("speed-up: over the original, timed in turn. front: no other row is as good and a faster model.")
        load = max((row.other_load or 0.0 for row in self.rows), default=0.0)
        if load > 0.2:
            said.append(f"Other processes kept up to {load:.1f} cores busy. Measure times again on a quiet machine.")
        return said

    def records(self) -> list[dict[str, Any]]:
        """The rows as dicts, with their ratios."""
        front = self.front
        return [
            dataclasses.asdict(row)
            | {"block_speedup": row.block_speedup, "model_speedup": row.model_speedup, "front": row in front}
            for row in self.rows
        ]

    def to_json(self) -> str:
        """The rows and settings as JSON."""
        about = {"quality": self.quality, "lower_is_better": self.lower_is_better, "settings": dict(self.settings)}
        about["skipped"] = [one._asdict() for one in self.skipped]
        return json.dumps(about | {"rows": self.records()}, indent=2)

    def to_csv(self) -> str:
        """The rows as CSV, with a header."""
        records, text = self.records(), io.StringIO()
        writer = csv.DictWriter(text, [*records[0]] if records else COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        return text.getvalue()

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Draw quality over the time of a block and of the model, both relative to the original; needs matplotlib.

        The line is the front of its panel. The suffix of `path` sets the format, such as .png or .svg.
        """
        check_picture(path)
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt

        path = Path(path)
        style: Any = {
            "svg.fonttype": "none",
            "svg.hashsalt": "fastff",
        }  # text stays text: small, reproducible files
        with plt.rc_context(style):
            figure, panels = plt.subplots(1, 2, figsize=(10, 4.4), sharey=True, layout="constrained")
            for axes, part in zip(panels, ("block", "model"), strict=True):
                self._panel(axes, part)
            panels[0].set_ylabel(f"{self.quality} ({'lower' if self.lower_is_better else 'higher'} is better)")
            figure.legend(*_named(panels), loc="outside upper center", ncols=5, frameon=False)
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
            plt.close(figure)
        return path

    def _panel(self, axes: Any, part: str) -> None:
        points = []
        for row in self.rows:
            speedup = getattr(row, f"{part}_speedup")
            if row.quality is None or speedup is None:
                continue
            x = 100 / speedup
            points.append((x, row.quality))
            style = {"color": COLORS[row.method], "marker": MARKERS[row.method], "linestyle": "none", "zorder": 2}
            axes.plot(x, row.quality, label=row.method, **style)
            if row.depth is not None:
                at = {
                    "xytext": (6, SHIFTS.get(row.method, 0)),
                    "textcoords": "offset points",
                    "fontsize": 8,
                    "va": "center",
                }
                axes.annotate(row.size, (x, row.quality), **at)
        sign = -1 if self.lower_is_better else 1
        line = _staircase(points, sign)
        axes.plot(*zip(*line, strict=True), color="#bbbbbb", linewidth=1, zorder=1) if line else None
        axes.set_xlabel(f"time of {'a block' if part == 'block' else 'the model'}, % of the original's")
        axes.margins(x=0.15, y=0.1)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)


def check_picture(path: str | os.PathLike[str]) -> None:
    """Raise if matplotlib cannot draw a picture at this path."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ModuleNotFoundError:
        raise ValueError("a picture needs matplotlib: pip install matplotlib") from None
    path, known = Path(path), sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in known:
        raise ValueError(f"the suffix of a picture must be one of {', '.join(known)}; got {path}. Try front.svg.")
    if path.is_dir():
        raise ValueError(f"a picture must be a file; {path} is a folder.")
    if (above := next(p for p in path.absolute().parents if p.exists())) and not above.is_dir():
        raise ValueError(f"the folder of a picture cannot be made: {above} is a file.")


def _named(panels: Sequence[Any]) -> tuple[list[Any], list[str]]:
    """One handle and label for each method in the panels."""
    found: dict[str, Any] = {}
    for axes in panels:
        found |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    return [*found.values()], [*found]


def _staircase(points: Sequence[tuple[float, float]], sign: int) -> list[tuple[float, float]]:
    """The points that no other point beats, fastest first."""
    kept: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (point[0], -sign * point[1])):
        if not kept or sign * y > sign * kept[-1][1]:
            kept.append((x, y))
    return kept


def _ratio(dense: float | None, ours: float | None) -> float | None:
    return None if dense is None or ours is None or ours <= 0 else dense / ours


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f} µs" if value >= 100 else f"{value:.3g} µs"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"
