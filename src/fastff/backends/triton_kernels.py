"""Triton kernels of the hard pass. Imported when one is first launched, never by `import fastff`.

Few samples a leaf: `descend`, one program a sample, walks the tree and runs the leaf. Many: `group` walks a tile of
samples and puts each into the list of its leaf; `leaf_tiles` runs both products on tiles of a leaf's samples, so that
its weights are read once a tile.

A walk never asks the host. Several levels go in one round: the logits of a small subtree become the bits of an integer,
and the walk through it is a few shifts. Sums are float32; a float32 leaf goes through tensor cores in several parts,
which together keep its bits. A float32 decision never sees TF32.

Blocks are 512 bytes wide, 16 for each lane of a warp, and one input meets many rows as (warps, 1, block) against
(warps, rows / warps, block): Triton then gives both one layout, and converts neither.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from .triton_activations import act


@triton.jit
def _blocks(ptr, rows, valid, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EVICT: tl.constexpr):
    """Some rows of a matrix with WIDTH columns, as a tuple of blocks (..., BLOCK), all on their way at once."""
    k = tl.arange(0, BLOCK)
    row = ptr + tl.expand_dims(rows.to(tl.int64), -1) * WIDTH
    valid = tl.expand_dims(valid, -1)
    blocks = ()
    for at in tl.static_range(0, WIDTH, BLOCK):
        block = tl.load(row + at + k, valid & (at + k < WIDTH), 0.0, eviction_policy=EVICT)
        blocks = blocks + (block,)  # noqa: RUF005 (Triton has no unpacking)
    return blocks


@triton.jit
def _products(
    x, x_ptr, x_rows, w_ptr, rows, valid, WIDTH: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr,
    EVICT: tl.constexpr,
):  # fmt: skip
    """The scalar products of rows of x, KEPT as blocks in x or read from x_ptr, with rows of w."""
    if KEPT:
        w = _blocks(w_ptr, rows, valid, WIDTH, BLOCK, EVICT)
        total = x[0].to(tl.float32) * w[0].to(tl.float32)
        for at in tl.static_range(BLOCK, WIDTH, BLOCK):
            total += x[at // BLOCK].to(tl.float32) * w[at // BLOCK].to(tl.float32)
    else:
        k = tl.arange(0, BLOCK)
        x_row = x_ptr + tl.expand_dims(x_rows.to(tl.int64), -1) * WIDTH
        w_row = w_ptr + tl.expand_dims(rows.to(tl.int64), -1) * WIDTH
        total = (tl.expand_dims(rows, -1) + k).to(tl.float32) * 0
        for at in tl.range(0, WIDTH, BLOCK):
            one = tl.load(w_row + at + k, tl.expand_dims(valid, -1) & (at + k < WIDTH), 0.0, eviction_policy=EVICT)
            total += one.to(tl.float32) * tl.load(x_row + at + k, at + k < WIDTH, 0.0).to(tl.float32)
    return tl.sum(total, -1)


@triton.jit
def _logits(
    x, x_ptr, x_rows, node, valid, nodes, IN: tl.constexpr, N: tl.constexpr, ACT: tl.constexpr, BLOCK: tl.constexpr,
    KEPT: tl.constexpr,
):  # fmt: skip
    """The logit of a node in each row, at the input in that row. Nodes are used often and should stay cached."""
    weight, bias, out_weight, out_bias = nodes
    z = tl.zeros(node.shape, tl.float32)
    for q in tl.static_range(N):
        hidden = _products(x, x_ptr, x_rows, weight, node * N + q, valid, IN, BLOCK, KEPT, "evict_last")
        hidden += tl.load(bias + node * N + q, valid, 0.0).to(tl.float32)
        if N == 1:
            z = hidden
        else:
            z += act(hidden, ACT) * tl.load(out_weight + node * N + q, valid, 0.0).to(tl.float32)
    if N > 1:
        z += tl.load(out_bias + node, valid, 0.0).to(tl.float32)
    return z


@triton.jit
def _numbers(ROWS: tl.constexpr, WARPS: tl.constexpr):
    """0 ... ROWS - 1 as (warps, rows / warps)."""
    return tl.arange(0, WARPS)[:, None] * (ROWS // WARPS) + tl.arange(0, ROWS // WARPS)[None, :]


@triton.jit
def _round(
    x_ptr, node, nodes, LEVELS: tl.constexpr, IN: tl.constexpr, N: tl.constexpr, ACT: tl.constexpr,
    BLOCK: tl.constexpr, KEPT: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """LEVELS further down from a node: the whole subtree's logits at once, as the bits of an integer."""
    WIDE: tl.constexpr = min(WARPS, 1 << LEVELS)
    i = _numbers(1 << LEVELS, WIDE)  # in heap order within the subtree; the last is none
    level = i * 0
    for m in tl.static_range(1, LEVELS):
        level += (i >= (1 << m) - 1).to(tl.int32)
    below = ((node + 1) << level) + i - (1 << level)
    valid = i < (1 << LEVELS) - 1
    one = tl.zeros((WIDE, 1), tl.int32)
    x = ()
    if KEPT:
        x = _blocks(x_ptr, one, one == 0, IN, BLOCK, "")
    z = _logits(x, x_ptr, one, below, valid, nodes, IN, N, ACT, BLOCK, KEPT)
    bits = tl.sum(tl.sum(((z >= 0) & valid).to(tl.int32) << i, 1), 0)
    at = node * 0
    for _ in tl.static_range(LEVELS):
        at = 2 * at + 1 + ((bits >> at) & 1)
    return ((node + 1) << LEVELS) + at - (1 << LEVELS)


