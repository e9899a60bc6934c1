"""Triton kernels of sampled training for nodes: walks, the logits along a path, and their gradients.

Samples go in the order of their leaves. So the samples of a program share most of their path, whose rows come from the
first cache, and the samples of any node lie side by side. No tensor has the size (batch, nodes).

Logits and decisions are float32 sums of float32 products in every dtype, never TF32.
"""

import triton
import triton.language as tl

from .triton_walk_kernels import node_logits, row_blocks


@triton.jit
def walk_from(
    x_ptr, weight, bias, node_out_weight, node_out_bias, node_ptr, threshold_ptr, swap_ptr, leaf_ptr, batch,
    IN: tl.constexpr, DEPTH: tl.constexpr, N: tl.constexpr, ACT: tl.constexpr, THRESHOLD: tl.constexpr,
    SWAP: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """The leaf that each sample of a tile reaches from its node, as `paths.descend`."""
    sample = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    real = sample < batch
    row = tl.where(real, sample, 0)
    nodes = (weight, bias, node_out_weight, node_out_bias)
    x = ()
    if KEPT:
        x = row_blocks(x_ptr, row, real, IN, BLOCK, "", "")
    node = tl.load(node_ptr + row).to(tl.int32)
    for m in tl.range(DEPTH, num_stages=1):
        here = real & (node < (2 << m) - 1)  # a walk that starts further down waits for its level
        z = node_logits(x, x_ptr, row, node, here, nodes, IN, N, ACT, BLOCK, KEPT, "")
        if SWAP:
            z = tl.where(tl.load(swap_ptr + row * DEPTH + m) != 0, -z, z)
        right = z >= (tl.load(threshold_ptr + row * DEPTH + m) if THRESHOLD else 0)
        node = tl.where(here, 2 * node + 1 + right.to(tl.int32), node)
    tl.store(leaf_ptr + sample, (node - ((1 << DEPTH) - 1)).to(tl.int64), real)


@triton.jit
def path_logits(
    x_ptr, weight, bias, leaf_ptr, order_ptr, z_ptr, batch,
    IN: tl.constexpr, DEPTH: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """The logits on the path to the leaf of each sample of a tile: (batch, DEPTH), in the order of the batch."""
    place = tl.program_id(0) * BM + tl.arange(0, BM)
    real = place < batch
    row = tl.load(order_ptr + place, real, 0)
    leaf = tl.load(leaf_ptr + place, real, 0)
    nodes = (weight, bias, weight, weight)
    x = ()
    if KEPT:
        x = row_blocks(x_ptr, row, real, IN, BLOCK, "", "")
    for m in tl.range(DEPTH, num_stages=1):
        node = (1 << m) - 1 + (leaf >> (DEPTH - m))
        z = node_logits(x, x_ptr, row, node, real, nodes, IN, 1, "identity", BLOCK, KEPT, "")
        tl.store(z_ptr + row * DEPTH + m, z, real)


@triton.jit
def path_inputs(
    weight, grad_ptr, leaf_ptr, order_ptr, out_ptr, batch, blocks,
    IN: tl.constexpr, DEPTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The gradient of x: the sum over the path of each logit's gradient times its node's row. BN columns of a tile.

    In the order of the leaves; `tree_inputs` has several paths of a sample, in the order of the batch.
    """
    place = (tl.program_id(0) // blocks) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % blocks) * BN + tl.arange(0, BN)
    real = place < batch
    inside = n < IN
    row = tl.load(order_ptr + place, real, 0)
    leaf = tl.load(leaf_ptr + place, real, 0)
    total = tl.zeros((BM, BN), tl.float32)
    for m in tl.range(DEPTH, num_stages=1):
        node = ((1 << m) - 1 + (leaf >> (DEPTH - m))).to(tl.int64)
        g = tl.load(grad_ptr + row * DEPTH + m, real, 0.0)
        w = tl.load(weight + node[:, None] * IN + n[None, :], real[:, None] & inside[None, :], 0.0)
        total += g[:, None] * w.to(tl.float32)
    to = out_ptr + row[:, None] * IN + n[None, :]
    tl.store(to, total.to(out_ptr.dtype.element_ty), real[:, None] & inside[None, :])


@triton.jit
def path_outer(
    x_ptr, grad_ptr, leaf_ptr, end_ptr, order_ptr, out_ptr, bias_ptr, part_ptr, batch, samples, span, blocks,
    IN: tl.constexpr, DEPTH: tl.constexpr, LEVELS: tl.constexpr, STRIDE: tl.constexpr, PRECISION: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient of the nodes: for each node, the rows of x below it, times the gradients of its logits.

    A block of BN columns over `span` places. All levels go in one product: where a leaf's rows end, the nodes that end
    there are written. A node whose rows lie in several spans is written in parts, as a leaf by `leaf_outer`: a slot has
    LEVELS rows of STRIDE numbers: IN, and one for the bias. Place p has row order[p] of the gradient, and row
    order[p] % samples of x.
    """
    chunk = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    n = block * BN + tl.arange(0, BN)
    inside = n < IN
    level = tl.arange(0, LEVELS)
    known = level < DEPTH
    shift = tl.where(known, DEPTH - level, 0)
    first = (1 << tl.where(known, level, 0)) - 1
    r = tl.arange(0, BR)
    start = chunk * span
    stop = min(start + span, batch)
    opening = tl.load(leaf_ptr + start) >> shift
    before = tl.load(leaf_ptr + start - 1, start > 0, -1) >> shift
    began = (opening != before).to(tl.int32)  # whether the node's rows began within the span, by level
    total = tl.zeros((LEVELS, BN), tl.float32)
    sums = tl.zeros((LEVELS,), tl.float32)
    place = start
    leaf = tl.load(leaf_ptr + start)
    end = tl.load(end_ptr + start)
    while place < stop:
        until = min(end, stop)
        next_leaf = tl.load(leaf_ptr + until, until < batch, -1)  # on its way while this leaf is added up
        next_end = tl.load(end_ptr + until, until < batch, 0)
        for at in tl.range(place, until, BR, num_stages=STAGES):
            real = at + r < until
            row = tl.load(order_ptr + at + r, real, 0)
            g_at = grad_ptr + row[None, :] * DEPTH + level[:, None]
            g = tl.load(g_at, known[:, None] & real[None, :], 0.0)
            x = tl.load(x_ptr + (row % samples)[:, None] * IN + n[None, :], real[:, None] & inside[None, :], 0.0)
            # 16-bit inputs as TF32, which has all their bits; a gradient in 16 bits would lose small numbers.
            total = tl.dot(g, x.to(tl.float32), total, input_precision=PRECISION)
            sums += tl.sum(g, 1)
        ends = (leaf >> shift) != (next_leaf >> shift)
        written = (ends | (until == stop)) & known
        whole = written & ends & (began == 1)
        node = (first + (leaf >> shift)).to(tl.int64)
        out_at = out_ptr + node[:, None] * IN + n[None, :]
        tl.store(out_at, total.to(out_ptr.dtype.element_ty), whole[:, None] & inside[None, :])
        part = written & ((began == 0) | (ends == 0))
        slot = part_ptr + ((2 * chunk + began).to(tl.int64) * LEVELS + level) * STRIDE
        tl.store(slot[:, None] + n[None, :], total, part[:, None] & inside[None, :])
        if block == 0:
            tl.store(bias_ptr + node, sums.to(bias_ptr.dtype.element_ty), whole)
            tl.store(slot + IN, sums, part)
        total = tl.where(written[:, None], 0.0, total)
        sums = tl.where(written, 0.0, sums)
        began = tl.where(written, 1, began)
        place = until
        leaf = next_leaf
        end = next_end
