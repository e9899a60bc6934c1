"""The operations of a sampled step on a GPU: how its Triton kernels are launched, and the same by torch operations.

triton_sampled.py makes a pass of them. Torch operations replace a kernel that fails.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .. import sampling
from ..tensors import Tree
from . import paths, triton_segments
from .choice import attempt
from .triton_arguments import stored
from .triton_launch import launch_kernel
from .triton_paths import gradient_precision, walk_options
from .triton_segments import part_stride, span_of
from .triton_size import power_of_two

_TOP = 5  # levels whose nodes, up to 32, meet a tile of samples in one product
_WHOLE = 8  # a walk of up to that many levels is all product
SMALL = 1 << _TOP  # a tree with fewer nodes has the gradient of all of them in one product


class Walked(NamedTuple):
    """What `walk` finds. Entry p * batch + i is path p of sample i; path 0 is the visited one."""

    logits: Tensor  # (paths with logits, batch, depth) float32, times the temperature
    key: Tensor  # (paths, batch): the leaf, plus the number of leaves for alternatives
    leaf: Tensor  # (paths, batch) int64
    share: Tensor  # (paths, batch) float32: as `Sampled.weight`, or the weight of a flipped walk's draw
    level: Tensor  # (alternatives, batch) int32: where they leave the visited path


def walk(
    x: Tensor, weight: Tensor, bias: Tensor, uniforms: Tensor, temperature: Tensor, mixture: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The paths that a step takes, as `Walked`. uniforms (batch, alternatives, 1 + depth): see `sample_paths`."""

    def by_torch() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return _walk_by_torch(x, weight, bias, uniforms, temperature, mixture)

    return attempt("paths", lambda: _walk(x, weight, bias, uniforms, temperature, mixture), by_torch, x, weight)


