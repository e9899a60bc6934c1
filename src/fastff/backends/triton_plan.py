"""The hard pass of one layer on a GPU, kept from call to call: its launches are recorded once for each batch size."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .._torch import current_gpu, current_stream, empty_strided_cuda
from ..activations import Activation
from ..tensors import Leaves, Tree, alias
from . import triton, triton_hard
from .plan import LayerPlan
from .triton_launch import Replay, has_hooks, record

_MOST = 64  # batch sizes that are kept


class Plan(LayerPlan):
    """A layer and its recorded launches, by batch size and alignment of the input."""

    backend = "triton"

    def __init__(self, tree: Tree, leaves: Leaves, activation: Activation) -> None:
        super().__init__(tree, leaves, activation)
        self._absent = [t is None for t in (*tree, *leaves)]
        self._gpu: int = self.device.index
        self._replays: dict[tuple[int, bool], Replay | None] = {}  # None: failed, or not by launches alone

    def run(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor | None:
        batch, storage = x.shape[0], x.untyped_storage()
        start = self._start(x, storage, batch)
        if not batch or current_gpu() != self._gpu:
            return None
        key = batch, start % 16 == 0
        replay = self._replays.get(key, self)  # once: another thread may change them
        if replay is self:
            return self._record(x, weights, key)
        if not isinstance(replay, Replay) or has_hooks():
            return None
        y = empty_strided_cuda((batch, self.out_features), self._strides, self.dtype)
        scratch = empty_strided_cuda((replay.scratch_bytes,), (1,), torch.uint8)
        replay(start, y.data_ptr(), scratch.data_ptr(), current_stream(self._gpu))
        return y

    def _record(self, x: Tensor, weights: Sequence[Tensor], key: tuple[int, bool]) -> Tensor | None:
        """The hard pass, whose launches are then kept."""
        given = iter(weights)
        tensors = [None if absent else next(given) for absent in self._absent]
        nodes = len(Tree._fields)
        # Aliases: another thread may give a parameter other memory while Triton compiles.
        tree, leaves = alias(Tree._make(tensors[:nodes])), alias(Leaves._make(tensors[nodes:]))
        held = [t for t in (*tree, *leaves) if t is not None]
        if [t.data_ptr() for t in held] != self._pointers or x.data_ptr() in self._pointers:
            return None  # moved meanwhile; or the weights themselves as input
        launch = triton_hard.choose_launch(x, tree, leaves)
        replay = y = None
        if triton_hard.is_recordable(x, leaves, launch):
            try:
                with record() as launches:
                    y = triton_hard.hard(x, tree, leaves, str(self.activation), launch)[0]
                if all(one.compiled is not None for one in launches):
                    replay = Replay(launches, x, y, held)
            except Exception as error:  # a compiler may raise anything
                if not triton.is_failure(error):
                    raise
                y = None  # functional runs it again, and says what went wrong
        if len(self._replays) >= _MOST:
            self._replays.pop(next(iter(self._replays)), None)  # the oldest
        self._replays[key] = replay
        return y
