"""The exact region of a leaf: a polyhedron that the nodes on the path to the leaf cut out of the input space.

A node with weight w and bias b has the logit z = w . x + b and sends an input right where z >= 0, left where z < 0 (or
NaN). Its boundary is the plane z = 0. So the region of a leaf is an intersection of `depth` half-spaces, and the
distance of an input to a boundary is |z| / ||w||. A node without weights (w = 0) sends all inputs one way and has no
boundary.

All this needs linear nodes: node_width 1. Only `contains` takes every node_width.
"""

from typing import NamedTuple, SupportsIndex

import torch
from torch import Tensor

from .. import tree as heap
from ..checks import check_int
from ..functional import flatten
from ..layer import FFF
from ..tensors import at_least_float32
from .polyhedron import irredundant

_ELEMENTS = 2**22  # of a float64 copy of weights, at a time


class Path(NamedTuple):
    """The path of inputs (..., in) from the root to their leaf; the last dimension is the level."""

    leaf: Tensor  # (...,) int64
    node: Tensor  # (..., depth) int64
    right: Tensor  # (..., depth) bool: the turn taken there
    logit: Tensor  # (..., depth): w . x + b
    distance: Tensor  # (..., depth): to the node's boundary; infinite for a node without weights


class Margin(NamedTuple):
    """How far inputs are from the nearest boundary of their region."""

    distance: Tensor  # (...,): Euclidean, in the inputs' units; float32 at least
    node: Tensor  # (...,) int64: the node with that boundary; -1 if the region has no boundary


def check_fff(layer: FFF, what: str) -> None:
    """Raise unless this is an FFF layer."""
    if not isinstance(layer, FFF):
        raise TypeError(
            f"{what} expects an FFF layer; got {type(layer).__name__}. Pass the layer itself, such as model.mlp, or "
            "estimator.layer_ with standardised inputs."
        )


def check_linear(layer: FFF, what: str) -> None:
    """Raise unless this is an FFF layer whose boundaries are planes."""
    check_fff(layer, what)
    if layer.node_width != 1:
        raise ValueError(
            f"{what} needs linear nodes, node_width=1: only their boundaries are planes; got node_width="
            f"{layer.node_width}. layer.route(x) says which region an input is in for every node_width."
        )


def check_leaf_number(layer: FFF, leaf: SupportsIndex) -> int:
    """A leaf's number as an int; raises if there is no such leaf."""
    number = check_int("leaf", leaf, 0)
    if number >= layer.num_leaves:
        raise ValueError(f"leaf must be within 0..{layer.num_leaves - 1}; got {number}.")
    return number


@torch.no_grad()
def path(layer: FFF, x: Tensor) -> Path:
    """The path of each input (..., in) in the tree: nodes, turns, logits, and distances to nodes' boundaries.

    Logits and distances are computed in float64 and returned in float32 at least. A distance is 0 where rounding alone
    decides the side, and NaN for an input that is not finite.
    """
    check_linear(layer, "path")
    flat = flatten(x, layer.node_weight)
    leaf, norm = layer.route(flat), norms(layer.node_weight)
    level = torch.arange(layer.depth, device=x.device)
    # The highest bits of a leaf's number give the node on its path in each level, and the turn there.
    node = (leaf.unsqueeze(1) >> (layer.depth - level)) + (1 << level) - 1
    right = (leaf.unsqueeze(1) >> (layer.depth - 1 - level) & 1).bool()
    logit = _logits_at(layer, flat, node)
    distance = torch.where(right, logit, -logit).clamp(min=0) / norm[node]
    distance = distance.masked_fill(norm[node] == 0, torch.inf).masked_fill(~flat.isfinite().all(-1, True), torch.nan)
    dtype, shape = at_least_float32(x.dtype), x.shape[:-1]
    parts = leaf, node, right, logit.to(dtype), distance.to(dtype)
    return Path(*(part.reshape(shape + part.shape[1:]) for part in parts))


