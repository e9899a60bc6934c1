"""The Triton kernel for layers of few neurons: a tile of samples goes through the nodes and through all leaves at once.

Inputs are read once. Where all leaves together are hardly wider than one, that is faster than sorting samples by leaf.
An infinity or NaN in the second matrix of an unvisited leaf reaches the output: it is multiplied by zero.
"""

import triton
import triton.language as tl

from .triton_activations import act
from .triton_walk_kernels import wait_in_turn, walk_down


@triton.jit
def whole_layer(
    x_ptr, weight, bias, in_weight, in_bias, gate_weight, gate_bias, out_weight, out_bias, leaf_ptr, y_ptr, batch, span,
    IN: tl.constexpr, OUT: tl.constexpr, DEPTH: tl.constexpr, L: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    IN_BIAS: tl.constexpr, GATE_BIAS: tl.constexpr, OUT_BIAS: tl.constexpr, BM: tl.constexpr, BL: tl.constexpr,
    BK: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, OUT_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of samples, block of `span` output columns). BL has room for the neurons of all leaves."""
    wait_in_turn(PDL)
    NODES: tl.constexpr = (1 << DEPTH) - 1
    NEURONS: tl.constexpr = (1 << DEPTH) * L
    COLUMNS: tl.constexpr = max(16, 1 << DEPTH)
    sample = tl.program_id(0) * BM + tl.arange(0, BM)
    real = sample < batch
    row = tl.where(real, sample, 0).to(tl.int64)
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
    for at in tl.range(0, IN, BK, num_stages=STAGES):
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
