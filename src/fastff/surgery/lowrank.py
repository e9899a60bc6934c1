"""LowRank: a feedforward block with every matrix in two factors, the control that a user would try before a tree.

    W (out, in)  ~  A (out, rank) @ B (rank, in)          rank (in + out) products instead of in * out

The block is fitted to the same inputs as a tree. A factored W keeps the directions of W x with most of the variance
over the inputs, which is the best fit of its rank (reduced-rank regression). The last matrix is first fitted by least
squares to the block's output, as a tree's leaves are: so it makes up in part for the loss in the first ones.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..activations import apply
from .blocks import Block

_RIDGE = 1e-3  # as for leaves: how strongly output weights stay near the block's


class LowRank(nn.Module):
    """A block down(activation(up(x))), gated or not, whose matrices have this rank; (..., in) -> (..., out)."""

    def __init__(self, block: Block, rank: int) -> None:
        super().__init__()
        self.rank, self.activation = rank, block.activation
        like = {"device": block.weights.up.device, "dtype": block.weights.up.dtype}

        def factors(in_features: int, out_features: int) -> nn.Sequential:
            first = nn.Linear(in_features, rank, bias=False, **like)
            return nn.Sequential(first, nn.Linear(rank, out_features, bias=block.bias, **like))

        self.up = factors(block.in_features, block.width)
        self.gate = None if block.weights.gate is None else factors(block.in_features, block.width)
        self.down = factors(block.width, block.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.hidden(x))

    def hidden(self, x: Tensor) -> Tensor:
        """The hidden layer: (..., width)."""
        return apply(self.activation, self.up(x), None if self.gate is None else self.gate(x))


def flops_of_rank(block: Block, rank: int) -> int:
    """The FLOPs per token of a LowRank: two for each product of a weight and a number."""
    inner = 1 if block.weights.gate is None else 2
    return 2 * rank * (inner * (block.in_features + block.width) + block.width + block.out_features)


def rank_for(block: Block, flops: int) -> int:
    """The largest rank with at most this many FLOPs per token: at least 1, and at most the full rank."""
    full = min(block.in_features, block.width, block.out_features)
    return max(1, min(full, flops // flops_of_rank(block, 1)))


@torch.no_grad()
def fit_low_rank_(layer: LowRank, block: Block, x: Tensor) -> None:
    """Fit the factors to the block's function at its inputs x (samples, in)."""
    try:
        _fit_(layer, block, x.split(8192))
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # sums that overflow
        fits = False
    else:
        fits = all(bool(parameter.isfinite().all()) for parameter in layer.parameters())
    if not fits:
        raise ValueError(
            f"the low-rank factors for the inputs of {block.name} exceed the range of {x.dtype}: the inputs are too "
            "small or too large. Standardise the data, or compare the model in a wider dtype."
        )


def _fit_(layer: LowRank, block: Block, parts: Sequence[Tensor]) -> None:
    w = block.weights
    mean, square = _moments([part.double() for part in parts], centred=block.bias)
    _factor_(layer.up, w.up.double(), w.up_bias, mean, square)
    if layer.gate is not None and w.gate is not None:
        _factor_(layer.gate, w.gate.double(), w.gate_bias, mean, square)
    down = w.down.double()
    hidden = [layer.hidden(part).double() for part in parts]
    missing = [block(part).double() - h @ down.mT for part, h in zip(parts, hidden, strict=True)]
    mean, square = _moments(hidden, centred=block.bias)
    offset = torch.cat(missing).mean(0)
    cross = torch.zeros_like(down.mT)
    for h, m in zip(hidden, missing, strict=True):
        cross += (h - mean).mT @ (m - offset) if block.bias else h.mT @ m
    ridge = _RIDGE * square.diagonal().mean() + 1e-12
    more = torch.linalg.solve(square + ridge * torch.eye(len(square)).to(square), cross).mT  # (out, width)
    _factor_(layer.down, down + more, offset - more @ mean if block.bias else None, mean, square)


def _moments(parts: list[Tensor], *, centred: bool) -> tuple[Tensor, Tensor]:
    """The mean (features,) of samples in parts, and the sum of their outer products, about the mean if centred."""
    mean = torch.stack([part.sum(0) for part in parts]).sum(0) / sum(map(len, parts))
    square = torch.stack([(p - mean).mT @ (p - mean) if centred else p.mT @ p for p in parts]).sum(0)
    return mean, square


def _factor_(pair: nn.Sequential, weight: Tensor, bias: Tensor | None, mean: Tensor, square: Tensor) -> None:
    """Set the two linear layers to the part of x -> weight x + bias that varies most.

    mean, square: moments of x. The dropped directions' mean contribution goes into the bias, if there is one.
    """
    first, second = (layer for layer in pair if isinstance(layer, nn.Linear))
    kept = _leading(weight, square, first.out_features)  # (out, rank), orthonormal columns
    first.weight.copy_(kept.mT @ weight)
    second.weight.copy_(kept)
    if second.bias is not None:
        lost = weight @ mean - kept @ (kept.mT @ (weight @ mean))
        second.bias.copy_(lost if bias is None else bias.double() + lost)


def _leading(weight: Tensor, square: Tensor, rank: int) -> Tensor:
    """The directions of weight x with the largest variance, given the second moments of x: (out, rank)."""
    if weight.shape[0] <= weight.shape[1]:
        return torch.linalg.eigh(weight @ square @ weight.mT).eigenvectors[:, -rank:]
    values, vectors = torch.linalg.eigh(square)
    root = vectors * values.clamp_min(0).sqrt()
    return torch.linalg.svd(weight @ root, full_matrices=False).U[:, :rank]