def _logits_at(layer: FFF, x: Tensor, node: Tensor) -> Tensor:
    """The logits of x (batch, in) at given nodes (batch, depth), in float64: (batch, depth)."""
    found = x.new_empty(node.shape, dtype=torch.float64)
    small = layer.num_nodes <= 16 * layer.depth  # one product with all nodes is then faster than copies
    weight = layer.node_weight.double() if small else layer.node_weight
    rows = max(_ELEMENTS // max(layer.in_features, layer.num_nodes if small else 0), 1)
    for start in range(0, len(x), rows):
        part = slice(start, start + rows)
        wide = x[part].double()
        if small:
            found[part] = (wide @ weight.mT).gather(1, node[part])
        else:
            for m in range(layer.depth):
                found[part, m] = (wide * weight[node[part, m]].double()).sum(-1)
    return found + layer.node_bias[node].double()


@torch.no_grad()
def margin(layer: FFF, x: Tensor) -> Margin:
    """The distance of each input (..., in) to the nearest boundary of its region, and that boundary's node.

    With a smaller change, the input stays in its region. A larger one, straight towards the boundary, takes it out.
    Computed in float64; 0 where rounding alone decides the side, infinite in a region without a boundary, NaN for
    an input that is not finite.
    """
    check_linear(layer, "margin")
    found = path(layer, x)
    if not layer.depth:
        whole = found.leaf.new_full(found.leaf.shape, torch.inf, dtype=found.distance.dtype)
        whole = whole.masked_fill(~x.isfinite().all(-1), torch.nan)
        return Margin(whole, torch.full_like(found.leaf, -1))
    distance, level = found.distance.min(-1)
    node = found.node.gather(-1, level.unsqueeze(-1)).squeeze(-1)
    return Margin(distance, node.masked_fill(distance.isinf(), -1))


def halfspaces(layer: FFF, leaf: SupportsIndex, *, minimal: bool = False) -> tuple[Tensor, Tensor]:
    """The region of a leaf as the inputs x with A x + b >= 0: A (rows, in) and b (rows,), float32 at least.

    There is one row for each node on the path, from the root down: (w, b) for a turn right, (-w, -b) for a turn left.
    A left turn needs more than 0: an input on the plane itself goes right.

    Args:
        minimal: leave out the rows that the others imply. The region stays the same. For an empty region, a few rows
            that contradict each other remain.
    """
    check_linear(layer, "halfspaces")
    number = check_leaf_number(layer, leaf)
    nodes = boundaries(layer, number) if minimal else None
    steps = [(n, right) for n, right in heap.path(number, layer.depth) if nodes is None or n in nodes]
    rows = torch.tensor([n for n, _ in steps], dtype=torch.int64, device=layer.node_weight.device)
    sign = torch.tensor([1.0 if right else -1.0 for _, right in steps], device=rows.device)
    wide = at_least_float32(layer.node_weight.dtype)
    weight, bias = layer.node_weight.detach()[rows].to(wide), layer.node_bias.detach()[rows].to(wide)
    return weight * sign.to(wide).unsqueeze(1), bias * sign.to(wide)


def boundaries(layer: FFF, leaf: SupportsIndex) -> list[int]:
    """The nodes on the path to a leaf whose planes bound its region, root first: no other node implies them."""
    check_linear(layer, "boundaries")
    number = check_leaf_number(layer, leaf)
    normals, offsets, closed = unit_halfspaces(layer, number)
    if closed:
        return closed
    steps = heap.path(number, layer.depth)
    rows = [row for row in range(layer.depth) if normals[row].any()]
    tolerance = 1e-9 * (1 + offsets.abs().max().item()) if rows else 0.0
    return [steps[rows[i]][0] for i in irredundant(normals[rows], offsets[rows], tolerance)]


def unit_halfspaces(layer: FFF, leaf: int) -> tuple[Tensor, Tensor, list[int]]:
    """The half-spaces of a leaf, scaled to normals of length 1 or 0, in float64 on the CPU.

    The list has the first node without weights that sends all inputs the other way, if there is one.
    """
    weight, bias = (part.double().cpu() for part in halfspaces(layer, leaf))
    if not (weight.isfinite().all() and bias.isfinite().all()):
        raise ValueError(
            f"a node on the way to leaf {leaf} has weights that are not finite; no region can be computed."
        )
    norm = norms(weight)
    scale = torch.where(norm > 0, norm, 1.0)
    offsets = bias / scale
    steps = heap.path(leaf, layer.depth)
    closed = [
        node
        for (node, right), length, offset in zip(steps, norm.tolist(), offsets.tolist(), strict=True)
        if not length and (offset < 0 if right else offset <= 0)
    ]
    return weight / scale.unsqueeze(1), offsets, closed[:1]


def contains(layer: FFF, leaf: SupportsIndex, x: Tensor) -> Tensor:
    """Whether the hard pass sends each input (..., in) to this leaf: (...,) bool. For any node_width."""
    check_fff(layer, "contains")
    return layer.route(x) == check_leaf_number(layer, leaf)


def norms(weight: Tensor) -> Tensor:
    """The Euclidean norm of each row of weight (rows, in), in float64, without overflow: (rows,)."""
    if not len(weight):
        return weight.new_zeros(0, dtype=torch.float64)
    peak = weight.abs().amax(-1, keepdim=True).double()  # (rows, 1)
    scale = torch.where(peak > 0, peak, 1.0)
    found = torch.empty_like(peak[:, 0])
    rows = max(_ELEMENTS // weight.shape[-1], 1)
    for start in range(0, len(weight), rows):
        part = slice(start, start + rows)
        found[part] = torch.linalg.vector_norm(weight[part].double() / scale[part], dim=-1) * scale[part, 0]
    return found
