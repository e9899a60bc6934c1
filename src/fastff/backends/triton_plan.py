"""The hard pass of one layer on a GPU, kept from call to call: its launches are recorded once for each batch size."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .._torch import current_gpu, current_stream, empty_strided_cuda
from ..activations import Activation
from ..tensors import Leaves, Tree
from . import triton, triton_hard
from .plan import LayerPlan
from .triton_launch import Replay, has_hooks, record

_MOST = 64  # batch sizes that are kept


class Plan(LayerPlan):
    """A layer and its recorded launches, by batch size and alignment of the input."""

    backend = "triton"

    def __init__(self, tree: Tree, leaves: Leaves, activation: Activation) -> None:
        assert isinstance(activation, str)  # other activations have no kernels
        super().__init__(tree, leaves, activation)
        self._name = activation
        self._absent = [t is None for t in (*tree, *leaves)]
        self._gpu: int = self.device.index
        self._replays: dict[tuple[int, int], Replay | None] = {}  # None: not by launches alone

    def run(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor | None:
        batch, storage = x.shape[0], x.untyped_storage()
        start = self._start(x, storage, batch)
        key = batch, start % 16
        if not batch or current_gpu() != self._gpu:
            return None
        replay = self._replays.get(key, self)  # once: another thread may clear them
        if replay is self:
            return self._record(x, weights, key)
        if not isinstance(replay, Replay) or has_hooks():
            return None
        y = empty_strided_cuda((batch, self.out_features), self._strides, self.dtype)
        scratch = empty_strided_cuda((replay.scratch_bytes,), (1,), torch.uint8)
        replay(start, y.data_ptr(), scratch.data_ptr(), current_stream(self._gpu))
        return y

    def _record(self, x: Tensor, weights: Sequence[Tensor], key: tuple[int, int]) -> Tensor | None:
        """The hard pass, whose launches are then kept."""
        if x.data_ptr() in self._pointers or x.is_neg():
            return None  # the weights themselves as input
        given = iter(weights)
        tensors = [None if absent else next(given) for absent in self._absent]
        nodes = len(Tree._fields)
        tree, leaves = Tree._make(tensors[:nodes]), Leaves._make(tensors[nodes:])
        launch = triton_hard.choose_launch(x, tree, leaves)
        replay = y = None
        if triton_hard.is_recordable(x, leaves, launch):
            try:
                with record() as launches:
                    y = triton_hard.hard(x, tree, leaves, self._name, launch)[0]
                replay = Replay(launches, x, y, weights)
            except Exception as error:  # a compiler may raise anything
                if not triton.is_failure(error):
                    raise
                y = None  # functional runs it again, and says what went wrong
        if len(self._replays) >= _MOST:
            self._replays.clear()
        self._replays[key] = replay
        return y
