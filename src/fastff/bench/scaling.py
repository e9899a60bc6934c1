"""What a step of sampled training costs with leaves over several ranks: bytes, FLOPs and memory, on paper.

A prediction for sizes that no machine here can hold, by `fastff.parallel.shard_leaves_`: every rank has a part of the
leaves, all nodes, and its part of the batch. With B samples per rank, W ranks, depth d, leaf width l, a alternatives,
D = in + out, P = l D + l + out parameters per leaf, and e bytes per number:

    all-to-all    e B D (2 + a) + 8 ((1 + a) B + 2 W)  rows and outputs of 1 + a leaves; their gradients for one
    all-reduce    (2**d - 1) (e (in + 1) + 8)          gradients of the nodes, which all ranks hold; and their shares
    leaves        2 l D B (3 + a) FLOPs                1 + a forward passes, and a backward of two more
    nodes         8 in d B (1 + a) FLOPs               per path: a walk, its logits and two products of backward
    memory        4 e ((2**d / W) P + (2**d - 1) (in + 1))    parameters, gradients and AdamW's two moments

`docs/research/scaling.md` compares it with what the code does at small sizes.
"""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Step:
    """A training step of one layer. Bytes, FLOPs and rows are one rank's mean."""

    depth: int
    leaf_width: int
    in_features: int
    out_features: int
    batch: int  # samples per rank
    ranks: int = 1
    alternatives: int = 1
    itemsize: int = 4  # bytes of a number: of parameters, moments and rows alike
    sparse: bool = False  # gradients and the optimizer touch what was visited alone (LazyAdamW, one rank)
    split_nodes: bool = False  # not built: a rank holds the nodes above its own leaves, and the top of the tree

    @property
    def leaves(self) -> int:
        """Leaves of this rank."""
        return 2**self.depth // self.ranks

    @property
    def leaf_bytes(self) -> int:
        """The parameters of one leaf."""
        width = self.in_features + self.out_features
        return self.itemsize * (self.leaf_width * width + self.leaf_width + self.out_features)

    @property
    def node_bytes(self) -> int:
        """The parameters of one node."""
        return self.itemsize * (self.in_features + 1)

    @property
    def nodes(self) -> int:
        """Nodes of this rank."""
        return self.leaves - 1 + self.shared_nodes if self.split_nodes else 2**self.depth - 1

    @property
    def shared_nodes(self) -> int:
        """Nodes that all ranks hold."""
        return self.ranks - 1 if self.split_nodes else 2**self.depth - 1

    @property
    def visited(self) -> float:
        """Leaves of this rank that at least one sample visits, if samples choose leaves evenly and independently."""
        return self._reached(self.batch)

    def _reached(self, rows: int) -> float:
        return self.leaves * -math.expm1(-rows / self.leaves)

    @property
    def visited_nodes(self) -> float:
        """Nodes on the paths of this rank's samples and their alternatives, if these are even and independent."""
        paths = self.batch * (1 + self.alternatives)
        return sum(2**m * -math.expm1(-paths / 2**m) for m in range(self.depth))

    @property
    def exchanged(self) -> int:
        """Bytes that a rank hands to all-to-alls, those for itself included: a part 1 / ranks."""
        rows = self.itemsize * self.batch * (self.in_features + self.out_features) * (2 + self.alternatives)
        return rows + 8 * ((1 + self.alternatives) * self.batch + 2 * self.ranks)

    @property
    def reduced(self) -> int:
        """Bytes of the node gradients and of the shares for the balance loss (float32 at least) that are averaged."""
        return self.shared_nodes * (self.node_bytes + 2 * max(self.itemsize, 4)) if self.ranks > 1 else 0

    @property
    def flops(self) -> int:
        leaf = 2 * self.leaf_width * (self.in_features + self.out_features) * (3 + self.alternatives)
        node = 8 * self.in_features * self.depth * (1 + self.alternatives)
        return self.batch * (leaf + node)

    @property
    def resident(self) -> int:
        """Bytes of parameters, gradients and moments."""
        return 4 * (self.leaves * self.leaf_bytes + self.nodes * self.node_bytes)

    @property
    def transient(self) -> float:
        """Peak bytes beyond parameters and moments: the gradients, and four tensors of rows."""
        leaves, nodes = (self.visited, self.visited_nodes) if self.sparse else (self.leaves, self.nodes)
        rows = 2 * self.batch * (self.in_features + self.out_features) * self.itemsize
        return leaves * self.leaf_bytes + nodes * self.node_bytes + rows

    @property
    def traffic(self) -> float:
        """Bytes between processor and memory: leaves, nodes on the paths, rows, and eight passes of the optimizer."""
        leaves, nodes = (self.visited, self.visited_nodes) if self.sparse else (self.leaves, self.nodes)
        read = (2 * self.visited + self._reached(self.alternatives * self.batch)) * self.leaf_bytes
        walks = 4 * self.batch * self.depth * self.node_bytes * (1 + self.alternatives)
        rows = 4 * (2 + self.alternatives) * self.batch * (self.in_features + self.out_features) * self.itemsize
        return read + walks + rows + 8 * (leaves * self.leaf_bytes + nodes * self.node_bytes)


@dataclass(frozen=True)
class Machine:
    """Rates of one rank, per second."""

    flops: float
    memory: float  # bytes
    network: float  # bytes, each way


# A part of the manufacturer's peaks that large operations reach: an assumption, not a measurement.
H200 = Machine(flops=0.5 * 989e12, memory=0.7 * 4.8e12, network=0.7 * 50e9)


def seconds(step: Step, machine: Machine, imbalance: float = 1.0) -> dict[str, float]:
    """The parts of a step, one after the other. `imbalance`: rows of the busiest rank over the mean."""
    away = (step.ranks - 1) / step.ranks
    return {
        "products": imbalance * step.flops / machine.flops,
        "memory": step.traffic / machine.memory,
        "all-to-all": imbalance * away * step.exchanged / machine.network,
        "all-reduce": 2 * away * step.reduced / machine.network,  # a ring
    }


def zipf(leaves: int, exponent: float) -> torch.Tensor:
    """Shares of leaves by Zipf's law, in an order drawn at random; exponent 0 is even: (leaves,)."""
    share = torch.arange(1, leaves + 1, dtype=torch.float64) ** -exponent
    return (share / share.sum())[torch.randperm(leaves)]


def imbalance(shares: torch.Tensor, samples: int, ranks: int, draws: int = 20) -> float:
    """Rows of the busiest rank over the mean, by simulation: `samples` of all ranks choose leaves by their shares."""
    by_rank = shares.view(ranks, -1).sum(1)
    rows = torch.distributions.Multinomial(samples, by_rank).sample((draws,))
    return float(rows.max(1).values.mean() / (samples / ranks))
