// The native library against loops in double, at odd sizes, with every buffer exactly as large as it must be: built
// with AddressSanitizer and UBSan (make test-sanitize), which see whatever is read or written beside it. Outputs are
// filled with NaN, or with a leaf that does not exist, before a kernel writes them.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/fastff.h"

using namespace fastff;

namespace {

std::mt19937 generator(0);
int failures = 0;

int pick(std::initializer_list<int> of) { return of.begin()[generator() % of.size()]; }

// A parameter: the numbers, and a heap block of exactly their size in the dtype of the layer.
struct Array {
    std::vector<double> values;
    std::unique_ptr<char[]> bytes;
    Array() = default;
    Array(int64_t count, double scale, Dtype dtype)
        : values(count), bytes(new char[count * (dtype == float32 ? 4 : 2)]) {
        std::uniform_real_distribution<float> uniform(float(-scale), float(scale));
        for (int64_t i = 0; i < count; i++) {
            float value = uniform(generator);
            uint32_t bits;
            std::memcpy(&bits, &value, 4);
            if (dtype == bfloat16) bits &= 0xffff0000;
            std::memcpy(&value, &bits, 4);
            values[i] = value;
            uint16_t upper = uint16_t(bits >> 16);
            dtype == float32 ? std::memcpy(&bytes[4 * i], &bits, 4) : std::memcpy(&bytes[2 * i], &upper, 2);
        }
    }
    // int8 numbers.
    explicit Array(int64_t count) : values(count), bytes(new char[count]) {
        for (int64_t i = 0; i < count; i++) values[i] = bytes[i] = int8_t(generator());
    }
    const void* data() const { return bytes.get(); }
    double operator[](int64_t i) const { return values.empty() ? 0 : values[i]; }
    double scale(int64_t i) const { return values.empty() ? 1 : values[i]; }
};

double act(Activation activation, double x) {
    switch (activation) {
        case relu: return x < 0 ? 0 : x;
        case gelu: case geglu: return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
        case gelu_tanh: case geglu_tanh: return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
        case silu: case swiglu: return x / (1 + std::exp(-x));
        case tanh_: return std::tanh(x);
        case identity: return x;
    }
    return x;
}

// A number, and the sum of the sizes of what it was added up from, which bounds its rounding error.
struct Sum {
    double value, size;
};

struct Case {
    Layer layer{};
    int64_t batch, threads;
    Array node_weight, node_bias, node_out_weight, node_out_bias, in_weight, in_bias, out_weight, out_bias, gate_weight,
        gate_bias, in_scale, out_scale, gate_scale, x;

    Case() {
        layer.dtype = Dtype(pick({0, 1}));
        layer.activation = Activation(generator() % (geglu_tanh + 1));
        layer.in = pick({1, 3, 5, 8, 16, 17, 37, 64, 1030});
        layer.out = pick({1, 2, 7, 10, 16, 29, 33, 100, 400});
        layer.depth = pick({0, 1, 2, 3, 6});
        layer.leaf_width = pick({1, 2, 3, 8, 13, 32});
        layer.node_width = pick({1, 1, 2, 9});
        batch = pick({0, 1, 2, 3, 7, 40, 63});
        threads = pick({1, 2, 5});
        if (generator() % 32 == 0) {  // leaves large enough for threads to share a row
            layer.in = 1030;
            layer.depth = pick({0, 1});
            layer.leaf_width = pick({530, 800});
            batch = pick({1, 2});
            threads = 5;
        }
        layer.leaves = int64_t(1) << layer.depth;
        bool bias = generator() % 3 > 0, gated = layer.activation >= swiglu, int8 = generator() % 2;
        int64_t nodes = layer.leaves - 1, n = layer.node_width, l = layer.leaf_width;
        auto make = [&](const void*& pointer, Array& array, bool there, int64_t count, double scale) {
            if (there) array = Array(count, scale, layer.dtype);
            pointer = there ? array.data() : nullptr;
        };
        make(layer.node_weight, node_weight, true, nodes * n * layer.in, 1);
        make(layer.node_bias, node_bias, true, nodes * n, 1);
        make(layer.node_out_weight, node_out_weight, n > 1, nodes * n, 1);
        make(layer.node_out_bias, node_out_bias, n > 1, nodes, 1);
        auto make_weight = [&](const void*& weight, Array& array, const void*& scale, Array& scales, int64_t features) {
            if (!int8) return make(weight, array, true, layer.leaves * l * features, 1);
            array = Array(layer.leaves * l * features);
            weight = array.data();
            make(scale, scales, true, layer.leaves * l, 1. / 128);
        };
        make_weight(layer.in_weight, in_weight, layer.in_scale, in_scale, layer.in);
        make(layer.in_bias, in_bias, bias, layer.leaves * l, 1);
        make_weight(layer.out_weight, out_weight, layer.out_scale, out_scale, layer.out);
        make(layer.out_bias, out_bias, bias, layer.leaves * layer.out, 1);
        if (gated) make_weight(layer.gate_weight, gate_weight, layer.gate_scale, gate_scale, layer.in);
        make(layer.gate_bias, gate_bias, gated && bias, layer.leaves * l, 1);
        x = Array(batch * layer.in, 2, layer.dtype);
    }

