"""The hard pass as registered operations, for torch.compile, which cannot look into compiled kernels.

The backend is chosen when an operation runs. The hard pass keeps its plan from call to call, as in a layer.
The operations have no derivative: if one is needed, the compiler gets the plain operations of `aten`. So does an
export, which must run without fastff.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..tensors import LEAF_PARAMETERS, TREE_PARAMETERS, Leaves, Tree
from ..tree import depth_of
from ..validate import check_layer, check_leaf
from . import triton_paths, triton_sampled_launch, triton_segments, triton_training
from .choice import choose, run
from .known import known_request, remember
from .plan_cache import PlanCache
from .request import Request, needs_grad
from .segments import outer, product


def _hard(
    x: Tensor,
    node_weight: Tensor,
    node_bias: Tensor,
    node_out_weight: Tensor | None,
    node_out_bias: Tensor | None,
    in_weight: Tensor,
    in_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    gate_weight: Tensor | None,
    gate_bias: Tensor | None,
    in_scale: Tensor | None,
    out_scale: Tensor | None,
    gate_scale: Tensor | None,
    activation: str,
) -> Tensor:
    nodes = node_weight, node_bias, node_out_weight, node_out_bias
    scales = in_scale, out_scale, gate_scale
    parts = in_weight, in_bias, out_weight, out_bias, gate_weight, gate_bias, *scales
    _check_no_gradient(x, parts)
    with torch.no_grad():
        y = _planned(x, in_weight, (*nodes, *parts), activation)
        if y is not None:
            return y
        tree, leaves = Tree(*nodes), Leaves(*parts)
        request = known_request(x, tree, leaves, activation)
        if request is None:
            check_layer(x, tree, leaves, activation)
            request = Request.make("hard", x, tree, leaves, activation)
            remember(request)
        output: Tensor = _run(request)[0]
        return output


def _planned(x: Tensor, leaves: Tensor, parameters: tuple[Tensor | None, ...], activation: str) -> Tensor | None:
    """The hard pass by a plan that is kept from call to call, as in a layer; None if the plan cannot run it."""
    if x.dim() != 2 or type(leaves) not in (Tensor, torch.nn.Parameter) or leaves.layout is not torch.strided:
        return None
    address = leaves.data_ptr()
    plans = _plans.get(address)
    if plans is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        plans = _plans.setdefault(address, PlanCache())
    return plans.hard(x, dict(zip(_NAMES, parameters, strict=True)), activation)


_MOST_PLANS = 1024
_plans: dict[int, PlanCache] = {}  # by the leaves' address: an operation knows no layer
_NAMES = (*TREE_PARAMETERS, *LEAF_PARAMETERS)


def _route(
    x: Tensor,
    node_weight: Tensor,
    node_bias: Tensor,
    node_out_weight: Tensor | None,
    node_out_bias: Tensor | None,
    activation: str,
) -> Tensor:
    tree = Tree(node_weight, node_bias, node_out_weight, node_out_bias)
    with torch.no_grad():
        check_layer(x, tree, None, activation)
        leaf: Tensor = _run(Request.make("route", x, tree, None, activation))
        return leaf


def _visit(
    x: Tensor,
    leaf: Tensor,
    in_weight: Tensor,
    in_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    gate_weight: Tensor | None,
    gate_bias: Tensor | None,
    in_scale: Tensor | None,
    out_scale: Tensor | None,
    gate_scale: Tensor | None,
    activation: str,
) -> Tensor:
    scales = in_scale, out_scale, gate_scale
    leaves = Leaves(in_weight, in_bias, out_weight, out_bias, gate_weight, gate_bias, *scales)
    _check_no_gradient(x, leaves)
    with torch.no_grad():
        check_layer(x, None, leaves, activation)
        check_leaf(leaf, x, leaves)
        y: Tensor = _run(Request.make("visit", x, None, leaves, activation, leaf=leaf))
        return y


def _segment_product(rows: Tensor, weight: Tensor, leaf: Tensor, transposed: bool) -> Tensor:
    with torch.no_grad():
        if triton_training.takes("identity", rows, weight):
            return triton_segments.product(rows, weight, None, leaf, None, transposed)
        return product(rows, weight, leaf, transposed)


def _segment_outer(first: Tensor, second: Tensor, leaf: Tensor, leaves: int) -> Tensor:
    with torch.no_grad():
        if triton_training.takes("identity", first, second):
            end = triton_segments.ends(leaf)
            return triton_segments.outer(first, second, leaf, None, end, leaves, "none")[0]
        return outer(first, second, leaf, leaves)


def _run(request: Request) -> Any:
    return run(choose(request)[0], request)


def _check_no_gradient(x: Tensor, leaves: Sequence[Tensor | None]) -> None:
    if needs_grad(x, *leaves):
        raise RuntimeError("fastff's operations have no derivative. Call the layer, or fastff.functional, instead.")


def _own_library() -> torch.library.Library:
    """A library for the operations. First frees the names held by an earlier import of this module."""
    if (old := getattr(torch.ops.fastff, "_library", None)) is not None:
        old._destroy()
    found = torch.library.Library("fastff", "FRAGMENT")
    torch.ops.fastff._library = found  # type: ignore[attr-defined]  # survives reloads
    return found


# Not by torch.library.custom_op, which adds about 70 us of Python to each call (EPYC).
_library = _own_library()


def _register(name: str, function: Callable[..., Any]) -> Any:
    schema = torch.library.infer_schema(function, mutates_args=())
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, function, "CompositeExplicitAutograd")
    return getattr(torch.ops.fastff, name).default


hard = _register("hard", _hard)
route = _register("route", _route)
visit = _register("visit", _visit)
# Parts of the sampled pass; segments.py and triton_segments.py, _paths.py and _sampled.py have their derivatives.
segment_product = _register("segment_product", _segment_product)
segment_outer = _register("segment_outer", _segment_outer)
leaf_product = _register("leaf_product", triton_segments.product)
leaf_outer = _register("leaf_outer", triton_segments.outer)
walk_from = _register("walk_from", triton_paths.walk_from)
path_logits = _register("path_logits", triton_paths.path_logits)
path_inputs = _register("path_inputs", triton_paths.path_inputs)
path_outer = _register("path_outer", triton_paths.path_outer)
leaf_credit = _register("leaf_credit", triton_segments.credit)
sampled_walk = _register("sampled_walk", triton_sampled_launch.walk)
sampled_places = _register("sampled_places", triton_sampled_launch.places)
score_gradients = _register("score_gradients", triton_sampled_launch.score_gradients)
tree_inputs = _register("tree_inputs", triton_sampled_launch.tree_inputs)
small_tree_outer = _register("small_tree_outer", triton_sampled_launch.small_tree_outer)


def _empty(x: Tensor, others: Sequence[Tensor | str | None], *size: int, dtype: torch.dtype | None = None) -> Tensor:
    """An output without values, for a compiler; an error if the tensors are on different devices."""
    for tensor in others:
        if isinstance(tensor, Tensor) and tensor.device != x.device:
            raise ValueError(f"x is on {x.device}, another tensor on {tensor.device}. Move one of them.")
    return x.new_empty(x.shape[0], *size, dtype=dtype)


def _fake_hard(x: Tensor, *rest: Any) -> Tensor:
    _check_no_gradient(x, rest[4:-1])
    return _empty(x, rest, rest[6].shape[-1])


def _fake_visit(x: Tensor, leaf: Tensor, *rest: Any) -> Tensor:
    _check_no_gradient(x, rest[:-1])
    return _empty(x, [leaf, *rest], rest[2].shape[-1])


_fake = functools.partial(torch.library.register_fake, lib=_library)
_fake("fastff::hard", _fake_hard)
_fake("fastff::route", lambda x, *rest: _empty(x, rest, dtype=torch.int64))
_fake("fastff::visit", _fake_visit)
_fake(
    "fastff::segment_product",
    lambda rows, weight, leaf, transposed: _empty(rows, (weight, leaf), weight.shape[1 if transposed else 2]),
)
_fake(
    "fastff::segment_outer",
    lambda first, second, leaf, leaves: first.new_empty(leaves, first.shape[1], second.shape[1]),
)
_fake(
    "fastff::leaf_product",
    lambda rows, weight, bias, leaf, order, transposed: rows.new_empty(
        leaf.shape[0], weight.shape[1 if transposed else 2]
    ),
)


def _fake_leaf_outer(
    first: Tensor, second: Tensor, leaf: Tensor, order: Tensor | None, end: Tensor, leaves: int, sums: str
) -> tuple[Tensor, Tensor]:
    a, b = first.shape[1], second.shape[1]
    return first.new_empty(leaves, a, b), first.new_empty(leaves, {"none": 0, "first": a, "second": b}[sums])


_fake("fastff::leaf_outer", _fake_leaf_outer)
_fake("fastff::walk_from", lambda x, *rest: _empty(x, rest, dtype=torch.int64))
_fake(
    "fastff::path_logits",
    lambda x, leaf, order, weight, bias: _empty(x, (leaf, weight), depth_of(weight.shape[0] + 1), dtype=torch.float32),
)
_fake("fastff::path_inputs", lambda grad, leaf, order, weight: weight.new_empty(grad.shape[0], weight.shape[1]))
_fake(
    "fastff::path_outer",
    lambda x, grad, leaf, order, end, weight: (weight.new_empty(weight.shape), weight.new_empty(weight.shape[0])),
)
_fake(
    "fastff::leaf_credit",
    lambda grad, weight, bias, hidden, leaf, order: (
        torch.empty_like(hidden), hidden.new_empty(hidden.shape[0], dtype=torch.float32)
    ),
)  # fmt: skip
_fake("fastff::sampled_walk", triton_sampled_launch.empty_walk)
_fake("fastff::sampled_places", lambda key, leaves: tuple(torch.empty_like(key, dtype=torch.int32) for _ in range(2)))
_fake("fastff::score_gradients", lambda logits, *rest: torch.empty_like(logits))
_fake("fastff::tree_inputs", lambda grad, leaf, weight, *rest: weight.new_empty(leaf.shape[1], weight.shape[1]))
_fake(
    "fastff::small_tree_outer",
    lambda x, grad, leaf, weight, start: (torch.empty_like(weight), weight.new_empty(weight.shape[0])),
)
