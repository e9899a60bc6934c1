"""A small vision transformer whose feedforward blocks are chosen by the caller: the model of the paper's Table 3.

An image is cut into square patches, and each patch with its position becomes a token. The paper gives four layers,
patches of 4, a dimension of 128, feedforward layers of width 128 and dropout of 0.1 on the input. Our choices for the
rest:

- 4 heads of 32 in each attention
- pre-norm layers with a final norm, which train without a warm-up
- the head sees the mean of all tokens; a class token would be a 65th, and 64 is a power of two
- learned positions, and ReLU in the feedforward blocks, as in the authors' code
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastff.checks import check_int, check_probability


class ViT(nn.Module):
    """Images (batch, channels, height, width) -> logits (batch, classes).

    Args:
        image: (channels, height, width).
        feedforward: builds the feedforward block of a layer, given the dimension of its inputs and outputs.
        dropout: on the tokens that enter the first layer.
    """

    def __init__(
        self,
        image: tuple[int, int, int],
        classes: int,
        *,
        feedforward: Callable[[int], nn.Module],
        layers: int = 4,
        dim: int = 128,
        heads: int = 4,
        patch: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        channels, height, width = image
        if height % patch or width % patch:
            raise ValueError(f"patches of {patch} must fill the image; got one of {height} x {width}.")
        check_probability("dropout", dropout)
        self.patch, self.dropout = check_int("patch", patch, 1), dropout
        tokens = (height // patch) * (width // patch)
        self.embed = nn.Linear(channels * patch * patch, dim)
        self.place = nn.Parameter(0.02 * torch.randn(tokens, dim))
        count = check_int("layers", layers, 1)
        self.layers = nn.Sequential(*[Layer(dim, heads, feedforward(dim)) for _ in range(count)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = F.dropout(self.embed(patches(x, self.patch)) + self.place, self.dropout, self.training)
        y: Tensor = self.head(self.norm(self.layers(tokens)).mean(-2))
        return y


class Layer(nn.Module):
    """Attention, then the feedforward block, each on normalised inputs and with a residual connection."""

    def __init__(self, dim: int, heads: int, feedforward: nn.Module) -> None:
        super().__init__()
        if dim % check_int("heads", heads, 1):
            raise ValueError(f"dim must be a multiple of heads; got {dim} and {heads}.")
        self.heads = heads
        self.attention_norm, self.feedforward_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.join = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.feedforward = feedforward

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.attention_norm(x))
        y: Tensor = x + self.feedforward(self.feedforward_norm(x))
        return y

    def _attend(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # (batch, tokens, 3, heads, dim / heads)
        q, k, v = heads.transpose(-2, -4).unbind(-3)  # (batch, heads, tokens, dim / heads)
        y = F.scaled_dot_product_attention(q, k, v)
        joined: Tensor = self.join(y.transpose(-2, -3).flatten(-2))
        return joined


def patches(x: Tensor, size: int) -> Tensor:
    """The squares of an image, row by row: (batch, channels, height, width) -> (batch, squares, channels * size**2)."""
    # Not a convolution: torch.func.vmap would turn it into a slow grouped one.
    cut = x.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))  # (batch, channels, rows, size, columns, size)
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(-3).flatten(1, 2)
