"""All or nothing: a call that fails, or is interrupted, leaves its models unchanged.

    with unchanged_on_error(model):
        ...  # if anything raises here, Ctrl-C included, the model is restored and the exception propagates

A snapshot keeps what surgery and distillation change: the attributes of every module (children, parameters, hooks,
mode, an overwritten forward), `requires_grad` and `grad` of every parameter, the values of buffers and of trained
parameters. The outermost call takes the snapshot, so an inner clean-up may be interrupted.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from ..interrupts import guarded
from ..switches import PROBING
from ..validate import check_allocated

_HOLDERS = (dict, OrderedDict, set)  # hold children, parameters, buffers and hooks


@guarded
def unchanged_on_error(*models: nn.Module, values: Iterable[Tensor] = (), data: bool = False) -> Iterator[None]:
    """Restore `models` if the block raises. values: parameters whose values the block changes. data: whether the block
    sets .data of parameters and buffers."""
    snapshot = _Snapshot(models, values, data)
    try:
        yield
    except BaseException:
        snapshot.restore()
        raise


def check_memory(*models: nn.Module) -> None:
    """Raise for a tensor whose memory was freed: copying one ends the process."""
    for model in models:
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
            if plain and not (tensor.is_meta or tensor.is_nested):
                check_allocated(name, tensor)


class _Snapshot:
    def __init__(self, models: Sequence[nn.Module], values: Iterable[Tensor], data: bool) -> None:
        check_memory(*models)
        self.modules = {module: dict(vars(module)) for model in models for module in model.modules()}
        self.held = [(v, v.copy()) for state in self.modules.values() for v in state.values() if type(v) in _HOLDERS]
        parameters = dict.fromkeys(p for model in models for p in model.parameters())
        self.parameters = [(p, p.requires_grad, p.grad) for p in parameters]
        buffers = dict.fromkeys(b for model in models for b in model.buffers() if not (b.is_meta or b.is_inference()))
        self.data = [(tensor, tensor.data) for tensor in [*parameters, *buffers]] if data else []
        self.buffers = [(b, b.detach().clone()) for b in buffers if b.layout is torch.strided]
        self.values = [(p, p.detach().clone()) for p in values]
        self.grad_mode = torch.is_grad_enabled()
        with PROBING:
            self.fused = torch.backends.mha.get_fastpath_enabled()

    def restore(self) -> None:
        """Restore everything."""
        for module, state in self.modules.items():
            now = vars(module)
            for name in now.keys() - state.keys():
                del now[name]
            now.update(state)
        for holder, kept in self.held:
            holder.clear()
            holder.update(kept)
        for tensor, content in self.data:
            tensor.data = content
        with torch.no_grad():
            for parameter, wanted, grad in self.parameters:
                if parameter.requires_grad is not wanted:
                    parameter.requires_grad_(wanted)
                if parameter.grad is not grad:
                    parameter.grad = grad
            for trained, value in self.values:
                trained.copy_(value)
            for buffer, value in self.buffers:
                if not torch.equal(buffer, value):  # an expanded buffer cannot be written
                    buffer.copy_(value)
        torch.set_grad_enabled(self.grad_mode)
        with PROBING:
            torch.backends.mha.set_fastpath_enabled(self.fused)
