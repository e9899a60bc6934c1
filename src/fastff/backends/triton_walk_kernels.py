"""Triton kernels that walk the tree, for one sample or for a batch, whose samples they list by leaf.

A walk never asks the host. Several levels go in one round: the logits of a small subtree become the bits of an integer,
and the walk through it is a few shifts. The top of a tree, or all of it, can also go as one product with many samples:
`node_products`, spread over the whole GPU. Sums are float32. A float32 decision never sees TF32.

Blocks are 512 bytes wide, 16 for each lane of a warp, and one input meets many rows as (warps, 1, block) against
(warps, rows / warps, block): Triton then gives both one layout, and converts neither.

Launches are chained (programmatic dependent launch): a kernel begins while the one before it ends. Each waits for the
kernel before it, and only then lets the next begin. So a kernel may read what the kernel two before it wrote without
waiting, from the second-level cache (".cg"): the first may hold an older copy.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .triton_activations import act


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait for the kernel before this one."""
    if PDL:
        gdc_wait()


@triton.jit
def let_next_begin(PDL: tl.constexpr):
    """Let the programs of the next kernel begin. Call it after `wait`: see above.

    An early call hides the time of a launch. But the next programs go where there is room, and crowd onto the few
    multiprocessors that have some. So a kernel that fills the GPU calls it late: 12 us instead of 18 (768 wide, depth
    5, batch 2048, H200).
    """
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_in_turn(PDL: tl.constexpr):
    """Wait for the kernel before this one; then let the next begin."""
    wait(PDL)
    let_next_begin(PDL)


@triton.jit
def sent(number, FENCE: tl.constexpr):
    """Zero, but no compiler knows it; to be had when all loads before this call were sent. `number` is not negative.

    Left alone, ptxas has about eight loads of a thread in flight, to save registers.
    A load does not move below a barrier, and a sum that starts from this zero does not move above it.
    """
    zero = 0.0
    if FENCE:  # not in the interpreter, which has no assembler
        zero = tl.inline_asm_elementwise(
            """{
            .reg .pred given, found;
            setp.lt.s32 given, $1, 0;
            bar.red.or.pred found, 0, given;
            selp.f32 $0, 0f3F800000, 0f00000000, found;
            }""",
            "=f,r", [number], dtype=tl.float32, is_pure=False, pack=1,
        )  # fmt: skip
    return zero


@triton.jit
def row_blocks(ptr, rows, valid, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EVICT: tl.constexpr, CACHE: tl.constexpr):
    """Some rows of a matrix with WIDTH columns, as a tuple of blocks (..., BLOCK), all on their way at once."""
    k = tl.arange(0, BLOCK)
    row = ptr + tl.expand_dims(rows.to(tl.int64), -1) * WIDTH
    valid = tl.expand_dims(valid, -1)
    blocks = ()
    for at in tl.static_range(0, WIDTH, BLOCK):
        block = tl.load(row + at + k, valid & (at + k < WIDTH), 0.0, cache_modifier=CACHE, eviction_policy=EVICT)
        blocks = blocks + (block,)  # noqa: RUF005 (Triton has no unpacking)
    return blocks


