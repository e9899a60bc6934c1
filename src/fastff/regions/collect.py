"""Collects the data of `statistics`, batch by batch, in bounded memory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layer import FFF
from ..training.losses import bernoulli_entropy
from .counts import MOST, Histogram, Lowest, path_groups
from .geometry import path

POOL = 64  # typical inputs of a leaf are sought among up to 64 random ones
CELLS = 2**24  # numbers in a chunk of node logits

Loss = Callable[[Any, Any], Tensor]
IGNORED = -100  # the label of an input without one, as in torch's cross entropy


@dataclass(frozen=True)
class Example:
    """One input of the layer."""

    index: int  # the sample's place in data
    position: int  # the place inside the sample: of a token or patch; 0 if the layer takes a sample as a whole
    leaf: int
    margins: Tensor = field(repr=False)  # (depth,): the distance to the boundary of each node on the path
    content: Tensor | None = field(repr=False)  # the model's input; of tokens, those around this one
    offset: int = 0  # the place of this token in `content`
    label: int | None = None
    target: float | None = None
    prediction: int | None = None
    loss: float | None = None

    @property
    def margin(self) -> float:
        """The distance to the nearest boundary of its region."""
        return float(self.margins.min()) if len(self.margins) else torch.inf


class Batch(NamedTuple):
    """The parts of a batch that statistics read."""

    x: Tensor
    target: Any
    mask: Tensor | None  # (batch, length): 0 for padding


class Rows(NamedTuple):
    """Data about the layer's inputs in one batch: one number for each."""

    sample: Tensor  # the number of the input, counted over all batches
    leaf: Tensor
    groups: Tensor  # (rows, depth + 1)
    margins: Tensor  # (rows, depth)
    entropies: Tensor  # (rows, depth)
    label: Tensor | None
    target: Tensor | None
    prediction: Tensor | None
    loss: Tensor | None


def read_batch(batch: Any) -> Batch:
    """The input, target and mask of a batch, as `feed` passes it to a model."""
    if isinstance(batch, Mapping):
        x = batch.get("input_ids", next((v for v in batch.values() if isinstance(v, Tensor)), None))
        if not isinstance(x, Tensor):
            raise TypeError(f"a batch needs a tensor; got a mapping with {', '.join(map(str, batch)) or 'nothing'}.")
        return Batch(x, batch.get("labels"), batch.get("attention_mask"))
    if isinstance(batch, tuple | list):
        return Batch(batch[0], batch[1] if len(batch) > 1 else None, None)
    return Batch(batch, None, None)


