"""The Triton kernel of fastff.optim.LazyAdamW: one pass over the rows that were visited."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["step"])
def adamw_rows(
    parameter_ptr, grad_ptr, mean_ptr, square_ptr, rows_ptr, last_ptr, decayed_ptr, decay_ptr, step, lr, log_first,
    log_second, first, second, rest_first, rest_second, mean_scale, square_scale, eps, weight_decay,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """AdamW on a block of one row of SIZE numbers, after the decay that the row has missed since its last step.

    grad (visited rows, SIZE); `step` is the number of steps before this one. log_first and log_second are the
    logarithms of the betas to base 2, the rests 1 minus the betas; the scales correct the moments' bias. Arithmetic is
    float32 in any dtype.
    """
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    visited = (tl.program_id(0) // BLOCKS).to(tl.int64)
    e = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    inside = e < SIZE
    row = tl.load(rows_ptr + visited)
    missed = (step - tl.load(last_ptr + row)).to(tl.float32)
    shrink = tl.exp((tl.load(decay_ptr) - tl.load(decayed_ptr + row)).to(tl.float32))
    at = row * SIZE + e
    p = tl.load(parameter_ptr + at, inside, 0.0).to(tl.float32) * shrink * (1 - lr * weight_decay)
    g = tl.load(grad_ptr + visited * SIZE + e, inside, 0.0).to(tl.float32)
    m = tl.load(mean_ptr + at, inside, 0.0).to(tl.float32)
    v = tl.load(square_ptr + at, inside, 0.0).to(tl.float32)
    if missed > 0:
        m *= tl.exp2(missed * log_first)
        v *= tl.exp2(missed * log_second)
    m = first * m + rest_first * g
    v = second * v + rest_second * g * g
    p -= lr * mean_scale * m / (tl.sqrt(v) * square_scale + eps)
    tl.store(parameter_ptr + at, p.to(parameter_ptr.dtype.element_ty), inside)
    tl.store(mean_ptr + at, m.to(mean_ptr.dtype.element_ty), inside)
    tl.store(square_ptr + at, v.to(square_ptr.dtype.element_ty), inside)
