"""Triton kernels of the hard pass for tiny layers: one launch, a tile of samples a program, no atomics.

Such a pass takes a few microseconds, most of them latency. So loads go out together, and few steps wait for others.
Left alone, ptxas has about eight loads of a thread in flight, to save registers: `sent` makes it send all of them.

`tile_rows`: a few lanes share a sample and keep its input in registers, block after block of columns. A row of weights
is read the same way, so that a product is a few FMAs and three shuffles. Each sample reads the nodes on its way and the
rows of its own leaf; samples of a tile that share them find them in the L1 cache.

`tile_leaf`: one program for each leaf and each tile. It runs its leaf on all samples, on tensor cores in 16 bits, and
writes those that reach the leaf. Its weights are on their way before the walk is over, and the time does not depend on
how samples spread.

Decisions are float32 sums of float32 products in every dtype, never TF32.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .triton_activations import act
from .triton_walk_kernels import sent


@triton.jit
def _begin(x_ptr, sample, real, IN: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr):
    """Let the next kernel begin, and wait for the last one. Inputs move to the L2 cache meanwhile.

    Here the next may begin before the wait: only kernels that read nothing before their own wait follow these directly.

    Nothing is read before the wait, since the kernel before may write inputs and weights. To move memory to L2 is no
    read: every write goes through L2.
    """
    if PDL:
        gdc_launch_dependents()
        if PREFETCH:
            LINE: tl.constexpr = 1024 // x_ptr.dtype.element_ty.primitive_bitwidth  # numbers in 128 bytes
            LINES: tl.constexpr = triton.next_power_of_2(triton.cdiv(IN, LINE))
            column = tl.arange(0, LINES) * LINE
            # Beyond the end of a row lies the next one, and beyond the last one the row itself is asked for again.
            row = x_ptr + tl.where(real, sample, 0).to(tl.int64)[:, None] * IN
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [row + tl.where(column < IN, column, 0)[None, :]],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        gdc_wait()


@triton.jit
def _rows(ptr, row, valid, WIDTH: tl.constexpr, COLS: tl.constexpr):
    """Rows of a matrix with WIDTH columns, as a tuple of blocks (rows, COLS), all on their way at once."""
    k = tl.arange(0, COLS)
    start = ptr + row.to(tl.int64)[:, None] * WIDTH
    blocks = ()
    for at in tl.static_range(0, WIDTH, COLS):
        inside = valid[:, None] & (at + k < WIDTH)[None, :] if at + COLS > WIDTH else valid[:, None]
        blocks = blocks + (tl.load(start + at + k[None, :], inside, 0.0),)  # noqa: RUF005 (Triton has no unpacking)
    return blocks


@triton.jit
def _product(x, w, zero, WIDTH: tl.constexpr, COLS: tl.constexpr):
    """The scalar product of each row of x with its row of w, or with the one row of w."""
    total = x[0].to(tl.float32) * w[0].to(tl.float32) + zero
    for at in tl.static_range(COLS, WIDTH, COLS):
        total += x[at // COLS].to(tl.float32) * w[at // COLS].to(tl.float32)
    return tl.sum(total, 1)


@triton.jit
def _levels(
    x, node, valid, weight, bias, batch, LEVELS: tl.constexpr, IN: tl.constexpr, COLS: tl.constexpr,
    FENCE: tl.constexpr,
):  # fmt: skip
    """LEVELS further down from a node: the whole subtree's rows at once, its decisions as bits of an integer.

    A node for each sample; or one node for all, in a tensor of one element, whose rows are then read once for all.
    """
    rows = ()
    biases = ()
    for m in tl.static_range(LEVELS):
        for q in tl.static_range(1 << m):
            below = ((node + 1) << m) + (q - 1)
            rows = rows + (_rows(weight, below, valid, IN, COLS),)  # noqa: RUF005
            biases = biases + (tl.load(bias + below, valid, 0.0),)  # noqa: RUF005
    zero = sent(batch, FENCE)
    bits = 0
    for i in tl.static_range((1 << LEVELS) - 1):
        z = _product(x, rows[i], zero, IN, COLS) + biases[i].to(tl.float32)
        bits |= (z >= 0).to(tl.int32) << i  # a NaN goes left
    at = bits * 0
    for _ in tl.static_range(LEVELS):
        at = 2 * at + 1 + ((bits >> at) & 1)
    return ((node + 1) << LEVELS) + at - (1 << LEVELS)


@triton.jit
def _walk(
    x, real, weight, bias, batch, DEPTH: tl.constexpr, TOP: tl.constexpr, ROUND: tl.constexpr, IN: tl.constexpr,
    COLS: tl.constexpr, FENCE: tl.constexpr,
):  # fmt: skip
    """The leaf of each sample: the first TOP levels at once, by the rows of all their nodes; then ROUND at a time."""
    node = real.to(tl.int32) * 0
    if TOP > 0:
        root = tl.zeros((1,), tl.int32)
        node = _levels(x, root, root == 0, weight, bias, batch, TOP, IN, COLS, FENCE)
        REST: tl.constexpr = DEPTH - TOP
        for _ in tl.static_range(REST // ROUND):
            node = _levels(x, node, real, weight, bias, batch, ROUND, IN, COLS, FENCE)
        if REST % ROUND > 0:
            node = _levels(x, node, real, weight, bias, batch, REST % ROUND, IN, COLS, FENCE)
    return node - ((1 << DEPTH) - 1)


@triton.jit
def _neuron(weight, bias, row, valid, IN: tl.constexpr, COLS: tl.constexpr, BIAS: tl.constexpr):
    """A neuron for each sample: the blocks of its row of weights, and its bias or zero."""
    offset = tl.load(bias + row, valid, 0.0) if BIAS else row.to(tl.float32) * 0
    return _rows(weight, row, valid, IN, COLS), offset


@triton.jit
def tile_rows(
    x_ptr, weight, bias, in_weight, in_bias, gate_weight, gate_bias, out_weight, out_bias, leaf_ptr, y_ptr, batch,
    IN: tl.constexpr, OUT: tl.constexpr, DEPTH: tl.constexpr, L: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    IN_BIAS: tl.constexpr, GATE_BIAS: tl.constexpr, OUT_BIAS: tl.constexpr, TOP: tl.constexpr, ROUND: tl.constexpr,
    BM: tl.constexpr, COLS: tl.constexpr, OUT_COLS: tl.constexpr, GROUP: tl.constexpr, FENCE: tl.constexpr,
    PDL: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """A tile of samples: each walks, then runs its own leaf, GROUP neurons at a time."""
    sample = tl.program_id(0) * BM + tl.arange(0, BM)
    real = sample < batch
    _begin(x_ptr, sample, real, IN, PDL, PREFETCH)
    x = _rows(x_ptr, sample, real, IN, COLS)
    leaf = _walk(x, real, weight, bias, batch, DEPTH, TOP, ROUND, IN, COLS, FENCE)
    y = ()
    for at in tl.static_range(0, OUT, OUT_COLS):
        n = at + tl.arange(0, OUT_COLS)
        block = tl.zeros((BM, OUT_COLS), tl.float32)
        if OUT_BIAS:
            inside = real[:, None] & (n < OUT)[None, :]
            block += tl.load(out_bias + leaf.to(tl.int64)[:, None] * OUT + n[None, :], inside, 0.0).to(tl.float32)
        y = y + (block,)  # noqa: RUF005
    for begin in tl.static_range(0, L, GROUP):
        w_in = ()
        w_gate = ()
        w_out = ()
        for i in tl.static_range(begin, min(begin + GROUP, L)):
            row = leaf * L + i
            w_in = w_in + (_neuron(in_weight, in_bias, row, real, IN, COLS, IN_BIAS),)  # noqa: RUF005
            if GATED:
                w_gate = w_gate + (_neuron(gate_weight, gate_bias, row, real, IN, COLS, GATE_BIAS),)  # noqa: RUF005
            w_out = w_out + (_rows(out_weight, row, real, OUT, OUT_COLS),)  # noqa: RUF005
        zero = sent(batch, FENCE)
        for i in tl.static_range(min(GROUP, L - begin)):
            hidden = _product(x, w_in[i][0], zero, IN, COLS) + w_in[i][1].to(tl.float32)
            if GATED:
                gate = _product(x, w_gate[i][0], zero, IN, COLS) + w_gate[i][1].to(tl.float32)
                hidden = act(gate, ACT) * hidden
            else:
                hidden = act(hidden, ACT)
            added = ()
            for at in tl.static_range(0, OUT, OUT_COLS):
                block = y[at // OUT_COLS] + hidden[:, None] * w_out[i][at // OUT_COLS].to(tl.float32)
                added = added + (block,)  # noqa: RUF005
            y = added
    for at in tl.static_range(0, OUT, OUT_COLS):
        n = at + tl.arange(0, OUT_COLS)
        inside = real[:, None] & (n < OUT)[None, :]
        row = y_ptr + sample.to(tl.int64)[:, None] * OUT
        tl.store(row + n[None, :], y[at // OUT_COLS].to(y_ptr.dtype.element_ty), inside)
    tl.store(leaf_ptr + sample, leaf.to(tl.int64), real)


@triton.jit
def _matrix(ptr, row, valid, WIDTH: tl.constexpr, BW: tl.constexpr):
    """Rows of a matrix with WIDTH columns, as one block (rows, BW)."""
    k = tl.arange(0, BW)[None, :]
    return tl.load(ptr + row.to(tl.int64)[:, None] * WIDTH + k, valid[:, None] & (k < WIDTH), 0.0)


@triton.jit
def tile_leaf(
    x_ptr, weight, bias, in_weight, in_bias, gate_weight, gate_bias, out_weight, out_bias, leaf_ptr, y_ptr, batch,
    IN: tl.constexpr, OUT: tl.constexpr, DEPTH: tl.constexpr, L: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    IN_BIAS: tl.constexpr, GATE_BIAS: tl.constexpr, OUT_BIAS: tl.constexpr, TOP: tl.constexpr, ROUND: tl.constexpr,
    BM: tl.constexpr, COLS: tl.constexpr, BL: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, FENCE: tl.constexpr,
    PDL: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """One leaf on a tile of samples, of which those that reach the leaf are written."""
    mine = tl.program_id(0)
    sample = tl.program_id(1) * BM + tl.arange(0, BM)
    real = sample < batch
    _begin(x_ptr, sample, real, IN, PDL, PREFETCH)
    x = _rows(x_ptr, sample, real, IN, COLS)
    j = tl.arange(0, BL)
    n = tl.arange(0, BN)
    row = mine * L + j
    x_tile = _matrix(x_ptr, sample, real, IN, BK)
    w_in = _matrix(in_weight, row, j < L, IN, BK)
    if GATED:
        w_gate = _matrix(gate_weight, row, j < L, IN, BK)
    w_out = _matrix(out_weight, row, j < L, OUT, BN)
    leaf = _walk(x, real, weight, bias, batch, DEPTH, TOP, ROUND, IN, COLS, FENCE)
    if FENCE:  # or a matrix moves to shared memory, and all wait for it, before the next one is asked for
        zero = sent(batch, FENCE).to(x_ptr.dtype.element_ty)
        x_tile += zero
        w_in += zero
    hidden = tl.dot(x_tile, tl.trans(w_in), input_precision="ieee")
    if IN_BIAS:
        hidden += tl.load(in_bias + row, j < L, 0.0).to(tl.float32)[None, :]
    if GATED:
        gate = tl.dot(x_tile, tl.trans(w_gate), input_precision="ieee")
        if GATE_BIAS:
            gate += tl.load(gate_bias + row, j < L, 0.0).to(tl.float32)[None, :]
        hidden = act(gate, ACT) * hidden
    else:
        hidden = act(hidden, ACT)
    hidden = tl.where((j < L)[None, :], hidden, 0.0).to(x_ptr.dtype.element_ty)  # not 0 yet where x is infinite
    y = tl.dot(hidden, w_out, input_precision="ieee")
    if OUT_BIAS:
        y += tl.load(out_bias + mine.to(tl.int64) * OUT + n, n < OUT, 0.0).to(tl.float32)[None, :]
    here = (leaf == mine) & real
    to = y_ptr + sample.to(tl.int64)[:, None] * OUT
    tl.store(to + n[None, :], y.to(y_ptr.dtype.element_ty), here[:, None] & (n < OUT)[None, :])
    tl.store(leaf_ptr + sample, leaf.to(tl.int64), here)
