"""The two passes as functions of tensors: check the input, choose a backend, run it.

soft:  y = sum_j c_j(x) L_j(x)      c_j: the product of the branch weights on the path to leaf j  (training)
hard:  y = L_j(x)                   j: go right wherever a node's logit is >= 0                   (inference)

`sampled` trains at the hard pass's cost: the hard output, with an estimate of the soft pass's gradient for the tree.
`shed` is the soft pass without the leaves of least weight.
"""

from typing import Any

import torch
from torch import Tensor

from ._torch import in_eager, is_plain, is_watched
from .activations import Activation
from .activations import check as check_activation
from .backends import Request, choose, ops, reference, run, torch_backend
from .backends.known import known_request, remember
from .backends.request import needs_grad
from .backends.sampled import sampled as sampled_pass
from .backends.shed import shed as shed_pass
from .backends.visited import run_with_gradient
from .checks import check_choice, check_number, check_probability
from .sampling import ESTIMATORS, check_alternatives
from .tensors import Leaves, Parts, Sampled, SampledOptions, Shed, Soft, SoftOptions, Tree, alias, cast, no_autocast
from .tree import depth_of
from .validate import check_fit, check_input, check_layer, check_leaf, check_tree

__all__ = ["Leaves", "Sampled", "Shed", "Soft", "Tree"]
__all__ += ["hard", "mixture", "node_logits", "route", "sampled", "shed", "soft", "visit", "walk"]


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
    options = SoftOptions(temperature, transposition, straight_through, dropout)
    request = soft_request(x, tree, leaves, activation, options)
    output, logits, weights = run(choose(request)[0], request)
    return Soft(restore(output, x), logits, weights)


def shed(
    x: Tensor,
    tree: Tree,
    leaves: Leaves,
    *,
    epsilon: float,
    activation: Activation = "relu",
    temperature: Tensor | float = 1.0,
    transposition: float = 0.0,
    straight_through: bool = False,
    dropout: float = 0.0,
) -> Shed:
    """The soft pass of x (..., in) without the leaves whose weight is below `epsilon` * 2**-depth for a sample.

    The other weights are scaled to sum to 1. For every sample, the total weight left out is below `epsilon`.
    """
    epsilon = check_probability("epsilon", epsilon)
    options = SoftOptions(temperature, transposition, straight_through, dropout)
    request = soft_request(x, tree, leaves, activation, options)
    # Which leaves remain depends on values. If these are unknown, as in a tracer, all leaves run.
    plain = choose(request)[0] is reference or not in_eager() or is_watched() or request.x.is_meta
    arguments: tuple[Any, ...] = (*request.arguments, epsilon)
    with no_autocast(request.x):
        found = reference.shed(*arguments) if plain else shed_pass(*arguments)
    return found._replace(output=restore(found.output, x))


def soft_request(x: Tensor, tree: Tree, leaves: Leaves, activation: Activation, options: SoftOptions) -> Request:
    """A checked request for the soft pass, in the dtype that autocast asks for."""
    flat = _check_training(x, tree, leaves, activation, options)
    dtype = autocast_dtype(flat)
    if dtype is not None:
        flat, tree, leaves = flat.to(dtype), cast(tree, dtype), cast(leaves, dtype)
    return Request.make("soft", flat, tree, leaves, activation, options=options)


def _check_training(
    x: Tensor, tree: Tree, leaves: Leaves, activation: Activation, options: SoftOptions | SampledOptions
) -> Tensor:
    """x as (batch, in); an error if these do not make a training pass."""
    check_fit(tree, leaves, activation)
    if leaves.is_int8:
        raise TypeError("int8 leaves have no soft pass and do not train. Call eval(); train before fastff.quantize_.")
    flat = flatten(x, tree.weight)
    check_probability("transposition", options.transposition)
    check_probability("dropout", options.dropout)
    if not isinstance(options.temperature, Tensor):
        check_number("temperature", options.temperature, 0, above=True)
    elif options.temperature.numel() != 1:
        raise ValueError(f"temperature must be one number; got a tensor of shape {tuple(options.temperature.shape)}.")
    return flat


def sampled(
    x: Tensor,
    tree: Tree,
    leaves: Leaves,
    *,
    activation: Activation = "relu",
    temperature: Tensor | float = 1.0,
    transposition: float = 0.0,
    dropout: float = 0.0,
    alternatives: int = 1,
    estimator: str = "mixture",
    sparse: bool = False,
    at_owner: Any = None,
) -> Sampled:
    """The hard pass of x (..., in), with a gradient for the tree from `alternatives` other leaves per sample.

    `estimator` says how they are drawn: "mixture", whose expectation is the straight-through gradient, or "even"
    (`fastff.sampling`). With `sparse`, gradients of the parameters are sparse tensors.
    Under autocast, too, the pass runs in the weights' dtype, as the hard pass does. `at_owner` runs leaves that
    other processes hold (`fastff.parallel`).
    """
    check_choice("estimator", estimator, ESTIMATORS)
    options = SampledOptions(temperature, transposition, dropout, alternatives, estimator, sparse, at_owner)
    flat = _check_training(x, tree, leaves, activation, options)
    check_alternatives(alternatives, depth_of(len(leaves.in_weight)))
    dtype = autocast_dtype(flat)
    with no_autocast(flat):
        found = sampled_pass(flat.to(tree.weight.dtype), tree, leaves, activation, options)
    output = found.output if dtype is None else found.output.to(dtype)
    return found._replace(output=restore(output, x))


