"""One requested pass. Each backend decides from it whether it can run the pass.

request = Request.make("hard", x, tree, leaves, "relu")
reason = native.why_not(request)     # empty if native can run it
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .._torch import has_transforms, holds_numbers, in_transform, is_exporting, is_plain
from ..activations import Activation
from ..tensors import Leaves, SoftOptions, Tree
from ..validate import check_allocated

Kind = Literal["soft", "hard", "route", "visit"]


class Request(NamedTuple):
    """One pass: its tensors, and the state of torch as it runs."""

    kind: Kind
    x: Tensor  # (batch, in), in the dtype in which the pass runs
    tree: Tree | None  # None: visit
    leaves: Leaves | None  # None: route
    activation: Activation
    leaf: Tensor | None  # visit: the leaf of each sample
    options: SoftOptions  # soft
    is_compiling: bool
    # Not set for the soft pass, whose operations all have a gradient:
    weights: list[Tensor]  # the parameters
    is_plain: bool  # compiled code may read the tensors: they hold values, and nothing traces
    needs_grad: bool  # of x or the leaves

    @classmethod
    def make(
        cls,
        kind: Kind,
        x: Tensor,
        tree: Tree | None,
        leaves: Leaves | None,
        activation: Activation,
        *,
        leaf: Tensor | None = None,
        options: SoftOptions | None = None,
    ) -> "Request":
        given = kind, x, tree, leaves, activation, leaf, options or SoftOptions(), torch.compiler.is_compiling()
        if kind == "soft":
            return cls(*given, [], False, False)
        weights = [t for t in (*(tree or ()), *(leaves or ())) if t is not None]
        plain = is_plain(x, *weights) and holds_numbers(x)
        if plain:  # kernels read memory themselves
            check_allocated("x", x)
            for name, part in (("tree", tree), ("leaves", leaves)):
                for key, tensor in zip(part._fields, part, strict=True) if part else ():
                    check_allocated(f"{name}.{key}", tensor)
        return cls(*given, weights, plain, needs_grad(x, *(leaves or ())))

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of the backend's function of this kind."""
        given = [part for part in (self.leaf, self.tree, self.leaves) if part is not None]
        return self.x, *given, self.activation, *([self.options] if self.kind == "soft" else [])

    @property
    def is_int8(self) -> bool:
        """Whether the pass reads int8 leaves."""
        return self.leaves is not None and self.leaves.is_int8

    @property
    def is_operation(self) -> bool:
        """Whether to show the compiler a single custom op. It cannot trace kernels, and the op has no gradient."""
        return (
            self.is_compiling
            and not is_exporting()
            and isinstance(self.activation, str)
            and not self.needs_grad
            and not has_transforms()
        )

    def why_no_kernel(self, device: str, dtypes: tuple[torch.dtype, ...]) -> str:
        """Why kernels for a device ("cpu", "cuda") and these dtypes cannot run this pass; empty if they can."""
        x = self.x
        if x.device.type != device:
            return f"needs a {device.upper()} tensor; got device {x.device}"
        if x.dtype not in dtypes:
            return f"has kernels for {_list(dtypes)}; got {x.dtype}"
        if not isinstance(self.activation, str):
            return "has kernels for named activations only"
        if in_transform():
            return "runs under no torch.func transform"
        if self.kind == "soft":
            return ""
        if not self.is_plain:
            return "runs on plain tensors, under no tracer and no forward-mode derivative"
        dtypes = (x.dtype, torch.int8)  # int8: leaves, already checked
        if any(t.device != x.device or t.dtype not in dtypes or not t.is_contiguous() for t in self.weights):
            return "needs contiguous parameters of the input's device and dtype"
        if any(t.is_neg() for t in self.weights):
            return "reads parameters from memory, where a view with the negative bit has the opposite numbers"
        return ""


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd records operations on these."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _list(dtypes: tuple[torch.dtype, ...]) -> str:
    *first, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{', '.join(first)} and {last}"