def decisions(layer: FFF, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The leaf (rows,) of each input, and the logits and margins on its path, (rows, depth).

    A margin is the distance to the node's boundary; for node_width > 1, which has no planes, the size of the logit.
    """
    x = x.to(layer.node_weight.dtype)  # autocast may have passed another dtype
    if layer.node_width == 1:
        found = path(layer, x)
        return found.leaf, found.logit, found.distance.double()
    leaf, depth = layer.route(x), layer.depth
    rows = max(1, CELLS // max(layer.num_nodes, 1))
    pairs = zip(x.split(rows), path_groups(leaf, depth)[:, :depth].split(rows), strict=True)
    logits = torch.cat([layer.node_logits(part).gather(1, nodes) for part, nodes in pairs])
    return leaf, logits, logits.double().abs()


class Collector:
    """Counts, sums and examples of one layer. `add` takes a batch."""

    def __init__(self, layer: FFF, *, loss: Loss | None, examples: int, context: int, memory: int, seed: int) -> None:
        self.layer, self.loss, self.context = layer, loss, context
        groups = layer.num_nodes + layer.num_leaves
        zeros = partial(torch.zeros, dtype=torch.float64)
        self.samples = self.batches = self._inputs = 0
        self.count = torch.zeros(groups, dtype=torch.int64)
        self.entropy, self.margin, self.loss_sum = (zeros(groups) for _ in range(3))
        self.target_sum: Tensor | None = None
        self.right_sum: Tensor | None = None  # of predictions; right_of: of labels beside them
        self.right_of: Tensor | None = None
        self.labels: Histogram | None = None
        self.tokens: Histogram | None = None
        self._sum = zeros(layer.num_leaves, layer.in_features)
        self._wanted, self._memory = examples, memory
        self._lowest: dict[str, Lowest] = {}
        self._kept: dict[int, tuple[Example, Tensor]] = {}
        self._generator = torch.Generator().manual_seed(seed)

    def add(self, seen: list[Tensor], batch: Batch, output: Any) -> None:
        """Take in a batch: the layer's inputs, (rows, in) for each of its calls, and the model's output."""
        for x in seen:
            if x.shape[0]:
                self._add(x, batch, output)
        self.batches += 1
        self._inputs += len(batch.x)

    def _add(self, x: Tensor, batch: Batch, output: Any) -> None:
        length = self._length(x, batch)
        rows = self._rows(x, batch, output)
        kept = torch.ones(len(x), dtype=torch.bool)
        if batch.mask is not None and batch.mask.numel() == len(x):
            kept = batch.mask.reshape(-1).bool().cpu()
        x, origin = x.detach().cpu()[kept].float(), torch.nonzero(kept).flatten()
        rows = Rows._make(None if part is None else part[kept] for part in rows)
        rows = rows._replace(sample=torch.arange(self.samples, self.samples + len(x)))
        self._count(x, rows)
        tokens = batch.x.reshape(-1).cpu()[kept] if _holds_tokens(batch.x, length) else None
        if tokens is not None:
            self.tokens = self.tokens or Histogram(self.layer.depth)
            self.tokens.add(rows.leaf, tokens.long())
        self._keep(x, rows, origin, batch.x, length, tokens is not None)
        self.samples += len(x)

    def _length(self, x: Tensor, batch: Batch) -> int:
        """The inputs of the layer for each sample: 1, or the positions of a sequence."""
        if not len(batch.x) or len(x) % len(batch.x):
            raise ValueError(
                f"the layer must see the same number of inputs for each sample; it saw {len(x)} for a batch of "
                f"{len(batch.x)}. Pass batches of one sample."
            )
        return len(x) // len(batch.x)

    def _rows(self, x: Tensor, batch: Batch, output: Any) -> Rows:
        layer = self.layer
        leaf, on_path, margins = decisions(layer, x)
        groups = path_groups(leaf, layer.depth)
        entropies = bernoulli_entropy((on_path * layer.temperature_tensor).double())
        label = target = prediction = loss = None
        if isinstance(batch.target, Tensor):
            label, target = _targets(batch.target, len(x), len(batch.x))
        if label is not None:
            prediction = _predictions(output, label)
        if self.loss is not None:
            loss = self._losses(output, batch, len(x))
        sample = torch.arange(len(x))
        known = (leaf, groups, margins, entropies, label, target, prediction, loss)
        return Rows._make([sample, *(None if part is None else part.detach().cpu() for part in known)])

    def _losses(self, output: Any, batch: Batch, rows: int) -> Tensor:
        if batch.target is None:
            raise ValueError("a loss needs targets. Pass batches (input, target), or mappings with 'labels'.")
        target = batch.target
        if isinstance(target, Tensor):
            target = target.to(self.layer.node_weight.device)
        assert self.loss is not None
        loss = self.loss(output, target)
        if not isinstance(loss, Tensor) or loss.numel() not in (rows, len(batch.x)):
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"loss must return a tensor with a number for each of {len(batch.x)} samples, or each of {rows} inputs "
                f'of the layer; got {got}. Pass reduction="none".'
            )
        return loss.detach().double().reshape(-1).repeat_interleave(rows // loss.numel())

    def _count(self, x: Tensor, rows: Rows) -> None:
        groups, depth = rows.groups, self.layer.depth
        flat = groups.flatten()
        self.count += torch.bincount(flat, minlength=len(self.count))
        self.entropy.index_add_(0, flat, _with_leaf(rows.entropies, rows.entropies.mean(1) if depth else None))
        self.margin.index_add_(0, flat, _with_leaf(rows.margins, rows.margins.amin(1) if depth else None, torch.inf))
        self._sum.index_add_(0, rows.leaf, x.double())
        sums = {"loss_sum": rows.loss, "target_sum": rows.target}
        if rows.label is not None and rows.prediction is not None:
            sums |= {"right_sum": rows.prediction == rows.label, "right_of": rows.label >= 0}
        for name, values in sums.items():
            if values is not None:
                total = getattr(self, name)
                total = torch.zeros_like(self.entropy) if total is None else total
                setattr(self, name, total.index_add_(0, flat, values.double().repeat_interleave(depth + 1)))
        if rows.label is not None:
            self.labels = self.labels or Histogram(depth)
            self.labels.add(rows.leaf, rows.label.long())

    def _keep(self, x: Tensor, rows: Rows, origin: Tensor, inputs: Tensor, length: int, tokens: bool) -> None:
        """Offer the batch as examples, and store the contents of those that stay."""
        if not self._lowest:
            span = 2 * self.context + 1 if tokens else inputs[0].numel()
            self._make_room(span * inputs.element_size() + x.shape[1] * 4)
        depth = self.layer.depth
        flat, sample = rows.groups.flatten(), rows.sample.repeat_interleave(depth + 1)
        draw = torch.rand(len(x), generator=self._generator, dtype=torch.float64)
        scores = {"random": draw.repeat_interleave(depth + 1)}
        scores["boundary"] = _with_leaf(rows.margins, rows.margins.amin(1) if depth else None, torch.inf)
        if rows.loss is not None:
            scores["hardest"] = -rows.loss.repeat_interleave(depth + 1)
        for kind, lowest in self._lowest.items():
            lowest.add(flat, scores[kind], sample)
        alive = torch.cat([lowest.sample.flatten() for lowest in self._lowest.values()])
        alive = torch.unique(alive[alive >= 0])
        self._kept = {number: self._kept[number] for number in alive[alive < self.samples].tolist()}
        inputs = inputs.detach()
        for row in (alive[alive >= self.samples] - self.samples).tolist():
            made = self._example(rows, row, int(origin[row]), inputs, length, tokens)
            self._kept[int(rows.sample[row])] = made, x[row].clone()

    def _make_room(self, size: int) -> None:
        """Decide how many examples fit into the memory, at `size` bytes each."""
        kinds, groups = (3 if self.loss is not None else 2), len(self.count)
        fit = self._memory // max(size, 1)
        wanted = min(self._wanted, fit // (kinds * groups))
        pool = max(wanted, min(POOL, fit // (2 * self.layer.num_leaves))) if wanted else 0
        self._lowest = {"random": Lowest(groups, pool), "boundary": Lowest(groups, wanted)}
        if self.loss is not None:
            self._lowest["hardest"] = Lowest(groups, wanted)
        self._wanted = wanted

    def _example(self, rows: Rows, row: int, origin: int, inputs: Tensor, length: int, tokens: bool) -> Example:
        index, position = divmod(origin, length)
        content, offset = inputs[index], 0
        if tokens and content.dim():
            start = max(0, position - self.context)
            content, offset = content[start : position + self.context + 1], position - start
        example = Example(
            index=self._inputs + index,
            position=position,
            leaf=int(rows.leaf[row]),
            margins=rows.margins[row].clone(),
            content=content.cpu().clone(),
            offset=offset,
        )
        label = None if rows.label is None else int(rows.label[row])
        return replace(
            example,
            label=label if label is None or label >= 0 else None,
            target=None if rows.target is None else float(rows.target[row]),
            prediction=None if rows.prediction is None else int(rows.prediction[row]),
            loss=None if rows.loss is None else float(rows.loss[row]),
        )

    def centre(self) -> Tensor:
        """The mean input of every node and leaf, NaN where nothing arrives: (groups, in)."""
        levels = [self._sum]
        while len(levels[0]) > 1:
            levels.insert(0, levels[0].unflatten(0, (-1, 2)).sum(1))
        return torch.cat(levels) / self.count.double().unsqueeze(1)

    def examples(self) -> dict[str, list[list[Example]]]:
        """The examples of every kind, for each node and leaf."""
        groups = range(len(self.count))
        centre = self.centre().float()
        found = {"typical": [self._typical(group, centre[group]) for group in groups]}
        for kind, lowest in self._lowest.items():
            found[kind] = [[self._kept[number][0] for number in lowest.of(g)[: self._wanted]] for g in groups]
        order = [kind for kind in ("typical", "boundary", "random", "hardest") if kind in found]
        return {kind: found[kind] for kind in order}

    def _typical(self, group: int, centre: Tensor) -> list[Example]:
        numbers = self._lowest["random"].of(group)
        if not numbers:
            return []
        distance = (torch.stack([self._kept[number][1] for number in numbers]) - centre).norm(dim=1)
        nearest = torch.argsort(distance, stable=True)[: self._wanted].tolist()
        return [self._kept[numbers[i]][0] for i in nearest]


def _with_leaf(on_path: Tensor, leaf: Tensor | None, empty: float = 0.0) -> Tensor:
    """The values of the nodes on the path, then the leaf's value, flat; `empty` for a tree without nodes."""
    last = torch.full((len(on_path),), empty, dtype=torch.float64) if leaf is None else leaf
    return torch.cat([on_path, last.unsqueeze(1)], 1).flatten()


def _targets(target: Tensor, rows: int, samples: int) -> tuple[Tensor | None, Tensor | None]:
    """Targets as labels or as real numbers, one for each input of the layer; None for others."""
    if target.is_complex() or not rows:
        return None, None
    if target.numel() not in (rows, samples):
        if target.dim() > 1 and len(target) == samples:
            return None, None  # several numbers for each sample
        raise ValueError(f"a batch has {target.numel()} targets for {samples} samples. Pass one for each.")
    flat = target.reshape(-1).repeat_interleave(rows // target.numel())
    if flat.is_floating_point():
        return None, flat
    label = flat.long()
    if (bad := label[((label < 0) & (label != IGNORED)) | (label >= MOST)]).numel():
        raise ValueError(f"labels are 0, 1, 2, ..., and {IGNORED} for an input without one; got {int(bad[0])}.")
    return label, None


def _predictions(output: Any, label: Tensor) -> Tensor | None:
    """The class with the highest score, if the output has for each sample a row of scores, one for each label."""
    output, rows = getattr(output, "logits", output), len(label)
    if not isinstance(output, Tensor) or output.dim() < 2 or output.shape[-1] < max(2, int(label.max()) + 1):
        return None
    found = output.reshape(-1, output.shape[-1]).argmax(-1)
    return None if not len(found) or rows % len(found) else found.repeat_interleave(rows // len(found))


def _holds_tokens(x: Tensor, length: int) -> bool:
    """Whether the model's input is a sequence of integers, one for each input of the layer."""
    return not x.is_floating_point() and x.dim() == 2 and x.shape[1] == length
