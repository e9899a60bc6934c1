"""Triton kernels of a sampled step: its walks and draws in one, and the gradients of the logits on its paths.

A step has 1 + ALTERNATIVES paths for each sample. Path by path, the paths of all samples follow each other: entry
p * batch + i is path p of sample i, and path 0 the visited one. No tensor has the size (batch, nodes).

A batch of 1 is a number like others (do_not_specialize): Triton would make it a constant, which has no `.to`.

The TOP levels of all paths come from one product of a tile of samples with the nodes there, whose logits stay in
registers. Further down, each path reads the row of one node per level. Sums are float32, never TF32 for a decision.
"""

import triton
import triton.language as tl

from .triton_walk_kernels import node_logits, row_blocks


@triton.jit(do_not_specialize=["batch"])
def sample_paths(
    x_ptr, weight, bias, uniform_ptr, temperature_ptr, z_ptr, key_ptr, leaf_ptr, share_ptr, level_ptr, batch,
    leaves,
    IN: tl.constexpr, DEPTH: tl.constexpr, LEVELS: tl.constexpr, ALTERNATIVES: tl.constexpr, MIXTURE: tl.constexpr,
    TOP: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Walks a tile of samples to its leaves, draws where alternatives leave these paths, and walks those on.

    Writes the logits of each path, times the temperature: (paths, batch, DEPTH). Of each entry: its leaf, its share as
    in `Sampled.weight`, and a key, which is the leaf, plus `leaves` for alternatives. Of each alternative: the level at
    which it leaves. `uniform_ptr` (batch, ALTERNATIVES, 1 + DEPTH) has numbers in [0, 1): for the level, and for each
    turn of a soft walk (MIXTURE). Flipped walks (not MIXTURE) leave no logits.
    """
    sample = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    real = sample < batch
    row = tl.where(real, sample, 0)
    temperature = tl.load(temperature_ptr).to(tl.float32)
    COLUMNS: tl.constexpr = max(16, 1 << TOP)
    column = tl.arange(0, COLUMNS)
    top = tl.zeros((BM, COLUMNS), tl.float32)
    if TOP > 0:
        k = tl.arange(0, BK)
        above = column < (1 << TOP) - 1
        for at in tl.range(0, IN, BK):
            inside = at + k < IN
            part = tl.load(x_ptr + row[:, None] * IN + at + k[None, :], inside[None, :], 0.0)
            w_at = weight + column[None, :] * IN + at + k[:, None]
            w = tl.load(w_at, above[None, :] & inside[:, None], 0.0, eviction_policy="evict_last")
            top = tl.dot(part, w, top, input_precision="ieee")
        top += tl.load(bias + column, above, 0.0).to(tl.float32)[None, :]
    nodes = (weight, bias, weight, weight)
    x = ()
    if KEPT and TOP < DEPTH:
        x = row_blocks(x_ptr, row, real, IN, BLOCK, "", "")

    m = tl.arange(0, LEVELS)
    known = m < DEPTH
    node = tl.zeros((BM,), tl.int32)
    z = tl.zeros((BM, LEVELS), tl.float32)
    for at in tl.static_range(TOP):
        logit = tl.sum(tl.where(column[None, :] == node[:, None], top, 0.0), 1)
        z = tl.where(m[None, :] == at, logit[:, None], z)
        node = 2 * node + 1 + (logit >= 0).to(tl.int32)
    if TOP < DEPTH:
        for at in tl.range(TOP, DEPTH, num_stages=1):
            logit = node_logits(x, x_ptr, row, node, real, nodes, IN, 1, "identity", BLOCK, KEPT, "")
            z = tl.where(m[None, :] == at, logit[:, None], z)
            node = 2 * node + 1 + (logit >= 0).to(tl.int32)
    FIRST_LEAF: tl.constexpr = (1 << DEPTH) - 1
    to = row[:, None] * DEPTH + m[None, :]
    stored = real[:, None] & known[None, :]
    tl.store(z_ptr + to, z * temperature, stored)
    leaf = node - FIRST_LEAF
    tl.store(key_ptr + sample, leaf.to(key_ptr.dtype.element_ty), real)
    tl.store(leaf_ptr + sample, leaf.to(tl.int64), real)

    # The probability that a soft walk leaves the path at each level, and their sums from the root on.
    leaves_here = tl.exp(-tl.abs(z * temperature))
    log_stays = tl.where(known[None, :], -tl.log(1 + leaves_here), 0.0)
    mass = tl.exp(tl.cumsum(log_stays, 1) - log_stays) * leaves_here / (1 + leaves_here)
    mass = tl.where(known[None, :], mass, 0.0)
    total = tl.sum(mass, 1)
    sums = tl.cumsum(mass, 1)
    tl.store(share_ptr + sample, 1 - total if MIXTURE else total * 0 + 1, real)
    for a in tl.range(ALTERNATIVES, num_stages=1):
        u = uniform_ptr + (row * ALTERNATIVES + a) * (1 + DEPTH)
        draw = (tl.load(u) + a) / ALTERNATIVES
        if MIXTURE:
            # Levels whose mass lies left of the place. A NaN compares as false: level 0, a valid one.
            passed = ((draw * total)[:, None] >= sums) & known[None, :]
            level = tl.minimum(tl.sum(passed.to(tl.int32), 1), DEPTH - 1)
            share = total / ALTERNATIVES
        else:
            level = tl.minimum((draw * DEPTH).to(tl.int32), DEPTH - 1)
            if ALTERNATIVES == DEPTH:
                level = level * 0 + a
            share = tl.full((BM,), DEPTH / ALTERNATIVES, tl.float32)
        other = tl.zeros((BM,), tl.int32)
        z_other = z
        for at in tl.static_range(TOP):
            logit = tl.sum(tl.where(column[None, :] == other[:, None], top, 0.0), 1)
            right = logit >= 0
            if MIXTURE:
                drawn = tl.load(u + 1 + at) <= 1 / (1 + tl.exp(-logit * temperature))
                right = tl.where(level < at, drawn, right)
            right = right != (level == at)
            z_other = tl.where(m[None, :] == at, logit[:, None], z_other)
            other = 2 * other + 1 + right.to(tl.int32)
        if TOP < DEPTH:
            for at in tl.range(TOP, DEPTH, num_stages=1):
                apart = level < at  # until then, the logits are the visited path's
                logit = node_logits(x, x_ptr, row, other, real & apart, nodes, IN, 1, "identity", BLOCK, KEPT, "")
                shared = tl.sum(tl.where(m[None, :] == at, z, 0.0), 1)
                logit = tl.where(apart, logit, shared)
                right = logit >= 0
                if MIXTURE:
                    drawn = tl.load(u + 1 + at) <= 1 / (1 + tl.exp(-logit * temperature))
                    right = tl.where(apart, drawn, right)
                right = right != (level == at)
                z_other = tl.where(m[None, :] == at, logit[:, None], z_other)
                other = 2 * other + 1 + right.to(tl.int32)
        entry = sample + (1 + a) * batch.to(tl.int64)
        if MIXTURE:
            tl.store(z_ptr + entry[:, None] * DEPTH + m[None, :], z_other * temperature, stored)
        leaf = other - FIRST_LEAF
        tl.store(key_ptr + entry, (leaf + leaves).to(key_ptr.dtype.element_ty), real)
        tl.store(leaf_ptr + entry, leaf.to(tl.int64), real)
        tl.store(share_ptr + entry, share, real)
        tl.store(level_ptr + entry - batch, level, real)


@triton.jit
def sorted_places(
    key_ptr, leaf_ptr, end_ptr, entries, leaves,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of each place in a sorted list of keys (see `sample_paths`): its leaf, and where its key ends."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = place < entries
    key = tl.load(key_ptr + place, real, 0).to(tl.int32)
    low = place  # the key is here
    high = tl.zeros((BLOCK,), tl.int32) + entries  # and not here
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        same = tl.load(key_ptr + middle, real & (high - low > 1), 0).to(tl.int32) == key
        same = same | (high - low <= 1)
        low = tl.where(same, middle, low)
        high = tl.where(same, high, middle)
    tl.store(leaf_ptr + place, tl.where(key < leaves, key, key - leaves), real)
    tl.store(end_ptr + place, high, real)


@triton.jit(do_not_specialize=["batch"])
def score_gradients(
    z_ptr, leaf_ptr, share_ptr, level_ptr, credit_ptr, walked_ptr, temperature_ptr, out_ptr, batch,
    DEPTH: tl.constexpr, LEVELS: tl.constexpr, ALTERNATIVES: tl.constexpr, MIXTURE: tl.constexpr,
    WALKED: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """The gradient of the logits on each path, before the temperature: (paths, batch, DEPTH).

    credit (ALTERNATIVES, batch) is the gradient of the scores: of share * log c for a soft walk's leaf (MIXTURE), of
    share * p for the side of a flipped one. WALKED: the losses' gradient (paths, batch, DEPTH) comes on top.
    """
    sample = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    real = sample < batch
    temperature = tl.load(temperature_ptr).to(tl.float32)
    m = tl.arange(0, LEVELS)
    stored = real[:, None] & (m < DEPTH)[None, :]
    at = sample[:, None] * DEPTH + m[None, :]
    total = tl.zeros((BM, LEVELS), tl.float32)  # of the visited path
    if WALKED:
        total += tl.load(walked_ptr + at, stored, 0.0)
    slope = total
    if not MIXTURE:
        leaf = tl.load(leaf_ptr + sample, real, 0).to(tl.int32)
        turn = (leaf[:, None] >> tl.maximum(DEPTH - 1 - m, 0)[None, :]) & 1
        p = 1 / (1 + tl.exp(-tl.load(z_ptr + at, stored, 0.0)))
        slope = p * (1 - p) * (1 - 2 * turn).to(tl.float32)
    for a in tl.range(ALTERNATIVES, num_stages=1):
        entry = sample + (1 + a) * batch.to(tl.int64)
        credit = tl.load(credit_ptr + entry - batch, real, 0.0) * tl.load(share_ptr + entry, real, 0.0)
        if MIXTURE:
            of_entry = entry[:, None] * DEPTH + m[None, :]
            leaf = tl.load(leaf_ptr + entry, real, 0).to(tl.int32)
            turn = (leaf[:, None] >> tl.maximum(DEPTH - 1 - m, 0)[None, :]) & 1
            p = 1 / (1 + tl.exp(-tl.load(z_ptr + of_entry, stored, 0.0)))
            found = credit[:, None] * (turn.to(tl.float32) - p)
            if WALKED:
                found += tl.load(walked_ptr + of_entry, stored, 0.0)
            tl.store(out_ptr + of_entry, found * temperature, stored)
        else:
            level = tl.load(level_ptr + entry - batch, real, 0)
            total += tl.where(m[None, :] == level[:, None], credit[:, None] * slope, 0.0)
    tl.store(out_ptr + at, total * temperature, stored)


@triton.jit(do_not_specialize=["batch"])
def tree_inputs(
    weight, grad_ptr, leaf_ptr, given_ptr, out_ptr, batch, blocks,
    IN: tl.constexpr, DEPTH: tl.constexpr, PATHS: tl.constexpr, FROM: tl.constexpr, GIVEN: tl.constexpr,
    TOP: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The gradient of x: each logit's gradient times the row of its node, over the paths FROM ... PATHS - 1.

    BN columns of a tile of samples. GIVEN: on top of another gradient.
    """
    sample = (tl.program_id(0) // blocks).to(tl.int64) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % blocks) * BN + tl.arange(0, BN)
    real = sample < batch
    inside = n < IN
    at = sample[:, None] * IN + n[None, :]
    stored = real[:, None] & inside[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    if TOP > 0:
        COLUMNS: tl.constexpr = max(16, 1 << TOP)
        column = tl.arange(0, COLUMNS)
        g = tl.zeros((BM, COLUMNS), tl.float32)
        for p in tl.range(FROM, PATHS, num_stages=1):
            entry = p * batch.to(tl.int64) + sample
            leaf = tl.load(leaf_ptr + entry, real, 0).to(tl.int32)
            for m in tl.static_range(TOP):
                row = (1 << m) - 1 + (leaf >> (DEPTH - m))
                one = tl.load(grad_ptr + entry * DEPTH + m, real, 0.0)
                g += tl.where(column[None, :] == row[:, None], one[:, None], 0.0)
        above = column < (1 << TOP) - 1
        w = tl.load(weight + column[:, None] * IN + n[None, :], above[:, None] & inside[None, :], 0.0)
        total = tl.dot(g, w.to(tl.float32), total, input_precision=PRECISION)
    for p in tl.range(FROM, PATHS, num_stages=1):
        entry = p * batch.to(tl.int64) + sample
        leaf = tl.load(leaf_ptr + entry, real, 0).to(tl.int32)
        for m in tl.range(TOP, DEPTH, num_stages=1):
            at_node = ((1 << m) - 1 + (leaf >> (DEPTH - m))).to(tl.int64)
            one = tl.load(grad_ptr + entry * DEPTH + m, real, 0.0)
            own = tl.load(weight + at_node[:, None] * IN + n[None, :], stored, 0.0)
            total += one[:, None] * own.to(tl.float32)
    if GIVEN:
        total += tl.load(given_ptr + at, stored, 0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), stored)


@triton.jit(do_not_specialize=["batch"])
def top_outer(
    x_ptr, grad_ptr, leaf_ptr, part_ptr, batch, span, blocks,
    IN: tl.constexpr, DEPTH: tl.constexpr, PATHS: tl.constexpr, FROM: tl.constexpr, COLUMNS: tl.constexpr,
    STRIDE: tl.constexpr, PRECISION: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The gradient of the nodes of a small tree over `span` samples: BN columns of (COLUMNS, STRIDE) in part_ptr.

    A node's row of STRIDE numbers holds the gradient of its weights and, after IN numbers, of its bias.
    """
    chunk = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    n = block * BN + tl.arange(0, BN)
    inside = n < IN
    r = tl.arange(0, BR)
    node = tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS, BN), tl.float32)
    sums = tl.zeros((COLUMNS,), tl.float32)
    start = chunk * span
    for at in tl.range(start, min(start + span, batch), BR, num_stages=1):
        sample = (at + r).to(tl.int64)
        real = sample < batch
        g = tl.zeros((COLUMNS, BR), tl.float32)
        for p in tl.range(FROM, PATHS, num_stages=1):
            entry = p * batch.to(tl.int64) + sample
            leaf = tl.load(leaf_ptr + entry, real, 0).to(tl.int32)
            for m in tl.static_range(DEPTH):
                on_path = (1 << m) - 1 + (leaf >> (DEPTH - m))
                one = tl.load(grad_ptr + entry * DEPTH + m, real, 0.0)
                g += tl.where(node[:, None] == on_path[None, :], one[None, :], 0.0)
        x = tl.load(x_ptr + sample[:, None] * IN + n[None, :], real[:, None] & inside[None, :], 0.0)
        # 16-bit inputs as TF32, which has all their bits; a gradient in 16 bits would lose small numbers.
        total = tl.dot(g, x.to(tl.float32), total, input_precision=PRECISION)
        sums += tl.sum(g, 1)
    to = part_ptr + (chunk * COLUMNS + node).to(tl.int64) * STRIDE
    tl.store(to[:, None] + n[None, :], total, (node >= 0)[:, None] & inside[None, :])
    if block == 0:
        tl.store(to + IN, sums)


@triton.jit
def add_chunks(
    part_ptr, out_ptr, bias_ptr, chunks,
    IN: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, MANY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds up what `top_outer` wrote: BLOCK numbers of one node, over all chunks, always in the same order."""
    BLOCKS: tl.constexpr = (IN + 1 + BLOCK - 1) // BLOCK
    node = (tl.program_id(0) // BLOCKS).to(tl.int64)
    e = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, MANY)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in tl.range(0, chunks, MANY):
        at = ((first + c).to(tl.int64) * COLUMNS + node) * STRIDE
        used = (first + c < chunks)[:, None] & (e <= IN)[None, :]
        total += tl.sum(tl.load(part_ptr + at[:, None] + e[None, :], used, 0.0), 0)
    tl.store(out_ptr + node * IN + e, total.to(out_ptr.dtype.element_ty), e < IN)
    tl.store(bias_ptr + node + (e - IN), total.to(bias_ptr.dtype.element_ty), e == IN)
