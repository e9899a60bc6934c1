"""Statistics of each node and leaf of one FFF layer: counts, labels, loss, entropies, margins and examples.

Data streams through the model once. Only counts, sums and histograms are kept for every node and leaf, and a bounded
number of inputs as examples.

Values for nodes and leaves are in one tensor, in heap order: node i at i, and leaf j of a tree with n nodes at n + j.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..batches import batches, check_reached, evaluation_mode, feed, watch_inputs
from ..checks import check_int
from ..layer import FFF, fff_layers
from ..progress import progress as show_progress
from .collect import Collector, Example, Loss, read_batch
from .counts import Histogram
from .usage import leaves_used, smallest_share

KINDS = {
    "typical": "near the mean of the region's inputs",
    "boundary": "nearest to the boundary",
    "random": "drawn at random",
    "hardest": "with the highest loss",
}
OVERLOADED = 3.0  # times the fair share


@dataclass(frozen=True, repr=False)
class Region:
    """One node or leaf: the inputs that reach it."""

    name: str  # such as "leaf 5"
    group: int  # its place in the tensors of `Statistics`
    count: int
    share: float  # of all inputs
    labels: dict[int, int]  # most frequent first; empty without labels
    tokens: dict[int, int]  # of a language model; most frequent first
    purity: float | None  # the share of the most frequent label
    accuracy: float | None  # if the model's output has a score for each label
    target: float | None  # the mean of real-valued targets
    loss: float | None
    entropy: float | None  # of the node's decision; of a leaf: the mean over its path; None if nothing arrives
    margin: float | None  # the mean distance to the node's boundary; of a leaf: to the nearest boundary of its region
    examples: dict[str, list[Example]]  # by kind: typical, boundary, random and, with a loss, hardest

    def __repr__(self) -> str:
        numbers = {
            "purity": self.purity,
            "accuracy": self.accuracy,
            "loss": self.loss,
            "entropy": self.entropy,
            "margin": self.margin,
        }
        parts = [f"{name} {value:.3g}" for name, value in numbers.items() if value is not None]
        return f"Region({', '.join([self.name, f'{self.count} inputs', *parts])})"


@dataclass(frozen=True, repr=False)
class Statistics:
    """Statistics of one FFF layer's nodes and leaves. Tensors are (nodes + leaves,), in heap order."""

    layer: str  # its name in the model
    depth: int
    samples: int
    batch_size: int  # the inputs of the layer in a batch, on average
    count: Tensor
    entropy: Tensor  # NaN where nothing arrives, as in all means
    margin: Tensor
    margin_is_distance: bool  # False for node_width > 1: margins are then logits, not distances
    loss: Tensor | None
    target: Tensor | None
    purity: Tensor | None
    accuracy: Tensor | None
    labels: Histogram | None
    tokens: Histogram | None
    centre: Tensor  # (nodes + leaves, in): the mean of the layer's inputs there
    examples: dict[str, list[list[Example]]]  # by kind, then by node or leaf

    @property
    def num_leaves(self) -> int:
        """2**depth."""
        return 1 << self.depth

    @property
    def leaf_count(self) -> Tensor:
        """(leaves,): the inputs of each leaf."""
        return self.count[self.num_leaves - 1 :]

    @property
    def leaves_used(self) -> int:
        """The number of leaves with an input."""
        return leaves_used(self.leaf_count)

    @property
    def smallest_share(self) -> float:
        """The inputs of the least used leaf, over its fair share, samples / leaves."""
        return smallest_share(self.leaf_count)

    @property
    def effective_leaves(self) -> float:
        """exp of the entropy of the leaves' shares: all leaves if used evenly, 1 if one leaf has all inputs."""
        share = self.leaf_count.double() / max(self.samples, 1)
        return float(torch.special.entr(share).sum().exp())

    def dead_leaves(self) -> list[int]:
        """The leaves that no input reaches."""
        return torch.nonzero(self.leaf_count == 0).flatten().tolist()

    def overloaded_leaves(self, factor: float = OVERLOADED) -> list[int]:
        """The leaves with more than `factor` times their fair share of the inputs, fullest first."""
        count = self.leaf_count
        order = torch.argsort(count, descending=True, stable=True)
        return order[count[order] * self.num_leaves > factor * self.samples].tolist()

    def leaf(self, leaf: int) -> Region:
        """One leaf, 0 to 2**depth - 1."""
        if not 0 <= leaf < self.num_leaves:
            raise ValueError(f"a tree of depth {self.depth} has leaves 0 to {self.num_leaves - 1}; got {leaf}.")
        return self._region(f"leaf {leaf}", self.num_leaves - 1 + leaf)

    def node(self, node: int) -> Region:
        """One node, 0 (the root) to 2**depth - 2."""
        if not 0 <= node < self.num_leaves - 1:
            raise ValueError(f"a tree of depth {self.depth} has {self.num_leaves - 1} nodes, from 0; got {node}.")
        return self._region(f"node {node}", node)

    def _region(self, name: str, group: int) -> Region:
        def number(values: Tensor | None) -> float | None:
            value = torch.nan if values is None else float(values[group])
            return None if value != value else value

        return Region(
            name=name,
            group=group,
            count=(count := int(self.count[group])),
            share=count / max(self.samples, 1),
            labels=self.labels.of(group) if self.labels else {},
            tokens=self.tokens.of(group) if self.tokens else {},
            purity=number(self.purity),
            accuracy=number(self.accuracy),
            target=number(self.target),
            loss=number(self.loss),
            entropy=number(self.entropy),
            margin=number(self.margin),
            examples={kind: found[group] for kind, found in self.examples.items()},
        )

    def __repr__(self) -> str:
        at = f" of {self.layer!r}" if self.layer else ""
        return (
            f"Statistics({self.samples} inputs{at}, {self.leaves_used} of {self.num_leaves} leaves used, "
            f"{self.effective_leaves:.1f} effective, smallest share {self.smallest_share:.2f})"
        )


