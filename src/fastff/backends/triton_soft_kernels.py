"""Triton kernels. Imported when one is first launched, never by `import fastff`.

The soft pass between its two matrix products. One program handles one sample: its row of the first product, [hidden
layer of all leaves | gates | node logits], becomes the row [weighted hidden layer | mixture] of the second product's
operand. The whole tree of a sample sits in the registers of a program, so neither pass writes anything in between.
"""

import triton
import triton.language as tl

from .triton_activations import act, slope


@triton.jit
def _logit(row_ptr, flip_ptr, node, scale, FLIP: tl.constexpr):
    """The logits that decide, at these nodes: scaled by the temperature, turned where the children are transposed."""
    z = tl.load(row_ptr + node).to(tl.float32) * scale
    if FLIP:
        z = tl.where(tl.load(flip_ptr + node), -z, z)
    return z


@triton.jit
def _weights(row_ptr, flip_ptr, leaf, scale, DEPTH: tl.constexpr, FLIP: tl.constexpr, HARD: tl.constexpr):
    """The weight of each leaf: the product of the branch weights on its path, or 1 for the leaf of the hard pass."""
    weight = leaf.to(tl.float32) * 0 + 1
    for m in tl.static_range(DEPTH):
        z = _logit(row_ptr, flip_ptr, (1 << m) - 1 + (leaf >> (DEPTH - m)), scale, FLIP)
        right = ((leaf >> (DEPTH - 1 - m)) & 1) == 1
        if HARD:
            weight = tl.where((z >= 0) == right, weight, 0.0)
        else:
            weight *= tl.sigmoid(tl.where(right, z, -z))
    return weight


@triton.jit
def weigh_forward(
    first_ptr, flip_ptr, temperature_ptr, packed_ptr, logits_ptr, mixture_ptr, first_stride, packed_stride,
    DEPTH: tl.constexpr, L: tl.constexpr, L_BLOCK: tl.constexpr, ACT: tl.constexpr,
    GATED: tl.constexpr, BIAS: tl.constexpr, FLIP: tl.constexpr, HARD: tl.constexpr,
):  # fmt: skip
    LEAVES: tl.constexpr = 1 << DEPTH
    WIDTH: tl.constexpr = LEAVES * L
    row = tl.program_id(0).to(tl.int64)
    first_ptr += row * first_stride
    packed_ptr += row * packed_stride
    node_ptr = first_ptr + WIDTH * (2 if GATED else 1)
    flip_ptr += row * (LEAVES - 1)
    scale = tl.load(temperature_ptr).to(tl.float32)
    dtype = packed_ptr.dtype.element_ty

    leaf = tl.arange(0, LEAVES)
    node = leaf < LEAVES - 1
    tl.store(logits_ptr + row * (LEAVES - 1) + leaf, tl.load(node_ptr + leaf, node, 0).to(tl.float32) * scale, node)
    weight = _weights(node_ptr, flip_ptr, leaf, scale, DEPTH, FLIP, HARD)  # (leaves,)
    tl.store(mixture_ptr + row * LEAVES + leaf, weight)

    neuron = tl.arange(0, L_BLOCK)
    column = leaf[:, None] * L + neuron[None, :]  # (leaves, l)
    inside = (neuron < L)[None, :] & (leaf >= 0)[:, None]
    hidden = tl.load(first_ptr + column, inside, 0).to(tl.float32)
    if GATED:
        hidden = act(tl.load(first_ptr + WIDTH + column, inside, 0).to(tl.float32), ACT) * hidden
    else:
        hidden = act(hidden, ACT)
    tl.store(packed_ptr + column, (hidden * weight[:, None]).to(dtype), inside)
    if BIAS:
        tl.store(packed_ptr + WIDTH + leaf, weight.to(dtype))
        pad = tl.arange(0, 8)
        end: tl.constexpr = WIDTH + LEAVES
        tl.store(
            packed_ptr + end + pad, (pad * 0).to(dtype), pad < packed_stride - end
        )  # contiguous: the stride is the columns