@triton.jit
def row_products(
    x, x_ptr, x_rows, w_ptr, rows, valid, WIDTH: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr,
    EVICT: tl.constexpr, CACHE: tl.constexpr, FENCE: tl.constexpr = False, LATE: tl.constexpr = False,
):  # fmt: skip
    """The scalar products of rows of x, KEPT as blocks in x or read from x_ptr, with rows of w.

    FENCE: all rows of w are on their way before the first is used. LATE: x is read then, since registers hold no more.
    """
    if KEPT:
        w = row_blocks(w_ptr, rows, valid, WIDTH, BLOCK, EVICT, CACHE)
        zero = sent(tl.program_id(0), FENCE)
        if LATE:
            x = row_blocks(x_ptr, x_rows, x_rows >= 0, WIDTH, BLOCK, "", CACHE)
        total = x[0].to(tl.float32) * w[0].to(tl.float32) + zero
        for at in tl.static_range(BLOCK, WIDTH, BLOCK):
            total += x[at // BLOCK].to(tl.float32) * w[at // BLOCK].to(tl.float32)
    else:
        k = tl.arange(0, BLOCK)
        x_row = x_ptr + tl.expand_dims(x_rows.to(tl.int64), -1) * WIDTH
        w_row = w_ptr + tl.expand_dims(rows.to(tl.int64), -1) * WIDTH
        total = (tl.expand_dims(rows, -1) + k).to(tl.float32) * 0
        for start in tl.range(0, WIDTH, 4 * BLOCK):  # four blocks are on their way at once
            for part in tl.static_range(4):
                at = start + part * BLOCK + k
                used = tl.expand_dims(valid, -1) & (at < WIDTH)
                w = tl.load(w_row + at, used, 0.0, cache_modifier=CACHE, eviction_policy=EVICT)
                total += w.to(tl.float32) * tl.load(x_row + at, at < WIDTH, 0.0, cache_modifier=CACHE).to(tl.float32)
    return tl.sum(total, -1)


@triton.jit
def node_logits(
    x, x_ptr, x_rows, node, valid, nodes, IN: tl.constexpr, N: tl.constexpr, ACT: tl.constexpr, BLOCK: tl.constexpr,
    KEPT: tl.constexpr, CACHE: tl.constexpr, FENCE: tl.constexpr = False, LATE: tl.constexpr = False,
):  # fmt: skip
    """The logit of a node in each row, at the input in that row. Nodes are used often and should stay cached."""
    weight, bias, out_weight, out_bias = nodes
    EVICT: tl.constexpr = "evict_last" if CACHE == "" else ""  # there is no instruction with both
    z = tl.zeros(node.shape, tl.float32)
    for q in tl.static_range(N):
        hidden = row_products(x, x_ptr, x_rows, weight, node * N + q, valid, IN, BLOCK, KEPT, EVICT, CACHE, FENCE, LATE)
        hidden += tl.load(bias + node * N + q, valid, 0.0, cache_modifier=CACHE).to(tl.float32)
        if N == 1:
            z = hidden
        else:
            w = tl.load(out_weight + node * N + q, valid, 0.0, cache_modifier=CACHE)
            z += act(hidden, ACT) * w.to(tl.float32)
    if N > 1:
        z += tl.load(out_bias + node, valid, 0.0, cache_modifier=CACHE).to(tl.float32)
    return z


@triton.jit
def row_numbers(ROWS: tl.constexpr, WARPS: tl.constexpr):
    """0 ... ROWS - 1 as (warps, rows / warps)."""
    return tl.arange(0, WARPS)[:, None] * (ROWS // WARPS) + tl.arange(0, ROWS // WARPS)[None, :]


@triton.jit
def walk_round(
    x_ptr, node, nodes, LEVELS: tl.constexpr, IN: tl.constexpr, N: tl.constexpr, ACT: tl.constexpr,
    BLOCK: tl.constexpr, KEPT: tl.constexpr, FENCE: tl.constexpr, LATE: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """LEVELS further down from a node: the whole subtree's logits at once, as the bits of an integer."""
    WIDE: tl.constexpr = min(WARPS, 1 << LEVELS)
    i = row_numbers(1 << LEVELS, WIDE)  # in heap order within the subtree; the last is none
    level = i * 0
    for m in tl.static_range(1, LEVELS):
        level += (i >= (1 << m) - 1).to(tl.int32)
    below = ((node + 1) << level) + i - (1 << level)
    valid = i < (1 << LEVELS) - 1
    one = tl.zeros((WIDE, 1), tl.int32)
    x = ()
    if KEPT and not LATE:
        x = row_blocks(x_ptr, one, one == 0, IN, BLOCK, "", "")
    z = node_logits(x, x_ptr, one, below, valid, nodes, IN, N, ACT, BLOCK, KEPT, "", FENCE, LATE)
    bits = tl.sum(tl.sum(((z >= 0) & valid).to(tl.int32) << i, 1), 0)
    at = node * 0
    for _ in tl.static_range(LEVELS):
        at = 2 * at + 1 + ((bits >> at) & 1)
    return ((node + 1) << LEVELS) + at - (1 << LEVELS)


@triton.jit
def walk_down(z, LEVELS: tl.constexpr, COLUMNS: tl.constexpr):
    """The node that each sample reaches, LEVELS down from the root, given the logits (samples, COLUMNS) of the top."""
    SAMPLES: tl.constexpr = z.shape[0]
    i = tl.arange(0, COLUMNS)
    bit = (z >= 0).to(tl.int32) << (i & 31)[None, :]
    node = tl.zeros((SAMPLES,), tl.int32)
    if COLUMNS <= 32:
        word = tl.sum(bit, 1)
        for _ in tl.static_range(LEVELS):
            node = 2 * node + 1 + ((word >> node) & 1)
    else:
        words = tl.sum(tl.reshape(bit, (SAMPLES, COLUMNS // 32, 32)), 2)
        w = tl.arange(0, COLUMNS // 32)
        for _ in tl.static_range(LEVELS):
            word = tl.sum(tl.where(w[None, :] == (node >> 5)[:, None], words, 0), 1)
            node = 2 * node + 1 + ((word >> (node & 31)) & 1)
    return node


@triton.jit
def read_parts(
    part_ptr, sample, real, batch, FIRST: tl.constexpr, COLUMNS: tl.constexpr, ROW: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """The sums (samples, COLUMNS) of SPLITS parts, each (batch, ROW), from column FIRST on."""
    i = FIRST + tl.arange(0, COLUMNS)
    total = tl.zeros((sample.shape[0], COLUMNS), tl.float32)
    for split in tl.static_range(SPLITS):
        row = part_ptr + (sample.to(tl.int64) + split * batch)[:, None] * ROW
        total += tl.load(row + i[None, :], real[:, None], 0.0, cache_modifier=".cg")
    return total


@triton.jit
def node_products(
    x_ptr, weight, z_ptr, count_ptr, batch, nodes, span, counters,
    IN: tl.constexpr, COLUMNS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The products of samples with the nodes at the top of the tree, over `span` features: one part of the logits.

    Program (tile of samples, block of nodes, part). The first one also clears the counters that `group` uses.
    """
    wait_in_turn(PDL)
    part = tl.program_id(2)
    if tl.program_id(0) + tl.program_id(1) + part == 0:
        for at in tl.range(0, counters, 1024):
            c = at + tl.arange(0, 1024)
            tl.store(count_ptr + c, c * 0, c < counters)
    sample = tl.program_id(0) * BM + tl.arange(0, BM)
    node = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x_row = x_ptr + tl.where(sample < batch, sample, 0).to(tl.int64)[:, None] * IN
    w_row = weight + tl.where(node < nodes, node, 0)[None, :] * IN
    z = tl.zeros((BM, BN), tl.float32)
    for at in tl.range(part * span, min(part * span + span, IN), BK, num_stages=STAGES):
        if EVEN:
            x = tl.load(x_row + at + k[None, :])
            w = tl.load(w_row + at + k[:, None], eviction_policy="evict_last")
        else:
            inside = at + k < IN
            x = tl.load(x_row + at + k[None, :], inside[None, :], 0.0)
            w = tl.load(w_row + at + k[:, None], inside[:, None], 0.0, eviction_policy="evict_last")
        z = tl.dot(x, w, z, input_precision="ieee")
    z_row = z_ptr + (sample.to(tl.int64) + part * batch)[:, None] * COLUMNS
    tl.store(z_row + node[None, :], z, (sample < batch)[:, None] & (node < COLUMNS)[None, :])


@triton.jit
def clear(count_ptr, counters, PDL: tl.constexpr):
    """Sets the counters that `group` uses to zero."""
    wait_in_turn(PDL)
    c = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(count_ptr + c, c * 0, c < counters)


@triton.jit
def group(
    x_ptr, z_ptr, weight, bias, node_out_weight, node_out_bias, leaf_ptr, list_ptr, count_ptr, extra_ptr, batch, leaves,
    most_extra,
    IN: tl.constexpr, DEPTH: tl.constexpr, N: tl.constexpr, ACT: tl.constexpr, ROUTE: tl.constexpr, LIST: tl.constexpr,
    CLEARED: tl.constexpr, TOP: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    BLOCK: tl.constexpr, KEPT: tl.constexpr, LISTED: tl.constexpr, LEAF_TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of samples: their leaves, walked to or read, and each sample in the list of its leaf.

    The first TOP levels by products with all their nodes, taken here or, in SPLITS parts, by `node_products`; the
    others by the row of one node a sample. A list has room for the whole batch. The kernels of the leaves expect up to
    LISTED samples in it; beyond, the program that begins a new tile of LEAF_TILE samples notes it as extra work. The
    order within a list may differ from run to run; what is computed from it does not.

    CLEARED: the kernel before this one is `clear`, and the walk need not wait for it.
    """
    CACHE: tl.constexpr = ".cg" if CLEARED else ""
    EVICT: tl.constexpr = "" if CLEARED else "evict_last"
    if not CLEARED:
        wait(PDL)
    t = tl.arange(0, BM)
    sample = tl.program_id(0) * BM + t
    real = sample < batch
    if ROUTE:
        node = t * 0
        COLUMNS: tl.constexpr = max(16, 1 << TOP)
        if SPLITS > 0:
            z = read_parts(z_ptr, sample, real, batch, 0, COLUMNS, COLUMNS, SPLITS)
            i = tl.arange(0, COLUMNS)
            z += tl.load(bias + i, i < (1 << TOP) - 1, 0.0).to(tl.float32)[None, :]
            node = walk_down(z, TOP, COLUMNS)
        elif TOP > 0:
            x_row = x_ptr + sample.to(tl.int64)[:, None] * IN
            i = tl.arange(0, COLUMNS)
            k = tl.arange(0, BK)
            above = i < (1 << TOP) - 1
            z = tl.zeros((BM, COLUMNS), tl.float32)
            for at in tl.range(0, IN, BK):
                inside = at + k < IN
                x = tl.load(x_row + at + k[None, :], real[:, None] & inside[None, :], 0.0, cache_modifier=CACHE)
                w_at = weight + i[None, :] * IN + at + k[:, None]
                used = above[None, :] & inside[:, None]
                w = tl.load(w_at, used, 0.0, cache_modifier=CACHE, eviction_policy=EVICT)
                z = tl.dot(x, w, z, input_precision="ieee")
            z += tl.load(bias + i, above, 0.0, cache_modifier=CACHE).to(tl.float32)[None, :]
            node = walk_down(z, TOP, COLUMNS)
        if TOP < DEPTH:
            nodes = (weight, bias, node_out_weight, node_out_bias)
            row = tl.where(real, sample, 0)
            x = ()
            if KEPT:
                x = row_blocks(x_ptr, row, real, IN, BLOCK, "", CACHE)
            # Unrolled where that is short: 80 blocks of nodes took Triton 16 s to compile.
            if (DEPTH - TOP) * IN <= 32 * BLOCK:
                for _ in tl.static_range(TOP, DEPTH):
                    logit = node_logits(x, x_ptr, row, node, real, nodes, IN, N, ACT, BLOCK, KEPT, CACHE)
                    node = 2 * node + 1 + (logit >= 0).to(tl.int32)
            else:
                for _ in tl.range(TOP, DEPTH, num_stages=1):
                    logit = node_logits(x, x_ptr, row, node, real, nodes, IN, N, ACT, BLOCK, KEPT, CACHE)
                    node = 2 * node + 1 + (logit >= 0).to(tl.int32)
        leaf = node - ((1 << DEPTH) - 1)
        tl.store(leaf_ptr + sample, leaf.to(leaf_ptr.dtype.element_ty), real)
    else:
        leaf = tl.load(leaf_ptr + sample, real, 0, cache_modifier=CACHE).to(tl.int32)
    if CLEARED:
        wait(PDL)
    let_next_begin(PDL)
    if LIST:
        place = tl.atomic_add(count_ptr + leaf, t * 0 + 1, real, sem="relaxed")
        tl.store(list_ptr + leaf.to(tl.int64) * batch + place, sample, real)
        extra = real & (place >= LISTED) & (place % LEAF_TILE == 0)
        note_tiles(leaf, place, extra, count_ptr + leaves, extra_ptr, most_extra)


@triton.jit
def note_tiles(leaf, place, extra, number_ptr, extra_ptr, most_extra):
    """Adds the tiles that begin at `place` in the list of a leaf to the extra work of the leaves' kernels."""
    new = extra.to(tl.int32)
    number = tl.sum(new, 0)
    if number > 0:
        at = tl.atomic_add(number_ptr, number, sem="relaxed") + tl.cumsum(new, 0) - 1
        tl.store(extra_ptr + at, leaf, extra)
        tl.store(extra_ptr + most_extra + at, place, extra)


@triton.jit
def sorted_tiles(
    leaf_ptr, first_ptr, number_ptr, extra_ptr, batch, most_extra, BM: tl.constexpr, LISTED: tl.constexpr,
    LEAF_TILE: tl.constexpr,
):  # fmt: skip
    """Notes extra tiles as `group` does, for samples sorted by leaf: `first_ptr` says where each leaf begins."""
    at = tl.program_id(0) * BM + tl.arange(0, BM)
    real = at < batch
    leaf = tl.load(leaf_ptr + at, real, 0).to(tl.int32)
    place = at - tl.load(first_ptr + leaf, real, 0).to(tl.int32)
    extra = real & (place >= LISTED) & (place % LEAF_TILE == 0)
    note_tiles(leaf, place, extra, number_ptr, extra_ptr, most_extra)
