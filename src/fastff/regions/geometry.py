"""The region of a leaf, exactly: a polyhedron that the nodes on the way to the leaf cut out of the input space.

A node with weight w and bias b has the logit z = w . x + b and sends an input right where z >= 0, left where z < 0 (or
NaN). Its boundary is the plane z = 0. So the region of a leaf is an intersection of `depth` half-spaces, and the
distance of an input to a boundary is |z| / ||w||. A node without weights (w = 0) sends all inputs one way and has no
boundary.

All of this needs linear nodes: node_width 1.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .. import tree as heap
from ..functional import flatten
from ..layer import FFF
from ..tensors import at_least_float32

_ELEMENTS = 2**22  # numbers of a float64 copy of weights, at a time


class Margin(NamedTuple):
    """How far inputs are from the nearest boundary of their region."""

    distance: Tensor  # (...,): Euclidean, in the inputs' units; float32 at least
    node: Tensor  # (...,) int64: the node whose boundary that is; -1 if the region has no boundary


def check_linear(layer: FFF, what: str) -> None:
    """Raise unless this is an FFF layer whose boundaries are planes."""
    if not isinstance(layer, FFF):
        raise TypeError(
            f"{what} expects an FFF layer; got {type(layer).__name__}. Pass the layer itself, for example "
            "model.mlp, or estimator.layer_ with inputs that are standardised."
        )
    if layer.node_width != 1:
        raise ValueError(
            f"{what} needs linear nodes, node_width=1: only their boundaries are planes; got node_width="
            f"{layer.node_width}. layer.route(x) says which region an input is in for every node_width."
        )


@torch.no_grad()
def margin(layer: FFF, x: Tensor) -> Margin:
    """The distance of each input (..., in) to the nearest boundary of its region, and the node that draws it.

    A smaller change of the input stays in its region. A change past the distance, straight towards the boundary, leaves
    it. Computed in float64; 0 where rounding alone decides the side, infinite in a region without a boundary, NaN for
    an input that is not finite.
    """
    check_linear(layer, "margin")
    flat = flatten(x, layer.node_weight)
    leaf, norm = layer.route(flat), norms(layer.node_weight)
    distance, node = flat.new_empty(len(flat), dtype=torch.float64), torch.empty_like(leaf)
    rows = max(_ELEMENTS // layer.in_features, 1)
    for start in range(0, len(flat), rows):
        part = slice(start, start + rows)
        distance[part], node[part] = _margin(layer, flat[part].double(), leaf[part], norm)
    shape = x.shape[:-1]
    return Margin(distance.to(at_least_float32(x.dtype)).reshape(shape), node.reshape(shape))


def _margin(layer: FFF, x: Tensor, leaf: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    """The distance and the node for x (batch, in) in float64, given the leaf of each row."""
    nearest, at = x.new_full((len(x),), torch.inf), torch.full_like(leaf, -1)
    for m in range(layer.depth):
        # The node of level m on the way to a leaf, and the turn there, are the highest bits of the leaf's number.
        node = (leaf >> (layer.depth - m)) + heap.num_nodes(m)
        right = (leaf >> (layer.depth - m - 1) & 1).bool()
        logit = (x * layer.node_weight[node].double()).sum(-1) + layer.node_bias[node].double()
        distance = torch.where(right, logit, -logit).clamp(min=0) / norm[node]
        closer = (norm[node] > 0) & ((distance < nearest) | distance.isnan())
        nearest, at = torch.where(closer, distance, nearest), torch.where(closer, node, at)
    unknown = ~x.isfinite().all(-1)
    return nearest.masked_fill(unknown, torch.nan), at


def norms(weight: Tensor) -> Tensor:
    """The Euclidean norm of each row of weight (rows, in), in float64, without overflow: (rows,)."""
    peak = weight.abs().amax(-1, keepdim=True).double()  # (rows, 1)
    scale = torch.where(peak > 0, peak, 1.0)
    found = torch.empty_like(peak[:, 0])
    rows = max(_ELEMENTS // weight.shape[-1], 1)
    for start in range(0, len(weight), rows):
        part = slice(start, start + rows)
        found[part] = torch.linalg.vector_norm(weight[part].double() / scale[part], dim=-1) * scale[part, 0]
    return found
