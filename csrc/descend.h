// The way down the tree for a few rows of the batch, on one thread.
#pragma once
#include "leaf.h"

namespace fastff::FASTFF_ISA {
namespace {

constexpr int PAIRS = W == 16 ? 4 : 2;  // rows of x that descend in step

// z[p] = w[p] . x[p] for P pairs. Each has four sums under way, so that none waits for the one before.
template <int P, class E>
INLINE void dot_pairs(const E* const* w, const float* const* x, int64_t n, float* z) {
    V sum[P][4] = {};
    auto add = [&](auto p, auto i, int64_t at, auto... count) INLINE_LAMBDA {
        V& s = sum[p.value][i.value];
        s = fma(load(w[p.value] + at, count...), load(x[p.value] + at, count...), s);
    };
    int64_t k = 0;
    for (; k + 4 * W <= n; k += 4 * W)
        unroll<P>([&](auto p) { unroll<4>([&](auto i) { add(p, i, k + i.value * W); }); });
    for (; k + W <= n; k += W) unroll<P>([&](auto p) { add(p, Index<0>{}, k); });
    if (k < n) unroll<P>([&](auto p) { add(p, Index<1>{}, k, int(n - k)); });
    V total[P];
    unroll<P>([&](auto p) {
        auto& s = sum[p.value];
        total[p.value] = (s[0] + s[1]) + (s[2] + s[3]);
    });
    V result = sums<P>(total);
    unroll<P>([&](auto p) { z[p.value] = result[p.value]; });
}

template <class E>
INLINE float number(const void* p, int64_t i) {
    return load((const E*)p + i, 1)[0];
}

// The logits of P nodes, each at a row of x of its own.
template <int P, class E>
INLINE void node_logits(const Layer& layer, const int64_t* node, const float* const* x, float* z, float* hidden) {
    int64_t n = layer.node_width;
    const E* w[P];
    unroll<P>([&](auto p) { w[p.value] = (const E*)layer.node_weight + node[p.value] * n * layer.in; });
    if (layer.node_out_weight == nullptr) {
        dot_pairs<P>(w, x, layer.in, z);
        unroll<P>([&](auto p) { z[p.value] += number<E>(layer.node_bias, node[p.value]); });
        return;
    }
    for (int p = 0; p < P; p++) {
        Nothing nothing;
        linear<1>(w[p], n, x + p, layer.in, hidden, n, nothing);
        scale_and_shift<1>(hidden, n, (const E*)nullptr, (const E*)layer.node_bias + node[p] * n, n);
        ACTIVATE[layer.activation](hidden, nullptr, n);
        const E* out = (const E*)layer.node_out_weight + node[p] * n;
        const float* h = hidden;
        dot_pairs<1>(&out, &h, n, z + p);
        z[p] += number<E>(layer.node_out_bias, node[p]);
    }
}

// Several rows go down together, level by level, so that several rows of the tree are on their way from memory.
template <class E>
void descend(const Layer& layer, const E* x, int64_t count, int64_t* leaf, float* scratch) {
    float* hidden = scratch + WALKERS * layer.in;
    for (; count > 0; count -= WALKERS, x += WALKERS * layer.in, leaf += WALKERS) {
        int walkers = count < WALKERS ? int(count) : WALKERS;
        const float* row[WALKERS];
        int64_t node[WALKERS] = {};
        float z[PAIRS];
        for (int t = 0; t < walkers; t++) row[t] = as_float(x + t * layer.in, layer.in, scratch + t * layer.in);
        auto go = [&](auto pairs, int t) INLINE_LAMBDA {
            node_logits<pairs.value, E>(layer, node + t, row + t, z, hidden);
            for (int p = t; p < t + pairs.value; p++) node[p] = 2 * node[p] + 1 + (z[p - t] >= 0);  // a NaN goes left
        };
        for (int64_t level = 0; level < layer.depth; level++) {
            int t = 0;
            for (; t + PAIRS <= walkers; t += PAIRS) go(Index<PAIRS>{}, t);
            for (; t < walkers; t++) go(Index<1>{}, t);
        }
        for (int t = 0; t < walkers; t++) leaf[t] = node[t] - (layer.leaves - 1);
    }
}

}  // namespace
}  // namespace fastff::FASTFF_ISA
