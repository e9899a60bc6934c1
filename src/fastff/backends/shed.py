"""The soft pass that sheds leaves, as `reference.shed`, by a walk from the root that never enters shed subtrees.

On each level, a sample has a few nodes that it reaches with at least epsilon * 2**-depth. A child that gets less is
left out, with its whole subtree. At the bottom, pairs (sample, leaf) remain, one row each: sorted by leaf, they are
products of segments, as in the sampled pass. If most pairs remain, running all leaves is cheaper, and the pass does
that.

If few pairs remain, no tensor has the size (batch, leaves) or (batch, nodes): only the paths cost time and memory.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import tree as heap
from ..activations import Activation, apply
from ..tensors import Leaves, Shed, SoftOptions, Tree, at_least_float32
from . import aten, paths, reference, segments
from .reference import input_pairs

# For a level of up to this many nodes per visit of a sample, all logits in one product are cheaper than gathering a row
# of weights per visit (as in aten.py).
_NODES_PER_VISIT = 64
_TOP = 7  # levels of no more nodes than that


def shed(x: Tensor, tree: Tree, leaves: Leaves, activation: Activation, options: SoftOptions, epsilon: float) -> Shed:
    """As the reference."""
    walk = soft_walk(x, tree, activation, options, epsilon)
    total = walk.reach.new_zeros(x.shape[0]).index_add(0, walk.sample, walk.reach)
    weight = walk.reach / total.index_select(0, walk.sample)
    if options.straight_through:
        weight = walk.likeliest.to(weight.dtype) + (weight - weight.detach())
    mixed = _all_leaves if is_dense(len(weight), x.shape[0], leaves) else _some_leaves
    y = mixed(x, walk, weight, leaves, activation, options.dropout)
    logits, reach, sample, node = (torch.cat(parts) for parts in zip(*walk.visits, strict=True))
    leaf = walk.leaf.new_zeros(x.shape[0])
    own = walk.likeliest.nonzero().squeeze(1)
    leaf = leaf.index_copy(0, walk.sample.index_select(0, own), walk.leaf.index_select(0, own))
    return Shed(y, logits, reach, sample, node, leaf)


def is_dense(pairs: int, batch: int, leaves: Leaves) -> bool:
    """Whether enough pairs remain that running all leaves is cheaper."""
    count, width = leaves.in_weight.shape[:2]
    return pairs * (1 + _ROW / width) >= batch * count


# A pair's work besides its products, in neurons of its leaf: gathering inputs and summing outputs. Leaves of 4 to 128
# neurons and 64 to 768 features cross over at 40 to 100 (EPYC, one thread).
_ROW = 80


@torch.no_grad()
def describe(
    x: Tensor, tree: Tree, leaves: Leaves, activation: Activation, options: SoftOptions, epsilon: float
) -> str:
    """How the pass runs this batch. Counts the batch's leaves."""
    pairs, batch, count = len(soft_walk(x, tree, activation, options, epsilon).leaf), len(x), len(leaves.in_weight)
    how = "few enough to run leaf by leaf"
    if is_dense(pairs, batch, leaves):
        how = "too many to run one by one: all leaves run, in two matrix products"
    return f"epsilon={epsilon} keeps {pairs / max(batch, 1):.1f} of {count} leaves a sample, {how}"


class SoftWalk(NamedTuple):
    """The pairs that remain, ordered by sample, and the visits to nodes on the way."""

    sample: Tensor  # (pairs,)
    leaf: Tensor  # (pairs,)
    reach: Tensor  # (pairs,): the weight of the leaf, before scaling
    likeliest: Tensor  # (pairs,) bool: whether every turn took the likelier side
    visits: list[tuple[Tensor, Tensor, Tensor, Tensor]]  # of each level: logits, reach, sample, node


def soft_walk(x: Tensor, tree: Tree, activation: Activation, options: SoftOptions, epsilon: float) -> SoftWalk:
    """Walk from the root to every leaf that is kept."""
    depth = heap.depth_of(len(tree.weight) + 1)
    least = epsilon / heap.num_leaves(depth)
    sample = torch.arange(x.shape[0], device=x.device)
    place, likeliest = torch.zeros_like(sample), torch.ones_like(sample, dtype=torch.bool)  # place: within the level
    reach = x.new_ones(x.shape[0], dtype=at_least_float32(x.dtype))
    levels = _Levels(x, tree, activation)
    visits = [] if depth else [(levels.none, reach[:0], sample[:0], sample[:0])]
    for m in range(depth):
        logits = levels.logits(m, sample, place) * options.temperature
        visits.append((logits, reach, sample, heap.num_nodes(m) + place))
        swapped = reference.transpose(logits, options.transposition)
        children = (reach.unsqueeze(-1) * reference.branches(swapped)).flatten()  # (2 * rows,)
        kept = (~(children < least)).nonzero().squeeze(1)  # a NaN is kept
        row, right = kept >> 1, (kept & 1).bool()
        reach, sample = children.index_select(0, kept), sample.index_select(0, row)
        place = 2 * place.index_select(0, row) + right
        likeliest = likeliest.index_select(0, row) & (right == (swapped >= 0).index_select(0, row))
    return SoftWalk(sample, place, reach, likeliest, visits)


