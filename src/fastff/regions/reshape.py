"""Change the shape of a tree: split a leaf, merge siblings, drop dead leaves, add and remove levels.

A tree stays perfect, with all leaves at one depth, because kernels rely on it. So every change here copies nodes and
leaves, and a part that a smaller tree would not have is filled with copies behind a node without weights. Such a node
(w = 0, b = 0) sends all inputs right; its children are equal, so it decides nothing, even in the soft pass.

    split_leaf_     one leaf becomes two equal ones with a boundary between them. All other leaves then need one more
                    level, unless the leaf has a copy beside it that no input reaches: then that copy is used.
    merge_siblings_ a leaf takes the region of its sibling.
    drop_leaves_    the sibling of each dropped leaf, or of a dropped subtree, takes its region.
    prune_          removes the levels that are no longer needed.

"No output changes" is bit for bit on the backends native and reference. aten and triton may run a deeper tree in
another way, which changes the last bits.

The parameters stay the same objects. If the depth stays, they change in place, and an optimizer keeps its state, also
for copied leaves. If the depth changes, they get new shapes: build a new optimizer, since an old one's state no longer
fits. Gradients are dropped. An error changes nothing.
"""

import sys
from collections.abc import Iterable
from typing import NamedTuple, SupportsIndex

import torch
from torch import Tensor, nn

from .. import tree as heap
from ..checks import check_number
from ..functional import flatten
from ..interrupts import uninterrupted
from ..last_forward import LAST
from ..layer import FFF
from ..surgery.operable import check_mode
from ..tensors import LEAF_PARAMETERS, TREE_PARAMETERS
from .freeze import frozen_leaves
from .geometry import check_fff, check_leaf_number, check_linear
from .records import changes_of

_STEPS = 50  # of the power iteration
_SAMPLES = 4096  # inputs that choose a direction


class Reshaped(NamedTuple):
    """A layer after a change of its tree."""

    depth: int
    origin: Tensor  # (leaves,) int64: for each leaf, the earlier leaf that it is a copy of


def deepen_(layer: FFF) -> Reshaped:
    """Add a level: each leaf becomes two equal ones behind a node without weights. No output changes."""
    _check_plain(layer, "deepen_")
    return _rearrange_(layer, *_deeper(layer))


def split_leaf_(
    layer: FFF, leaf: SupportsIndex, x: Tensor | None = None, *, weight: Tensor | None = None, bias: float = 0.0
) -> Reshaped:
    """Split the region of a leaf in two, each with a copy of the leaf. No output changes until they are trained.

    If the leaf has a spare copy beside it, behind a node without weights, the depth stays. Otherwise the tree gets one
    more level, as by `deepen_`: memory doubles, and each other leaf has a spare copy for later splits. A `Recipe`
    keeps the tree and the leaves afterwards.

    Args:
        leaf: as layer.route numbers it.
        x: inputs (..., in). Those in the leaf are halved at their median, across the direction in which they vary most.
        weight, bias: instead, the boundary itself, weight . x + bias = 0; weight is (in,).

    Returns the new depth, and the origin of each new leaf: the two halves are those with origin == leaf.
    """
    _check_plain(layer, "split_leaf_")
    check_linear(layer, "split_leaf_")
    number = check_leaf_number(layer, leaf)
    normal, offset = _boundary(layer, number, x, weight, bias)
    node, sibling = (number + layer.num_nodes - 1) // 2, number ^ 1
    nodes, leaves = _unchanged(layer)
    if layer.depth and not _decides(layer, node):
        leaves[sibling] = number
    else:
        node = layer.num_nodes + number
        nodes, leaves = _deeper(layer)
    done = _rearrange_(layer, nodes, leaves, {node: (normal, offset)})
    layer.fitted_tree = layer.fitted_leaves = True
    return done


def merge_siblings_(layer: FFF, leaf: SupportsIndex) -> Reshaped:
    """Let a leaf take the region of its sibling, leaf ^ 1, whose weights are lost. Other outputs do not change.

    The inverse of a split: no output changes while the two leaves are equal.
    """
    _check_plain(layer, "merge_siblings_")
    number = check_leaf_number(layer, leaf)
    if not layer.depth:
        raise ValueError("a tree of depth 0 has one leaf, which has no sibling to merge with.")
    return drop_leaves_(layer, [number ^ 1])


