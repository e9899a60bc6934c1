"""The speed figures of the paper, and the speed-up over depth, drawn from rows of results."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .rows import SIZE, Row

COLORS = {"FF": "#7f7f7f", "MoE": "#d95f02", "FFF": "#1b6ca8"}
NAMES = {"FF": "FF, dense", "MoE": "MoE, k = 1", "FFF": "FFF"}


def draw(rows: Iterable[Row], folder: Path, kind: str = "png") -> list[Path]:
    """Draw all figures that the rows allow, one set per machine, dtype and block size. Returns the files written.

    `kind` is the file format, such as png or svg.
    """
    import matplotlib

    matplotlib.use("Agg")
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in _latest(rows):
        names = ("machine", "threads", "dtype", "in", "out", "leaf_width", "node_width", "activation")
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    written = []
    for found in groups.values():
        folder.mkdir(parents=True, exist_ok=True)
        for batch in sorted({row["batch"] for row in found}):
            same = [row for row in found if row["batch"] == batch]
            if len({row["depth"] for row in same}) > 2:
                written.append(_blocks(same, folder, kind, closeup=False))
                written.append(_blocks(same, folder, kind, closeup=True))
        if len({row["depth"] for row in found}) > 2:
            written.append(_speedups(found, folder, kind))
    return written


def _latest(rows: Iterable[Row]) -> list[Row]:
    """The rows to draw: the last one of each model and size; the fastest backend of MoE; FFF with auto."""
    kept: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row["status"] == "ok" and (row["model"] in ("FF", "MoE") or row["backend"] == "auto"):
            kept[tuple(row[name] for name in ("machine", "threads", "tf32", *SIZE, "model", "backend"))] = row
    best: dict[tuple[Any, ...], Row] = {}
    for key, row in kept.items():
        old = best.get(key[:-1])
        if old is None or row["median_us"] < old["median_us"]:
            best[key[:-1]] = row
    return list(best.values())


def _blocks(rows: list[Row], folder: Path, kind: str, closeup: bool) -> Path:
    """Time over the number of blocks. As in the paper, the close-up has no FF and a linear axis."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    for model in ("MoE", "FFF") if closeup else ("FF", "MoE", "FFF"):
        line = sorted((row for row in rows if row["model"] == model), key=lambda row: row["depth"])
        if not line:
            continue
        median = [row["median_us"] for row in line]
        low = [max(0.0, row["median_us"] - row["p20_us"]) for row in line]
        high = [max(0.0, row["p80_us"] - row["median_us"]) for row in line]
        blocks = [2 ** row["depth"] for row in line]
        style: dict[str, Any] = {"marker": "o", "markersize": 4, "capsize": 2.5, "linewidth": 1.6}
        axes.errorbar(blocks, median, [low, high], color=COLORS[model], label=NAMES[model], **style)
    _blocks_axis(axes, sorted({row["depth"] for row in rows}))
    if closeup:
        axes.set_ylim(bottom=0)
    else:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("time of a forward pass, µs (p20 to p80)")
    _finish(axes, rows[0], f"batch {rows[0]['batch']}")
    return _save(figure, folder, kind, "closeup" if closeup else "blocks", rows[0], f"b{rows[0]['batch']}")


def _speedups(rows: list[Row], folder: Path, kind: str) -> Path:
    """The speed-up of FFF over FF, one line per batch."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    found = [row for row in rows if row["model"] == "FFF" and row["speedup_dense"] is not None]
    batches = sorted({row["batch"] for row in found})
    for i, batch in enumerate(batches):
        line = sorted((row for row in found if row["batch"] == batch), key=lambda row: row["depth"])
        color = plt.get_cmap("viridis")(0.35 + 0.5 * i / max(1, len(batches) - 1))
        x, y = [2 ** row["depth"] for row in line], [row["speedup_dense"] for row in line]
        axes.plot(x, y, marker="o", markersize=4, linewidth=1.6, color=color, label=f"batch {batch}")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}x")
    _blocks_axis(axes, sorted({row["depth"] for row in found}))
    axes.set_ylabel("speed-up of FFF over the dense FF")
    _finish(axes, rows[0], "")
    return _save(figure, folder, kind, "speedup", rows[0], "")


def _blocks_axis(axes: Any, depths: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks([2**depth for depth in depths], [f"$2^{{{depth}}}$" for depth in depths])
    axes.minorticks_off()
    axes.set_xlabel("blocks (experts, leaves)")


def _finish(axes: Any, row: Row, extra: str) -> None:
    threads = f", {row['threads']} threads" if row["threads"] else ""
    size = f"{row['in']} → {row['out']}, blocks of {row['leaf_width']} neurons, {row['dtype']}"
    axes.set_title(f"{row['machine']}{threads}\n{size}{', ' + extra if extra else ''}", fontsize=9)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def _save(figure: Any, folder: Path, kind: str, what: str, row: Row, extra: str) -> Path:
    from matplotlib import pyplot as plt

    parts = [what, row["machine"], f"{row['in']}-{row['out']}-l{row['leaf_width']}", row["dtype"], extra]
    parts += [f"n{row['node_width']}" if row["node_width"] > 1 else "", row["activation"].replace("relu", "")]
    parts += [f"{row['threads']}threads" if row["threads"] else ""]
    name = re.sub(r"[^a-z0-9]+", "-", "-".join(part for part in parts if part).lower())
    path = folder / f"{name}.{kind}"
    figure.savefig(path, dpi=160)
    plt.close(figure)
    return path
