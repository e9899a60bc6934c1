"""A whole sampled step on a GPU: how the operations of triton_sampled_launch.py make a pass with a gradient.

The pass is the one in sampled.py, for trees with nodes of width 1. It differs in how it gets there:

- One operation walks the visited path and the alternatives, and draws (`walk`). One sort then puts the samples of each
  leaf side by side: visited leaves first, alternatives after them.
- Alternatives run their leaf's first layer alone. With g the gradient at the output and h the hidden neurons,
  <g, L_a> = <W_a g, h_a> + <g, b_a>, where L = h W + b. So backward has it without the output L_a, and without keeping
  L_r, whose W_r g is the gradient of h_r anyway (`triton_segments.credit`).
- x passes through `_Paths`, whose backward adds the tree's gradient to the leaves' in place of autograd.

The score of an alternative is a number of which only the gradient is used: see sampled.py for what it is.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import tree as heap
from .._torch import in_eager
from ..activations import Activation, apply
from ..tensors import Leaves, Sampled, SampledOptions, Tree
from . import sampled, triton_segments
from .reference import input_pairs
from .segments import refuse_second_derivative
from .triton_arguments import stored
from .triton_paths import of_visited, path_outer
from .triton_sampled_launch import SMALL, Walked, places, score_gradients, small_tree_outer, tree_inputs, walk


def run(x: Tensor, tree: Tree, leaves: Leaves, activation: Activation, options: SampledOptions) -> Sampled:
    """As `sampled.sampled`, where the tree or x learns. For nodes of width 1 and without transposition."""
    depth, mixture = heap.depth_of(len(tree.weight) + 1), options.estimator == "mixture"
    temperature = options.temperature
    if isinstance(temperature, Tensor):
        temperature = temperature.to(x.device, torch.float32)
    else:  # filled there: a copy would wait for the GPU
        temperature = torch.full((), temperature, dtype=torch.float32, device=x.device)
    uniforms = torch.rand(len(x), options.alternatives, 1 + depth, dtype=torch.float32, device=x.device)
    given = (x, tree.weight, tree.bias, uniforms, temperature, mixture, options.sparse)
    passed, logits, scores, leaf, share, *groups = _Paths.apply(*given)  # type: ignore[no-untyped-call]
    if options.alternatives > 1 and mixture:
        compared = sampled.compared(list(scores.unbind()), share[1], logits[0], leaf[0], None)
        scores = torch.stack(compared)
    rows = stored(passed if in_eager() and x.requires_grad else x)
    first = (triton_segments.linear(rows, w, b, groups, True, options.sparse) for w, b in input_pairs(leaves))
    hidden = apply(activation, *first)  # (entries, l)
    hidden = F.dropout(hidden, options.dropout) if options.dropout else hidden
    y = _Output.apply(hidden, leaves.out_weight, leaves.out_bias, scores, *groups, options.sparse)  # type: ignore[no-untyped-call]
    walked, own = logits.transpose(0, 1), logits.shape[0]  # the paths with logits
    # The layer keeps the logits, and AOTAutograd (torch 2.13) confuses the shapes of a view that leaves a graph.
    walked = walked if in_eager() else walked.contiguous()
    return Sampled(y, walked, leaf[:own].T, share[:own].T, None)


class _Paths(torch.autograd.Function):
    """x, the logits on all paths, the alternatives' scores (alternatives, batch); and the entries by leaf."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        uniforms: Tensor,
        temperature: Tensor,
        mixture: bool,
        sparse: bool,
    ) -> tuple[Tensor, ...]:
        found = Walked(*_operation(walk, "sampled_walk")(x, weight, bias, uniforms, temperature, mixture))
        key, order = found.key.flatten().sort(stable=True)
        leaf, end = _operation(places, "sampled_places")(key, len(weight) + 1)
        drawn = found.leaf, found.share, found.level
        ctx.save_for_backward(x, weight, temperature, found.logits, *drawn, leaf, order, end)
        ctx.mixture, ctx.sparse = mixture, sparse
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(found.leaf, found.share, leaf, order, end)
        scores = found.share.new_empty(uniforms.shape[1], len(x))  # `compared` adds them up for their gradients alone
        return x.view_as(x), found.logits, scores, found.leaf, found.share, leaf, order, end

    @staticmethod
    def backward(
        ctx: Any, d_x: Tensor | None, d_logits: Tensor | None, d_scores: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        x, weight, temperature, logits, visited, share, level, leaf, order, end = ctx.saved_tensors
        need_x, *need, _, _, _, _ = ctx.needs_input_grad
        if d_logits is None and d_scores is None:
            return d_x, *[None] * 6
        if d_scores is None:
            d_scores = share.new_zeros(level.shape)
        run = _operation(score_gradients, "score_gradients")
        grad = run(logits, visited, share, level, d_scores, d_logits, temperature, ctx.mixture)
        start = 0 if d_logits is not None or not ctx.mixture else 1  # a visited path has no gradient of its own
        batch = len(x)
        d_weight = d_bias = None
        if need_x:
            run = _operation(tree_inputs, "tree_inputs")
            d_x = run(grad, visited, weight, None if d_x is None else stored(d_x), start)
        if any(need):
            if len(weight) < SMALL:
                run = _operation(small_tree_outer, "small_tree_outer")
                d_weight, d_bias = run(x, grad, visited, weight, start)
            else:
                run = _operation(path_outer, "path_outer")
                flat = grad.flatten(0, 1)
                parts = []
                if start == 0:
                    parts.append(run(x, flat, leaf[:batch], order[:batch], end[:batch], weight))
                if len(grad) > 1:
                    parts.append(run(x, flat, leaf[batch:], order[batch:], end[batch:] - batch, weight))
                d_weight, d_bias = parts[0] if len(parts) == 1 else (a + b for a, b in zip(*parts, strict=True))
            if ctx.sparse and in_eager():
                d_weight, d_bias = of_visited(visited[start : len(grad)].flatten(), d_weight, d_bias)
        return d_x, d_weight, d_bias, *[None] * 4


class _Output(torch.autograd.Function):
    """The visited leaves' outputs, from the hidden neurons of all entries. The scores get <g, L_a - L_r>."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scores: Tensor,
        leaf: Tensor,
        order: Tensor,
        end: Tensor,
        sparse: bool,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, leaf, order, end)
        ctx.sparse, ctx.paths, ctx.batch = sparse, 1 + scores.shape[0], scores.shape[1]
        batch = ctx.batch
        run = _operation(triton_segments.product, "leaf_product")
        found: Tensor = run(hidden[:batch], weight, bias, leaf[:batch], order[:batch], False)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        hidden, weight, bias, leaf, order, end = ctx.saved_tensors
        grad, batch = stored(grad), ctx.batch
        run = _operation(triton_segments.credit, "leaf_credit")
        d_hidden, dots = run(grad, weight, bias, hidden, leaf, order)
        dots = dots.view(ctx.paths, batch)
        d_scores = dots[1:] - dots[:1]
        d_weight = d_bias = None
        if ctx.needs_input_grad[1] or (bias is not None and ctx.needs_input_grad[2]):
            own = hidden[:batch], grad, leaf[:batch], order[:batch], end[:batch]
            sums = "none" if bias is None else "second"
            d_weight, d_bias = triton_segments.weight_gradients(*own, len(weight), sums, ctx.sparse)
        return d_hidden, d_weight, None if bias is None else d_bias, d_scores, *[None] * 4


def _operation(function: Callable[..., Any], name: str) -> Any:
    """The function; for a compiler, the operation registered for it in ops.py."""
    return function if in_eager() else getattr(torch.ops.fastff, name)
