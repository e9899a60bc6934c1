"""The hard pass of one layer on a CPU, without asking again what was answered before.

A single sample takes the kernels a few microseconds. The general way through `functional` takes several times as long
to find them. So a layer keeps the plan of its parameters here for as long as they stay where they are.
"""

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from .._torch import alike_test, has_transforms, is_plain, is_watched
from ..activations import Activation
from ..tensors import LEAF_PARAMETERS, TREE_PARAMETERS, Leaves, Tree, alias
from . import native
from .choice import chosen
from .request import Request

_NAMES, _NODES = (*TREE_PARAMETERS, *LEAF_PARAMETERS), len(TREE_PARAMETERS)
_NONE = (None,) * len(_NAMES)
_is_grad_enabled = torch.is_grad_enabled


class PlanCache:
    """Runs a layer by its native plan, and returns None for what is not plain; `functional.hard` then does the work.

    That is: gradients, autocast, a tracer, another dtype or shape, or any chosen backend but native.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.plan: native.Plan | None = None

    def __call__(self, x: Tensor, parameters: Mapping[str, Tensor | None], activation: Activation) -> Tensor | None:
        """The hard pass of x by the parameters of an FFF layer, given by name; or None."""
        if _is_grad_enabled():
            return None
        plan = self.plan or self._make(x, parameters, activation)
        if plan is None:
            return None
        try:
            found = plan.read(parameters)
        except KeyError:  # a parametrization took one
            self.plan = None
            return None
        weights = found[: plan.count]
        if found[plan.count :] != _NONE[plan.count :]:  # the layer got a parameter
            self.plan = None
            return None
        if not plan.alike(x, *weights):
            if not _is_simple(x, plan.dtype, plan.in_features):
                return None
            if any(t is None for t in weights) or not plan.reads(weights):
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
        return plan.run(x.view(-1, plan.in_features)).view(*x.shape[:-1], plan.out_features)

    def _make(self, x: Any, parameters: Mapping[str, Any], activation: Activation) -> native.Plan | None:
        """A plan for these parameters, if this is a case for one. What does not fit, `functional.hard` refuses."""
        tensors = [parameters.get(name, self) for name in _NAMES]  # self: a parametrization has it
        weight, present = tensors[0], [t for t in tensors if t is not None]
        if not self.enabled or chosen() not in ("auto", "native") or not isinstance(activation, str):
            return None
        if not is_plain(*present):
            return None
        if weight is None or not weight.dim() or weight.dtype not in native._DTYPES:
            return None
        if not _is_simple(x, weight.dtype, weight.shape[-1]):
            return None
        tree, leaves = alias(Tree._make(tensors[:_NODES])), alias(Leaves._make(tensors[_NODES:]))
        if native.why_not(Request.make("hard", x.view(-1, x.shape[-1]), tree, leaves, activation)):
            return None
        plan = native.Plan(tree, leaves, activation).let_go()
        # Kept with the plan, so that a thread that replaces it cannot mix them.
        missing = [name for name, t in zip(_NAMES, tensors, strict=True) if t is None]
        plan.read = itemgetter(*(name for name in _NAMES if name not in missing), *missing)
        plan.count = len(present)
        self.plan = plan
        return plan


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
