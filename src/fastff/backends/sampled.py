"""The sampled pass: training at the cost of inference. Each sample runs one leaf, and tries a few alternatives.

The output is the visited leaf's, L_r(x), as in evaluation. The visited leaf learns from it, exactly as with
straight-through decisions. The tree learns from alternatives: the sample leaves its path at one level (sampling.py),
walks on to a leaf a, and compares. With g the gradient at the output, c_a the mixture weight of leaf a and w the weight
of the draw,

    "mixture": the walk goes on softly, right with probability p. The nodes v on the way to a get
               dL/dz_v = w <g, L_a - L_r> d log c_a / dz_v                      (1 - p_v to the right, -p_v to the left)
    "even":    the walk goes on hard. The node v that was flipped alone gets
               dL/dz_v = w p_v (1 - p_v) <g, L_right - L_left>                  (one of them L_a, the other L_r)

Expectations. "mixture" is unbiased: over the draws, the gradient of every parameter and of x is exactly the
straight-through gradient. (With g_j = <g, L_j>, sum_j c_j g_j has the derivative sum_j c_j g_j dlog c_j. As the c_j sum
to 1, any number may be subtracted from all g_j, here g_r. So leaf r drops out; the others are drawn by c_j / (1 - c_r),
with w = 1 - c_r.)
Each of several alternatives is also a baseline for the others. Let S_i = w log c_a be the score of alternative i, and
E_i the expectation of its gradient, which the levels alone give in closed form. The draws are independent, so that
<g, L_j - L_r> (dS_i - E_i) has mean 0 for i != j. Its mean over i is subtracted from the estimate of j, which is then
compared with the other alternatives, not with the visited leaf, which is far better than all of them.
"even" is biased: its expectation is the sum over the path of the gradients of p_v L_right + (1 - p_v) L_left, as if the
sample were certain to reach each of its nodes, and both subtrees were hard.

x gets the gradient of the visited leaf and the gradient through the logits. A step costs 1 + alternatives leaves and
about (2 + alternatives) * depth nodes per sample, and no activations that grow with 2**depth.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import tree as heap
from .._torch import in_eager
from ..activations import Activation
from ..sampling import draw, level_chances, running_sum, thresholds
from ..tensors import Leaves, Sampled, SampledOptions, Tree, at_least_float32, no_autocast
from . import aten, paths, segments, triton_training
from .choice import choose, run
from .request import Request, needs_grad


def sampled(x: Tensor, tree: Tree, leaves: Leaves, activation: Activation, options: SampledOptions) -> Sampled:
    """The output and, for the losses, each sample's paths. Alternatives are drawn if the tree or x learns."""
    depth = heap.depth_of(len(tree.weight) + 1)
    if _by_kernels(x, tree, leaves, activation, options):
        from . import triton_sampled  # which imports this file

        return triton_sampled.run(x, tree, leaves, activation, options)
    swap = _swaps(x, depth, options.transposition)
    with torch.no_grad():
        leaf = _route(x, tree, activation, swap)
    nodes = paths.Nodes(x, tree, activation, options)
    logits = nodes.logits_to(leaf)
    at_owner = options.at_owner or _here

    def visit(rows: Tensor, leaf: Tensor, leaves: Leaves) -> Tensor:
        return segments.visit(rows, leaf, leaves, activation, options.dropout, options.sparse)

    def outputs(rows: Tensor, leaf: Tensor, leaves: Leaves) -> Tensor:
        return _outputs(rows, leaf, leaves, activation, options.dropout)

    y = at_owner(x, leaf, leaves, visit)
    walks: list[_Walk] = []
    if depth and needs_grad(logits):
        flipped = logits.detach() if swap is None else torch.where(swap, -logits, logits).detach()
        level, weight = draw(flipped, options.estimator, options.alternatives)
        draws = zip(level.unbind(1), weight.unbind(1), strict=True)
        walks = [_walk(nodes, leaf, swap, at, own, options) for at, own in draws]
    soft = [walk for walk in walks if walk.logits is not None]
    # The losses read these, and the output's gradient passes them: see last_forward.py.
    walked = torch.stack([logits, *(walk.logits for walk in soft if walk.logits is not None)], 1)
    scores = [
        _score_of_walk(walk, walked[:, 1 + k]) if soft else _score_of_flip(walk, walked[:, 0], leaf, swap)
        for k, walk in enumerate(walks)
    ]
    if len(soft) > 1:
        scores = compared(scores, soft[0].weight, walked[:, 0], leaf, swap)
    if walks:
        other = torch.cat([walk.leaf for walk in walks])  # in one pass: a leaf is read once for all of its samples
        with torch.no_grad():
            rows = x.repeat(len(walks), 1) if len(walks) > 1 else x
            others = at_owner(rows, other, leaves, outputs).unflatten(0, (len(walks), len(x)))
        y = _Credit.apply(y, torch.stack(scores), others, other)  # type: ignore[no-untyped-call]
        # _Credit returns a view, which must not change in place: a ReLU(inplace=True) may follow.
        y = y.clone()
    rest = torch.stack([walk.weight for walk in soft], 1) if soft else logits.new_zeros(len(x), 0)
    weights = torch.cat([1 - rest.sum(1, keepdim=True), rest], 1)
    return Sampled(y, walked, torch.stack([leaf, *(walk.leaf for walk in soft)], 1), weights, nodes.all)