    Sum dot(const Array& weight, const Array& scale, const Array& bias, int64_t row, int64_t b) const {
        Sum sum = {bias[row], std::fabs(bias[row])};
        for (int64_t k = 0; k < layer.in; k++) {
            double term = scale.scale(row) * weight[row * layer.in + k] * x[b * layer.in + k];
            sum.value += term;
            sum.size += std::fabs(term);
        }
        return sum;
    }

    // No activation is steeper than 1.2.
    double rounding(int64_t terms) const { return 1.2e-7 * double(terms + 20) * 1.5; }

    Sum logit(int64_t node, int64_t b) const {
        if (layer.node_width == 1) return dot(node_weight, {}, node_bias, node, b);
        Sum sum = {node_out_bias[node], std::fabs(node_out_bias[node])};
        for (int64_t i = node * layer.node_width; i < (node + 1) * layer.node_width; i++) {
            Sum hidden = dot(node_weight, {}, node_bias, i, b);
            sum.value += act(layer.activation, hidden.value) * node_out_weight[i];
            sum.size += hidden.size * std::fabs(node_out_weight[i]);
        }
        return sum;
    }

    // The leaf, or -1 if rounding could decide.
    int64_t route(int64_t b) const {
        int64_t node = 0;
        for (int64_t level = 0; level < layer.depth; level++) {
            Sum z = logit(node, b);
            if (std::fabs(z.value) <= z.size * rounding(layer.in + layer.node_width)) return -1;
            node = 2 * node + 1 + (z.value >= 0);
        }
        return node - (layer.leaves - 1);
    }

    std::vector<Sum> output(int64_t leaf, int64_t b) const {
        std::vector<Sum> sums;
        for (int64_t c = leaf * layer.out; c < (leaf + 1) * layer.out; c++)
            sums.push_back({out_bias[c], std::fabs(out_bias[c])});
        for (int64_t i = leaf * layer.leaf_width; i < (leaf + 1) * layer.leaf_width; i++) {
            Sum hidden = dot(in_weight, in_scale, in_bias, i, b);
            if (layer.gate_weight) {
                Sum gate = dot(gate_weight, gate_scale, gate_bias, i, b);
                hidden = {act(layer.activation, gate.value) * hidden.value, 2 * gate.size * hidden.size};
            } else {
                hidden.value = act(layer.activation, hidden.value);
            }
            for (int64_t c = 0; c < layer.out; c++) {
                double weight = out_scale.scale(i) * out_weight[i * layer.out + c];
                sums[c].value += hidden.value * weight;
                sums[c].size += hidden.size * std::fabs(weight);
            }
        }
        return sums;
    }

