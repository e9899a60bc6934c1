"""Triton kernels for many samples a leaf: tiles of a leaf's samples go through it on tensor cores.

`group` has listed the samples of each leaf. A tile of them is one program's work, or a few programs'. Every leaf has
PER tiles, which hold what an even tree would send there; tiles beyond were noted by `group` and come last. So a leaf
that many samples take costs no more than its tiles. `leaf_tiles` runs both products of a narrow leaf; a wide leaf, or
few tiles, go by `group_hidden` (spread by neurons) and `group_output` (spread by output columns).

Weights are read once a tile. A float32 leaf goes through tensor cores in several parts, which together keep its bits.
"""

import triton
import triton.language as tl

from .triton_activations import act
from .triton_walk_kernels import let_next_begin, wait, wait_in_turn


@triton.jit
def _samples(
    tile, list_ptr, count_ptr, extra_ptr, number_ptr, batch, leaves, most_extra,
    PER: tl.constexpr, SORTED: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """The leaf of a tile, its samples, which of them are real, and whether any is.

    The samples are in the leaf's list, as `group` made it; or, SORTED, list_ptr holds all samples in the order of
    their leaves and count_ptr where each leaf begins.
    """
    end = batch
    leaf = tile // PER
    place = (tile % PER) * BM
    if leaf >= leaves:
        extra = tile - leaves * PER
        noted = extra < tl.load(number_ptr, cache_modifier=".cg")
        leaf = tl.load(extra_ptr + extra, noted, 0, cache_modifier=".cg")
        place = tl.load(extra_ptr + most_extra + extra, noted, batch, cache_modifier=".cg")
    leaf = leaf.to(tl.int64)
    if SORTED:
        first = tl.load(count_ptr + leaf, cache_modifier=".cg")
        total = tl.load(count_ptr + leaf + 1, cache_modifier=".cg") - first
        list_ptr += first
        end -= first
    else:
        total = tl.load(count_ptr + leaf, cache_modifier=".cg")
        list_ptr += leaf * batch
    at = place + tl.arange(0, BM)
    # Beyond the end of a list lies anything, up to `end`; so the load need not wait for `total`.
    sample = tl.load(list_ptr + at, at < end, 0, cache_modifier=".cg")
    return leaf, tl.where(at < total, sample, 0).to(tl.int64), at < total, place < total


@triton.jit
def _hidden(
    x_ptr, sample, real, leaf, j, in_weight, in_bias, in_scale, gate_weight, gate_bias, gate_scale, out_scale,
    IN: tl.constexpr, L: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, IN_BIAS: tl.constexpr,
    GATE_BIAS: tl.constexpr, INT8: tl.constexpr, PRECISION: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The neurons j of one leaf at a tile of samples: (samples, neurons), float32; 0 beyond the last neuron.

    INT8: times the scale of the neuron's output row, and times 128, for the second product. A scale is a row's largest
    weight / 127, so the result is as large as hidden * weight; without the 128, float16 would lose its last bits.
    """
    BM: tl.constexpr = sample.shape[0]
    BL: tl.constexpr = j.shape[0]
    neuron = leaf * L + j
    inside_neuron = j < L
    # Rows beyond the end stand for the first: loads need no mask, and what they give is set to 0.
    row = (leaf * L + tl.where(inside_neuron, j, 0))[None, :] * IN
    x_row = x_ptr + sample[:, None] * IN
    w_row = in_weight + row
    g_row = gate_weight + row
    k = tl.arange(0, BK)
    hidden = tl.zeros((BM, BL), tl.float32)
    gate = tl.zeros((BM, BL), tl.float32)
    for at in tl.range(0, IN, BK, num_stages=STAGES):
        if EVEN:
            x = tl.load(x_row + at + k[None, :], real[:, None], 0.0)
            w = tl.load(w_row + at + k[:, None])
        else:
            inside = at + k < IN
            x = tl.load(x_row + at + k[None, :], real[:, None] & inside[None, :], 0.0)
            w = tl.load(w_row + at + k[:, None], inside[:, None], 0.0)
        hidden = tl.dot(x, w.to(x.dtype), hidden, input_precision=PRECISION)
        if GATED:
            if EVEN:
                w = tl.load(g_row + at + k[:, None])
            else:
                w = tl.load(g_row + at + k[:, None], (at + k < IN)[:, None], 0.0)
            gate = tl.dot(x, w.to(x.dtype), gate, input_precision=PRECISION)
    if INT8:
        hidden *= tl.load(in_scale + neuron, inside_neuron, 0.0).to(tl.float32)[None, :]
    if IN_BIAS:
        hidden += tl.load(in_bias + neuron, inside_neuron, 0.0).to(tl.float32)[None, :]
    if GATED:
        if INT8:
            gate *= tl.load(gate_scale + neuron, inside_neuron, 0.0).to(tl.float32)[None, :]
        if GATE_BIAS:
            gate += tl.load(gate_bias + neuron, inside_neuron, 0.0).to(tl.float32)[None, :]
        hidden = act(gate, ACT) * hidden
    else:
        hidden = act(hidden, ACT)
    if INT8:
        hidden *= 128 * tl.load(out_scale + neuron, inside_neuron, 0.0).to(tl.float32)[None, :]
    return tl.where(inside_neuron[None, :], hidden, 0.0)


@triton.jit
def leaf_tiles(
    x_ptr, in_weight, in_bias, in_scale, gate_weight, gate_bias, gate_scale, out_weight, out_bias, out_scale, list_ptr,
    count_ptr, extra_ptr, number_ptr, y_ptr, batch, leaves, most_extra,
    IN: tl.constexpr, L: tl.constexpr, OUT: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    IN_BIAS: tl.constexpr, GATE_BIAS: tl.constexpr, OUT_BIAS: tl.constexpr, INT8: tl.constexpr,
    PRECISION: tl.constexpr, PER: tl.constexpr, SORTED: tl.constexpr, BM: tl.constexpr, BL: tl.constexpr,
    BK: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of the samples of one leaf, both products. The leaf has at most BL neurons."""
    wait_in_turn(PDL)
    leaf, sample, real, used = _samples(
        tl.program_id(0), list_ptr, count_ptr, extra_ptr, number_ptr, batch, leaves, most_extra, PER, SORTED, BM
    )
    if used:
        j = tl.arange(0, BL)
        n = tl.arange(0, BN)
        hidden = _hidden(
            x_ptr, sample, real, leaf, j, in_weight, in_bias, in_scale, gate_weight, gate_bias, gate_scale, out_scale,
            IN, L, ACT, GATED, IN_BIAS, GATE_BIAS, INT8, PRECISION, BK, EVEN, STAGES,
        ).to(x_ptr.dtype.element_ty)  # fmt: skip
        w_row = out_weight + (leaf * L + j)[:, None] * OUT
        y_row = y_ptr + sample[:, None] * OUT
        for at in tl.range(0, OUT, BN, num_stages=STAGES):
            inside = at + n < OUT
            w = tl.load(w_row + at + n[None, :], (j < L)[:, None] & inside[None, :], 0.0)
            y = tl.dot(hidden, w.to(hidden.dtype), input_precision=PRECISION)
            if INT8:
                y *= 1 / 128
            if OUT_BIAS:
                y += tl.load(out_bias + leaf * OUT + at + n, inside, 0.0).to(tl.float32)[None, :]
            tl.store(y_row + at + n[None, :], y.to(y_ptr.dtype.element_ty), real[:, None] & inside[None, :])


@triton.jit
def group_hidden(
    x_ptr, in_weight, in_bias, in_scale, gate_weight, gate_bias, gate_scale, out_scale, list_ptr, count_ptr, extra_ptr,
    number_ptr, hidden_ptr, batch, leaves, most_extra, blocks,
    IN: tl.constexpr, L: tl.constexpr, ROW: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    IN_BIAS: tl.constexpr, GATE_BIAS: tl.constexpr, INT8: tl.constexpr, PRECISION: tl.constexpr, PER: tl.constexpr,
    SORTED: tl.constexpr, BM: tl.constexpr, BL: tl.constexpr,
    BK: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A block of hidden neurons at a tile of the samples of one leaf, to rows of ROW that end in zeros."""
    wait(PDL)
    tile = tl.program_id(0) // blocks
    leaf, sample, real, used = _samples(
        tile, list_ptr, count_ptr, extra_ptr, number_ptr, batch, leaves, most_extra, PER, SORTED, BM
    )
    if used:
        j = (tl.program_id(0) % blocks) * BL + tl.arange(0, BL)
        hidden = _hidden(
            x_ptr, sample, real, leaf, j, in_weight, in_bias, in_scale, gate_weight, gate_bias, gate_scale, out_scale,
            IN, L, ACT, GATED, IN_BIAS, GATE_BIAS, INT8, PRECISION, BK, EVEN, STAGES,
        ).to(hidden_ptr.dtype.element_ty)  # fmt: skip
        let_next_begin(PDL)
        written = real[:, None] & (j < ROW)[None, :]
        tl.store(hidden_ptr + sample[:, None] * ROW + j[None, :], hidden, written)


@triton.jit
def group_output(
    out_weight, out_bias, list_ptr, count_ptr, extra_ptr, number_ptr, hidden_ptr, y_ptr, batch, leaves, most_extra,
    blocks, span,
    L: tl.constexpr, ROW: tl.constexpr, OUT: tl.constexpr, OUT_BIAS: tl.constexpr, INT8: tl.constexpr,
    PRECISION: tl.constexpr, PER: tl.constexpr, SORTED: tl.constexpr, BM: tl.constexpr, BJ: tl.constexpr,
    BN: tl.constexpr, EVEN: tl.constexpr, ONE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`span` output columns at a tile of the samples of one leaf.

    ONE: BJ neurons are all; they stay, and columns pass. Otherwise `span` is BN, and neurons pass. EVEN: BJ divides the
    width, BN the output. The tile is read while `group_hidden` ends.
    """
    tile = tl.program_id(0) // blocks
    leaf, sample, real, used = _samples(
        tile, list_ptr, count_ptr, extra_ptr, number_ptr, batch, leaves, most_extra, PER, SORTED, BM
    )
    wait_in_turn(PDL)
    if used:
        begin = (tl.program_id(0) % blocks) * span
        n = tl.arange(0, BN)
        j = tl.arange(0, BJ)
        w_row = out_weight + (leaf * L + j)[:, None] * OUT
        h_row = hidden_ptr + sample[:, None] * ROW + j[None, :]
        y_row = y_ptr + sample[:, None] * OUT
        out_bias += leaf * OUT
        if ONE:
            neurons = j < L
            h = tl.load(h_row, real[:, None] & (j < ROW)[None, :], 0.0)
            for at in tl.range(begin, min(begin + span, OUT), BN, num_stages=STAGES):
                inside = at + n < OUT
                if EVEN:
                    w = tl.load(w_row + at + n[None, :])
                else:
                    w = tl.load(w_row + at + n[None, :], neurons[:, None] & inside[None, :], 0.0)
                y = tl.dot(h, w.to(h.dtype), input_precision=PRECISION)
                if INT8:
                    y *= 1 / 128
                if OUT_BIAS:
                    y += tl.load(out_bias + at + n, inside, 0.0).to(tl.float32)[None, :]
                tl.store(y_row + at + n[None, :], y.to(y_ptr.dtype.element_ty), real[:, None] & inside[None, :])
        else:
            n += begin
            inside = n < OUT
            y = tl.zeros((BM, BN), tl.float32)
            for at in tl.range(0, L, BJ, num_stages=STAGES):
                if EVEN:
                    h = tl.load(h_row + at, real[:, None], 0.0)
                    w = tl.load(w_row + at * OUT + n[None, :])
                else:
                    neurons = at + j < L
                    h = tl.load(h_row + at, real[:, None] & (at + j < ROW)[None, :], 0.0)
                    w = tl.load(w_row + at * OUT + n[None, :], neurons[:, None] & inside[None, :], 0.0)
                y = tl.dot(h, w.to(h.dtype), y, input_precision=PRECISION)
            if INT8:
                y *= 1 / 128
            if OUT_BIAS:
                y += tl.load(out_bias + n, inside, 0.0).to(tl.float32)[None, :]
            tl.store(y_row + n[None, :], y.to(y_ptr.dtype.element_ty), real[:, None] & inside[None, :])
