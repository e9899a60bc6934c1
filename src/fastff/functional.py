"""The two passes as functions of tensors: check the input once, choose a backend, keep the leading dimensions.

soft:  y = sum_j c_j(x) L_j(x)      c_j: the product of the branch weights on the way to leaf j   (training)
hard:  y = L_j(x)                   j: go right wherever a node's logit is >= 0                   (inference)
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ._torch import alike_test, has_transforms, is_exporting, is_plain, is_watched
from .activations import Activation
from .activations import check as check_activation
from .backends import chosen, give_way, native, ops, run_hard, select, select_hard, select_soft, triton, triton_soft
from .checks import check_number, check_probability
from .tensors import Leaves, Tree, cast
from .validate import check_fit, check_layer, check_leaf, check_tree

__all__ = ["Leaves", "Soft", "Tree", "hard", "mixture", "node_logits", "route", "soft", "visit"]

Parts = TypeVar("Parts", Tree, Leaves)
Run = Callable[[Tensor], tuple[Tensor, Tensor]]
_is_grad_enabled = torch.is_grad_enabled


class Soft(NamedTuple):
    """What a soft pass computes: the output, and what the losses on the tree need."""

    output: Tensor  # (..., out)
    logits: Tensor  # (batch, nodes): scaled by the temperature, before transposition
    mixture: Tensor  # (batch, leaves): the weights that were used


def soft(
    x: Tensor,
    tree: Tree,
    leaves: Leaves,
    *,
    activation: Activation = "relu",
    temperature: Tensor | float = 1.0,
    transposition: float = 0.0,
    straight_through: bool = False,
    dropout: float = 0.0,
) -> Soft:
    """The soft pass of x (..., in). `transposition` and `dropout` are probabilities and act whenever they are not 0."""
    check_fit(tree, leaves, activation)
    flat = flatten(x, tree.weight)
    check_probability("transposition", transposition)
    check_probability("dropout", dropout)
    if not isinstance(temperature, Tensor):
        check_number("temperature", temperature, 0, above=True)
    elif temperature.numel() != 1:
        raise ValueError(f"temperature must be one number; got a tensor of shape {tuple(temperature.shape)}.")
    dtype = autocast_dtype(flat)
    if dtype is not None:
        flat, tree, leaves = flat.to(dtype), cast(tree, dtype), cast(leaves, dtype)
    parts, _ = select_soft(flat, tree, leaves, activation, dropout)
    if parts is triton_soft and isinstance(activation, str):
        options = activation, temperature, transposition, straight_through
        try:
            y, logits, weights = triton_soft.soft(flat, tree, leaves, *options)
            return Soft(restore(y, x), logits, weights)
        except Exception as error:  # a compiler may raise anything; give_way looks at it
            give_way("soft", flat, leaves, activation, error)
            parts = select()[0]
    logits = parts.node_logits(flat, tree, activation) * temperature  # (batch, nodes)
    # p -> 1 - p is z -> -z.
    turned = torch.where(torch.rand_like(logits) < transposition, -logits, logits) if transposition else logits
    weights = parts.mixture(turned, straight_through)  # (batch, leaves)
    hidden = parts.leaf_hidden(flat, leaves, activation)
    y = parts.mix(F.dropout(hidden, dropout) if dropout else hidden, weights, leaves)
    return Soft(restore(y, x), logits, weights)


def share(leaves: Leaves, sharing: float) -> Leaves:
    """The leaves as they are, but with a part of each one's gradient from the samples of all.

    With g one leaf's gradient, G the sum over the leaves and L their number: (1 - sharing) g + sharing G / sqrt(L). The
    root makes both parts equally noisy, as a leaf sees one sample in L.
    """
    shared: list[Any] = [None if p is None else _Shared.apply(p, sharing) for p in leaves]  # type: ignore[no-untyped-call]
    return Leaves(*shared)


class _Shared(torch.autograd.Function):
    """A parameter of all leaves, which are along its first dimension."""

    generate_vmap_rule = True

    @staticmethod
    def forward(parameter: Tensor, sharing: float) -> Tensor:
        return parameter.view_as(parameter)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.sharing = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.sum(0, keepdim=True) / math.sqrt(len(grad))
        return torch.lerp(grad, total, ctx.sharing), None


def hard(x: Tensor, tree: Tree, leaves: Leaves, *, activation: Activation = "relu") -> Tensor:
    """The hard pass of x (..., in): one node a level, then one leaf."""
    tree, leaves = snapshot(tree), snapshot(leaves)
    check_fit(tree, leaves, activation)
    flat = flatten(x, tree.weight)
    dtype = autocast_dtype(flat)
    if dtype is None:
        return restore(_hard(flat, tree, leaves, activation), x)
    # The weights stay as they are: casting them would touch every leaf, and the point is to visit one.
    with no_autocast(flat):
        return restore(_hard(flat.to(tree.weight.dtype), tree, leaves, activation).to(dtype), x)


def _hard(x: Tensor, tree: Tree, leaves: Leaves, activation: Activation) -> Tensor:
    if as_operation(activation, x, *leaves):
        return ops.hard(x, *tree, *leaves, activation)
    engine = hard_engine(x, tree, leaves, activation)
    if needs_grad(x, *leaves) and engine in (native, triton):

        def run(x: Tensor) -> tuple[Tensor, Tensor]:
            return run_hard(engine, "hard_with_leaf", x, tree, leaves, activation)

        return _Visited.apply(run, x, activation, *leaves)  # type: ignore[no-untyped-call]
    return run_hard(engine, "hard", x, tree, leaves, activation)


def visit(x: Tensor, leaf: Tensor, leaves: Leaves, activation: Activation) -> Tensor:
    """The output at x (batch, in) of the leaf given for each sample, (batch,) int64: (batch, out)."""
    leaves = snapshot(leaves)
    check_layer(x, None, leaves, activation)
    check_leaf(leaf, x, leaves)
    if as_operation(activation, x, *leaves):
        return ops.visit(x, leaf, *leaves, activation)
    engine = hard_engine(x, None, leaves, activation)
    if needs_grad(x, *leaves) and engine in (native, triton):

        def run(x: Tensor) -> tuple[Tensor, Tensor]:
            return run_hard(engine, "visit", x, None, leaves, activation, leaf), leaf

        return _Visited.apply(run, x, activation, *leaves)  # type: ignore[no-untyped-call]
    return run_hard(engine, "visit", x, None, leaves, activation, leaf)


def as_operation(activation: Activation, *tensors: Tensor | None) -> bool:
    """Whether a compiler is to see one registered operation: it cannot look into kernels, and needs no derivative."""
    compiling = torch.compiler.is_compiling() and not is_exporting()
    return compiling and isinstance(activation, str) and not needs_grad(*tensors) and not has_transforms()


def hard_engine(x: Tensor, tree: Tree | None, leaves: Leaves | None, activation: Activation) -> ModuleType:
    """What runs a hard pass, or a part of it. A compiler gets plain operations."""
    return select()[0] if torch.compiler.is_compiling() else select_hard(x, tree, leaves, activation)[0]


def needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


class _Visited(torch.autograd.Function):
    """What kernels without a derivative compute: backward goes through the visited leaves once more, in torch.

    `run(x)` gives the output and the leaf of each sample. Decisions are constants: nodes get no gradient.
    """

    @staticmethod
    def forward(ctx: Any, run: Run, x: Tensor, activation: str, *leaves: Tensor | None) -> Tensor:
        y, leaf = run(x.detach())
        ctx.activation = activation
        ctx.save_for_backward(x, leaf, *leaves)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *leaves = _visited_grads(ctx, grad)
        return None, x, None, *leaves


def _visited_grads(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    """The gradients of x and of the leaves' tensors."""
    x, leaf, *leaves = ctx.saved_tensors
    tensors = [x, *leaves]
    again = torch.is_grad_enabled()  # a derivative of this derivative is wanted
    with torch.enable_grad():
        # A view of each, so that the gradient of one does not reach another from which it was computed.
        own = [
            None if t is None else t.view_as(t) if again else t.detach().requires_grad_(t.requires_grad)
            for t in tensors
        ]
        y = select()[0].visit(own[0], leaf, Leaves._make(own[1:]), ctx.activation)
        wanted = [t for t in own if t is not None and t.requires_grad]
        found = iter(torch.autograd.grad(y, wanted, grad, create_graph=again))
    return [next(found) if t is not None and t.requires_grad else None for t in own]


