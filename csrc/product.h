// Rows of weights times a few rows of x, and what is fetched from memory meanwhile.
//
// Inputs are float32 while a kernel works on them (bfloat16 rows are widened first); weights are of type Q. The order in
// which a sum is added up depends on the sizes of the layer alone, so what a row of the batch gives does not depend on the
// rows beside it.
#pragma once
#include "vec.h"

namespace fastff::FASTFF_ISA {
namespace {

constexpr int TILE = W == 16 ? 6 : 3;            // rows of x that share the weights they read, at most
constexpr int ACCUMULATORS = W == 16 ? 24 : 12;  // of 32 or 16 registers
constexpr int64_t DEPTH_BLOCK = 1024;            // this many columns of TILE rows of x stay in the first-level cache
constexpr int SPARSE_TILE = 3;                   // up to this many rows, it pays to look for neurons that are zero
constexpr int WALKERS = 8;                       // rows of x that descend together

// Rows of weights that are read together, for T rows of x.
constexpr int rows_together(int T) { return T == 1 || (W == 16 && T <= 3) ? 8 : 4; }

// A piece of memory. Numbers and not pointers: nothing is read there, and it may be the end of an array.
struct Piece {
    uintptr_t at, end;
};
// Memory that will be needed soon, fetched a few lines at a time while something else is computed: what waits for
// memory waits in line, and a crowd of fetches would hold up the loads of the moment.
struct Ahead : Piece {
    static constexpr bool something = true;
    template <int LINES>
    INLINE void fetch() {
        unroll<LINES>([&](auto i) { __builtin_prefetch((const void*)(at + 64 * i.value), 0, 2); });
        at = at + 64 * LINES < end ? at + 64 * LINES : at;
    }
};
// For int8 weights: one piece after the other. Rows of them are too short for the processor to foresee, so a single row
// of x fetches its own leaf. With `mix_rows` that takes 4.8 us instead of 8.2 us (EPYC, 768 -> 768, l = 32, leaves that
// are in no cache).
struct Queue : Piece {
    const Piece* then;  // the last one is empty
    template <int LINES>
    INLINE void fetch() {
        unroll<LINES>([&](auto i) { __builtin_prefetch((const void*)(at + 64 * i.value), 0, 2); });
        at += 64 * LINES;
        if (at >= end) {
            at = then->at, end = then->end;
            then += at != end;
        }
    }
};
// Nothing to fetch, and no time lost with it: for a single row, whose weights may all be in the cache.
struct Nothing {
    static constexpr bool something = false;
    template <int LINES>
    INLINE void fetch() {}
};
// Lines per step, with T rows of x. The fewer they are, the sooner the next weights are needed.
template <class Q>
constexpr int lines_ahead(int T) {
    return sizeof(Q) == 1 ? (W + 7) / 8 : T <= SPARSE_TILE ? 4 : 2;
}

// out[t][r] (+)= w[r] . x[t], for R rows of w and T rows of x.
template <int R, int T, class Q, class A>
INLINE void dots(const Q* w, int64_t stride, const float* const* x, int64_t n, float* out, int64_t out_stride,
                 bool add, A& ahead) {
    V sum[T * R] = {};
    const float* row[T];
    unroll<T>([&](auto t) { row[t.value] = x[t.value]; });
    A soon = ahead;
    // The fewer of the two stay in registers while the others pass by.
    auto step = [&](auto get_w, auto get_x) INLINE_LAMBDA {
        constexpr int held = T < R ? T : R, passing = T < R ? R : T;
        V a[held];
        unroll<held>([&](auto i) { a[i.value] = T < R ? get_x(row[i.value]) : get_w(w + i.value * stride); });
        unroll<passing>([&](auto j) {
            V b = T < R ? get_w(w + j.value * stride) : get_x(row[j.value]);
            unroll<held>([&](auto i) {
                constexpr int t = T < R ? i.value : j.value, r = T < R ? j.value : i.value;
                sum[t * R + r] = fma(a[i.value], b, sum[t * R + r]);
            });
        });
    };
    int64_t k = 0;
    for (; k + W <= n; k += W) {
        auto whole = [&](auto* p) INLINE_LAMBDA { return load(p + k); };
        step(whole, whole);
        soon.template fetch<lines_ahead<Q>(T)>();
    }
    if (k < n) {
        auto rest = [&](auto* p) INLINE_LAMBDA { return load(p + k, int(n - k)); };
        step(rest, rest);
    }
    ahead = soon;
    // Up to W sums at a time.
    constexpr int rounds = (T * R + W - 1) / W;
    unroll<rounds>([&](auto i) {
        constexpr int from = decltype(i)::value * W, count = T * R - from < W ? T * R - from : W;
        V total = sums<count>(sum + from);
        unroll<count>([&](auto j) {
            constexpr int t = (from + decltype(j)::value) / R, r = (from + decltype(j)::value) % R;
            float* to = out + t * out_stride + r;
            *to = add ? *to + total[j.value] : total[j.value];
        });
    });
}

template <int R, int T, class Q, class A>
INLINE void dot_rows(const Q* w, int64_t stride, int64_t rows, const float* const* x, int64_t n, float* out,
                     int64_t out_stride, bool add, A& ahead) {
    int64_t r = 0;
    for (; r + R <= rows; r += R) dots<R, T>(w + r * stride, stride, x, n, out + r, out_stride, add, ahead);
    if constexpr (R > 1) {
        if (r < rows) dot_rows<R / 2, T>(w + r * stride, stride, rows - r, x, n, out + r, out_stride, add, ahead);
    }
}

// out[t][r] = w[r] . x[t].
template <int T, class Q, class A>
void linear(const Q* w, int64_t rows, const float* const* x, int64_t n, float* out, int64_t out_stride, A& ahead) {
    for (int64_t k = 0; k < n; k += DEPTH_BLOCK) {
        const float* part[T];
        for (int t = 0; t < T; t++) part[t] = x[t] + k;
        int64_t length = n - k < DEPTH_BLOCK ? n - k : DEPTH_BLOCK;
        dot_rows<rows_together(T), T>(w + k, n, rows, part, length, out, out_stride, k > 0, ahead);
    }
}

// out[t][r] = out[t][r] * scale[r] + bias[r]; either may be null.
template <int T, class E>
void scale_and_shift(float* out, int64_t out_stride, const E* scale, const E* bias, int64_t rows) {
    auto apply = [&](float* to, int64_t r, auto... count) INLINE_LAMBDA {
        V value = load(to + r, count...);
        if (scale) value *= load(scale + r, count...);
        if (bias) value += load(bias + r, count...);
        store(to + r, value, count...);
    };
    if (!scale && !bias) return;
    for (int t = 0; t < T; t++, out += out_stride) {
        int64_t r = 0;
        for (; r + W <= rows; r += W) apply(out, r);
        if (r < rows) apply(out, r, int(rows - r));
    }
}

}  // namespace
}  // namespace fastff::FASTFF_ISA
