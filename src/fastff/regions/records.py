"""Records of edits: the rows of a layer's leaves before and after, kept with the layer, so that an edit can be undone.

A layer keeps its changes as a plain attribute: they are copied and pickled with it, and `fastff.save` writes them.
Records hold bits, not differences, so undoing is exact. It is possible while the leaves still have the bits that the
edit left there: edits of different leaves are undone in any order, edits of one leaf newest first.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._torch import is_dtensor
from ..interrupts import guarded
from ..layer import FFF, fff_layers
from ..validate import check_allocated
from .traffic import Traffic, measure_traffic

RECORDS = "_fastff_edits"  # the attribute of an edited layer
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class LeafChange:
    """What one edit did to a layer."""

    number: int  # counts the layer's edits, from 1
    note: str
    inputs: int  # how many outputs were corrected
    leaves: tuple[int, ...]
    before: dict[str, Tensor]  # by parameter: its rows of these leaves, (leaves, ...)
    after: dict[str, Tensor]
    error_before: float  # the largest difference to a target, of any input and output
    error: float  # afterwards, by the layer's own hard pass in its dtype


class Edit:
    """The record of an edit: what changed, and how to undo it."""

    def __init__(self, layer: FFF, change: LeafChange) -> None:
        self.layer, self.change = layer, change

    @property
    def number(self) -> int:
        """Counts the layer's edits, from 1."""
        return self.change.number

    @property
    def note(self) -> str:
        """The text given to the edit."""
        return self.change.note

    @property
    def leaves(self) -> tuple[int, ...]:
        """The leaves that were changed."""
        return self.change.leaves

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameters that were changed, in the rows of these leaves."""
        return tuple(self.change.after)

    @property
    def error(self) -> float:
        """The largest difference to a target that is left, of any input and output, in the layer's dtype."""
        return self.change.error

    @property
    def error_before(self) -> float:
        """The same before the edit."""
        return self.change.error_before

    @property
    def is_active(self) -> bool:
        """Whether the layer has this edit: it was not undone."""
        return any(change is self.change for change in changes_of(self.layer))

    def undo(self, *, force: bool = False) -> None:
        """Restore every bit of the leaves from before this edit.

        The leaves must still have the bits that this edit wrote. After a later edit of one of them, training or a
        conversion, undo raises. Undo later edits first, or pass force=True: then this edit's change is subtracted
        from the rows that have changed since, which is not exact.
        """
        change, layer = self.change, self.layer
        if not self.is_active:
            raise ValueError(f"{self._name} is not among the edits of this layer: it was undone.")
        own = editable(layer, change.before)
        index = torch.tensor(change.leaves, device=layer.node_weight.device)
        rows, others = {}, [other for other in changes_of(layer) if other is not change]
        for name, parameter in own.items():
            now, old, new = parameter.detach()[index], change.before[name], change.after[name]
            if now.dtype != old.dtype or now.shape != old.shape:
                kind, was = (f"{t.dtype} of shape {tuple(t.shape)}" for t in (now, old))
                raise ValueError(f"{name} had rows of {was} at {self._name}, and has {kind} now: no bits to restore.")
            old, new = old.to(now.device), new.to(now.device)
            same = same_bits(now, new)
            if not force and not same.all():
                self._refuse(change.leaves, same, others)
            wide = [t.to("cpu", torch.float64) for t in (now, new, old)]
            moved = (wide[0] - (wide[1] - wide[2])).to(now)
            rows[name] = torch.where(same.view(-1, *[1] * (now.dim() - 1)), old, moved)
        with written(layer, change.leaves, rows, others):
            pass

    def _refuse(self, leaves: Sequence[int], same: Tensor, others: Sequence[LeafChange]) -> None:
        changed = [leaf for leaf, equal in zip(leaves, same.tolist(), strict=True) if not equal]
        later = [c.number for c in others if c.number > self.number and set(c.leaves) & set(changed)]
        cause = f"edits {later} came later: undo them first, newest first" if later else "training, or a conversion?"
        raise ValueError(
            f"{self._name} cannot be undone exactly: leaves {changed[:8]} have changed since ({cause}). force=True "
            "subtracts this edit's change from them instead."
        )

    def traffic(self, data: Any, model: nn.Module | None = None, *, show: bool = True) -> Traffic:
        """How many inputs of a reference data set lie in the touched leaves, and how this edit moves outputs.

        Args:
            data: batches of the model's inputs, or of the layer's own without a model.
            model: the model that has the layer. It runs twice on each batch. Nothing is changed.
            show: whether to draw a progress bar.
        """
        change = self.change
        return measure_traffic(model or self.layer, self.layer, change.leaves, change.before, change.after, data, show)

    @property
    def _name(self) -> str:
        return f"edit {self.number}" + (f" ({self.note})" if self.note else "")

    def __repr__(self) -> str:
        count, leaves = self.change.inputs, self.leaves
        what = f"{count} input{'s' * (count > 1)}, {'leaves' if len(leaves) > 1 else 'leaf'} "
        what += ", ".join(map(str, leaves[:8])) + ", ..." * (len(leaves) > 8)
        state = "" if self.is_active else ", undone"
        return f"Edit({self._name[5:]}: {what}, error {self.error_before:.3g} -> {self.error:.3g}{state})"