def statistics(
    model: nn.Module,
    data: Any,
    layer: str | None = None,
    *,
    loss: Loss | None = None,
    examples: int = 4,
    context: int = 8,
    memory: int = 2**28,
    seed: int = 0,
    progress: bool = True,
) -> Statistics:
    """Assign data to the nodes and leaves of one FFF layer of a model, which runs in evaluation mode.

    A batch is a tensor, a tuple (input, target), or a mapping of keyword arguments whose targets are called "labels".
    Integer targets are labels; real ones are averaged. Integer inputs (batch, length), one for each input of the layer,
    are tokens. If the model's output has a score for each label, the highest is the prediction. Positions masked by an
    "attention_mask" do not count.

    Args:
        data: a batch or an iterable of batches, such as a DataLoader. It is read once and never held.
        layer: the layer's name, if the model has several FFF layers.
        loss: loss(output, target), a tensor with one number for each sample or each position.
        examples: how many inputs to keep of each kind, for each node and leaf.
        context: tokens to keep on each side of an example's token.
        memory: bytes for examples. Fewer are kept if they would not fit.
        seed: of the random examples.
        progress: show a progress bar (needs rich).

    Typical examples are those nearest to the mean of the region's inputs, out of 64 or fewer random ones, or of all
    inputs if the region has no more.
    """
    name, found = find_layer(model, layer)
    collector = Collector(
        found,
        loss=loss,
        examples=check_int("examples", examples, 0),
        context=check_int("context", context, 0),
        memory=check_int("memory", memory, 0),
        seed=seed,
    )
    seen: list[Tensor] = []
    total, stream = _length(data), batches(data)
    with (
        evaluation_mode(model),
        watch_inputs({name: found}, lambda _, __, x: seen.append(x)),
        show_progress("assigning inputs to leaves", total, show=progress, unit="batches") as advance,
    ):
        for batch in stream:
            seen.clear()
            output = feed(model, batch)
            collector.add(seen, read_batch(batch), output)
            advance()
    check_reached([name], {name: collector.samples})
    return _finish(name, found, collector)


def find_layer(model: nn.Module, name: str | None) -> tuple[str, FFF]:
    """The FFF layer of this name; without a name, the only one."""
    layers = fff_layers(model)
    if name is None:
        if len(layers) > 1:
            raise ValueError(f"the model has {len(layers)} FFF layers. Pass layer=, one of {', '.join(layers)}.")
        name = next(iter(layers))
    if name not in layers:
        raise ValueError(f"layer must be one of {', '.join(map(repr, layers))}; got {name!r}.")
    return name, layers[name]


def _length(data: Any) -> int | None:
    """The number of batches, if known."""
    found = batches(data)
    try:
        return len(found)  # type: ignore[arg-type]
    except TypeError:
        return None


def _finish(name: str, layer: FFF, collector: Collector) -> Statistics:
    count, right, of = collector.count, collector.right_sum, collector.right_of

    def mean(total: Tensor) -> Tensor:
        return total / count.double()

    return Statistics(
        layer=name,
        depth=layer.depth,
        samples=collector.samples,
        batch_size=round(collector.samples / max(collector.batches, 1)),
        count=count,
        entropy=mean(collector.entropy),
        margin=mean(collector.margin),
        margin_is_distance=layer.node_width == 1,
        loss=None if collector.loss is None else mean(collector.loss_sum),
        target=None if collector.target_sum is None else mean(collector.target_sum),
        purity=collector.labels.purity() if collector.labels else None,
        accuracy=None if right is None or of is None else right / of,
        labels=collector.labels,
        tokens=collector.tokens,
        centre=collector.centre(),
        examples=collector.examples(),
    )
