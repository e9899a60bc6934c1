"""Triton kernels for layers of few neurons: a tile of samples goes through the nodes and through all leaves at once.

Where all leaves together are hardly wider than one, that is faster than sorting samples by leaf. `whole_layer` reads
the inputs of a tile once. If they are wide and tiles are few, `first_products` spreads their products over the GPU
first, in parts of the features, and `whole_layer` adds up the parts.

An infinity or NaN in the second matrix of an unvisited leaf reaches the output: it is multiplied by zero.
"""

import triton
import triton.language as tl

from .triton_activations import act
from .triton_walk_kernels import let_next_begin, read_parts, wait, wait_in_turn, walk_down


@triton.jit
def _products(
    x_ptr, row, weight, in_weight, gate_weight, begin, end,
    IN: tl.constexpr, NODES: tl.constexpr, NEURONS: tl.constexpr, COLUMNS: tl.constexpr, BL: tl.constexpr,
    GATED: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The products of some rows of x with all nodes, neurons and gates, over the features from begin to end."""
    BM: tl.constexpr = row.shape[0]
    i = tl.arange(0, COLUMNS)
    j = tl.arange(0, BL)
    k = tl.arange(0, BK)
    x_row = x_ptr + row[:, None] * IN
    # Rows beyond the end stand for the first: loads need no mask, and what they give is not used or set to 0.
    n_row = weight + tl.where(i < NODES, i, 0)[None, :] * IN
    neuron = tl.where(j < NEURONS, j, 0)
    w_row = in_weight + neuron[None, :] * IN
    g_row = gate_weight + neuron[None, :] * IN
    z = tl.zeros((BM, COLUMNS), tl.float32)
    hidden = tl.zeros((BM, BL), tl.float32)
    gate = tl.zeros((BM, BL), tl.float32)
    for at in tl.range(begin, end, BK, num_stages=STAGES):
        if EVEN:
            x = tl.load(x_row + at + k[None, :])
            n = tl.load(n_row + at + k[:, None])
            w = tl.load(w_row + at + k[:, None])
        else:
            inside = at + k < IN
            x = tl.load(x_row + at + k[None, :], inside[None, :], 0.0)
            n = tl.load(n_row + at + k[:, None], inside[:, None], 0.0)
            w = tl.load(w_row + at + k[:, None], inside[:, None], 0.0)
        z = tl.dot(x, n, z, input_precision="ieee")
        hidden = tl.dot(x, w, hidden, input_precision="ieee")
        if GATED:
            if EVEN:
                w = tl.load(g_row + at + k[:, None])
            else:
                w = tl.load(g_row + at + k[:, None], (at + k < IN)[:, None], 0.0)
            gate = tl.dot(x, w, gate, input_precision="ieee")
    return z, hidden, gate


@triton.jit
def first_products(
    x_ptr, weight, in_weight, gate_weight, part_ptr, batch, span,
    IN: tl.constexpr, NODES: tl.constexpr, NEURONS: tl.constexpr, COLUMNS: tl.constexpr, BL: tl.constexpr,
    GATED: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The first products over `span` features: one part of them. Program (tile of samples, part).

    A row of a part has COLUMNS for nodes, then BL for the neurons of all leaves, and BL for their gates.
    """
    wait(PDL)
    part = tl.program_id(1)
    sample = tl.program_id(0) * BM + tl.arange(0, BM)
    real = sample < batch
    z, hidden, gate = _products(
        x_ptr, tl.where(real, sample, 0).to(tl.int64), weight, in_weight, gate_weight, part * span,
        min(part * span + span, IN), IN, NODES, NEURONS, COLUMNS, BL, GATED, BK, EVEN, STAGES,
    )  # fmt: skip
    let_next_begin(PDL)
    j = tl.arange(0, BL)
    to = part_ptr + (sample.to(tl.int64) + part * batch)[:, None] * (COLUMNS + BL * (1 + GATED))
    tl.store(to + tl.arange(0, COLUMNS)[None, :], z, real[:, None])
    tl.store(to + COLUMNS + j[None, :], hidden, real[:, None])
    if GATED:
        tl.store(to + COLUMNS + BL + j[None, :], gate, real[:, None])


@triton.jit
def whole_layer(
    x_ptr, part_ptr, weight, bias, in_weight, in_bias, gate_weight, gate_bias, out_weight, out_bias, leaf_ptr, y_ptr,
    batch, span,
    IN: tl.constexpr, OUT: tl.constexpr, DEPTH: tl.constexpr, L: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    IN_BIAS: tl.constexpr, GATE_BIAS: tl.constexpr, OUT_BIAS: tl.constexpr, BM: tl.constexpr, BL: tl.constexpr,
    BK: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    OUT_STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of samples, block of `span` output columns). BL has room for the neurons of all leaves.

    SPLITS: the parts in which `first_products` left the first products; 0: they are taken here.
    """
    wait_in_turn(PDL)
    NODES: tl.constexpr = (1 << DEPTH) - 1
    NEURONS: tl.constexpr = (1 << DEPTH) * L
    COLUMNS: tl.constexpr = max(16, 1 << DEPTH)
    sample = tl.program_id(0) * BM + tl.arange(0, BM)
    real = sample < batch
    row = tl.where(real, sample, 0).to(tl.int64)
    if SPLITS > 0:
        ROW: tl.constexpr = COLUMNS + BL * (1 + GATED)
        z = read_parts(part_ptr, sample, real, batch, 0, COLUMNS, ROW, SPLITS)
        hidden = read_parts(part_ptr, sample, real, batch, COLUMNS, BL, ROW, SPLITS)
        gate = hidden
        if GATED:
            gate = read_parts(part_ptr, sample, real, batch, COLUMNS + BL, BL, ROW, SPLITS)
    else:
        z, hidden, gate = _products(
            x_ptr, row, weight, in_weight, gate_weight, 0, IN, IN, NODES, NEURONS, COLUMNS, BL, GATED, BK, EVEN, STAGES
        )
    i = tl.arange(0, COLUMNS)
    j = tl.arange(0, BL)
    neuron = tl.where(j < NEURONS, j, 0)
    z += tl.load(bias + i, i < NODES, 0.0).to(tl.float32)[None, :]
    leaf = walk_down(z, DEPTH, COLUMNS) - NODES
    if tl.program_id(1) == 0:
        tl.store(leaf_ptr + sample, leaf.to(leaf_ptr.dtype.element_ty), real)
    if IN_BIAS:
        hidden += tl.load(in_bias + neuron).to(tl.float32)[None, :]
    if GATED:
        if GATE_BIAS:
            gate += tl.load(gate_bias + neuron).to(tl.float32)[None, :]
        hidden = act(gate, ACT) * hidden
    else:
        hidden = act(hidden, ACT)
    own = (j // L)[None, :] == leaf[:, None]
    hidden = tl.where(own, hidden, 0.0).to(x_ptr.dtype.element_ty)
    c = tl.arange(0, BN)
    begin = tl.program_id(1) * span
    o_row = out_weight + neuron[:, None] * OUT
    for at in tl.range(begin, min(begin + span, OUT), BN, num_stages=OUT_STAGES):
        inside = at + c < OUT
        w = tl.load(o_row + at + c[None, :], inside[None, :], 0.0)
        y = tl.dot(hidden, w, input_precision="ieee")
        if OUT_BIAS:
            y += tl.load(out_bias + leaf[:, None] * OUT + at + c[None, :], inside[None, :], 0.0).to(tl.float32)
        to = y_ptr + row[:, None] * OUT + at + c[None, :]
        tl.store(to, y.to(y_ptr.dtype.element_ty), real[:, None] & inside[None, :])