@triton.jit
def weigh_backward(
    first_ptr, flip_ptr, temperature_ptr, d_packed_ptr, d_logits_ptr, d_first_ptr, first_stride, d_packed_stride,
    d_first_stride,
    DEPTH: tl.constexpr, L: tl.constexpr, L_BLOCK: tl.constexpr, ACT: tl.constexpr,
    GATED: tl.constexpr, BIAS: tl.constexpr, FLIP: tl.constexpr, HARD: tl.constexpr,
):  # fmt: skip
    LEAVES: tl.constexpr = 1 << DEPTH
    WIDTH: tl.constexpr = LEAVES * L
    NODE: tl.constexpr = WIDTH * (2 if GATED else 1)
    row = tl.program_id(0).to(tl.int64)
    first_ptr += row * first_stride
    d_first_ptr += row * d_first_stride
    d_packed_ptr += row * d_packed_stride
    node_ptr = first_ptr + NODE
    flip_ptr += row * (LEAVES - 1)
    d_logits_ptr += row * (LEAVES - 1)
    scale = tl.load(temperature_ptr).to(tl.float32)
    dtype = d_first_ptr.dtype.element_ty

    leaf = tl.arange(0, LEAVES)
    soft = _weights(node_ptr, flip_ptr, leaf, scale, DEPTH, FLIP, False)  # (leaves,)
    used = soft
    if HARD:
        used = _weights(node_ptr, flip_ptr, leaf, scale, DEPTH, FLIP, True)

    neuron = tl.arange(0, L_BLOCK)
    column = leaf[:, None] * L + neuron[None, :]  # (leaves, l)
    inside = (neuron < L)[None, :] & (leaf >= 0)[:, None]
    x = tl.load(first_ptr + column, inside, 0).to(tl.float32)
    d_product = tl.load(d_packed_ptr + column, inside, 0).to(tl.float32)
    d_hidden = d_product * used[:, None]
    if GATED:
        gate = tl.load(first_ptr + WIDTH + column, inside, 0).to(tl.float32)
        hidden = act(gate, ACT) * x
        tl.store(d_first_ptr + column, (d_hidden * act(gate, ACT)).to(dtype), inside)
        tl.store(d_first_ptr + WIDTH + column, (d_hidden * x * slope(gate, ACT)).to(dtype), inside)
    else:
        hidden = act(x, ACT)
        tl.store(d_first_ptr + column, (d_hidden * slope(x, ACT)).to(dtype), inside)
    d_weight = tl.sum(tl.where(inside, d_product * hidden, 0.0), 1)
    if BIAS:
        d_weight += tl.load(d_packed_ptr + WIDTH + leaf).to(tl.float32)

    # dL/dz = sigmoid(-z) S_right - sigmoid(z) S_left, S the sum of c dL/dc below a child: one sweep up the tree.
    below = soft * d_weight
    side = tl.arange(0, 2)[None, :]
    for up in tl.static_range(DEPTH):
        pairs = tl.reshape(below, (1 << (DEPTH - 1 - up), 2))
        left = tl.sum(tl.where(side == 0, pairs, 0.0), 1)
        right = tl.sum(tl.where(side == 1, pairs, 0.0), 1)
        node = (1 << (DEPTH - 1 - up)) - 1 + tl.arange(0, 1 << (DEPTH - 1 - up))
        z = _logit(node_ptr, flip_ptr, node, scale, FLIP)
        d_z = tl.sigmoid(-z) * right - tl.sigmoid(z) * left
        if FLIP:
            d_z = tl.where(tl.load(flip_ptr + node), -d_z, d_z)
        tl.store(d_first_ptr + NODE + node, ((d_z + tl.load(d_logits_ptr + node)) * scale).to(dtype))
        below = left + right
    pad = tl.arange(0, 8)
    end: tl.constexpr = NODE + LEAVES - 1
    tl.store(
        d_first_ptr + end + pad, (pad * 0).to(dtype), pad < d_first_stride - end
    )  # contiguous: the stride is the columns
