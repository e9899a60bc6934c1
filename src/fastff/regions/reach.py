"""Which regions an input can reach, and by what smallest change.

A region is a polyhedron, so both questions have exact answers: it is empty or has a point, and it has exactly one point
nearest to an input. That point lies on a boundary, where rounding decides the side. So `smallest_change` goes past the
boundary by a few roundings, until the layer's hard pass arrives.
"""

from collections.abc import Callable
from typing import NamedTuple, SupportsIndex

import torch
from torch import Tensor

from .. import tree as heap
from ..checks import check_number
from ..functional import flatten
from ..layer import FFF
from ..progress import progress
from ..tensors import at_least_float32
from .geometry import check_leaf_number, check_linear, norms, unit_halfspaces
from .polyhedron import inside_box, project


class Change(NamedTuple):
    """Inputs that were moved to another region."""

    x: Tensor  # (..., in): the changed inputs
    distance: Tensor  # (...,): how far they moved, Euclidean; float32 at least


@torch.no_grad()
def smallest_change(layer: FFF, x: Tensor, leaf: SupportsIndex | Tensor) -> Change:
    """The inputs nearest to x (..., in) that the hard pass sends to a leaf: one number, or one for each input.

    An input that is in the region is returned unchanged. Others move to the nearest point of the region, computed in
    float64, and past the boundary by a few roundings of their dtype. Raises if the region is empty, or so thin or far
    away that no input of this dtype is found in it.
    """
    check_linear(layer, "smallest_change")
    flat = flatten(x, layer.node_weight)
    if not flat.isfinite().all():
        raise ValueError("smallest_change expects finite inputs; got NaN or infinity.")
    wanted = _wanted(layer, leaf, x.shape[:-1])
    moved, left = flat.clone(), (layer.route(flat) != wanted).nonzero()[:, 0]
    spaces = {number: _open_halfspaces(layer, number) for number in set(wanted[left].tolist())}
    slack = 0.0  # in roundings
    with progress("inputs", len(left)) as advance:
        while len(left) and slack * torch.finfo(flat.dtype).eps < 1:
            for i in left.tolist():
                normals, offsets = spaces[int(wanted[i])]
                moved[i] = _move(normals, offsets, flat[i], slack, int(wanted[i]))
            arrived = layer.route(moved[left]) == wanted[left]
            advance(int(arrived.sum()))
            left, slack = left[~arrived], 2 * slack or 0.25
    if len(left):
        raise _unreachable(int(wanted[left[0]]), flat.dtype)
    distance = torch.linalg.vector_norm(moved.double() - flat.double(), dim=-1).to(at_least_float32(x.dtype))
    return Change(moved.reshape(x.shape), distance.reshape(x.shape[:-1]))


def _wanted(layer: FFF, leaf: SupportsIndex | Tensor, shape: torch.Size) -> Tensor:
    """The leaf for each input, (batch,) int64."""
    if not isinstance(leaf, Tensor):
        leaf = torch.tensor(check_leaf_number(layer, leaf))
    if leaf.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"leaf must be an integer, or a tensor of int64; got {leaf.dtype}.")
    if leaf.shape not in (shape, torch.Size()):
        raise ValueError(f"leaf must be one number, or have the shape {tuple(shape)} of the inputs; got {leaf.shape}.")
    for number in {*leaf.flatten().tolist()}:
        check_leaf_number(layer, number)
    return leaf.to(layer.node_weight.device, torch.int64).expand(shape).reshape(-1)


def _open_halfspaces(layer: FFF, leaf: int) -> tuple[Tensor, Tensor]:
    """The half-spaces of a leaf that have a boundary; raises if a node without weights blocks the path."""
    normals, offsets, closed = unit_halfspaces(layer, leaf)
    if closed:
        raise ValueError(
            f"the region of leaf {leaf} is empty: node {closed[0]} has no weights and sends nothing there."
        )
    rows = normals.any(1)
    return normals[rows], offsets[rows]


def _move(normals: Tensor, offsets: Tensor, x: Tensor, slack: float, leaf: int) -> Tensor:
    """The point nearest to x (in,) that is `slack` roundings inside, in the dtype of x."""
    start = x.double().cpu()
    scale = torch.linalg.vector_norm(start) + offsets.abs()
    point = project(normals, offsets - slack * torch.finfo(x.dtype).eps * scale, start)
    if point is None and not slack:
        raise ValueError(f"the region of leaf {leaf} is empty: no input reaches it. empty_regions lists such leaves.")
    if point is None or not point.to(x.dtype).isfinite().all():
        raise _unreachable(leaf, x.dtype)
    return point.to(x)