def drop_leaves_(layer: FFF, leaves: Iterable[SupportsIndex]) -> Reshaped:
    """Drop leaves, such as those that no input reaches. Outputs of inputs in other leaves do not change.

    A dropped leaf's region goes to its sibling; if all leaves below a node are dropped, their regions go to the leaves
    on the other side of the node above. The depth stays: a dropped leaf's place holds a copy that no input reaches.
    `prune_` then removes superfluous levels.
    """
    _check_plain(layer, "drop_leaves_")
    listed = leaves.tolist() if isinstance(leaves, Tensor) else leaves
    dropped = {check_leaf_number(layer, leaf) for leaf in listed}
    if len(dropped) == layer.num_leaves:
        raise ValueError(f"all {layer.num_leaves} leaves would be dropped; keep at least one.")
    kept = [0 if leaf in dropped else 1 for leaf in range(layer.num_leaves)]
    alive = [*heap.sum_below(torch.tensor(kept)).tolist(), *kept]  # the kept leaves below each node, then the leaves
    node_origin, leaf_origin = _unchanged(layer)

    def fill(new: int, old: int) -> None:
        """Put the kept part of the subtree at `old` into the subtree at `new` on the same level."""
        if old >= layer.num_nodes:
            leaf_origin[new - layer.num_nodes] = old - layer.num_nodes
            return
        left, right = 2 * old + 1, 2 * old + 2
        both = bool(alive[left] and alive[right])
        node_origin[new] = old if both else -1
        fill(2 * new + 1, left if alive[left] else right)
        fill(2 * new + 2, right if alive[right] else left)

    fill(0, 0)
    return _rearrange_(layer, node_origin, leaf_origin)


def prune_(layer: FFF) -> Reshaped:
    """Remove the levels that the tree does not need. No output changes.

    Nodes without weights and with two equal sides are not needed. The depth becomes the number of other nodes on the
    longest path; shorter ones are filled with copies.
    """
    _check_plain(layer, "prune_")
    decides = [_decides(layer, node) for node in range(layer.num_nodes)]
    first = layer.num_nodes  # of the leaves

    def behind(node: int) -> int:
        """The first node or leaf from here that makes a difference."""
        while node < first and not decides[node]:
            node = 2 * node + 2
        return node

    def height(node: int) -> int:
        node = behind(node)
        return 0 if node >= first else 1 + max(height(2 * node + 1), height(2 * node + 2))

    depth = height(0)
    nodes, leaves = torch.full((heap.num_nodes(depth),), -1), torch.zeros(heap.num_leaves(depth), dtype=torch.int64)

    def fill(new: int, old: int) -> None:
        old = behind(old)
        if new >= len(nodes):
            leaves[new - len(nodes)] = old - first
            return
        is_leaf = old >= first
        nodes[new] = -1 if is_leaf else old
        for side in (1, 2):
            fill(2 * new + side, old if is_leaf else 2 * old + side)

    fill(0, 0)
    return _rearrange_(layer, nodes, leaves)


def _check_plain(layer: FFF, what: str) -> None:
    """Raise unless the parameters of a layer are its own plain tensors, and can be replaced here."""
    check_fff(layer, what)
    _check_unused(layer, what)
    check_mode()
    names = (*TREE_PARAMETERS, *LEAF_PARAMETERS)
    computed = type(layer).tree is not FFF.tree or type(layer).leaves is not FFF.leaves
    if computed or any(name not in layer._parameters for name in names):
        raise ValueError(
            f"{what} needs plain parameters; this layer computes its tree or leaves, by a parametrization, by pruning "
            "or in a subclass. Make them plain first, for example with parametrize.remove_parametrizations."
        )
    for name in names:
        parameter = layer._parameters[name]
        if parameter is not None and (type(parameter) is not nn.Parameter or parameter.is_meta):
            kind = "a meta tensor" if parameter.is_meta else type(parameter).__name__
            raise TypeError(f"{what} needs plain parameters; {name} is {kind}. Gather sharded parameters first.")


def _check_unused(layer: FFF, what: str) -> None:
    """Raise if something relies on the leaves' numbers."""
    if changes_of(layer):
        raise ValueError(
            f"{what} moves leaves, and this layer has {len(changes_of(layer))} edits on record. Undo them first, or "
            "keep them without a record by regions.forget_edits_(layer)."
        )
    if frozen_leaves(layer):
        raise ValueError(f"{what} moves leaves, and some are frozen. Call regions.unfreeze_leaves_(layer) first.")


def _unchanged(layer: FFF) -> tuple[Tensor, Tensor]:
    return torch.arange(layer.num_nodes), torch.arange(layer.num_leaves)


def _deeper(layer: FFF) -> tuple[Tensor, Tensor]:
    """The origin of each node (-1: none) and leaf in a tree one level deeper."""
    nodes, leaves = _unchanged(layer)
    return torch.cat([nodes, torch.full_like(leaves, -1)]), leaves.repeat_interleave(2)