def _walk_by_torch(
    x: Tensor, weight: Tensor, bias: Tensor, uniforms: Tensor, temperature: Tensor, mixture: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    alternatives, depth = uniforms.shape[1], uniforms.shape[2] - 1
    tree, leaves = Tree(weight, bias), len(weight) + 1
    root = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    leaf = [paths.descend_by_torch(x, tree, "identity", root, None, None)]
    logits = [paths.logits(x, paths.nodes(leaf[0], depth), tree, "identity") * temperature]
    estimator = "mixture" if mixture else "even"
    level, weights = sampling.place(logits[0], estimator, uniforms[:, :, 0])
    for a in range(alternatives):
        at = level[:, a : a + 1]
        node = paths.nodes(leaf[0], depth).gather(1, at).squeeze(1)
        other = 2 * node + 1 + ~paths.turns(leaf[0], depth).gather(1, at).squeeze(1)
        threshold = torch.logit(uniforms[:, a, 1:]) / temperature if mixture else None
        leaf.append(paths.descend_by_torch(x, tree, "identity", other, threshold, None))
        if mixture:
            logits.append(paths.logits(x, paths.nodes(leaf[-1], depth), tree, "identity") * temperature)
    found = torch.stack(leaf)
    key = found.clone()
    key[1:] += leaves
    rest = weights.T
    own = 1 - rest.sum(0, keepdim=True) if mixture else torch.ones_like(rest[:1])
    return torch.stack(logits), key.to(_key_dtype(leaves)), found, torch.cat([own, rest]), level.T.int().contiguous()


def _key_dtype(leaves: int) -> torch.dtype:
    """A radix sort passes over eight bits of its keys after the other."""
    return torch.uint8 if leaves <= 2**7 else torch.int16 if leaves <= 2**14 else torch.int32


def _walk(
    x: Tensor, weight: Tensor, bias: Tensor, uniforms: Tensor, temperature: Tensor, mixture: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from .triton_sampled_kernels import sample_paths

    x, uniforms = stored(x), stored(uniforms)
    batch, alternatives, depth, leaves = len(x), uniforms.shape[1], uniforms.shape[2] - 1, len(weight) + 1
    found = logits, key, leaf, share, level = empty_walk(x, weight, bias, uniforms, temperature, mixture)
    if batch:
        options, width, top = walk_options(x), power_of_two(x.shape[1]), _top(x, depth)
        if depth <= _WHOLE and x.element_size() == 2:
            top, options = depth, options | {"BM": 64, "num_warps": 8 if depth == _WHOLE else 4}
        with torch.cuda.device_of(x):
            launch_kernel(
                sample_paths, (-(-batch // options["BM"]),),
                x, stored(weight), stored(bias), uniforms, stored(temperature), logits, key, leaf, share, level, batch,
                leaves,
                # With two levels, Triton 3.6 cannot compile the running sums.
                IN=x.shape[1], DEPTH=depth, LEVELS=max(8, power_of_two(depth)), ALTERNATIVES=alternatives,
                MIXTURE=mixture, TOP=top, BK=max(16, min(128 if top <= _TOP else 64, width)), **options,
            )  # fmt: skip
    return found


def empty_walk(
    x: Tensor, weight: Tensor, bias: Tensor, uniforms: Tensor, temperature: Tensor, mixture: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tensors as `walk` returns them, without values."""
    batch, alternatives, depth = x.shape[0], uniforms.shape[1], uniforms.shape[2] - 1
    entries = 1 + alternatives, batch
    logits = uniforms.new_empty(1 + alternatives * mixture, batch, depth)
    key, leaf = (x.new_empty(entries, dtype=dtype) for dtype in (_key_dtype(weight.shape[0] + 1), torch.int64))
    level = x.new_empty(alternatives, batch, dtype=torch.int32)
    return logits, key, leaf, uniforms.new_empty(entries), level


def _top(x: Tensor, depth: int) -> int:
    """The levels that go as a product. Not in float32, where tensor cores would need several passes."""
    return min(depth, _TOP) if x.element_size() == 2 else 0


def places(key: Tensor, leaves: int) -> tuple[Tensor, Tensor]:
    """Of each place in the sorted keys: its leaf, and where its key ends; int32."""

    def by_torch() -> tuple[Tensor, Tensor]:
        return torch.where(key < leaves, key, key - leaves).int(), triton_segments.ends(key)

    return attempt("places", lambda: _places(key, leaves), by_torch, key.unsqueeze(1), key)


def _places(key: Tensor, leaves: int) -> tuple[Tensor, Tensor]:
    from .triton_sampled_kernels import sorted_places

    leaf, end = (torch.empty(len(key), dtype=torch.int32, device=key.device) for _ in range(2))
    if len(key):
        block = 128
        with torch.cuda.device_of(key):
            launch_kernel(
                sorted_places, (-(-len(key) // block),), key, leaf, end, len(key), leaves,
                STEPS=power_of_two(len(key)).bit_length(), BLOCK=block, num_warps=4,
            )  # fmt: skip
    return leaf, end


def score_gradients(
    logits: Tensor,
    leaf: Tensor,
    share: Tensor,
    level: Tensor,
    credit: Tensor,
    losses: Tensor | None,
    temperature: Tensor,
    mixture: bool,
) -> Tensor:
    """The gradient of the logits before the temperature, given the scores' and, from the losses, the one of `logits`.

    All paths with logits: (paths, batch, depth). Without losses, the visited path of a mixture has none: zeros.
    """

    def by_torch() -> Tensor:
        depth = logits.shape[2]
        turn, p = paths.turns(leaf[: len(logits)], depth), logits.sigmoid()
        weight = (credit * share[1:]).unsqueeze(-1)
        found = torch.zeros_like(logits) if losses is None else losses.clone()
        if mixture:
            found[1:] += weight * (turn[1:].to(p.dtype) - p[1:])
        else:
            at = torch.arange(depth, device=level.device) == level.unsqueeze(-1)
            found[0] += (weight * at).sum(0) * p[0] * (1 - p[0]) * torch.where(turn[0], -1, 1)
        return found * temperature

    kernels = lambda: _score_gradients(logits, leaf, share, level, credit, losses, temperature, mixture)  # noqa: E731
    return attempt("scores", kernels, by_torch, logits.flatten(0, 1), credit)


def _score_gradients(
    logits: Tensor,
    leaf: Tensor,
    share: Tensor,
    level: Tensor,
    credit: Tensor,
    losses: Tensor | None,
    temperature: Tensor,
    mixture: bool,
) -> Tensor:
    from .triton_sampled_kernels import score_gradients

    (_, batch, depth), out = logits.shape, logits.new_empty(logits.shape)
    if batch:
        with torch.cuda.device_of(out):
            launch_kernel(
                score_gradients, (-(-batch // 64),),
                stored(logits), leaf, stored(share), level, stored(credit),
                logits if losses is None else stored(losses), stored(temperature), out, batch,
                DEPTH=depth, LEVELS=max(2, power_of_two(depth)), ALTERNATIVES=len(level), MIXTURE=mixture,
                WALKED=losses is not None, BM=64, num_warps=4,
            )  # fmt: skip
    return out


def tree_inputs(grad: Tensor, leaf: Tensor, weight: Tensor, given: Tensor | None, start: int) -> Tensor:
    """The gradient of x through the logits of the paths from `start` on, given theirs; plus `given`."""

    def by_torch() -> Tensor:
        d_x = weight.new_zeros(leaf.shape[1], weight.shape[1], dtype=grad.dtype)
        for p in range(start, len(grad)):
            node, like = paths.nodes(leaf[p], grad.shape[2]), torch.empty_like(d_x)
            found = paths.gradients(like, node, weight, weight[:, 0], grad[p], (True, False, False))[0]
            assert found is not None
            d_x += found
        return (d_x if given is None else d_x + given).to(weight.dtype)

    return attempt("input gradient", lambda: _tree_inputs(grad, leaf, weight, given, start), by_torch, grad[0], weight)


def _tree_inputs(grad: Tensor, leaf: Tensor, weight: Tensor, given: Tensor | None, start: int) -> Tensor:
    from .triton_sampled_kernels import tree_inputs

    weight, (known, batch, depth), features = stored(weight), grad.shape, weight.shape[1]
    out = weight.new_empty(batch, features)
    if batch:
        columns = min(256, max(16, power_of_two(features)))
        blocks = -(-features // columns)
        with torch.cuda.device_of(out):
            launch_kernel(
                tree_inputs, (-(-batch // 32) * blocks,),
                weight, stored(grad), leaf, out if given is None else stored(given), out, batch, blocks,
                IN=features, DEPTH=depth, PATHS=known, FROM=start, GIVEN=given is not None, TOP=_top(weight, depth),
                PRECISION=gradient_precision(weight), BM=32, BN=columns, num_warps=4,
            )  # fmt: skip
    return out


def small_tree_outer(x: Tensor, grad: Tensor, leaf: Tensor, weight: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """The gradients of the weights and biases of a tree with less than 32 nodes, given the logits' on all paths."""

    def by_torch() -> tuple[Tensor, Tensor]:
        node = paths.nodes(leaf[start : len(grad)], grad.shape[2]).flatten(0, 1)
        rows = x.repeat(len(grad) - start, 1), node, weight, weight[:, 0], grad[start:].flatten(0, 1)
        return paths.gradients(*rows, (False, True, True))[1:]  # type: ignore[return-value]

    return attempt("node gradient", lambda: _small_tree_outer(x, grad, leaf, weight, start), by_torch, x, weight)


def _small_tree_outer(x: Tensor, grad: Tensor, leaf: Tensor, weight: Tensor, start: int) -> tuple[Tensor, Tensor]:
    from .triton_sampled_kernels import add_chunks, top_outer

    x, (known, batch, depth), features = stored(x), grad.shape, x.shape[1]
    out, bias = weight.new_zeros(weight.shape), weight.new_zeros(len(weight))
    if not batch:
        return out, bias
    columns, width = max(16, power_of_two(len(weight) + 1)), min(128, max(16, power_of_two(features)))
    blocks, stride = -(-features // width), part_stride(features + 1)
    span = span_of(batch, blocks)
    chunks = -(-batch // span)
    part = torch.empty(chunks * columns * stride, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        launch_kernel(
            top_outer, (chunks * blocks,), x, stored(grad), leaf, part, batch, span, blocks,
            IN=features, DEPTH=depth, PATHS=known, FROM=start, COLUMNS=columns, STRIDE=stride,
            PRECISION=gradient_precision(x), BR=32, BN=width, num_warps=4,
        )  # fmt: skip
        block = min(128, power_of_two(features + 1))
        launch_kernel(
            add_chunks, (len(weight) * -(-(features + 1) // block),), part, out, bias, chunks,
            IN=features, COLUMNS=columns, STRIDE=stride, MANY=64, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out, bias