def _is_simple(x: Any, dtype: torch.dtype, features: int) -> bool:
    """Whether x is an input that a CPU kernel may read itself, with no autocast, tracer or transform on."""
    return (
        type(x) is Tensor
        and x.layout is torch.strided
        and x.is_cpu
        and x.dtype is dtype
        and x.dim() > 0
        and x.shape[-1] == features
        and x.is_contiguous()
        and not x.is_neg()
        and not torch.is_autocast_enabled("cpu")
        and not has_transforms()
        and not is_watched()
    )


class Direct:
    """The hard pass of one layer on a CPU, without asking again what was answered before.

    A single sample takes the kernels a few microseconds, and the general way several times as much to find them. This
    keeps the native backend's plan for as long as the parameters stay where they are, and steps back (returns None)
    from everything that is not plain: a gradient, autocast, a tracer, another dtype or shape.
    """

    def __init__(self) -> None:
        self.plan: native.Plan | None = None

    def __call__(self, x: Tensor, parameters: Mapping[str, Tensor | None], activation: Activation) -> Tensor | None:
        plan = self.plan
        if plan is None or _is_grad_enabled():
            return None
        weights = [t for t in parameters.values() if t is not None]
        if len(weights) != plan.num_weights:
            self.plan = None
            return None
        if not plan.alike(x, *weights):
            if not _is_simple(x, plan.dtype, plan.in_features):
                return None
            if not plan.reads(weights):
                self.plan = None
                return None
            plan.alike = alike_test(x, weights)
        if not x.is_contiguous() or has_transforms() or is_watched() or chosen() not in ("auto", "native"):
            return None
        held = plan.hold(weights)  # until this call is over
        if activation != plan.activation or held is None:
            self.plan = None
            return None
        if x.dim() == 2:
            return plan.run(x)
        return restore(plan.run(x.view(-1, plan.in_features)), x)

    def prepare(self, x: Tensor, tree: Tree, leaves: Leaves, activation: Activation) -> None:
        """Make a plan, if this is a case for one."""
        with torch.no_grad():
            tree, leaves = snapshot(tree), snapshot(leaves)
        weights = [t for t in (*tree, *leaves) if t is not None]
        if self.plan is None and is_plain(x, *weights) and not native.unsupported(x, tree, leaves, activation):
            self.plan = native.Plan(tree, leaves, activation).let_go()