def _decides(layer: FFF, node: int) -> bool:
    """Whether a node makes a difference: it has weights, or its two sides differ.

    Without weights, it sends all inputs one way in the hard pass, but the soft pass mixes both sides: a converted
    dense layer starts with such a tree.
    """
    weight = layer.node_weight if layer.node_out_weight is None else layer.node_out_weight
    if weight[node].any():
        return True
    level = (node + 1).bit_length() - 1
    place = node - heap.num_nodes(level)  # from the left

    def differ(parameters: list[nn.Parameter], start: int, size: int) -> bool:
        middle = start + size // 2
        return not all(torch.equal(p[start:middle], p[middle : start + size]) for p in parameters)

    size = 1 << (layer.depth - level)
    if differ(layer.leaf_parameters(), place * size, size):
        return True
    below = ((m, 1 << (m - level)) for m in range(level + 1, layer.depth))
    return any(differ(layer.tree_parameters(), heap.num_nodes(m) + place * count, count) for m, count in below)


@torch.no_grad()
def _rearrange_(
    layer: FFF, nodes: Tensor, leaves: Tensor, boundary: dict[int, tuple[Tensor, Tensor]] | None = None
) -> Reshaped:
    """Give a layer the nodes and leaves with these origins; -1 is a node without weights. `boundary` sets nodes."""
    empty, depth, new = nodes < 0, heap.depth_of(len(leaves)), {}
    for name, parameter in layer.named_parameters(recurse=False):
        if name.startswith("leaf_"):
            new[name] = parameter.detach()[leaves.to(parameter.device)]
            continue
        source = parameter.detach() if len(parameter) else parameter.detach().new_zeros(1, *parameter.shape[1:])
        new[name] = source[nodes.clamp(min=0).to(parameter.device)]
        # With a hidden layer, only the node's output must be 0; its hidden layer keeps its weights.
        if layer.node_width == 1 or name.startswith("node_out_"):
            new[name][empty.to(parameter.device)] = 0
    for node, (weight, bias) in (boundary or {}).items():
        new["node_weight"][node], new["node_bias"][node] = weight, bias
    with uninterrupted():
        for name, value in new.items():
            parameter = getattr(layer, name)
            parameter.grad = None
            if parameter.shape == value.shape:
                parameter.copy_(value)
            else:
                parameter.data = value
        layer.depth, layer.running_shares = depth, None
        for name in LAST:
            setattr(layer, name, None)
    return Reshaped(depth, leaves)


@torch.no_grad()
def _boundary(layer: FFF, leaf: int, x: Tensor | None, weight: Tensor | None, bias: float) -> tuple[Tensor, Tensor]:
    """A split's weight and bias, given or chosen by inputs, in the layer's dtype."""
    like = layer.node_weight
    if x is not None and weight is None:
        flat = flatten(x, like)
        own = flat[layer.route(flat) == leaf]
        if len(own) < 2:
            raise ValueError(f"splitting leaf {leaf} by inputs needs two of them in it; got {len(own)} of {len(flat)}.")
        return _halving(leaf, own)
    if x is not None or weight is None:
        raise ValueError("split_leaf_ needs either inputs x or the weight of a boundary; pass one of them.")
    given = torch.as_tensor(weight).detach().to(like)
    if given.shape != (layer.in_features,) or not given.isfinite().all() or not given.any():
        shape = f"({layer.in_features},)"
        raise ValueError(f"weight must have shape {shape}, be finite and not all 0; got {tuple(given.shape)}.")
    return given, torch.tensor(check_number("bias", bias, -sys.float_info.max)).to(like)


def _halving(leaf: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """A boundary between the halves of x (batch, in), across the direction in which x varies most."""
    wide = x.double()
    spread = wide[:_SAMPLES] - wide[:_SAMPLES].mean(0)
    normal = spread[spread.norm(dim=1).argmax()]
    for _ in range(_STEPS):  # of a power iteration
        normal = nn.functional.normalize(spread.mT @ (spread @ normal), dim=0)
    weight = (normal / (wide @ normal).std(correction=0)).to(x)  # logits of deviation 1
    logit = wide @ weight.double()
    ordered, middle = logit.sort().values, len(x) // 2
    bias = -((ordered[middle - 1] + ordered[middle]) / 2).to(x)  # between two inputs, so that rounding decides none
    right = (logit + bias.double() >= 0).sum().item()
    if not 0 < right < len(x):
        raise ValueError(f"the {len(x)} inputs in leaf {leaf} are equal up to rounding; pass others, or a weight.")
    return weight, bias
