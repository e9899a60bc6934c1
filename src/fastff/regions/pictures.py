"""Pictures of regions: a plane, the tree, the leaves' prototypes, and training. Each returns a matplotlib Figure.

    figure = fastff.regions.pictures.draw_tree(statistics, image_shape=(8, 8))
    figure.savefig("tree.png")

matplotlib is an extra, imported when a picture is drawn.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..batches import evaluation_mode
from ..checks import check_int
from ..extras import install
from ..layer import FFF
from .contents import Contents, label_name
from .development import History
from .diagnosis import SOFT
from .plane import LINE, Plane, palette
from .statistics import Statistics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Names = Sequence[str] | Mapping[int, str] | None
_DROP = 1.75  # from one level of the tree to the next, in leaf widths


def draw_plane(
    layer: FFF,
    x: Tensor,
    y: Tensor | None = None,
    *,
    cells: int = 300,
    class_names: Names = None,
    feature_names: Sequence[str] = ("", ""),
) -> "Figure":
    """The regions of a layer with two inputs, as in the paper's first figure.

    Colours show the class with the highest output, paler where it is less sure. Lines are the boundaries of regions;
    a boundary is dark where leaves mix in the soft pass. Points are x (samples, 2), by their label y if given.
    """
    if layer.in_features != 2 or x.dim() != 2 or x.shape[1] != 2:
        raise ValueError(
            f"a plane needs two inputs; got in_features={layer.in_features} and x of shape {tuple(x.shape)}. For other "
            "layers use draw_tree or draw_prototypes."
        )
    low, high = x.min(0).values, x.max(0).values
    rim = 0.08 * (high - low).clamp(min=1e-6)
    (left, bottom), (right, top) = (low - rim).tolist(), (high + rim).tolist()
    plane = Plane(left, right, bottom, top, check_int("cells", cells, 2))
    figure = _figure(5.2, 5.4)
    axes = figure.subplots()
    weight = layer.node_weight
    with torch.no_grad():
        grid = plane.grid().to(weight.device, weight.dtype)
        leaf = layer.route(grid).cpu()
        output = _outputs(layer, grid)
        plane.fill(axes, output, palette(output.shape[-1]))
        plane.boundaries(axes, F.one_hot(leaf, layer.num_leaves).float())
        plane.haze(axes, (1 - layer.mixture(grid).amax(-1)).float().cpu())
    classes = [0] if y is None else sorted(set(y.tolist()))
    colors = palette(max(output.shape[-1], len(classes)))
    for at, label in enumerate(classes):
        mine = x.cpu() if y is None else x[y == label].cpu()
        color = LINE if y is None else colors[label if 0 <= label < len(colors) else at]
        style: dict[str, Any] = {"s": 14, "edgecolors": "white", "linewidths": 0.3, "color": color}
        axes.scatter(
            mine[:, 0].tolist(),
            mine[:, 1].tolist(),
            label=None if y is None else label_name(class_names, label),
            **style,
        )
    for j in leaf.unique().tolist():
        across, up = plane.grid()[leaf == j].mean(0).tolist()
        axes.text(across, up, str(j), ha="center", va="center", weight="bold", color=LINE, bbox=_PLATE)
    axes.set(xlabel=feature_names[0], ylabel=feature_names[1], aspect="auto")
    axes.set_title(f"{layer.num_leaves} regions; dark: soft boundaries", fontsize=10)
    if y is not None:
        figure.legend(loc="outside lower center", ncols=6, frameon=False)
    return figure


_PLATE = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.75}


def _outputs(layer: FFF, grid: Tensor) -> Tensor:
    """The outputs of the hard pass on a grid; one output counts as the logit of the second of two classes."""
    with evaluation_mode(layer):
        output = layer(grid).float().cpu()
    return torch.cat([torch.zeros_like(output), output], -1) if output.shape[-1] == 1 else output


def draw_tree(
    found: Statistics,
    *,
    levels: int = 4,
    image_shape: Sequence[int] | None = None,
    class_names: Names = None,
) -> "Figure":
    """The tree: lines as thick as their share of the inputs, frames coloured by purity, a typical example in each.

    A deeper tree is drawn for `levels` levels below the root. Without labels, frames show entropy.
    """
    levels = min(check_int("levels", levels, 0), found.depth)
    width = 2**levels
    figure = _figure(max(4.0, 0.85 * width), 1.0 + 1.45 * (levels + 1))
    from matplotlib import colormaps

    axes = figure.subplots()
    shade = colormaps["viridis_r" if found.purity is None else "viridis"]
    values = found.entropy if found.purity is None else found.purity
    spot = {group: _spot(group, levels) for group in range(2 * width - 1)}
    for group, (a, b) in spot.items():
        if group:
            above = spot[(group - 1) // 2]
            share = float(found.count[group]) / found.samples
            style: dict[str, Any] = {"linewidth": 0.5 + 11 * share, "linestyle": "-" if share else ":", "zorder": 1}
            axes.plot(
                [above[0], a],
                [above[1] - (0.85 if found.labels else 0.66), b + 0.4],
                color="#8a949e",
                solid_capstyle="round",
                **style,
            )
    typical = [examples[0] if examples else None for examples in found.examples.get("typical", [])]
    contents = Contents(
        next(filter(None, typical), None), image_shape=image_shape, decode=None, tokens=found.tokens is not None
    )
    contents.measure([one for one in typical if one is not None])
    scale = 1.0 if found.purity is not None else max(float(values.nan_to_num(0.0).max()), SOFT)
    for group, (a, b) in spot.items():
        value = float(values[group])
        color = "#d0d5da" if value != value else shade(0.05 + 0.85 * min(1.0, value / scale))
        one = typical[group] if group < len(typical) else None
        _box(axes, a, b, color, None if one is None or contents.kind != "image" else contents.pixels(one))
        for line, text in enumerate(_caption(found, group, class_names)):
            axes.text(a, b - 0.46 - 0.17 * line, text, ha="center", va="top", fontsize=7)
    axes.set(xlim=(-0.6, width - 0.4), ylim=(-levels * _DROP - 0.95, 0.5), aspect="equal")
    axes.axis("off")
    what = "purity, dark is low" if found.purity is not None else "entropy of decisions, dark is high"
    axes.set_title(f"lines: share of the inputs\nframes: {what}", fontsize=8)
    return figure


def _spot(group: int, levels: int) -> tuple[float, float]:
    level = (group + 1).bit_length() - 1
    slot = 2 ** (levels - level)
    return (group - 2**level + 1) * slot + (slot - 1) / 2, -_DROP * level


def _box(axes: "Axes", a: float, b: float, color: Any, image: Tensor | None) -> None:
    from matplotlib.patches import Rectangle

    half = 0.36
    if image is not None:
        shown = image if image.shape[-1] == 3 else image[..., 0]
        axes.imshow(
            shown.numpy(), extent=(a - half, a + half, b - half, b + half), cmap="gray", vmin=0, vmax=1, zorder=2
        )
    face = "none" if image is not None else color
    axes.add_patch(
        Rectangle((a - half, b - half), 2 * half, 2 * half, facecolor=face, edgecolor=color, linewidth=3, zorder=3)
    )


def _caption(found: Statistics, group: int, class_names: Names) -> list[str]:
    nodes = found.num_leaves - 1
    name = f"leaf {group - nodes}" if group >= nodes else f"node {group}" if group else "root"
    lines = [f"{name}: {int(found.count[group])}"]
    if found.labels and (counts := found.labels.of(group)):
        label, count = next(iter(counts.items()))
        lines.append(f"{label_name(class_names, label)} {count / sum(counts.values()):.0%}")
    return lines


def draw_prototypes(
    found: Statistics,
    *,
    image_shape: Sequence[int] | None = None,
    feature_names: Sequence[str] | None = None,
    class_names: Names = None,
    leaves: int = 64,
) -> "Figure":
    """The mean input of each leaf: as images, or as the difference from the mean of all inputs, one row per leaf.

    The fullest `leaves` leaves are drawn, in the order of their numbers.
    """
    nodes = found.num_leaves - 1
    order = torch.argsort(found.leaf_count, descending=True, stable=True)[: check_int("leaves", leaves, 1)]
    chosen = [leaf for leaf in sorted(order.tolist()) if found.leaf_count[leaf]]
    mean = found.centre[nodes:][chosen]
    if image_shape is None:
        return _rows_of(found, chosen, mean - found.centre[0], feature_names, class_names)
    if torch.Size(image_shape).numel() != mean.shape[1]:
        raise ValueError(
            f"image_shape must have {mean.shape[1]} numbers, the layer's inputs; got {tuple(image_shape)}. Without it, "
            "features are drawn."
        )
    columns = min(8, len(chosen))
    rows = -(-len(chosen) // columns)
    figure = _figure(1.2 * columns, 1.45 * rows + 0.3)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    low, high = float(mean.min()), float(mean.max())
    for axes in panels:
        axes.axis("off")
    for axes, leaf, image in zip(panels, chosen, mean, strict=False):
        axes.imshow(image.reshape(tuple(image_shape)).numpy(), cmap="gray", vmin=low, vmax=high)
        axes.set_title("\n".join(_caption(found, nodes + leaf, class_names)), fontsize=7)
    return figure


def _rows_of(
    found: Statistics, chosen: list[int], difference: Tensor, feature_names: Sequence[str] | None, class_names: Names
) -> "Figure":
    features = difference.shape[1]
    if feature_names is not None and len(feature_names) != features:
        raise ValueError(f"feature_names must name each of the {features} inputs; got {len(feature_names)} names.")
    figure = _figure(min(14.0, 2.5 + 0.35 * features), 1.2 + 0.24 * len(chosen))
    axes = figure.subplots()
    reach = max(float(difference.abs().max()), 1e-12)
    shown = axes.imshow(difference.numpy(), cmap="RdBu_r", vmin=-reach, vmax=reach, aspect="auto")
    nodes = found.num_leaves - 1
    axes.set_yticks(
        range(len(chosen)), [", ".join(_caption(found, nodes + leaf, class_names)) for leaf in chosen], fontsize=7
    )
    if feature_names is not None:
        axes.set_xticks(range(features), list(feature_names), rotation=90, fontsize=7)
    else:
        axes.set_xlabel("input")
    figure.colorbar(shown, ax=axes, label="mean of the leaf minus mean of all inputs")
    return figure


def draw_training(history: History, *, label: str = "step") -> "Figure":
    """Leaves in use, the smallest share and the entropy of decisions over training, a line for each layer."""
    if not history.steps:
        raise ValueError("history is empty. Call history.record(model) after training steps.")
    figure = _figure(9.6, 3.2)
    panels = figure.subplots(1, 3)
    titles = ("leaves in use, share", "smallest share, of a fair one", "mean entropy of a decision, nats")
    for axes, title in zip(panels, titles, strict=True):
        axes.set(title=title, xlabel=label)
        axes.title.set_fontsize(9)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    for at, (name, lines) in enumerate(history.layers.items()):
        color = f"C{at % 10}"
        used = [count / lines.leaves for count in lines.leaves_used]
        for axes, line in zip(panels, (used, lines.smallest_share, lines.entropy), strict=True):
            axes.plot(
                history.steps,
                line,
                color=color,
                linewidth=1.4,
                label=name or "layer",
                marker="." if len(line) == 1 else "",
            )
    panels[2].axhline(SOFT, color=LINE, linewidth=0.8, linestyle=":")
    for axes in panels[:2]:
        axes.set_ylim(0, 1.05)
    panels[2].set_ylim(bottom=0)
    if len(history.layers) > 1:
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    return figure


def _figure(width: float, height: float) -> "Figure":
    """An empty figure that pyplot does not know, so that it need not be closed."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError(f"pictures need matplotlib: {install('cli')}", name="matplotlib") from None
    return Figure(figsize=(width, height), layout="constrained")