def _unreachable(leaf: int, dtype: torch.dtype) -> ValueError:
    return ValueError(
        f"no {dtype} input was found in the region of leaf {leaf}: it is empty, too thin or too far away. Use a wider "
        "dtype, or choose another leaf."
    )


@torch.no_grad()
def empty_regions(
    layer: FFF, *, radius: float = 1e-6, bounds: tuple[Tensor | float, Tensor | float] | None = None
) -> list[int]:
    """The leaves that no input reaches: the decisions on the way to them contradict each other.

    With in_features >= depth, nearly every region has a point somewhere, maybe far from all data. `bounds` looks only
    where data can be.

    Args:
        radius: a region counts as empty if no ball of this radius fits between its boundaries.
        bounds: (low, high), numbers or tensors of shape (in,): look only at inputs in this box, by linear programs
            (scipy).
    """
    check_linear(layer, "empty_regions")
    check_number("radius", radius, 0)
    box = None if bounds is None else _box(bounds, layer.in_features)
    weight, bias = layer.node_weight.double().cpu(), layer.node_bias.double().cpu()
    if not (weight.isfinite().all() and bias.isfinite().all()):
        raise ValueError("the tree has weights that are not finite; no region can be computed.")
    norm = norms(weight)
    scale = torch.where(norm > 0, norm, 1.0)
    search = _Search(weight / scale.unsqueeze(1), bias / scale, layer.depth, radius, box)
    with progress("nodes", layer.num_nodes) as advance:
        return search.empty_leaves(advance)


def _box(bounds: tuple[Tensor | float, Tensor | float], size: int) -> tuple[Tensor, Tensor]:
    low, high = (torch.as_tensor(bound, dtype=torch.float64).cpu() for bound in bounds)
    if any(bound.shape not in (torch.Size(), torch.Size([size])) for bound in (low, high)):
        raise ValueError(f"bounds must be two numbers, or two tensors of shape ({size},); got {bounds!r:.120}.")
    low, high = low.expand(size), high.expand(size)
    if not (low <= high).all() or not (low.isfinite().all() and high.isfinite().all()):
        raise ValueError("bounds must be finite, with low <= high for every feature.")
    return low, high


class _Search:
    """Looks for a point in every region, from the root down.

    A point of a node's region lies in the region of one of its children, so each node needs at most one new point.
    """

    def __init__(
        self, normals: Tensor, offsets: Tensor, depth: int, radius: float, box: tuple[Tensor, Tensor] | None
    ) -> None:
        self.normals, self.offsets, self.depth, self.radius, self.box = normals, offsets, depth, radius, box

    def empty_leaves(self, advance: Callable[..., None]) -> list[int]:
        """The leaves without a point, in order."""
        found: list[int] = []
        size = self.normals.shape[-1]
        start = torch.zeros(size, dtype=torch.float64) if self.box is None else (self.box[0] + self.box[1]) / 2
        todo: list[tuple[int, list[tuple[int, bool]], Tensor | None]] = [(0, [], start)]
        while todo:
            node, steps, point = todo.pop()
            if node >= heap.num_nodes(self.depth):
                found += [node - heap.num_nodes(self.depth)] if point is None else []
                continue
            advance()
            for right in (True, False):
                way = [*steps, (node, right)]
                todo.append((2 * node + 1 + right, way, None if point is None else self._point(way, point)))
        return sorted(found)

    def _point(self, steps: list[tuple[int, bool]], point: Tensor) -> Tensor | None:
        """A point that satisfies all steps, given one that satisfies all but the last; None if there is none."""
        node, right = steps[-1]
        if not self.normals[node].any():
            return point if (self.offsets[node].item() >= 0) == right else None
        rows = [row for row, _ in steps if self.normals[row].any()]
        sign = torch.tensor([1.0 if turn else -1.0 for row, turn in steps if row in rows], dtype=torch.float64)
        normals, offsets = self.normals[rows] * sign.unsqueeze(1), self.offsets[rows] * sign - self.radius
        if normals[-1] @ point + offsets[-1] >= 0:
            return point
        return project(normals, offsets, point) if self.box is None else inside_box(normals, offsets, *self.box)