def edits(model: nn.Module) -> list[Edit]:
    """The edits of a layer, or of every FFF layer of a model, that were not undone: by layer, oldest first."""
    return [Edit(layer, change) for layer in fff_layers(model).values() for change in changes_of(layer)]


def forget_edits_(model: nn.Module) -> None:
    """Keep the edits of a layer or model, and drop their records: the edits can then not be undone."""
    for layer in fff_layers(model).values():
        vars(layer).pop(RECORDS, None)


def changes_of(layer: FFF) -> tuple[LeafChange, ...]:
    """The changes that a layer keeps, oldest first."""
    return vars(layer).get(RECORDS, ())


def same_bits(a: Tensor, b: Tensor) -> Tensor:
    """Whether the rows of two tensors have the same bits: (rows,)."""
    kind = _BITS[a.element_size()]
    return (a.contiguous().view(kind) == b.contiguous().view(kind)).flatten(1).all(1)


@guarded
def written(
    layer: FFF, leaves: Sequence[int], rows: Mapping[str, Tensor], changes: Sequence[LeafChange]
) -> Iterator[list[LeafChange]]:
    """Write rows of leaves in place. An error in the block restores them; after it, the layer keeps these changes.

    Yields the list of changes, which the block may extend.
    """
    own, index = editable(layer, rows), torch.tensor(leaves, device=layer.node_weight.device)
    before, kept = {name: parameter.detach()[index] for name, parameter in own.items()}, list(changes)
    try:
        _write(own, index, rows)
        yield kept
        vars(layer)[RECORDS] = tuple(kept)
    except BaseException:
        _write(own, index, before)
        raise


@torch.no_grad()
def _write(parameters: Mapping[str, Tensor], index: Tensor, rows: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter[index] = rows[name]


def editable(layer: FFF, names: Collection[str], model: nn.Module | None = None) -> dict[str, nn.Parameter]:
    """These parameters of a layer, by name; raises if their rows cannot be changed alone."""
    if not isinstance(layer, FFF):
        raise TypeError(f"an edit needs an FFF layer; got {type(layer).__name__}. Pass one of the model's FFF layers.")
    if layer.leaf_in_scale is not None:
        raise TypeError("int8 leaves cannot be edited: a row has 255 levels. Edit before fastff.quantize_.")
    if type(layer).leaves is not FFF.leaves or not all(layer._parameters.get(name) is not None for name in names):
        raise ValueError(
            "the layer computes its leaves, by a parametrization, by pruning or in a subclass. Make them plain "
            "parameters first, for example with torch.nn.utils.parametrize.remove_parametrizations."
        )
    found: dict[str, nn.Parameter] = {name: layer._parameters[name] for name in names}  # type: ignore[misc]
    if any(is_dtensor(p) for p in layer.parameters()):
        raise TypeError("a sharded layer (FSDP, DTensor) cannot be edited. Edit the whole model, then shard it.")
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError("an edit in one of several processes leaves the others behind. Edit in one, save, and load.")
    for name, parameter in found.items():
        if parameter.is_meta:
            raise ValueError(f"{name} is on the meta device, which holds no values. Load the weights first.")
        check_allocated(name, parameter)
        if len(parameter) > 1 and parameter.stride(0) == 0:
            raise ValueError(f"the leaves share the memory of {name}: a change of one would change all. Clone it.")
    if model is not None and (tied := _tied(model, layer, found)):
        raise ValueError(
            f"{', '.join(tied)} is tied to another module, which an edit would change too. Untie it first."
        )
    return found


def _tied(model: nn.Module, layer: FFF, parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """The names of these parameters that share memory with another module of a model."""
    other = {
        p.untyped_storage().data_ptr()
        for module in model.modules()
        if module is not layer
        for p in (*module._parameters.values(), *module._buffers.values())
        if p is not None and not p.is_meta
    }
    return [name for name, p in parameters.items() if p.untyped_storage().data_ptr() in other]
