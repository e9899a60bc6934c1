"""The Triton kernel between two dense products over all leaves. It zeroes the neurons outside a sample's own leaf."""

import triton
import triton.language as tl

from .triton_activations import act


@triton.jit
def own_neurons(
    hidden_ptr, gate_ptr, leaf_ptr, width, neurons,
    ACT: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The activation in each sample's own leaf, 0 elsewhere, in place. Program (sample, block of neurons)."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(leaf_ptr + row).to(tl.int32) * width
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = (j >= first) & (j < first + width)
    at = row * neurons + j
    hidden = tl.load(hidden_ptr + at, own, 0.0).to(tl.float32)
    if GATED:
        gate = tl.load(gate_ptr + at, own, 0.0).to(tl.float32)
        hidden = act(gate, ACT) * hidden
    else:
        hidden = act(hidden, ACT)
    hidden = tl.where(own, hidden, 0.0)
    tl.store(hidden_ptr + at, hidden.to(hidden_ptr.dtype.element_ty), j < neurons)