    std::string name() const {
        char text[200];
        std::snprintf(text, sizeof text, "%s dtype %d%s act %d in %d out %d depth %d l %d n %d batch %d threads %d",
                      fastff_isa(), layer.dtype, layer.in_scale ? " int8" : "", layer.activation, int(layer.in),
                      int(layer.out), int(layer.depth), int(layer.leaf_width), int(layer.node_width), int(batch),
                      int(threads));
        return text;
    }
};

void fail(const Case& c, const char* what) {
    std::printf("FAILED %s: %s\n", what, c.name().c_str());
    failures++;
}

// Outputs filled with NaN, and read back.
struct Output {
    std::unique_ptr<char[]> bytes;
    int64_t size;
    bool wide;
    explicit Output(const Case& c) : size(c.batch * c.layer.out), wide(c.layer.dtype == float32) {
        bytes.reset(new char[size * (wide ? 4 : 2)]);
        std::memset(bytes.get(), 0xff, size * (wide ? 4 : 2));
    }
    bool untouched() const {
        for (int64_t i = 0; i < size; i++)
            if (!std::isnan((*this)[i])) return false;
        return true;
    }
    double operator[](int64_t i) const {
        uint32_t bits = 0;
        float value;
        std::memcpy(wide ? (char*)&bits : (char*)&bits + 2, &bytes[i * (wide ? 4 : 2)], wide ? 4 : 2);
        std::memcpy(&value, &bits, 4);
        return value;
    }
};

void check(const Case& c) {
    std::unique_ptr<int64_t[]> leaf(new int64_t[c.batch]), routed(new int64_t[c.batch]);
    for (int64_t* poisoned : {leaf.get(), routed.get()}) std::fill(poisoned, poisoned + c.batch, INT64_MIN);
    Output y(c), again(c), visited(c), refused(c);
    Call call = {&c.layer, c.x.data(), leaf.get(), y.bytes.get(), c.batch, c.threads};
    fastff_hard(&call);
    call.leaf = nullptr;
    call.y = again.bytes.get();
    fastff_hard(&call);
    call.leaf = routed.get();
    fastff_route(&call);
    call.y = visited.bytes.get();
    if (fastff_visit(&call)) fail(c, "visit refuses its own leaves");
    for (int64_t b = 0; b < c.batch; b++) {
        int64_t j = c.route(b);
        if (leaf[b] != routed[b] || leaf[b] < 0 || leaf[b] >= c.layer.leaves || (j >= 0 && j != leaf[b]))
            return fail(c, "route");
        std::vector<Sum> sums = c.output(leaf[b], b);
        for (int64_t i = 0; i < c.layer.out; i++) {
            Sum exact = sums[i];
            double got = y[b * c.layer.out + i];
            double allowed = exact.size * c.rounding(c.layer.in + c.layer.leaf_width);
            if (c.layer.dtype == bfloat16) allowed += std::fabs(exact.value) / 256;
            if (!(std::fabs(got - exact.value) <= allowed)) return fail(c, "value");
            if (again[b * c.layer.out + i] != got || visited[b * c.layer.out + i] != got) return fail(c, "repetition");
        }
    }
    if (c.batch) {
        routed[c.batch - 1] = c.layer.leaves;
        call.y = refused.bytes.get();
        if (!fastff_visit(&call)) fail(c, "visit accepts a leaf that does not exist");
        if (!refused.untouched()) fail(c, "visit writes although it refuses");
    }
}

// Rounding to bfloat16, and what a NaN and an infinity become.
void check_special_values() {
    float ones[1] = {1};
    uint32_t bits[] = {0x7fc00000, 0xffc00001, 0x7f800000, 0xff800000, 0x7f7fffff, 0x3f808000, 0x3f818000, 0x80000000};
    for (uint32_t word : bits) {
        float x;
        std::memcpy(&x, &word, 4);
        Layer layer{};
        layer.in_weight = layer.out_weight = ones;
        layer.in = layer.out = layer.leaf_width = layer.node_width = layer.leaves = 1;
        for (int a = 0; a < swiglu; a++) {
            layer.activation = Activation(a);
            float y = std::isnan(x) ? 1 : NAN;  // what the output must not be
            Call call = {&layer, &x, nullptr, &y, 1, 1};
            fastff_hard(&call);
            bool bad = std::isnan(x) != std::isnan(y);
            if (std::isinf(x) && x < 0) bad = a == relu && y != 0;  // the others are NaN or a limit
            if (bad) std::printf("FAILED %s: activation %d of %08x\n", fastff_isa(), a, word), failures++;
        }
    }
}

}  // namespace

int main(int count, char** arguments) {
    int cases = count > 1 ? std::stoi(arguments[1]) : 400;
    for (const char* isa : {"portable", "avx2", "avx512"}) {
        if (!fastff_use_isa(isa)) continue;
        for (int i = 0; i < cases; i++) check(Case());
        check_special_values();
        // Several callers at once, each with threads of its own.
        std::vector<Case> shared(4);
        std::vector<std::thread> callers;
        for (const Case& c : shared) callers.emplace_back([&c] { for (int i = 0; i < 20; i++) check(c); });
        for (auto& caller : callers) caller.join();
        std::printf("%s: %d cases\n", isa, cases);
    }
    if (!failures) std::printf("all well\n");
    return failures > 0;
}
