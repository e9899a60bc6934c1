// The named activations on vectors, to about the rounding error of float32. A NaN stays one.
#pragma once
#include "layer.h"
#include "vec.h"

namespace fastff::FASTFF_ISA {
namespace {

INLINE V absolute(V x) { return (V)((I)x & 0x7fffffff); }
INLINE V with_sign_of(V x, V sign) { return (V)((I)x | ((I)sign & (I)splat(-0.0f))); }

// first * x**n + ... + last.
template <class... F>
INLINE V polynomial(V x, float first, F... rest) {
    V p = splat(first);
    ((p = fma(p, x, splat(rest))), ...);
    return p;
}

// 0 below -87.3 or so, infinity above 88.7.
INLINE V exp(V x) {
    x = choose(x < splat(-88.0f), splat(-88.0f), x);
    x = choose(x > splat(89.0f), splat(89.0f), x);
    // Adding 1.5 * 2**23 rounds to an integer, which then stands in the low bits.
    V shifted = fma(x, splat(1.44269504f), splat(12582912.0f));
    V n = shifted - 12582912.0f;
    V r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), x));
    V p = polynomial(r, 1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                     5.0000001201e-1f);
    p = fma(p * r, r, r) + 1.0f;
    // 2**n in two factors: n = 128 and n = -127 have no float of their own.
    I k = (I)shifted - 0x4b400000;
    I half = k >> 1;
    return p * (V)((half + 127) << 23) * (V)((k - half + 127) << 23);
}

INLINE V tanh(V x) {
    V a = absolute(x), s = x * x;
    V p = polynomial(s, -5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f,
                     -3.33332819422e-1f);
    V small = fma(x * s, p, x);
    V large = with_sign_of(1.0f - 2.0f / (exp(a + a) + 1.0f), x);
    return choose(a > splat(0.625f), large, small);
}

INLINE V erf(V x) {
    V a = absolute(x), s = x * x;
    V r = fma(a, splat(-1.72853470e-5f), splat(3.83197126e-4f));
    r = fma(r, s, fma(a, splat(-3.88396438e-3f), splat(2.42546219e-2f)));
    r = fma(r, a, splat(-1.06777877e-1f));
    r = fma(r, a, splat(-6.34846687e-1f));
    r = fma(r, a, splat(-1.28717512e-1f));
    r = fma(r, a, -a);
    V large = with_sign_of(1.0f - exp(r), x);
    V p = polynomial(s, -5.96761703e-4f, 4.99119423e-3f, -2.67681349e-2f, 1.12819925e-1f, -3.76125336e-1f,
                     1.28379166e-1f);
    V small = fma(p, x, x);
    return choose(a > splat(0.927734375f), large, small);
}

template <Activation A>
INLINE V act(V x) {
    if constexpr (A == relu) return choose(x < splat(0.0f), splat(0.0f), x);
    if constexpr (A == gelu) return 0.5f * x * (1.0f + erf(x * 0.70710678f));
    if constexpr (A == gelu_tanh) return 0.5f * x * (1.0f + tanh(0.79788456f * fma(0.044715f * x * x, x, x)));
    if constexpr (A == silu) return x / (1.0f + exp(-x));
    if constexpr (A == tanh_) return tanh(x);
    return x;
}

}  // namespace
}  // namespace fastff::FASTFF_ISA