def hard(x: Tensor, tree: Tree, leaves: Leaves, *, activation: Activation = "relu") -> Tensor:
    """The hard pass of x (..., in): one node per level, then one leaf."""
    request = hard_request(x, tree, leaves, activation)
    dtype = autocast_dtype(x)
    if dtype is None:
        return restore(_run(request), x)
    with no_autocast(x):
        return restore(_run(request).to(dtype), x)


def hard_request(x: Tensor, tree: Tree, leaves: Leaves, activation: Activation) -> Request:
    """A checked request for the hard pass, in the dtype of the weights.

    Autocast does not change this dtype: casting the weights would touch every leaf, but the pass visits only one.
    """
    tree, leaves = snapshot(tree), snapshot(leaves)
    if (known := _known(x, tree, leaves, activation)) is not None:
        return known
    check_fit(tree, leaves, activation)
    flat = flatten(x, tree.weight)
    request = Request.make("hard", flat.to(tree.weight.dtype), tree, leaves, activation)
    remember(request)
    return request


def _known(x: Tensor, tree: Tree, leaves: Leaves, activation: Activation) -> Request | None:
    """The request, if its layer was checked before; else None."""
    if type(x) is not Tensor or not x.dim() or not isinstance(tree, Tree) or not isinstance(leaves, Leaves):
        return None
    return known_request(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]), tree, leaves, activation)


def visit(x: Tensor, leaf: Tensor, leaves: Leaves, activation: Activation) -> Tensor:
    """The output at x (batch, in) of the leaf given for each sample, (batch,) int64: (batch, out)."""
    leaves = snapshot(leaves)
    check_layer(x, None, leaves, activation)
    check_leaf(leaf, x, leaves)
    return _run(Request.make("visit", x, None, leaves, activation, leaf=leaf))


def _run(request: Request) -> Tensor:
    """The output of a hard pass or of a visit; the leaves of a route."""
    if request.is_operation:
        leaf = () if request.leaf is None else (request.leaf,)
        # x and the leaves need no gradient here, and nodes get none.
        nodes = [t.detach() if t is not None and needs_grad(t) else t for t in request.tree or ()]
        return getattr(ops, request.kind)(request.x, *leaf, *nodes, *(request.leaves or ()), request.activation)
    backend, _ = choose(request)
    if request.needs_grad and not backend.HAS_GRADIENT:
        return run_with_gradient(backend, request)
    found = run(backend, request)
    return found[0] if request.kind == "hard" else found


def route(x: Tensor, tree: Tree, *, activation: Activation = "relu") -> Tensor:
    """The leaf that the hard pass uses at x (..., in): (...,) int64."""
    check_activation(activation)
    tree = snapshot(tree)
    check_tree(tree)
    flat = flatten(x, tree.weight)
    with torch.no_grad(), no_autocast(flat):
        leaf = _run(Request.make("route", flat.to(tree.weight.dtype), tree, None, activation))
    return leaf.reshape(x.shape[:-1])


def node_logits(x: Tensor, tree: Tree, *, activation: Activation = "relu") -> Tensor:
    """The logit of every node at x (..., in): (..., nodes), float32 at least."""
    check_activation(activation)
    check_tree(tree)
    flat = flatten(x, tree.weight)
    with no_autocast(flat):
        return restore(torch_backend().node_logits(flat.to(tree.weight.dtype), tree, activation), x)


def mixture(logits: Tensor) -> Tensor:
    """The weight of every leaf, given the logits (..., nodes): (..., leaves), summing to one."""
    return restore(torch_backend().mixture(_rows("mixture", logits)), logits)


def walk(logits: Tensor) -> Tensor:
    """The leaf that the hard pass reaches, given the logits (..., nodes): (...,) int64."""
    leaf: Tensor = torch_backend().walk(_rows("walk", logits))
    return leaf.reshape(logits.shape[:-1])


def _rows(name: str, logits: Tensor) -> Tensor:
    if not isinstance(logits, Tensor) or not logits.dim():
        raise ValueError(f"{name} expects logits of shape (..., nodes); got {logits!r:.80}.")
    nodes = int(logits.shape[-1])  # a tensor under torch.jit.trace
    if nodes & (nodes + 1):
        raise ValueError(f"{name} expects logits of 2**depth - 1 nodes (0, 1, 3, 7, ...); got {tuple(logits.shape)}.")
    return logits.reshape(logits.shape[:-1].numel(), nodes)


def flatten(x: Tensor, weight: Tensor, layer: str = "FFF") -> Tensor:
    """x as (batch, in); an error if it does not fit the layer."""
    check_input(x, weight, layer, autocast=isinstance(x, Tensor) and autocast_dtype(x) is not None)
    return x if x.dim() == 2 else x.reshape(-1, weight.shape[-1])


def restore(y: Tensor, x: Tensor) -> Tensor:
    """y (batch, features) with the leading dimensions of x."""
    return y if x.dim() == 2 else y.reshape(x.shape[:-1] + y.shape[-1:])


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast asks for, if it is on; float64 is exempt from autocast in torch, so here too."""
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return None
    return torch.get_autocast_dtype(x.device.type)


def snapshot(tensors: Parts) -> Parts:
    """Aliases of tensors that need no gradient: the pass then reads exactly what was checked."""
    if not isinstance(tensors, Tree | Leaves):
        return tensors  # the checks say what is wrong with it
    found = [t for t in tensors if t is not None]
    return tensors if not is_plain(*found) or needs_grad(*found) else alias(tensors)