def _by_kernels(x: Tensor, tree: Tree, leaves: Leaves, activation: Activation, options: SampledOptions) -> bool:
    """Whether triton_sampled.py has this pass."""
    plain = len(tree.weight) > 0 and tree.out_weight is None and not options.transposition and not options.at_owner
    temperature = options.temperature if isinstance(options.temperature, Tensor) else None
    learns = needs_grad(x, *tree) and not needs_grad(temperature)
    few = paths.are_few(x, tree, options.alternatives)  # then the losses see all logits, on every device
    return plain and learns and not few and triton_training.takes(activation, x, *tree, *leaves)


class _Walk(NamedTuple):
    """One alternative of each sample."""

    level: Tensor  # (batch,): where it leaves the visited path
    weight: Tensor  # (batch,): of the draw
    leaf: Tensor  # (batch,): where it ends
    logits: Tensor | None  # (batch, depth): on a soft walk's path
    swap: Tensor | None  # (batch, depth): the nodes on the path with swapped children


def _walk(
    nodes: paths.Nodes, leaf: Tensor, swap: Tensor | None, level: Tensor, weight: Tensor, options: SampledOptions
) -> _Walk:
    depth = nodes.depth
    with torch.no_grad():
        turn = paths.turns(leaf, depth).gather(1, level.unsqueeze(1)).squeeze(1)
        node = paths.nodes(leaf, depth).gather(1, level.unsqueeze(1)).squeeze(1)
        other = 2 * node + 1 + ~turn  # the other child
        own = _swaps(nodes.x, depth, options.transposition)
        if options.estimator != "mixture":
            return _Walk(level, weight, nodes.descend(other, swap=own), None, None)
        like = torch.empty(len(leaf), depth, dtype=weight.dtype, device=leaf.device)
        end = nodes.descend(other, thresholds(like), own)
        if own is not None and swap is not None:
            shared = torch.arange(depth, device=leaf.device) <= level.unsqueeze(1)  # the part that both paths share
            own = torch.where(shared, swap, own)
    return _Walk(level, weight, end, nodes.logits_to(end), own)


def _score_of_walk(walk: _Walk, logits: Tensor) -> Tensor:
    """The weighted log c of the leaf of a soft walk; its gradient times <g, L_a - L_r> is the tree's: (batch,)."""
    turn = paths.turns(walk.leaf, logits.shape[1])
    turn = turn if walk.swap is None else turn ^ walk.swap
    return F.logsigmoid(torch.where(turn, logits, -logits)).sum(-1) * walk.weight


