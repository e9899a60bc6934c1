// A vector of W floats in the vector extension of GCC and Clang, which compiles to whatever instruction set the file is
// compiled for. Included by isa.cpp inside a namespace of that instruction set, and all of internal linkage, so that
// the linker cannot take a function compiled for one processor as another's.
#pragma once
#if defined(__AVX512F__)
#include <immintrin.h>
#define FASTFF_WIDTH 16
#elif defined(__AVX2__)
#include <immintrin.h>
#define FASTFF_WIDTH 8
#else
#define FASTFF_WIDTH 4
#endif
#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif
#include <cstdint>
#include <cstring>
#include <utility>

#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))

namespace fastff::FASTFF_ISA {
namespace {

constexpr int W = FASTFF_WIDTH;
typedef float V __attribute__((vector_size(4 * W)));
typedef int32_t I __attribute__((vector_size(4 * W)));
typedef uint32_t U __attribute__((vector_size(4 * W)));
typedef uint16_t H __attribute__((vector_size(2 * W)));
typedef uint16_t bf16;  // the upper half of a float32

template <int N>
struct Index {
    static constexpr int value = N;
};

// f(Index<0>), ..., f(Index<N - 1>): a loop that is always unrolled, so that arrays of vectors stay in registers.
template <int N, class F>
INLINE void unroll(F&& f) {
    if constexpr (N > 0) {
        unroll<N - 1>(f);
        f(Index<N - 1>{});
    }
}

INLINE V splat(float a) { return a - V{}; }  // unlike V{} + a, right for -0, and so without an addition

// a * b + c, rounded once where the instruction set has such an instruction. Said outright and not left to the compiler
// (-ffp-contract=off): GCC 13 fuses the sums of some kernels and not of others, and then a row's result depends on how
// many rows share its leaf.
INLINE V fma(V a, V b, V c) {
#if defined(__AVX512F__)
    return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (V)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// GCC 12 takes __builtin_convertvector apart, at twice the time of a product; these are one instruction each.
INLINE U to_32_bits(H a) {
#if defined(__AVX512F__)
    return (U)_mm512_cvtepu16_epi32((__m256i)a);
#elif defined(__AVX2__)
    return (U)_mm256_cvtepu16_epi32((__m128i)a);
#else
    return __builtin_convertvector(a, U);
#endif
}
INLINE H to_16_bits(U a) {
#if defined(__AVX512F__)
    return (H)_mm512_cvtepi32_epi16((__m512i)a);
#else
    return __builtin_convertvector(a, H);
#endif
}

INLINE V widen(H a) { return (V)(to_32_bits(a) << 16); }

// int8 numbers, as floats: exact.
typedef int8_t B __attribute__((vector_size(W)));
INLINE V widen(B a) {
#if defined(__AVX512F__)
    return (V)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)a));
#elif defined(__AVX2__)
    return (V)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((int64_t)a)));
#else
    return __builtin_convertvector(a, V);
#endif
}

INLINE V load(const float* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE V load(const bf16* p) {
    H v;
    memcpy(&v, p, sizeof v);
    return widen(v);
}

INLINE V load(const int8_t* p) {
    B v;
    memcpy(&v, p, sizeof v);
    return widen(v);
}

// The first n < W elements, zeros behind them; nothing behind them is read.
INLINE V load(const float* p, int n) {
#if defined(__AVX512F__)
    return (V)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#else
    V v = {};
    memcpy(&v, p, 4 * n);
    return v;
#endif
}
INLINE V load(const bf16* p, int n) {
#if defined(__AVX512F__)
    return widen((H)_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p));
#else
    H v = {};
    memcpy(&v, p, 2 * n);
    return widen(v);
#endif
}

INLINE V load(const int8_t* p, int n) {
    B v = {};
    memcpy(&v, p, n);
    return widen(v);
}

// To nearest even; a NaN stays one.
INLINE H narrow(V v) {
    U u = (U)v;
    U rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    U nan = (u >> 16) | 0x40;
    I is_nan = v != v;
    return to_16_bits((nan & (U)is_nan) | (rounded & (U)~is_nan));
}

INLINE void store(float* p, V v) { memcpy(p, &v, sizeof v); }
INLINE void store(bf16* p, V v) {
    H h = narrow(v);
    memcpy(p, &h, sizeof h);
}
INLINE void store(float* p, V v, int n) {
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)v);
#else
    memcpy(p, &v, 4 * n);
#endif
}
INLINE void store(bf16* p, V v, int n) {
    H h = narrow(v);
#if defined(__AVX512F__)
    _mm256_mask_storeu_epi16(p, (__mmask16)((1u << n) - 1), (__m256i)h);
#else
    memcpy(p, &h, 2 * n);
#endif
}

INLINE V choose(I condition, V yes, V no) { return (V)(((I)yes & condition) | ((I)no & ~condition)); }

// Sums of many vectors at once. A vector holds W / S segments of S partial sums; fold<S>(a, b) adds the halves of
// every segment, those of a and then those of b. Every sum is added in the same order, however many there are.
template <int S, int... N>
INLINE V fold(V a, V b, std::integer_sequence<int, N...>) {
    constexpr int half = S / 2;
    return __builtin_shufflevector(a, b, (N / half * S + N % half)...) +
           __builtin_shufflevector(a, b, (N / half * S + N % half + half)...);
}

// The sums of a[0..N), in the first N elements.
template <int N, int S = W>
INLINE V sums(const V* a) {
    if constexpr (S == 1) {
        return a[0];
    } else {
        constexpr int pairs = (N + 1) / 2;
        V folded[pairs];
        unroll<pairs>([&](auto i) {
            constexpr int k = 2 * decltype(i)::value;
            folded[k / 2] = fold<S>(a[k], a[k + 1 < N ? k + 1 : k], std::make_integer_sequence<int, W>{});
        });
        return sums<pairs, S / 2>(folded);
    }
}

}  // namespace
}  // namespace fastff::FASTFF_ISA
