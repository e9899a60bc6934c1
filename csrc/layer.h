// What the kernels are told: a layer as pointers and sizes, and the table of functions that each instruction set fills.
#pragma once
#include <cstdint>

namespace fastff {

enum Activation : int32_t { relu, gelu, gelu_tanh, silu, tanh_, identity, swiglu, geglu, geglu_tanh };
enum Dtype : int32_t { float32, bfloat16 };

// Laid out as backends/native.py lays it out. A pointer is null where the layer has no such parameter. The weights of
// leaves are int8 where they have scales; everything else has the layer's dtype.
struct Layer {
    const void* node_weight;      // (nodes, n, in)
    const void* node_bias;        // (nodes, n)
    const void* node_out_weight;  // (nodes, n), null for n = 1
    const void* node_out_bias;    // (nodes,), null for n = 1
    const void* in_weight;        // (leaves, l, in)
    const void* in_bias;          // (leaves, l)
    const void* out_weight;       // (leaves, l, out)
    const void* out_bias;         // (leaves, out)
    const void* gate_weight;      // (leaves, l, in)
    const void* gate_bias;        // (leaves, l)
    // Of int8 leaves, in the layer's dtype: what a neuron multiplies its row of a weight by. Null for other leaves.
    const void* in_scale;    // (leaves, l)
    const void* out_scale;   // (leaves, l)
    const void* gate_scale;  // (leaves, l)
    int64_t in, out, depth, leaf_width, node_width, leaves;
    Activation activation;
    Dtype dtype;
};

// One set per instruction set. x and y are rows of the layer's dtype; scratch is of scratch_floats() floats or more.
struct Kernels {
    const char* name;
    int64_t (*scratch_floats)(const Layer&);
    // The leaf of each of `count` rows that follow one another.
    void (*descend)(const Layer&, const void* x, int64_t count, int64_t* leaf, float* scratch);
    // One leaf at the rows rows[0..count) of x, to the same rows of y. `next` is the leaf that this thread will need
    // next, or -1.
    void (*visit)(const Layer&, int64_t leaf, const int32_t* rows, int64_t count, const void* x, void* y,
                  int64_t next, float* scratch);
    // The part of one leaf's output that its neurons [first, last) give, without bias: `out` floats.
    void (*visit_part)(const Layer&, int64_t leaf, const void* x, int64_t first, int64_t last, float* part,
                       float* scratch);
    // y = the sum of `count` such parts + the leaf's bias.
    void (*add_parts)(const Layer&, int64_t leaf, const float* parts, int64_t count, void* y);
};

extern const Kernels kernels_portable;
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;

}  // namespace fastff
