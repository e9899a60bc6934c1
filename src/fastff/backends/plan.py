"""A backend's record of a layer between calls: where its weights lie, and how to read them."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from .._torch import never
from ..activations import Activation
from ..tensors import Leaves, Tree
from ..validate import check_allocated
from .direct import Direct

_data_ptr, _storage, _nbytes = Tensor.data_ptr, Tensor.untyped_storage, torch.UntypedStorage.nbytes


class LayerPlan:
    """A layer as kernels see it: pointers and sizes, read once. Subclasses run it.

    A plan describes the weights' memory at the time it was made, and keeps that memory alive: replacing
    `parameter.data` meanwhile, in any thread, changes the next call and not this one. A plan that is kept between calls
    releases the memory in between; `hold` and `reads` say whether it still describes the weights.
    """

    backend: ClassVar[str]  # its name
    # Tests, from `_torch.alike_test`, whether an input and the weights still have the form that they had.
    suits: Callable[..., bool] = staticmethod(never)
    alike: Callable[..., bool] = staticmethod(never)
    calls: int  # of inputs of this form
    # For plan_cache.py: the names of a layer's parameters, first the `count` that it has, then those that are None; and
    # a getter by name.
    names: tuple[str, ...]
    count: int
    read: Callable[[Any], tuple[Any, ...]]

    def __init__(self, tree: Tree | None, leaves: Leaves | None, activation: Activation) -> None:
        weights = [t for t in (*(tree or ()), *(leaves or ())) if t is not None]
        self.activation = activation
        self.dtype: torch.dtype = tree.weight.dtype if tree else leaves.dtype  # type: ignore[union-attr]  # one is given
        self.device = weights[0].device
        self.in_features: int = weights[0].shape[-1]
        self.out_features: int = leaves.out_weight.shape[-1] if leaves else 0
        self._row = self.in_features * self.dtype.itemsize  # bytes
        self._strides = (self.out_features, 1)  # of the output
        self._pointers, self._layout = [*map(_data_ptr, weights)], _layout(weights)
        self._memory: list[torch.UntypedStorage] | None = [*map(_storage, weights)]
        self._references = [*map(weakref.ref, self._memory)]
        self._bytes = [*map(_nbytes, self._memory)]

    def run(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor | None:
        """The hard pass of contiguous x (batch, in), by weights that are held; None if the plan cannot run it."""
        raise NotImplementedError

    def direct(self, x: Tensor, weights: Sequence[Tensor]) -> Direct | None:
        """A function that runs inputs like x after the checks of plan_cache.py; None if the backend has none."""
        return None

    def let_go(self) -> "LayerPlan":
        """Release the memory of the weights. A caller then holds it for each call."""
        self._memory = None
        return self

    def hold(self, weights: Sequence[Tensor]) -> list[Any] | None:
        """The memory of these weights, alive as long as the list; None if they have moved."""
        held: list[Any] = [reference() for reference in self._references]
        # Held memory is not given to another tensor, so the same address is the same storage.
        if [*map(_data_ptr, weights)] != self._pointers:
            return None
        try:
            return held if [*map(_nbytes, held)] == self._bytes else None
        except TypeError:  # one is None: it was freed, and another storage has its address
            return None

    def reads(self, weights: Sequence[Tensor]) -> bool:
        """Whether the memory of these weights is to be read as before."""
        return _layout(weights) == self._layout

    def _start(self, x: Tensor, storage: torch.UntypedStorage, batch: int) -> int:
        """The address of x (batch, in); raises if x is not inside its storage. The caller holds the storage."""
        start, base = x.data_ptr(), storage.data_ptr()
        if not base <= start <= base + storage.nbytes() - batch * self._row:
            check_allocated("x", x)
            if batch:  # an empty x may lie anywhere
                raise RuntimeError("x was changed by another thread while the layer read it.")
        return start


def _layout(weights: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """How to read the memory of each tensor."""
    return [(t.shape, t.stride(), t.dtype, t.device, t.is_neg()) for t in weights]
