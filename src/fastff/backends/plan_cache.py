"""The hard pass of one layer, without repeating the checks of earlier calls.

The kernels take a few microseconds for a single sample. The general way through `functional` takes several times as
long to find them. So a layer keeps a plan of its parameters here while they stay in place: native's on a CPU, triton's
on a GPU.
"""

from collections.abc import Mapping
from operator import itemgetter
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .._torch import alike_test, frozen, has_transforms, holds_numbers, is_plain, is_watched
from ..activations import Activation
from ..tensors import LEAF_PARAMETERS, TREE_PARAMETERS, Leaves, Tree, alias
from . import native, triton, triton_plan
from .choice import chosen
from .direct import Direct
from .plan import LayerPlan
from .request import Request

_NAMES, _NODES = (*TREE_PARAMETERS, *LEAF_PARAMETERS), len(TREE_PARAMETERS)
_NONE = (None,) * len(_NAMES)
_is_grad_enabled = torch.is_grad_enabled
# By type of device.
_MAKERS: dict[str, tuple[ModuleType, type[LayerPlan]]] = {
    "cpu": (native, native.Plan),
    "cuda": (triton, triton_plan.Plan),
}


class PlanCache:
    """Runs a layer by its plan. Returns None where it cannot; `functional.hard` then does the work.

    It cannot with gradients, autocast, a tracer, another device, dtype or shape, or another chosen backend.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.plan: LayerPlan | None = None
        self.direct: Direct | None = None  # a faster way for inputs like the last one

    def hard(self, x: Tensor, parameters: Mapping[str, Tensor | None], activation: Activation) -> Tensor | None:
        """The hard pass of x by the parameters of an FFF layer, given by name; or None."""
        direct = self.direct  # read once: threads may change it
        if direct is not None and (y := direct(x, parameters, activation)) is not None:
            return y
        if _is_grad_enabled() or type(x) is not Tensor or x.is_nested:
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
        if not plan.suits(x):
            form = plan.device, plan.dtype, plan.in_features
            # Another thread may change x before the test is made. So the test is made from a copy, also checked.
            if not _is_simple(x, *form) or not _is_simple(copy := frozen(x)[0], *form):
                if not is_plain(*weights) or not plan.reads(weights):  # the layer was converted or moved, too
                    self.plan = None
                return None
            plan.suits, plan.calls, self.direct = alike_test(copy, ()), 0, None
        if not x.is_contiguous() or has_transforms() or is_watched() or chosen() not in ("auto", plan.backend):
            return None
        if not plan.alike(*weights):
            if not is_plain(*weights) or not plan.reads(copies := frozen(*weights)):
                self.plan = None
                return None
            plan.alike, plan.calls, self.direct = alike_test(None, copies), 0, None
        held = plan.hold(weights)  # until this call ends
        if activation != plan.activation or held is None:
            self.plan = None
            return None
        plan.calls = calls = plan.calls + 1
        if calls == 2:  # not for a form that comes once
            copy, *copies = frozen(x, *weights)
            self.direct = plan.direct(copy, copies) if plan.suits(copy) and plan.alike(*copies) else None
        if x.dim() == 2:
            return plan.run(x, weights)
        y = plan.run(x.view(-1, plan.in_features), weights)
        return None if y is None else y.view(*x.shape[:-1], plan.out_features)

    def _make(self, x: Any, parameters: Mapping[str, Any], activation: Activation) -> LayerPlan | None:
        """A plan for these parameters, if they can have one. `functional.hard` refuses those that do not fit."""
        tensors = [parameters.get(name, self) for name in _NAMES]  # self: a parametrization has it
        weight, present = tensors[0], [t for t in tensors if t is not None]
        if not self.enabled or not isinstance(activation, str) or not is_plain(*present):
            return None
        if weight is None or not weight.dim() or weight.device.type not in _MAKERS:
            return None
        backend, make = _MAKERS[weight.device.type]
        if chosen() not in ("auto", make.backend) or not _is_simple(x, weight.device, weight.dtype, weight.shape[-1]):
            return None
        tree, leaves = alias(Tree._make(tensors[:_NODES])), alias(Leaves._make(tensors[_NODES:]))
        if backend.why_not(Request.make("hard", x.view(-1, x.shape[-1]), tree, leaves, activation)):
            return None
        plan = make(tree, leaves, activation).let_go()
        # Kept in the plan, so that a thread that replaces it cannot mix plans.
        missing = [name for name, t in zip(_NAMES, tensors, strict=True) if t is None]
        plan.names, plan.count = (*(name for name in _NAMES if name not in missing), *missing), len(present)
        plan.read = itemgetter(*plan.names)
        self.plan = plan
        return plan


def _is_simple(x: Any, device: torch.device, dtype: torch.dtype, features: int) -> bool:
    """Whether x is an input that a kernel may read itself, with no autocast, tracer or transform on."""
    return (
        type(x) is Tensor
        and x.layout is torch.strided
        and x.device == device
        and x.dtype is dtype
        and x.dim() > 0
        and x.shape[-1] == features
        and x.is_contiguous()
        and not x.is_neg()
        and holds_numbers(x)
        and not torch.is_autocast_enabled(device.type)
        and not has_transforms()
        and not is_watched()
    )
