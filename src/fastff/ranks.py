"""Communication between the processes (ranks) that train one model, each with its part of the batch.

`fastff.parallel.synchronize_` gives every FFF layer the same `Ranks`. The balance loss, tree placement, rebalancing and
the recipe ask `ranks_of(model)` for it, and then count the samples of all ranks. Without it, nothing here communicates:
a model that is not synchronised works alone, even while a process group is initialised.

Every method that communicates must be called by all ranks, in the same order.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ._torch import is_dtensor
from .layer import FFF

T = TypeVar("T")


_RAISED = 2**32  # a rank that raises adds this to a count of ranks


class OtherRankError(RuntimeError):
    """Another rank has raised an error."""


class Ranks:
    """A process group. Copies share it, and pickles leave it out: another process has other groups."""

    def __init__(self, group: Any = None) -> None:
        self.group = group  # None: the default group

    @property
    def size(self) -> int:
        """The number of ranks; 1 once the process group is gone."""
        return dist.get_world_size(self.group) if dist.is_initialized() else 1

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Each tensor's sum over the ranks, all in one reduction; the same bits on every rank."""
        flat = _flat(tensors)
        dist.all_reduce(flat, group=self.group)
        return _parts(flat, tensors)

    def log_sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Each tensor's logsumexp over the ranks, all in one collective."""
        flat = _flat(tensors)
        found = [torch.empty_like(flat) for _ in range(self.size)]
        dist.all_gather(found, flat, group=self.group)
        return _parts(torch.stack(found).logsumexp(0), tensors)

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, one after the other. Ranks may have different numbers of rows."""
        counts = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(self.size)]
        dist.all_gather(counts, torch.tensor([len(rows)], device=rows.device), group=self.group)
        sizes = [int(count) for count in counts]
        padded = torch.cat([rows, rows.new_zeros(max(sizes) - len(rows), *rows.shape[1:])])
        found = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(found, padded, group=self.group)
        return torch.cat([part[:size] for part, size in zip(found, sizes, strict=True)])

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Give every rank the values of the first one."""
        for tensor in tensors:
            dist.broadcast(tensor.detach(), group=self.group, group_src=0)

    def first(self, value: bool, device: torch.device) -> bool:
        """The first rank's value."""
        said = torch.tensor(int(value), device=device)
        self.broadcast_([said])
        return bool(said)

    def agree(self, value: str, device: torch.device) -> bool:
        """Whether all ranks give the same value."""
        number = int.from_bytes(hashlib.sha256(value.encode()).digest()[:7], "big")
        return self.gather(torch.tensor([number], device=device)).unique().numel() == 1

    @contextmanager
    def together(self, device: torch.device) -> Iterator[Callable[[bool], bool]]:
        """If the block raises on one rank, it raises on all of them: nobody waits for a rank that has given up.

        Yields a function that tells if a value is true on all ranks; all call it equally often in the block. After an
        error, the others raise at the next call or at the block's end.
        """

        def count(value: int) -> int:
            found = torch.tensor(value, device=device)
            dist.all_reduce(found, group=self.group)
            return int(found)

        def everywhere(value: bool) -> bool:
            missing = count(int(not value))
            if missing >= _RAISED:
                raise OtherRankError(f"{missing // _RAISED} of {self.size} ranks raised an error here; read theirs.")
            return not missing

        try:
            yield everywhere
        except OtherRankError:
            raise
        except Exception:
            count(_RAISED)
            raise
        everywhere(True)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ranks":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def ranks_of(model: nn.Module) -> Ranks | None:
    """The ranks over which the FFF layers of a model are synchronised; None if this process is alone."""
    found = [layer.ranks for layer in model.modules() if isinstance(layer, FFF)]
    if any(ranks is not found[0] for ranks in found):
        raise ValueError(
            "some FFF layers of this model are synchronised, others are not, or over other ranks. Call "
            "fastff.parallel.synchronize_ on the whole model."
        )
    return found[0] if found and found[0] is not None and found[0].size > 1 else None


def alone() -> AbstractContextManager[Callable[[bool], bool]]:
    """Replaces `Ranks.together` where a model is not synchronised."""
    return nullcontext(bool)


def until_enough(source: Iterable[T], is_enough: Callable[[], bool], everywhere: Callable[[bool], bool]) -> Iterator[T]:
    """Items until all ranks have enough, asked after each item: where forwards are collectives, all run as many."""
    for item in source:
        yield item
        if everywhere(is_enough()):
            return
    while not everywhere(True):  # this rank has no more
        pass


def reshard_(model: nn.Module) -> None:
    """Free the copies that FSDP2 has gathered. Until then, modules hold those, and writes to them are lost."""
    for module in model.modules():
        if hasattr(module, "reshard") and hasattr(module, "unshard"):
            module.reshard()  # type: ignore[operator]


@contextmanager
def whole(tensor: Tensor) -> Iterator[Tensor]:
    """A plain tensor to change in place: the tensor itself, or all of a DTensor, which then gets the new values."""
    if not is_dtensor(tensor):
        yield tensor
        return
    from torch.distributed.tensor import DTensor, distribute_tensor

    sharded = cast(DTensor, tensor)
    full = sharded.full_tensor()
    yield full
    sharded.copy_(distribute_tensor(full, sharded.device_mesh, sharded.placements))


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    dtype = tensors[0].dtype
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return torch.cat([tensor.detach().flatten().to(dtype) for tensor in tensors])


def _parts(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view_as(tensor).to(tensor.dtype) for part, tensor in zip(parts, like, strict=True)]
