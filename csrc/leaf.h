// One leaf at a few rows of the batch, on one thread.
//
// Inputs are float32 while a kernel works on them (bfloat16 rows are widened first). E is the layer's type, Q the type of
// the leaves' weights: E or int8. int8 weights are widened on the way to their products; a neuron's scale multiplies its
// first product once that is added up, and the neuron itself before the second.
// As in product.h, the order in which a sum is added up depends on the sizes of the layer alone.
#pragma once
#include "activation.h"
#include "layer.h"
#include "product.h"

namespace fastff::FASTFF_ISA {
namespace {

// hidden = act(hidden), or act(gate) * hidden; gate may be null.
template <Activation A>
void activate(float* hidden, const float* gate, int64_t n) {
    auto apply = [&](int64_t i, auto... count) INLINE_LAMBDA {
        V h = load(hidden + i, count...);
        store(hidden + i, gate ? act<A>(load(gate + i, count...)) * h : act<A>(h), count...);
    };
    int64_t i = 0;
    for (; i + W <= n; i += W) apply(i);
    if (i < n) apply(i, int(n - i));
}

// In the order of the enumeration.
constexpr void (*ACTIVATE[])(float*, const float*, int64_t) = {
    activate<relu>, activate<gelu>, activate<gelu_tanh>, activate<silu>, activate<tanh_>, activate<identity>,
    activate<silu>, activate<gelu>, activate<gelu_tanh>,
};

// The neurons that are not zero at all of T rows: behind relu, about half of them at a single row. Returns how many.
template <int T>
INLINE int64_t active_neurons(const float* h, int64_t neurons, int32_t* active) {
    int64_t count = 0;
    for (int64_t r = 0; r < neurons; r++) {
        bool any = false;
        unroll<T>([&](auto t) { any |= h[t.value * neurons + r] != 0; });
        active[count] = int32_t(r);
        count += any;
    }
    return count;
}

// y[t][c] = bias[c] + sum over r of h[t][r] w[r][c], for C vectors of columns or, with `count`, for less than one.
template <int T, int C, class Q, class E, class Y, class A, class... Count>
INLINE void mix_columns(const Q* w, int64_t stride, const E* bias, const int32_t* active, int64_t actives,
                        const float* h, int64_t h_stride, Y* const* y, int64_t column, A& ahead, Count... count) {
    V sum[T * C];
    unroll<C>([&](auto c) {
        V start = bias ? load(bias + column + c.value * W, count...) : V{};
        unroll<T>([&](auto t) { sum[t.value * C + c.value] = start; });
    });
    w += column;
    A soon = ahead;
    for (int64_t i = 0; i < actives; i++) {
        int64_t r = T <= SPARSE_TILE ? active[i] : i;
        const Q* row = w + r * stride;
        if (T <= SPARSE_TILE && A::something && i + 4 < actives) {
            // The processor does not foresee which rows follow.
            const Q* later = w + active[i + 4] * stride;
            for (int c = 0; c < C * W; c += 64 / int(sizeof(Q))) __builtin_prefetch(later + c);
        }
        soon.template fetch<lines_ahead<Q>(T)>();
        V a[T];
        unroll<T>([&](auto t) { a[t.value] = splat(h[t.value * h_stride + r]); });
        unroll<C>([&](auto c) {
            V b = load(row + c.value * W, count...);
            unroll<T>([&](auto t) {
                constexpr int i = decltype(t)::value * C + decltype(c)::value;
                sum[i] = fma(a[t.value], b, sum[i]);
            });
        });
    }
    ahead = soon;
    unroll<T>([&](auto t) {
        unroll<C>([&](auto c) { store(y[t.value] + column + c.value * W, sum[t.value * C + c.value], count...); });
    });
}

template <int T, int C = ACCUMULATORS / T, class Q, class E, class Y, class A>
void mix(const Q* w, const E* bias, const int32_t* active, int64_t actives, const float* h, int64_t h_stride,
         Y* const* y, int64_t columns, A& ahead, int64_t column = 0) {
    for (; column + C * W <= columns; column += C * W)
        mix_columns<T, C>(w, columns, bias, active, actives, h, h_stride, y, column, ahead);
    if constexpr (C > 1) {
        mix<T, C / 2>(w, bias, active, actives, h, h_stride, y, columns, ahead, column);
    } else if (column < columns) {
        mix_columns<T, 1>(w, columns, bias, active, actives, h, h_stride, y, column, ahead, int(columns - column));
    }
}

// The same with int8 weights. A few vectors of columns are hardly a line of memory of an int8 row, so rows are read from
// one end to the other, a few at a time, while the next ones are fetched. The sums are the same as in `mix`, in the same
// order: a row of zeros fills up the last few, and no int8 weight is infinite.
template <int T, class E, class A>
void mix_rows(const int8_t* w, const E* bias, const int32_t* active, int64_t actives, const float* h, int64_t h_stride,
              float* const* y, int64_t columns, A& ahead) {
    constexpr int ROWS = 4, LINE = 64;
    auto row_of = [&](int64_t i) { return active[i < actives ? i : actives - 1]; };
    for (int64_t from = 0, to; from < columns; from = to) {
        to = columns - from < DEPTH_BLOCK ? columns : from + DEPTH_BLOCK;
        for (int g = 0; g < ROWS && g < actives; g++)
            for (int64_t c = from; c < to; c += LINE) __builtin_prefetch(w + active[g] * columns + c);
        auto start = [&](int64_t c, auto... count) INLINE_LAMBDA {
            V value = bias ? load(bias + c, count...) : V{};
            unroll<T>([&](auto t) { store(y[t.value] + c, value, count...); });
        };
        int64_t c = from;
        for (; c + W <= to; c += W) start(c);
        if (c < to) start(c, int(to - c));
        for (int64_t i = 0; i < actives; i += ROWS) {
            const int8_t *row[ROWS], *later[ROWS];
            V a[T * ROWS];
            unroll<ROWS>([&](auto g) {
                row[g.value] = w + row_of(i + g.value) * columns;
                later[g.value] = w + row_of(i + g.value + ROWS) * columns;
                unroll<T>([&](auto t) {
                    bool there = i + g.value < actives;
                    a[t.value * ROWS + g.value] = splat(there ? h[t.value * h_stride + active[i + g.value]] : 0);
                });
            });
            auto step = [&](int64_t c, auto... count) INLINE_LAMBDA {
                V sum[T];
                unroll<T>([&](auto t) { sum[t.value] = load(y[t.value] + c, count...); });
                unroll<ROWS>([&](auto g) {
                    V b = load(row[g.value] + c, count...);
                    unroll<T>([&](auto t) { sum[t.value] = fma(a[t.value * ROWS + g.value], b, sum[t.value]); });
                });
                unroll<T>([&](auto t) { store(y[t.value] + c, sum[t.value], count...); });
            };
            A soon = ahead;
            for (c = from; c + LINE <= to; c += LINE) {
                unroll<ROWS>([&](auto g) { __builtin_prefetch(later[g.value] + c); });
                soon.template fetch<1>();
                for (int64_t end = c + LINE, k = c; k < end; k += W) step(k);
            }
            ahead = soon;
            for (; c + W <= to; c += W) step(c);
            if (c < to) step(c, int(to - c));
        }
    }
}

INLINE const float* as_float(const float* x, int64_t, float*) { return x; }
INLINE const float* as_float(const bf16* x, int64_t n, float* copy) {
    int64_t k = 0;
    for (; k + W <= n; k += W) store(copy + k, load(x + k));
    if (k < n) store(copy + k, load(x + k, int(n - k)), int(n - k));
    return copy;
}

// Where to add up an output: in place, or in memory of its own; and the output then.
INLINE float* sums_of(float* y, float*) { return y; }
INLINE float* sums_of(bf16*, float* memory) { return memory; }
INLINE void narrow_to(float*, const float*, int64_t) {}
INLINE void narrow_to(bf16* y, const float* sums, int64_t n) {
    int64_t k = 0;
    for (; k + W <= n; k += W) store(y + k, load(sums + k));
    if (k < n) store(y + k, load(sums + k, int(n - k)), int(n - k));
}

// Scratch memory: rows of x as float32, hidden layer, gate, active neurons, sums of the outputs.
int64_t scratch_floats(const Layer& layer) {
    int64_t width = layer.leaf_width > layer.node_width ? layer.leaf_width : layer.node_width;
    return WALKERS * layer.in + (2 * TILE + 1) * width + TILE * layer.out;
}

// What to fetch while a leaf is computed: the weights of the next.
template <class A>
struct Next {
    A in, out;
};

// p[i], or null where p is.
template <class E>
INLINE const E* at(const void* p, int64_t i) {
    return p ? (const E*)p + i : nullptr;
}

// The neurons [first, last) of a leaf at T rows of x.
template <int T, class Q, class E, class Y, class A>
INLINE void leaf_tile(const Layer& layer, int64_t leaf, int64_t first, int64_t last, const float* const* x,
                      const E* out_bias, Y* const* y, Next<A>& next, float* scratch) {
    int64_t from = leaf * layer.leaf_width + first, neurons = last - first;
    float *hidden = scratch + WALKERS * layer.in, *gate = hidden + TILE * layer.leaf_width;
    int32_t* active = (int32_t*)(gate + TILE * layer.leaf_width);
    auto first_product = [&](const void* weight, const void* scale, const void* bias, float* out) INLINE_LAMBDA {
        linear<T>((const Q*)weight + from * layer.in, neurons, x, layer.in, out, neurons, next.in);
        scale_and_shift<T>(out, neurons, at<E>(scale, from), at<E>(bias, from), neurons);
    };
    first_product(layer.in_weight, layer.in_scale, layer.in_bias, hidden);
    if (layer.gate_weight) first_product(layer.gate_weight, layer.gate_scale, layer.gate_bias, gate);
    ACTIVATE[layer.activation](hidden, layer.gate_weight ? gate : nullptr, T * neurons);
    scale_and_shift<T>(hidden, neurons, at<E>(layer.out_scale, from), (const E*)nullptr, neurons);
    if constexpr (sizeof(Q) == 1) {
        int64_t actives = active_neurons<T>(hidden, neurons, active);
        float *memory = (float*)(active + layer.leaf_width), *sums[T];
        for (int t = 0; t < T; t++) sums[t] = sums_of(y[t], memory + t * layer.out);
        mix_rows<T>((const Q*)layer.out_weight + from * layer.out, out_bias, active, actives, hidden, neurons, sums,
                    layer.out, next.in);
        for (int t = 0; t < T; t++) narrow_to(y[t], sums[t], layer.out);
    } else {
        int64_t actives = T <= SPARSE_TILE ? active_neurons<T>(hidden, neurons, active) : neurons;
        // Which of the next leaf's output weights a few rows will use is not known yet.
        mix<T>((const Q*)layer.out_weight + from * layer.out, out_bias, active, actives, hidden, neurons, y, layer.out,
               T <= SPARSE_TILE ? next.in : next.out);
    }
}

template <int T, class Q, class E, class A>
void visit_tile(const Layer& layer, int64_t leaf, const int32_t* rows, const E* x, E* y, Next<A>& next,
                float* scratch) {
    const float* from[T];
    E* to[T];
    for (int t = 0; t < T; t++) {
        from[t] = as_float(x + rows[t] * layer.in, layer.in, scratch + t * layer.in);
        to[t] = y + rows[t] * layer.out;
    }
    leaf_tile<T, Q>(layer, leaf, 0, layer.leaf_width, from, at<E>(layer.out_bias, leaf * layer.out), to, next, scratch);
}

template <class Q, class E>
void visit(const Layer& layer, int64_t leaf, const int32_t* rows, int64_t count, const E* x, E* y, int64_t next_leaf,
           float* scratch) {
    auto visit_all = [&](auto& next) INLINE_LAMBDA {
        for (int64_t tiles = (count + TILE - 1) / TILE; tiles > 0; tiles--) {
            int64_t n = (count + tiles - 1) / tiles;  // tiles of nearly the same size
            unroll<TILE>([&](auto t) {
                if (n == t.value + 1) visit_tile<t.value + 1, Q>(layer, leaf, rows, x, y, next, scratch);
            });
            rows += n;
            count -= n;
        }
    };
    auto weights_of = [&](int64_t leaf, const void* weight, int64_t features) -> Piece {
        uintptr_t size = layer.leaf_width * features * sizeof(Q), at = (uintptr_t)weight + leaf * size;
        return {at, at + size};
    };
    if constexpr (sizeof(Q) == 1) {
        Piece pieces[4], *end = pieces;  // in the order in which they are needed; output weights: see mix_rows
        if (next_leaf < 0) {
            Piece own = weights_of(leaf, layer.in_weight, layer.in);
            own.at += rows_together(1) * layer.in;  // behind the rows that are read first
            *end++ = own;
        }
        if (layer.gate_weight) *end++ = weights_of(leaf, layer.gate_weight, layer.in);
        if (next_leaf >= 0) *end++ = weights_of(next_leaf, layer.in_weight, layer.in);
        *end = {pieces->at, pieces->at};
        Next<Queue> next = {{*pieces, pieces + 1}, {}};
        visit_all(next);
    } else if (count == 1 && next_leaf < 0) {
        Next<Nothing> nothing;
        visit_tile<1, Q>(layer, leaf, rows, x, y, nothing, scratch);
    } else {
        auto ahead = [&](const void* weight, int64_t features) -> Ahead {
            Piece piece = weights_of(next_leaf < 0 ? leaf : next_leaf, weight, features);
            if (next_leaf < 0 || next_leaf == leaf) piece.end = piece.at;
            return {piece};
        };
        Next<Ahead> next = {ahead(layer.in_weight, layer.in), ahead(layer.out_weight, layer.out)};
        visit_all(next);
    }
}

template <class Q, class E>
void visit_part(const Layer& layer, int64_t leaf, const E* x, int64_t first, int64_t last, float* part,
                float* scratch) {
    const float* from = as_float(x, layer.in, scratch);
    Next<Nothing> nothing;
    leaf_tile<1, Q>(layer, leaf, first, last, &from, (const E*)nullptr, &part, nothing, scratch);
}

template <class E>
void add_parts(const Layer& layer, int64_t leaf, const float* parts, int64_t count, E* y) {
    const E* bias = at<E>(layer.out_bias, leaf * layer.out);
    auto add = [&](int64_t c, auto... n) INLINE_LAMBDA {
        V sum = bias ? load(bias + c, n...) : V{};
        for (int64_t i = 0; i < count; i++) sum += load(parts + i * layer.out + c, n...);
        store(y + c, sum, n...);
    };
    int64_t c = 0;
    for (; c + W <= layer.out; c += W) add(c);
    if (c < layer.out) add(c, int(layer.out - c));
}

}  // namespace
}  // namespace fastff::FASTFF_ISA