class _Levels:
    """The logits of single nodes: of the uppermost levels and of full ones in one product, else path by path."""

    def __init__(self, x: Tensor, tree: Tree, activation: Activation) -> None:
        self.x, self.activation = x, activation
        depth = heap.depth_of(len(tree.weight) + 1)
        self.top = min(depth, _TOP)
        # Split, not sliced: each slice's derivative would fill and add a tensor of all nodes.
        sizes = [heap.num_nodes(self.top), *heap.level_sizes(depth)[self.top :]]
        parts = [[None] * len(sizes) if t is None else t.split(sizes) for t in tree]
        first, *self.below = (Tree._make(part) for part in zip(*parts, strict=True))
        upper = reference.node_logits(x, first, activation)  # (batch, nodes)
        self.upper, self.none = upper.split(heap.level_sizes(self.top), 1), upper.flatten()[:0]

    def logits(self, m: int, sample: Tensor, place: Tensor) -> Tensor:
        """The logit of a node in level m for each row: (rows,), float32 at least."""
        if m < self.top:
            return _pick(self.upper[m], sample, place)
        part = self.below[m - self.top]
        if self.x.shape[0] << m <= _NODES_PER_VISIT * len(sample):
            return _pick(reference.node_logits(self.x, part, self.activation), sample, place)
        rows = _Rows.apply(self.x, sample)  # type: ignore[no-untyped-call]
        return paths.logits(rows, place.unsqueeze(1), part, self.activation).squeeze(1)


def _pick(values: Tensor, sample: Tensor, place: Tensor) -> Tensor:
    return values.flatten().index_select(0, sample * values.shape[1] + place)


def _all_leaves(
    x: Tensor, walk: SoftWalk, weight: Tensor, leaves: Leaves, activation: Activation, dropout: float
) -> Tensor:
    count = len(leaves.in_weight)
    weights = weight.new_zeros(x.shape[0] * count).index_copy(0, walk.sample * count + walk.leaf, weight)
    hidden = aten.leaf_hidden(x, leaves, activation)
    return aten.mix(F.dropout(hidden, dropout) if dropout else hidden, weights.view(-1, count), leaves)


def _some_leaves(
    x: Tensor, walk: SoftWalk, weight: Tensor, leaves: Leaves, activation: Activation, dropout: float
) -> Tensor:
    leaf, order = walk.leaf.sort(stable=True)
    sample, weight = walk.sample.index_select(0, order), weight.index_select(0, order)
    rows = _Rows.apply(x, sample)  # type: ignore[no-untyped-call]
    hidden = apply(activation, *(segments.linear(rows, *pair, leaf, True, False) for pair in input_pairs(leaves)))
    hidden = F.dropout(hidden, dropout) if dropout else hidden
    weight = weight.to(hidden.dtype)
    second = leaves.out_weight, leaves.out_bias
    y: Tensor = _Sum.apply(hidden, weight, *second, leaf, sample, x.shape[0])  # type: ignore[no-untyped-call]
    return y


class _Rows(torch.autograd.Function):
    """The rows of these samples. A sample's gradients are summed in float32 at least."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sample: Tensor) -> Tensor:
        ctx.save_for_backward(sample)
        ctx.batch = x.shape[0]
        return x.index_select(0, sample)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (sample,) = ctx.saved_tensors
        return _add_up(grad, sample, ctx.batch), None


class _Sum(torch.autograd.Function):
    """The sum over a sample's rows of weight * (hidden @ out_weight[leaf] + out_bias[leaf]): (batch, out)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        out_weight: Tensor,
        out_bias: Tensor | None,
        leaf: Tensor,
        sample: Tensor,
        batch: int,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, out_weight, out_bias, leaf, sample)
        weight = weight.unsqueeze(1)
        y = segments.product(hidden * weight, out_weight, leaf, False)
        if out_bias is not None:
            y.addcmul_(out_bias.index_select(0, leaf), weight)
        return _add_up(y, sample, batch)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        segments.refuse_second_derivative("epsilon > 0", "epsilon=0")
        hidden, weight, out_weight, out_bias, leaf, sample = ctx.saved_tensors
        need_hidden, need_weight, need_out_weight, need_out_bias, *_ = ctx.needs_input_grad
        rows, weight = grad.index_select(0, sample), weight.unsqueeze(1)
        d_hidden = d_weight = d_out_weight = d_out_bias = None
        if need_hidden or need_weight:
            d_product = segments.product(rows, out_weight, leaf, True)
            d_hidden = d_product * weight if need_hidden else None
            d_weight = torch.linalg.vecdot(d_product, hidden)
            if out_bias is not None:
                d_weight += segments.product(rows, out_bias.unsqueeze(1), leaf, True).squeeze(1)
        if need_out_weight:
            d_out_weight = segments.outer(hidden * weight, rows, leaf, len(out_weight))
        if need_out_bias:
            d_out_bias = segments.outer(weight, rows, leaf, len(out_weight)).squeeze(1)
        return d_hidden, d_weight, d_out_weight, d_out_bias, None, None, None


def _add_up(rows: Tensor, sample: Tensor, batch: int) -> Tensor:
    """The sum of the rows of each sample: (batch, columns)."""
    wide = at_least_float32(rows.dtype)
    total = torch.zeros(batch, rows.shape[1], dtype=wide, device=rows.device)
    return total.index_add_(0, sample, rows.to(wide)).to(rows.dtype)
