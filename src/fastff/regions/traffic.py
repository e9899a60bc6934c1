"""The traffic of an edit: which inputs of a reference data set meet the touched leaves, and which outputs move.

Outside the touched leaves, a layer's outputs keep every bit. In a transformer, attention carries a change to the other
tokens of its sequence. So the report counts samples (sequences) without an input in a touched leaf: for these, the
whole model is unchanged.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..batches import batches, evaluation_mode, feed
from ..functional import visit
from ..interrupts import guarded
from ..layer import FFF
from ..progress import progress
from ..tensors import Leaves


@dataclass
class Traffic:
    """What an edit does to the inputs of a data set. str() prints it."""

    samples: int = 0  # rows of the batches: images, sequences
    untouched_samples: int = 0  # without an input in a touched leaf: nothing changes for them
    inputs: int = 0  # inputs of the layer: samples, or tokens
    touched: int = 0  # those in touched leaves
    by_leaf: dict[int, int] = field(default_factory=dict)  # inputs of each touched leaf
    mean_change: float = 0.0  # of the layer's output at touched inputs: the norm of the difference
    max_change: float = 0.0
    moved_samples: int = 0  # with any different bit in the model's output
    max_output_change: float = 0.0  # of any number in the model's output
    answers: int = 0  # outputs of the model, each with a largest number: its answer
    changed_answers: int = 0

    @property
    def untouched_share(self) -> float:
        """The share of samples for which nothing changes."""
        return self.untouched_samples / max(self.samples, 1)

    def __str__(self) -> str:
        def part(count: int, total: int) -> str:
            return f"{count} of {total} ({100 * count / max(total, 1):.2f} %)"

        change = f"{self.mean_change:.4g} on average, {self.max_change:.4g} at most"
        return "\n".join(
            [
                f"inputs in touched leaves           {part(self.touched, self.inputs)}",
                f"samples that meet no touched leaf  {part(self.untouched_samples, self.samples)}",
                f"change of the layer there          {change}",
                f"samples whose output moved         {part(self.moved_samples, self.samples)}",
                f"answers that changed               {part(self.changed_answers, self.answers)}",
            ]
        )


def measure_traffic(
    model: nn.Module,
    layer: FFF,
    leaves: Sequence[int],
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    data: Any,
    show: bool = True,
) -> Traffic:
    """Run a model twice on each batch, with these rows of the touched leaves before and after. Nothing is changed."""
    if not any(module is layer for module in model.modules()):
        raise ValueError("the model does not have the layer that was edited. Pass the model that it is part of.")
    found, total = Traffic(by_leaf=dict.fromkeys(leaves, 0)), 0.0
    old = _Swap(layer, leaves, before)
    new = _Swap(layer, leaves, after, old.rows)
    every = batches(data)
    with evaluation_mode(model), progress("batches", _length(every), show=show, unit="batches") as advance:
        for batch in every:
            first = _answer(old.run(model, batch))
            second = _answer(new.run(model, batch))
            if not new.touched:
                raise ValueError("no sample in data reaches the layer. Pass data that runs through it.")
            samples = 1 if first is None else len(first)
            total += _count(found, new, samples)
            if first is not None and second is not None:
                _compare(found, first, second, samples)
            advance()
    if not found.inputs:
        raise ValueError("data has no sample. Pass at least one batch.")
    found.mean_change = total / max(found.touched, 1)
    return found


class _Swap:
    """Runs a model with other rows in some leaves of a layer: a hook replaces the outputs of these leaves.

    versus: rows to compare with, at the same inputs of the layer.
    """

    def __init__(
        self, layer: FFF, leaves: Sequence[int], rows: Mapping[str, Tensor], versus: Leaves | None = None
    ) -> None:
        device, self.versus = layer.node_weight.device, versus
        self.layer, self.index = layer, torch.tensor(leaves, device=device)
        own = {name: p for name, p in layer._parameters.items() if p is not None and name.startswith("leaf_")}
        parts = {name: parameter.detach()[self.index] for name, parameter in own.items()}
        parts |= {name: tensor.to(device) for name, tensor in rows.items()}
        every = {field: parts.get(f"leaf_{field}") for field in Leaves._fields}
        self.rows = Leaves(**every)  # type: ignore[arg-type]
        self.touched: list[Tensor] = []  # by call in the last run: place of inputs' leaves in `leaves`, or -1
        self.changes: list[Tensor] = []  # of each call: the norm of the output's change at touched inputs
        self.leading: list[torch.Size] = []

    def run(self, model: nn.Module, batch: Any) -> Any:
        """The model's output for a batch."""
        self.touched, self.changes, self.leading = [], [], []
        with self._hooked():
            return feed(model, batch)

    @guarded
    def _hooked(self) -> Iterator[None]:
        handle = self.layer.register_forward_hook(self._replace, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _replace(self, layer: FFF, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        x: Tensor = args[0] if args else kwargs["x"]
        flat = x.reshape(-1, layer.in_features).to(layer.node_weight.dtype)
        match = layer.route(flat).unsqueeze(1) == self.index  # (inputs, leaves)
        place = torch.where(match.any(1), match.int().argmax(1), -1)
        here = (place >= 0).nonzero()[:, 0]
        y = output.reshape(-1, layer.out_features).clone()
        if len(here):
            made = visit(flat[here], place[here], self.rows, layer.activation)
            y[here] = made.to(y.dtype)
            if self.versus is not None:
                other = visit(flat[here], place[here], self.versus, layer.activation)
                self.changes.append(_difference(other, made).norm(dim=-1))
        self.touched.append(place)
        self.leading.append(x.shape[:-1])
        return y.reshape(output.shape)


def _count(found: Traffic, new: _Swap, samples: int) -> float:
    """Add the inputs of one batch to the report; returns the sum of the changes at touched inputs."""
    seen = torch.zeros(samples, dtype=torch.bool)
    change = torch.cat([torch.zeros(1, dtype=torch.float64), *new.changes])
    for place, leading in zip(new.touched, new.leading, strict=True):
        is_touched = (place >= 0).cpu()
        found.inputs += len(place)
        found.touched += int(is_touched.sum())
        counts = torch.bincount(place[place >= 0].cpu(), minlength=len(found.by_leaf)).tolist()
        for leaf, count in zip(found.by_leaf, counts, strict=True):
            found.by_leaf[leaf] += count
        # A model may merge samples and tokens before the layer. If it does anything else, every sample counts as seen.
        whole = (leading[:1] == (samples,) or len(place) % samples == 0) if samples else False
        seen |= is_touched.reshape(samples, -1).any(1) if whole else is_touched.any()
    found.max_change = max(found.max_change, float(change.max()))
    found.samples += samples
    found.untouched_samples += int((~seen).sum())
    return float(change.sum())


def _compare(found: Traffic, first: Tensor, second: Tensor, samples: int) -> None:
    """Add the differences of the model's outputs to the report."""
    flat = [output.reshape(samples, -1) for output in (first, second)]
    if not flat[0].numel():
        return
    found.moved_samples += int((flat[0] != flat[1]).any(1).sum())
    found.max_output_change = max(found.max_output_change, float(_difference(*flat).abs().max()))
    answers = [output.reshape(-1, output.shape[-1]).argmax(-1) for output in (first, second)]
    found.answers += len(answers[0])
    found.changed_answers += int((answers[0] != answers[1]).sum())


def _difference(first: Tensor, second: Tensor) -> Tensor:
    return second.to("cpu", torch.float64) - first.to("cpu", torch.float64)


def _answer(output: Any) -> Tensor | None:
    """The tensor in a model's output, (samples, ..., numbers): itself, its logits, or the first one."""
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(found, Tensor):
        values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
        found = next((value for value in values if isinstance(value, Tensor)), None)
    if found is None or found.dim() > 1:
        return found
    return found.reshape(-1, 1)  # a number for each sample, or one for all


def _length(data: Any) -> int | None:
    return len(data) if hasattr(data, "__len__") else None
