"""Triton kernels for few samples a leaf: no sample waits for another.

`descend`, one program a sample, walks the tree and runs the leaf: one launch, for small leaves. A large leaf of one
sample is spread over the GPU instead: `sample_hidden` by neurons, `sample_output` by output columns.
"""

import triton
import triton.language as tl

from .triton_activations import act
from .triton_walk_kernels import (
    let_next_begin,
    row_blocks,
    row_numbers,
    row_products,
    wait,
    wait_in_turn,
    walk_round,
)


@triton.jit
def descend(
    x_ptr, weight, bias, node_out_weight, node_out_bias, in_weight, in_bias, in_scale, gate_weight, gate_bias,
    gate_scale, out_weight, out_bias, out_scale, leaf_ptr, hidden_ptr, y_ptr,
    IN: tl.constexpr, OUT: tl.constexpr, DEPTH: tl.constexpr, L: tl.constexpr, N: tl.constexpr, ACT: tl.constexpr,
    GATED: tl.constexpr, IN_BIAS: tl.constexpr, GATE_BIAS: tl.constexpr, OUT_BIAS: tl.constexpr, INT8: tl.constexpr,
    ROUTE: tl.constexpr, VISIT: tl.constexpr, ROUND: tl.constexpr, BL: tl.constexpr,
    BLOCK: tl.constexpr, BN: tl.constexpr, KEPT_NODE: tl.constexpr, KEPT: tl.constexpr, WARPS: tl.constexpr,
    FENCE: tl.constexpr, LATE: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One sample: its leaf, walked to or read, and the leaf's output."""
    wait(PDL)
    if EARLY:
        let_next_begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * IN
    if ROUTE:
        node = tl.program_id(0) * 0
        nodes = (weight, bias, node_out_weight, node_out_bias)
        # Rounds are unrolled where that is short: 128 blocks took Triton a minute to compile, one round of them 2 s.
        if (DEPTH // ROUND) * IN <= 32 * BLOCK:
            for _ in tl.static_range(DEPTH // ROUND):
                node = walk_round(x_ptr, node, nodes, ROUND, IN, N, ACT, BLOCK, KEPT_NODE, FENCE, LATE, WARPS)
        else:
            for _ in tl.range(DEPTH // ROUND, num_stages=1):
                node = walk_round(x_ptr, node, nodes, ROUND, IN, N, ACT, BLOCK, KEPT_NODE, FENCE, LATE, WARPS)
        if DEPTH % ROUND > 0:
            node = walk_round(x_ptr, node, nodes, DEPTH % ROUND, IN, N, ACT, BLOCK, KEPT_NODE, FENCE, LATE, WARPS)
        leaf = node - ((1 << DEPTH) - 1)
        tl.store(leaf_ptr + row, leaf.to(leaf_ptr.dtype.element_ty))
    else:
        leaf = tl.load(leaf_ptr + row)
    if VISIT:
        leaf = leaf.to(tl.int64)
        j = row_numbers(BL, WARPS)
        one = tl.zeros((WARPS, 1), tl.int32)
        x = ()
        if KEPT and not LATE:
            x = row_blocks(x_ptr, one, one == 0, IN, BLOCK, "", "")
        hidden = row_products(x, x_ptr, one, in_weight, leaf * L + j, j < L, IN, BLOCK, KEPT, "", "", FENCE, LATE)
        if INT8:
            hidden *= tl.load(in_scale + leaf * L + j, j < L, 0.0).to(tl.float32)
        if IN_BIAS:
            hidden += tl.load(in_bias + leaf * L + j, j < L, 0.0).to(tl.float32)
        if GATED:
            gate = row_products(x, x_ptr, one, gate_weight, leaf * L + j, j < L, IN, BLOCK, KEPT, "", "", FENCE, LATE)
            if INT8:
                gate *= tl.load(gate_scale + leaf * L + j, j < L, 0.0).to(tl.float32)
            if GATE_BIAS:
                gate += tl.load(gate_bias + leaf * L + j, j < L, 0.0).to(tl.float32)
            hidden = act(gate, ACT) * hidden
        else:
            hidden = act(hidden, ACT)
        if INT8:
            hidden *= tl.load(out_scale + leaf * L + j, j < L, 0.0).to(tl.float32)
        # The hidden layer goes through memory, where every thread finds all of it: the second product is then a sum of
        # rows, and each thread has its columns. A sum across warps is several times slower (5.5 us of 12, H200).
        hidden_ptr += row * BL
        tl.store(hidden_ptr + j, tl.where(j < L, hidden, 0.0))  # not 0 yet where x is infinite
        tl.debug_barrier()
        n = tl.arange(0, BN)
        UNROLL: tl.constexpr = min(L, 32)
        for at in tl.range(0, OUT, BN):
            inside = at + n < OUT
            y = tl.zeros((BN,), tl.float32)
            if OUT_BIAS:
                y += tl.load(out_bias + leaf * OUT + at + n, inside, 0.0).to(tl.float32)
            for begin in tl.range(0, L, UNROLL):
                for i in tl.static_range(UNROLL):
                    r = begin + i
                    used = inside if L % UNROLL == 0 else inside & (r < L)
                    w = tl.load(out_weight + (leaf * L + r) * OUT + at + n, used, 0.0)
                    y += tl.load(hidden_ptr + r) * w.to(tl.float32)
            tl.store(y_ptr + row * OUT + at + n, y.to(y_ptr.dtype.element_ty), inside)


@triton.jit
def sample_hidden(
    x_ptr, in_weight, in_bias, in_scale, gate_weight, gate_bias, gate_scale, out_scale, leaf_ptr, hidden_ptr, width,
    IN: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, IN_BIAS: tl.constexpr, GATE_BIAS: tl.constexpr,
    INT8: tl.constexpr, BL: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr, FENCE: tl.constexpr,
    LATE: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some hidden neurons of the leaf of one sample."""
    wait_in_turn(PDL)
    row = tl.program_id(0)
    leaf = tl.load(leaf_ptr + row)
    x_ptr += row.to(tl.int64) * IN
    j = tl.program_id(1) * BL + row_numbers(BL, WARPS)
    neuron = leaf * width + j
    real = j < width
    one = tl.zeros((WARPS, 1), tl.int32)
    x = ()
    if KEPT and not LATE:
        x = row_blocks(x_ptr, one, one == 0, IN, BLOCK, "", "")
    hidden = row_products(x, x_ptr, one, in_weight, neuron, real, IN, BLOCK, KEPT, "", "", FENCE, LATE)
    if INT8:
        hidden *= tl.load(in_scale + neuron, real, 0.0).to(tl.float32)
    if IN_BIAS:
        hidden += tl.load(in_bias + neuron, real, 0.0).to(tl.float32)
    if GATED:
        gate = row_products(x, x_ptr, one, gate_weight, neuron, real, IN, BLOCK, KEPT, "", "", FENCE, LATE)
        if INT8:
            gate *= tl.load(gate_scale + neuron, real, 0.0).to(tl.float32)
        if GATE_BIAS:
            gate += tl.load(gate_bias + neuron, real, 0.0).to(tl.float32)
        hidden = act(gate, ACT) * hidden
    else:
        hidden = act(hidden, ACT)
    if INT8:
        hidden *= tl.load(out_scale + neuron, real, 0.0).to(tl.float32)
    tl.store(hidden_ptr + row.to(tl.int64) * width + j, hidden, real)


@triton.jit
def sample_output(
    out_weight, out_bias, leaf_ptr, hidden_ptr, y_ptr,
    L: tl.constexpr, OUT: tl.constexpr, OUT_BIAS: tl.constexpr, BJ: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Some output columns of the leaf of one sample. The first weights are on their way while the hidden layer ends.

    WIDE: the columns fill all threads, so that a thread has whole columns, and adds up BJ rows by itself.
    """
    row = tl.program_id(0)
    leaf = tl.load(leaf_ptr + row, cache_modifier=".cg")
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    j = tl.arange(0, BJ)
    inside = n < OUT
    w_at = out_weight + (leaf * L + j)[:, None] * OUT + n[None, :]
    w = tl.load(w_at, (j < L)[:, None] & inside[None, :], 0.0, cache_modifier=".cg")
    wait_in_turn(PDL)
    total = tl.zeros((1 if WIDE else BJ, BN), tl.float32)
    hidden_ptr += row.to(tl.int64) * L
    for at in tl.range(0, L, BJ):
        hidden = tl.load(hidden_ptr + at + j, at + j < L, 0.0)
        part = hidden[:, None] * w.to(tl.float32)
        total += tl.sum(part, 0)[None, :] if WIDE else part
        w_at += BJ * OUT
        w = tl.load(w_at, (at + BJ + j < L)[:, None] & inside[None, :], 0.0)
    y = tl.sum(total, 0)
    if OUT_BIAS:
        y += tl.load(out_bias + leaf * OUT + n, inside, 0.0).to(tl.float32)
    tl.store(y_ptr + row.to(tl.int64) * OUT + n, y.to(y_ptr.dtype.element_ty), inside)