def compared(scores: list[Tensor], weight: Tensor, logits: Tensor, leaf: Tensor, swap: Tensor | None) -> list[Tensor]:
    """The scores of the alternatives, each less the mean of the others', which have no gradient in expectation."""
    turn = paths.turns(leaf, logits.shape[1])
    signed = torch.where(turn if swap is None else turn ^ swap, logits, -logits)
    stays = F.logsigmoid(signed)
    leaves_path = running_sum(stays) - stays + F.logsigmoid(-signed)  # log of the probability, at each level
    chance = level_chances(signed.detach(), len(scores))
    expected = (chance * leaves_path.unsqueeze(1)).sum(-1) * weight.unsqueeze(-1)  # (batch, alternatives)
    score = torch.stack(scores, 1)
    centred = score - expected
    others = (centred.sum(1, keepdim=True) - centred) / (len(scores) - 1)
    return list((score - others).unbind(1))


def _score_of_flip(walk: _Walk, logits: Tensor, leaf: Tensor, swap: Tensor | None) -> Tensor:
    """The weighted probability of the alternative's side, at the level of the flip; as _score_of_walk: (batch,)."""
    level = walk.level.unsqueeze(1)
    logits = logits if swap is None else torch.where(swap, -logits, logits)
    turn = paths.turns(leaf, logits.shape[1]).gather(1, level).squeeze(1)
    right = torch.sigmoid(logits.gather(1, level).squeeze(1))
    return torch.where(turn, -right, right) * walk.weight


class _Credit(torch.autograd.Function):
    """y, such that the scores (alternatives, batch) get the gradients <g, others - y>."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, score: Tensor, others: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(y, others)
        ctx.dtype = score.dtype
        if in_eager():
            return y.view_as(y)
        # No output of forward depends on the draws, so a compiler (torch 2.13) would draw again, differently, in
        # backward. Leaves are never negative: the output stays the same, but seems to depend on them.
        return torch.where((other[: len(y)] >= 0).unsqueeze(-1), y, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        segments.refuse_second_derivative()  # the outputs depend on the leaves, and the draw on the tree
        y, others = (outputs.to(ctx.dtype) for outputs in ctx.saved_tensors)
        wide = grad.to(ctx.dtype)
        if grad.is_cuda:  # no product, which may run in TF32, and which deterministic algorithms refuse
            dots = (others * wide).sum(-1)
        else:  # half the time, and no tensor of that size
            with no_autocast(grad):
                dots = torch.einsum("abo,bo->ab", others, wide)
        return grad, dots - (y * wide).sum(-1), None, None


def _swaps(x: Tensor, depth: int, transposition: float) -> Tensor | None:
    """Which nodes on a path swap their children: (batch, depth)."""
    if not transposition:
        return None
    return torch.rand(len(x), depth, dtype=at_least_float32(x.dtype), device=x.device) < transposition


def _route(x: Tensor, tree: Tree, activation: Activation, swap: Tensor | None) -> Tensor:
    request = Request.make("route", x, tree, None, activation)
    backend, _ = choose(request)
    if swap is None and backend is not aten:  # aten would compute all logits of a small tree
        return run(backend, request)
    start = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    return paths.descend(x, tree, activation, start, swap=swap)


def _here(x: Tensor, leaf: Tensor, leaves: Leaves, run: Callable[[Tensor, Tensor, Leaves], Tensor]) -> Tensor:
    return run(x, leaf, leaves)


def _outputs(x: Tensor, leaf: Tensor, leaves: Leaves, activation: Activation, dropout: float) -> Tensor:
    """The outputs of these leaves, without a gradient."""
    request = Request.make("visit", x, None, leaves, activation, leaf=leaf)
    backend, _ = choose(request)
    # aten would run all leaves of a small layer, and the kernels of the hard pass list (leaves, batch) samples.
    if dropout or backend is aten or triton_training.takes(activation, x, *leaves):
        return segments.visit(x, leaf, leaves, activation, dropout)
    return run(backend, request)
