"""The activations as Triton functions, and their derivatives."""

import triton
import triton.language as tl


@triton.jit
def _tanh(x):
    # (1 - e) / (1 + e) cancels near 0, where the series is exact to rounding.
    e = tl.exp(-2 * tl.abs(x))
    large = (1 - e) / (1 + e)
    s = x * x
    small = x * (1 - s * (1 / 3 - s * (2 / 15 - s * (17 / 315))))
    return tl.where(tl.abs(x) < 0.1, small, tl.where(x < 0, -large, large))


@triton.jit
def act(x, ACT: tl.constexpr):
    if ACT == "relu":
        y = tl.where(x < 0, 0.0, x)  # a NaN stays one
    elif ACT == "gelu":
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        y = 0.5 * x * (1 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif ACT == "silu":
        y = x * tl.sigmoid(x)
    elif ACT == "tanh":
        y = _tanh(x)
    else:
        y = x
    return y


@triton.jit
def slope(x, ACT: tl.constexpr):
    if ACT == "relu":
        y = tl.where(x > 0, 1.0, tl.where(x <= 0, 0.0, x))
    elif ACT == "gelu":
        y = 0.5 * (1 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif ACT == "gelu_tanh":
        t = _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
        y = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.7978845608028654 * (1 + 0.134145 * x * x)
    elif ACT == "silu":
        s = tl.sigmoid(x)
        y = s * (1 + x * (1 - s))
    elif ACT == "tanh":
        t = _tanh(x)
        y = 1 - t * t
    else:
        y = x * 0 + 1
    return y