def node_logits(x: Tensor, tree: Tree, *, activation: Activation = "relu") -> Tensor:
    """The logit of every node at x (..., in): (..., nodes), float32 at least."""
    check_activation(activation)
    check_tree(tree)
    flat = flatten(x, tree.weight)
    with no_autocast(flat):
        return restore(select()[0].node_logits(flat.to(tree.weight.dtype), tree, activation), x)


def mixture(logits: Tensor) -> Tensor:
    """The weight of every leaf, given the logits (..., nodes): (..., leaves), summing to one."""
    if not isinstance(logits, Tensor) or not logits.dim():
        raise ValueError(f"mixture expects logits of shape (..., nodes); got {logits!r:.80}.")
    return restore(select()[0].mixture(logits.reshape(logits.shape[:-1].numel(), logits.shape[-1])), logits)


def route(x: Tensor, tree: Tree, *, activation: Activation = "relu") -> Tensor:
    """The leaf that the hard pass uses at x (..., in): (...,) int64."""
    check_activation(activation)
    tree = snapshot(tree)
    check_tree(tree)
    flat = flatten(x, tree.weight)
    with torch.no_grad(), no_autocast(flat):
        flat = flat.to(tree.weight.dtype)
        if as_operation(activation):
            leaf: Tensor = ops.route(flat, *tree, activation)
        else:
            leaf = run_hard(hard_engine(flat, tree, None, activation), "route", flat, tree, None, activation)
    return leaf.reshape(x.shape[:-1])


def flatten(x: Tensor, weight: Tensor, layer: str = "FFF") -> Tensor:
    """x as (batch, in), or an error that says what is wrong with it."""
    features = weight.shape[-1]
    if not isinstance(x, Tensor):
        raise TypeError(f"{layer} expects a tensor; got {type(x).__name__}. Convert it with torch.as_tensor.")
    if x.dim() == 0 or x.shape[-1] != features:
        raise ValueError(
            f"{layer} expects inputs of shape (..., {features}); got {tuple(x.shape)}. "
            + (f"Pass in_features={x.shape[-1]}, or project the input first." if x.dim() else "Add a last dimension.")
        )
    if x.layout is not torch.strided:
        raise TypeError(f"{layer} expects a dense tensor; got the layout {x.layout}. Convert it with x.to_dense().")
    if x.device != weight.device:
        raise ValueError(
            f"{layer} has its parameters on {weight.device}; got an input on {x.device}. Move one of them."
        )
    if not x.is_floating_point() or (x.dtype != weight.dtype and autocast_dtype(x) is None):
        remedy = f"Convert it with x.to({weight.dtype}), convert the layer, or use torch.autocast"
        if x.dtype == torch.float64:  # which autocast leaves alone
            remedy = f"Convert it with x.to({weight.dtype}), or convert the layer"
        elif x.is_complex():
            remedy = "Pass its real and imaginary parts as features: torch.view_as_real(x).flatten(-2)"
        raise TypeError(f"{layer} has {weight.dtype} parameters; got a {x.dtype} input. {remedy}.")
    return x if x.dim() == 2 else x.reshape(-1, features)


def restore(y: Tensor, x: Tensor) -> Tensor:
    """y (batch, features) with the leading dimensions of x."""
    return y if x.dim() == 2 else y.reshape(x.shape[:-1] + y.shape[-1:])


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast asks for, if it is on; float64 is exempt from autocast in torch, so here too."""
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return None
    return torch.get_autocast_dtype(x.device.type)


def no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Autocast off, on a device that has it."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def snapshot(tensors: Parts) -> Parts:
    """Aliases of tensors, where no gradient is asked for: another thread that sets `parameter.data` from here on does
    not change what is checked and then read."""
    found = [t for t in tensors if t is not None]
    if not is_plain(*found) or needs_grad(*found):
        return tensors
    return type(tensors)._make(None if t is None else t.data for t in tensors)