@triton.jit
def descend(
    x_ptr, weight, bias, node_out_weight, node_out_bias, in_weight, in_bias, gate_weight, gate_bias, out_weight,
    out_bias, leaf_ptr, hidden_ptr, y_ptr,
    IN: tl.constexpr, OUT: tl.constexpr, DEPTH: tl.constexpr, L: tl.constexpr, N: tl.constexpr, ACT: tl.constexpr,
    GATED: tl.constexpr, IN_BIAS: tl.constexpr, GATE_BIAS: tl.constexpr, OUT_BIAS: tl.constexpr,
    ROUTE: tl.constexpr, VISIT: tl.constexpr, ROUND: tl.constexpr, BL: tl.constexpr,
    BLOCK: tl.constexpr, BN: tl.constexpr, KEPT_NODE: tl.constexpr, KEPT: tl.constexpr, WARPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One sample: its leaf, walked to or read, and the leaf's output."""
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * IN
    if ROUTE:
        node = tl.program_id(0) * 0
        nodes = (weight, bias, node_out_weight, node_out_bias)
        for _ in tl.static_range(DEPTH // ROUND):
            node = _round(x_ptr, node, nodes, ROUND, IN, N, ACT, BLOCK, KEPT_NODE, WARPS)
        if DEPTH % ROUND > 0:
            node = _round(x_ptr, node, nodes, DEPTH % ROUND, IN, N, ACT, BLOCK, KEPT_NODE, WARPS)
        leaf = node - ((1 << DEPTH) - 1)
        tl.store(leaf_ptr + row, leaf.to(leaf_ptr.dtype.element_ty))
    else:
        leaf = tl.load(leaf_ptr + row)
    if VISIT:
        leaf = leaf.to(tl.int64)
        j = _numbers(BL, WARPS)
        one = tl.zeros((WARPS, 1), tl.int32)
        x = ()
        if KEPT:
            x = _blocks(x_ptr, one, one == 0, IN, BLOCK, "")
        hidden = _products(x, x_ptr, one, in_weight, leaf * L + j, j < L, IN, BLOCK, KEPT, "")
        if IN_BIAS:
            hidden += tl.load(in_bias + leaf * L + j, j < L, 0.0).to(tl.float32)
        if GATED:
            gate = _products(x, x_ptr, one, gate_weight, leaf * L + j, j < L, IN, BLOCK, KEPT, "")
            if GATE_BIAS:
                gate += tl.load(gate_bias + leaf * L + j, j < L, 0.0).to(tl.float32)
            hidden = act(gate, ACT) * hidden
        else:
            hidden = act(hidden, ACT)
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
                    w = tl.load(out_weight + (leaf * L + r) * OUT + at + n, used, 0.0).to(tl.float32)
                    y += tl.load(hidden_ptr + r) * w
            tl.store(y_ptr + row * OUT + at + n, y.to(y_ptr.dtype.element_ty), inside)


@triton.jit
def group(
    x_ptr, weight, bias, node_out_weight, node_out_bias, leaf_ptr, list_ptr, count_ptr, batch,
    IN: tl.constexpr, DEPTH: tl.constexpr, N: tl.constexpr, ACT: tl.constexpr, ROUTE: tl.constexpr, LIST: tl.constexpr,
    TOP: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """A tile of samples: their leaves, walked to or read, and each sample in the list of its leaf.

    The first TOP levels by one product with all their nodes, the others by the row of one node a sample. A list has
    room for the whole batch. The order within a list may differ from run to run; what is computed from it does not.
    """
    t = tl.arange(0, BM)
    sample = tl.program_id(0) * BM + t
    real = sample < batch
    if ROUTE:
        node = t * 0
        if TOP > 0:
            x_row = x_ptr + sample.to(tl.int64)[:, None] * IN
            COLUMNS: tl.constexpr = max(16, 1 << TOP)
            i = tl.arange(0, COLUMNS)
            k = tl.arange(0, BK)
            z = tl.zeros((BM, COLUMNS), tl.float32)
            for at in tl.range(0, IN, BK):
                inside = at + k < IN
                x = tl.load(x_row + at + k[None, :], real[:, None] & inside[None, :], 0.0)
                above = (i < (1 << TOP) - 1)[None, :] & inside[:, None]
                z = tl.dot(
                    x, tl.load(weight + i[None, :] * IN + at + k[:, None], above, 0.0, eviction_policy="evict_last"), z
                )
            z += tl.load(bias + i, i < (1 << TOP) - 1, 0.0).to(tl.float32)[None, :]
            bit = (z >= 0).to(tl.int32) << (i & 31)[None, :]
            if COLUMNS <= 32:
                word = tl.sum(bit, 1)
                for _ in tl.static_range(TOP):
                    node = 2 * node + 1 + ((word >> node) & 1)
            else:
                words = tl.sum(tl.reshape(bit, (BM, COLUMNS // 32, 32)), 2)
                w = tl.arange(0, COLUMNS // 32)
                for _ in tl.static_range(TOP):
                    word = tl.sum(tl.where(w[None, :] == (node >> 5)[:, None], words, 0), 1)
                    node = 2 * node + 1 + ((word >> (node & 31)) & 1)
        if TOP < DEPTH:
            nodes = (weight, bias, node_out_weight, node_out_bias)
            row = tl.where(real, sample, 0)
            x = ()
            if KEPT:
                x = _blocks(x_ptr, row, real, IN, BLOCK, "")
            for _ in tl.static_range(TOP, DEPTH):
                z = _logits(x, x_ptr, row, node, real, nodes, IN, N, ACT, BLOCK, KEPT)
                node = 2 * node + 1 + (z >= 0).to(tl.int32)
        leaf = node - ((1 << DEPTH) - 1)
        tl.store(leaf_ptr + sample, leaf.to(leaf_ptr.dtype.element_ty), real)
    else:
        leaf = tl.load(leaf_ptr + sample, real, 0).to(tl.int32)
    if LIST:
        place = tl.atomic_add(count_ptr + leaf, t * 0 + 1, real, sem="relaxed")
        tl.store(list_ptr + leaf.to(tl.int64) * batch + place, sample, real)


@triton.jit
def leaf_tiles(
    x_ptr, in_weight, in_bias, gate_weight, gate_bias, out_weight, out_bias, list_ptr, count_ptr, y_ptr, batch,
    IN: tl.constexpr, OUT: tl.constexpr, L: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    IN_BIAS: tl.constexpr, GATE_BIAS: tl.constexpr, OUT_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    SORTED: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Some tiles of the samples of one leaf, both products.

    The samples are in the leaf's list, as `group` made it; or, SORTED, list_ptr holds all samples in the order of
    their leaves and count_ptr where each leaf begins. A leaf wider than BL adds up its output block by block in y,
    which must then be float32.
    """
    leaf = tl.program_id(0).to(tl.int64)
    if SORTED:
        first = tl.load(count_ptr + leaf)
        total = tl.load(count_ptr + leaf + 1) - first
        list_ptr += first
    else:
        total = tl.load(count_ptr + leaf)
        list_ptr += leaf * batch
    t = tl.arange(0, BM)
    k = tl.arange(0, BK)
    j = tl.arange(0, BL)
    n = tl.arange(0, BN)
    in_weight += leaf * L * IN
    gate_weight += leaf * L * IN
    out_weight += leaf * L * OUT
    for begin in tl.range(tl.program_id(1) * BM, total, tl.num_programs(1) * BM):
        real = begin + t < total
        sample = tl.load(list_ptr + begin + t, real, 0).to(tl.int64)
        x_row = x_ptr + sample[:, None] * IN
        y_row = y_ptr + sample[:, None] * OUT
        for block in tl.static_range(0, L, BL):
            neuron = block + j
            hidden = tl.zeros((BM, BL), tl.float32)
            gate = tl.zeros((BM, BL), tl.float32)
            for at in tl.range(0, IN, BK, num_stages=STAGES):
                inside = at + k < IN
                x = tl.load(x_row + at + k[None, :], real[:, None] & inside[None, :], 0.0)
                used = (neuron < L)[None, :] & inside[:, None]
                w = tl.load(in_weight + neuron[None, :] * IN + at + k[:, None], used, 0.0)
                hidden = tl.dot(x, w, hidden, input_precision=PRECISION)
                if GATED:
                    w = tl.load(gate_weight + neuron[None, :] * IN + at + k[:, None], used, 0.0)
                    gate = tl.dot(x, w, gate, input_precision=PRECISION)
            if IN_BIAS:
                hidden += tl.load(in_bias + leaf * L + neuron, neuron < L, 0.0).to(tl.float32)[None, :]
            if GATED:
                if GATE_BIAS:
                    gate += tl.load(gate_bias + leaf * L + neuron, neuron < L, 0.0).to(tl.float32)[None, :]
                hidden = act(gate, ACT) * hidden
            else:
                hidden = act(hidden, ACT)
            hidden = tl.where((neuron < L)[None, :], hidden, 0.0).to(x_ptr.dtype.element_ty)
            for at in tl.range(0, OUT, BN, num_stages=STAGES):
                inside = at + n < OUT
                used = (neuron < L)[:, None] & inside[None, :]
                w = tl.load(out_weight + neuron[:, None] * OUT + at + n[None, :], used, 0.0)
                y = tl.dot(hidden, w, input_precision=PRECISION)
                written = real[:, None] & inside[None, :]
                if block == 0:
                    if OUT_BIAS:
                        y += tl.load(out_bias + leaf * OUT + at + n, inside, 0.0).to(tl.float32)[None, :]
                else:
                    y += tl.load(y_row + at + n[None, :], written, 0.0)
                tl.store(y_row + at + n[None, :], y.to(y_ptr.dtype.element_ty), written)
