"""What a backend keeps of a layer from call to call: where its weights lie, and how they are read."""

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

    It describes the memory in which the weights lay when it was made, and keeps that memory alive: whoever replaces
    `parameter.data` meanwhile, in this thread or in another, changes the next call and not this one. A plan that is
    kept from call to call lets go of the memory in between; `hold` and `reads` say whether it still describes the
    weights.
    """

    backend: ClassVar[str]  # its name
    # Whether an input, and whether the weights, have the form for which this test was made, by `_torch.alike_test`.
    suits: Callable[..., bool] = staticmethod(never)
    alike: Callable[..., bool] = staticmethod(never)
    calls: int  # of inputs of this form
    # For plan_cache.py: the names of a layer's parameters, first the `count` that it has, then those that are None; and
    # what gets them by name.
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
        """The hard pass of x (batch, in), contiguous, by weights that are held; or None, if this is no case for it."""
        raise NotImplementedError

    def direct(self, x: Tensor, weights: Sequence[Tensor]) -> Direct | None:
        """A function that runs inputs like x after the checks of plan_cache.py; None if the backend has none."""
        return None

    def let_go(self) -> "LayerPlan":
        """Keep the memory of the weights alive no longer. A caller holds it for each call."""
        self._memory = None
        return self

    def hold(self, weights: Sequence[Tensor]) -> list[Any] | None:
        """The memory of these weights, alive for as long as the list is; None if they have moved."""
        held: list[Any] = [reference() for reference in self._references]
        # Memory that is held is not given to another tensor, so the same address is the same storage.
        if [*map(_data_ptr, weights)] != self._pointers:
            return None
        try:
            return held if [*map(_nbytes, held)] == self._bytes else None
        except TypeError:  # one is None: it was freed, and another storage lies at its address
            return None

    def reads(self, weights: Sequence[Tensor]) -> bool:
        """Whether the memory of these weights has the meaning that it had then."""
        return _layout(weights) == self._layout

    def _start(self, x: Tensor, storage: torch.UntypedStorage, batch: int) -> int:
        """The address of x (batch, in), which lies inside its storage; or an error. The caller holds the storage."""
        start, base = x.data_ptr(), storage.data_ptr()
        if not base <= start <= base + storage.nbytes() - batch * self._row:
            check_allocated("x", x)
            if batch:  # an empty one may lie anywhere
                raise RuntimeError("x was changed by another thread while the layer read it.")
        return start


def _layout(weights: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """All that says how to read a tensor's memory."""
    return [(t.shape, t.stride(), t.dtype, t.device, t.is_neg()) for t in weights]
