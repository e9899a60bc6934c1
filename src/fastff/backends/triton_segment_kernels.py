"""Triton kernels of sampled training: products of rows with the matrix of their leaf, and sums over the rows of a leaf.

Rows come in the order of their leaves. `leaf_ptr` (batch,) holds each row's leaf, `end_ptr` where its leaf's rows end.
A product has one side in that order and one in the order of the batch: `order_ptr` names the row of the batch at each
place. So rows are gathered and scattered by the kernels, and not copied for it.

Work goes by places, not by leaves. A program takes a tile of places and every leaf in it, one after the other: there
are at most batch / tile + visited leaves products, and a tree that sends all samples to one leaf is no slower.
A sum over rows of several programs is added up from their parts by a second kernel, in the order of the rows.
No atomics: the same numbers at every run. Sums are float32. Offsets of leaves are 64 bits wide.
"""

import triton
import triton.language as tl


@triton.jit
def leaf_product(
    rows_ptr, weight_ptr, bias_ptr, leaf_ptr, order_ptr, out_ptr, hidden_ptr, credit_ptr, batch, samples, blocks,
    leaves,
    K: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr, ORDERED: tl.constexpr, BIAS: tl.constexpr,
    CREDIT: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of rows (K) times the matrices (K, N) of their leaves, BN columns; plus the leaf's bias.

    TRANSPOSED: matrices lie as (N, K), rows are in the order of the batch, and the output is in the order of the
    leaves. Otherwise matrices lie as (K, N), and the orders are swapped. Not ORDERED: both follow the leaves.
    The batch may go round several times: place p then has row order[p] % samples. EVEN: BK divides K.

    CREDIT, for rows g that are gradients of a leaf's output (TRANSPOSED): also the product of g with that output, from
    the leaf's hidden neurons (batch, N), in the order of the leaves, and its bias (K), in the order of the batch. Each
    block of columns has its part: (blocks, batch). The bias is not added then.
    """
    place = (tl.program_id(0) // blocks).to(tl.int64) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % blocks) * BN + tl.arange(0, BN)
    real = place < batch
    inside_n = n < N
    leaf = tl.where(real, tl.load(leaf_ptr + place, real, 0), leaves)
    other = place
    if ORDERED:
        other = tl.load(order_ptr + place, real, 0)
    row = other % samples if TRANSPOSED else place
    to = place if TRANSPOSED else other
    # Rows and columns beyond the end stand for the first: what they give is not stored.
    row_at = rows_ptr + tl.where(real, row, 0)[:, None] * K
    column = tl.where(inside_n, n, 0)
    k = tl.arange(0, BK)
    c = tl.arange(0, 16)
    found = tl.zeros((BM, BN), out_ptr.dtype.element_ty)
    credit = tl.zeros((BM,), tl.float32)
    hidden = tl.zeros((BM, BN), tl.float32)
    if CREDIT:
        at_hidden = hidden_ptr + place[:, None] * N + n[None, :]
        hidden = tl.load(at_hidden, real[:, None] & inside_n[None, :], 0.0).to(tl.float32)
    current = tl.min(leaf, 0)
    while current < leaves:
        matrix = weight_ptr + current.to(tl.int64) * (K * N)
        y = tl.zeros((BM, BN), tl.float32)
        biased = tl.zeros((BM, 16), tl.float32)  # the product with the bias, in the first column
        for at in tl.range(0, K, BK, num_stages=STAGES):
            if TRANSPOSED:
                w_at = matrix + column[None, :] * K + (at + k)[:, None]
            else:
                w_at = matrix + (at + k)[:, None] * N + column[None, :]
            if EVEN:
                x = tl.load(row_at + (at + k)[None, :])
                w = tl.load(w_at)
            else:
                inside = at + k < K
                x = tl.load(row_at + (at + k)[None, :], inside[None, :], 0.0)
                w = tl.load(w_at, inside[:, None], 0.0)
            y = tl.dot(x, w, y, input_precision=PRECISION)
            if CREDIT and BIAS:
                b_at = bias_ptr + current.to(tl.int64) * K + at + k
                b = tl.load(b_at[:, None] + c[None, :], (at + k < K)[:, None] & (c == 0)[None, :], 0.0)
                biased = tl.dot(x, b, biased, input_precision=PRECISION)
        if CREDIT:
            own = tl.sum(biased, 1)
            own = tl.where(tl.program_id(0) % blocks == 0, own, 0.0) + tl.sum(y * hidden, 1)
            credit = tl.where(leaf == current, own, credit)
        elif BIAS:
            y += tl.load(bias_ptr + current.to(tl.int64) * N + column).to(tl.float32)[None, :]
        # Not stored here: the addresses would stay in as many registers as the product itself.
        found = tl.where((leaf == current)[:, None], y.to(found.dtype), found)
        current = tl.min(tl.where(leaf > current, leaf, leaves), 0)
    tl.store(out_ptr + to[:, None] * N + n[None, :], found, real[:, None] & inside_n[None, :])
    if CREDIT:
        tl.store(credit_ptr + (tl.program_id(0) % blocks).to(tl.int64) * batch + other, credit, real)


@triton.jit
def leaf_output(
    rows_ptr, weight_ptr, bias_ptr, leaf_ptr, order_ptr, out_ptr, batch, span, spans, leaves, places,
    K: tl.constexpr, N: tl.constexpr, ORDERED: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `leaf_product`, not TRANSPOSED, for short rows: BK holds all K, and stays while `span` columns pass.

    A tile has `places` rows, at most BM. EVEN: BK is K, and BN divides the span and N.
    """
    r = tl.arange(0, BM)
    place = (tl.program_id(0) // spans).to(tl.int64) * places + r
    begin = (tl.program_id(0) % spans) * span
    n = tl.arange(0, BN)
    k = tl.arange(0, BK)
    real = (r < places) & (place < batch)
    leaf = tl.where(real, tl.load(leaf_ptr + place, real, 0), leaves)
    to = place
    if ORDERED:
        to = tl.load(order_ptr + place, real, 0)
    x = tl.load(rows_ptr + place[:, None] * K + k[None, :], real[:, None] & (k < K)[None, :], 0.0)
    out_row = out_ptr + to[:, None] * N
    current = tl.min(leaf, 0)
    while current < leaves:
        w_row = weight_ptr + current.to(tl.int64) * (K * N) + k[:, None] * N
        b_row = bias_ptr + current.to(tl.int64) * N
        mine = leaf == current
        for at in tl.range(begin, min(begin + span, N), BN, num_stages=STAGES):
            inside = at + n < N
            if EVEN:
                w = tl.load(w_row + at + n[None, :])
            else:
                w = tl.load(w_row + at + n[None, :], (k < K)[:, None] & inside[None, :], 0.0)
            y = tl.dot(x, w, input_precision=PRECISION)
            if BIAS:
                y += tl.load(b_row + at + n, inside, 0.0).to(tl.float32)[None, :]
            tl.store(out_row + at + n[None, :], y.to(out_ptr.dtype.element_ty), mine[:, None] & inside[None, :])
        current = tl.min(tl.where(leaf > current, leaf, leaves), 0)


@triton.jit
def leaf_outer(
    first_ptr, second_ptr, leaf_ptr, end_ptr, order_ptr, out_ptr, bias_ptr, part_ptr, batch, span, a_blocks, b_blocks,
    A: tl.constexpr, B: tl.constexpr, ORDERED: tl.constexpr, FIRST_BIAS: tl.constexpr, SECOND_BIAS: tl.constexpr,
    STRIDE: tl.constexpr, PRECISION: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr, BR: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The outer products of two rows, summed over the rows of each leaf: (A, B), a block of it over `span` places.

    first (batch, A) is in the order of the leaves, second (batch, B) in the order of the batch if ORDERED. FIRST_BIAS:
    first (A) is also summed by itself; SECOND_BIAS: second (B) is. If a leaf's rows lie in several spans, each span
    writes its part: in slot 0 if the leaf began before the span, in slot 1 if it begins there and goes on. A slot has
    A * B numbers, then the bias, in STRIDE numbers.
    """
    chunk = tl.program_id(0) // (a_blocks * b_blocks)
    a_block = tl.program_id(0) // b_blocks % a_blocks
    b_block = tl.program_id(0) % b_blocks
    a = a_block * BA + tl.arange(0, BA)
    b = b_block * BB + tl.arange(0, BB)
    inside_a = a < A
    inside_b = b < B
    offset = a.to(tl.int64)[:, None] * B + b[None, :]
    inside = inside_a[:, None] & inside_b[None, :]
    r = tl.arange(0, BR)
    start = chunk * span
    stop = min(start + span, batch)
    before = tl.load(leaf_ptr + start - 1, start > 0, -1)
    place = start
    leaf = tl.load(leaf_ptr + start)
    end = tl.load(end_ptr + start)
    while place < stop:
        until = min(end, stop)
        next_leaf = tl.load(leaf_ptr + until, until < batch, -1)  # on its way while this leaf is added up
        next_end = tl.load(end_ptr + until, until < batch, 0)
        total = tl.zeros((BA, BB), tl.float32)
        first_sum = tl.zeros((BA,), tl.float32)
        second_sum = tl.zeros((BB,), tl.float32)
        for at in tl.range(place, until, BR, num_stages=STAGES):
            i = (at + r).to(tl.int64)
            real = at + r < until
            j = i
            if ORDERED:
                j = tl.load(order_ptr + i, real, 0)
            f = tl.load(first_ptr + i[:, None] * A + a[None, :], real[:, None] & inside_a[None, :], 0.0)
            s = tl.load(second_ptr + j[:, None] * B + b[None, :], real[:, None] & inside_b[None, :], 0.0)
            total = tl.dot(tl.trans(f), s, total, input_precision=PRECISION)
            if FIRST_BIAS:
                first_sum += tl.sum(f.to(tl.float32), 0)
            if SECOND_BIAS:
                second_sum += tl.sum(s.to(tl.float32), 0)
        began = (place > start) | (leaf != before)
        if began & (end <= stop):
            row = leaf.to(tl.int64)
            tl.store(out_ptr + row * (A * B) + offset, total.to(out_ptr.dtype.element_ty), inside)
            if FIRST_BIAS:
                tl.store(bias_ptr + row * A + a, first_sum.to(bias_ptr.dtype.element_ty), inside_a & (b_block == 0))
            if SECOND_BIAS:
                tl.store(bias_ptr + row * B + b, second_sum.to(bias_ptr.dtype.element_ty), inside_b & (a_block == 0))
        else:
            slot = part_ptr + (2 * chunk + began.to(tl.int32)).to(tl.int64) * STRIDE
            tl.store(slot + offset, total, inside)
            if FIRST_BIAS:
                tl.store(slot + A * B + a, first_sum, inside_a & (b_block == 0))
            if SECOND_BIAS:
                tl.store(slot + A * B + b, second_sum, inside_b & (a_block == 0))
        place = until
        leaf = next_leaf
        end = next_end


@triton.jit
def clear_unvisited(
    leaf_ptr, out_ptr, bias_ptr, batch,
    SIZE: tl.constexpr, SUMS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sets the numbers of a leaf that is not in the sorted list to zero."""
    leaf = tl.program_id(0)
    low = leaf * 0
    high = low + batch  # the first place of this leaf, or of a later one, is in low ... high
    for _ in tl.range(STEPS):
        middle = (low + high) // 2
        before = tl.load(leaf_ptr + middle, middle < batch, leaf) < leaf
        low = tl.where(before & (low < high), middle + 1, low)
        high = tl.where(before, high, middle)
    if tl.load(leaf_ptr + low, low < batch, -1) != leaf:
        e = tl.arange(0, BLOCK)
        for at in tl.range(0, SIZE, BLOCK):
            tl.store(out_ptr + leaf.to(tl.int64) * SIZE + at + e, (e * 0).to(out_ptr.dtype.element_ty), at + e < SIZE)
        for at in tl.range(0, SUMS, BLOCK):
            tl.store(bias_ptr + leaf.to(tl.int64) * SUMS + at + e, (e * 0).to(bias_ptr.dtype.element_ty), at + e < SUMS)


@triton.jit
def add_parts(
    part_ptr, leaf_ptr, out_ptr, bias_ptr, batch, span, chunks, blocks,
    DEPTH: tl.constexpr, LEVELS: tl.constexpr, SIZE: tl.constexpr, SUMS: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Adds up the parts of a leaf, or of a node, whose rows lie in several spans: a block of its numbers.

    LEVELS 0: leaves. Otherwise nodes, and a slot has LEVELS rows. The program of the span in which the rows begin does
    it, over the spans that follow, MANY at a time. Of each STRIDE numbers, SIZE go to out_ptr, then SUMS to bias_ptr.
    """
    ROWS: tl.constexpr = max(LEVELS, 1)
    FULL: tl.constexpr = SIZE + SUMS
    block = tl.program_id(0) % blocks
    level = tl.program_id(0) // blocks % ROWS
    chunk = tl.program_id(0) // blocks // ROWS
    shift = level * 0
    first = level * 0
    if LEVELS > 0:
        shift = max(DEPTH - level, 0)
        first = (1 << level) - 1
    start = chunk * span
    stop = start + span
    mine = tl.load(leaf_ptr + min(stop, batch) - 1).to(tl.int32) >> shift
    before = tl.load(leaf_ptr + start - 1, start > 0, -1).to(tl.int32) >> shift
    after = tl.load(leaf_ptr + stop, stop < batch, -1).to(tl.int32) >> shift
    goes_on = (before != mine) & (after == mine)
    if LEVELS > 0:
        goes_on = goes_on & (level < DEPTH)
    if goes_on:
        e = block * BLOCK + tl.arange(0, BLOCK)
        inside = e < FULL
        total = tl.load(part_ptr + ((2 * chunk + 1).to(tl.int64) * ROWS + level) * STRIDE + e, inside, 0.0)
        next_chunk = chunk + 1
        more = 1
        while more > 0:
            c = next_chunk + tl.arange(0, MANY)
            known = c < chunks
            there = tl.load(leaf_ptr + tl.where(known, c * span, 0), known, -1).to(tl.int32) >> shift
            same = known & (there == mine)
            at = ((2 * c).to(tl.int64) * ROWS + level) * STRIDE
            parts = tl.load(part_ptr + at[:, None] + e[None, :], same[:, None] & inside[None, :], 0.0)
            total += tl.sum(parts, 0)
            more = (tl.sum(same.to(tl.int32), 0) == MANY).to(tl.int32)
            next_chunk += MANY
        row = (first + mine).to(tl.int64)
        tl.store(out_ptr + row * SIZE + e, total.to(out_ptr.dtype.element_ty), e < SIZE)
        if SUMS > 0:
            at_bias = bias_ptr + row * SUMS + (e - SIZE)
            tl.store(at_bias, total.to(bias_ptr.dtype.element_ty), (e >= SIZE) & inside)
