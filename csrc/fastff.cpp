// The hard pass of a batch: which kernels, how many threads, which rows together.
#include "fastff.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "parallel.h"

namespace fastff {
namespace {

const Kernels* best_kernels() {
#if defined(FASTFF_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return &kernels_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &kernels_avx2;
#endif
    return &kernels_portable;
}

std::atomic<const Kernels*> kernels{best_kernels()};

// Memory of one thread that grows and is kept. Aligned to cache lines.
template <class T>
class Buffer {
   public:
    T* get(int64_t count) {
        if (count > size_) {
            size_ = count + count / 4;
            memory_.reset(static_cast<T*>(std::aligned_alloc(64, (size_ * sizeof(T) + 63) / 64 * 64)));
            if (!memory_) std::abort();
        }
        return memory_.get();
    }

   private:
    struct Free {
        void operator()(T* p) const { std::free(p); }
    };
    std::unique_ptr<T, Free> memory_;
    int64_t size_ = 0;
};

float* scratch(const Kernels& k, const Layer& layer) {
    thread_local Buffer<float> buffer;
    return buffer.get(k.scratch_floats(layer));
}

int64_t element_size(const Layer& layer) { return layer.dtype == float32 ? 4 : 2; }

// Some rows of one leaf: order[start .. start + count).
struct Job {
    int64_t leaf;
    int32_t start, count;
};

// Multiply-adds of one row.
int64_t leaf_work(const Layer& layer) {
    return layer.leaf_width * (layer.in * (layer.gate_weight ? 2 : 1) + layer.out);
}
int64_t descent_work(const Layer& layer) { return layer.depth * layer.node_width * layer.in; }

// Waking a thread takes about as long as this many multiply-adds (1 us on a Xeon of 2 cores).
int useful_threads(int threads, int64_t work) { return int(std::clamp<int64_t>(work / 16000, 1, threads)); }

void descend(const Kernels& k, const Layer& layer, const char* x, int64_t batch, int64_t* leaf, int threads) {
    int useful = useful_threads(threads, batch * descent_work(layer));
    int64_t row = layer.in * element_size(layer);
    int64_t chunk = std::clamp<int64_t>(batch / (8 * useful), 16, 256);
    int64_t chunks = (batch + chunk - 1) / chunk;
    useful = int(std::min<int64_t>(useful, std::max<int64_t>(chunks, 1)));
    Tickets tickets(chunks, useful);
    parallel(useful, threads, [&] {
        float* memory = scratch(k, layer);
        Tickets::Taker taker(tickets);
        for (int64_t i; taker.take(i);) {
            int64_t from = i * chunk;
            k.descend(layer, x + from * row, std::min(chunk, batch - from), leaf + from, memory);
        }
    });
}

// The rows in the order of their leaves, cut into jobs.
int64_t group(const Layer& layer, const int64_t* leaf, int64_t batch, int threads, int32_t* order, Job* jobs) {
    thread_local Buffer<int64_t> buffer;
    if (layer.leaves <= 8 * batch) {
        int64_t* next = buffer.get(layer.leaves + 1);
        std::memset(next, 0, (layer.leaves + 1) * sizeof *next);
        for (int64_t b = 0; b < batch; b++) next[leaf[b] + 1]++;
        for (int64_t j = 0; j < layer.leaves; j++) next[j + 1] += next[j];
        for (int64_t b = 0; b < batch; b++) order[next[leaf[b]]++] = int32_t(b);
    } else {
        int64_t* keys = buffer.get(batch);
        for (int64_t b = 0; b < batch; b++) keys[b] = leaf[b] << 31 | b;
        std::sort(keys, keys + batch);
        for (int64_t b = 0; b < batch; b++) order[b] = int32_t(keys[b] & 0x7fffffff);
    }
    int64_t most = std::clamp<int64_t>(batch / (4 * threads), 6, 24), count = 0;
    for (int64_t start = 0, end; start < batch; start = end) {
        int64_t j = leaf[order[start]];
        for (end = start + 1; end < batch && leaf[order[end]] == j;) end++;
        for (int64_t pieces = (end - start + most - 1) / most, from = start; pieces > 0; pieces--) {
            int64_t n = (end - from + pieces - 1) / pieces;
            jobs[count++] = {j, int32_t(from), int32_t(n)};
            from += n;
        }
    }
    return count;
}

void visit(const Kernels& k, const Layer& layer, const void* x, const int64_t* leaf, void* y, int64_t batch,
           int threads) {
    thread_local Buffer<int32_t> order_buffer;
    thread_local Buffer<Job> job_buffer;
    int32_t* order = order_buffer.get(batch);
    Job* jobs = job_buffer.get(batch);
    int useful = useful_threads(threads, batch * leaf_work(layer));
    int64_t count = group(layer, leaf, batch, useful, order, jobs);
    useful = int(std::min<int64_t>(useful, count));
    bool many = count >= 8 * useful;
    Tickets tickets(count, useful);
    parallel(useful, threads, [&] {
        float* memory = scratch(k, layer);
        Tickets::Taker taker(tickets);
        int64_t i, next;
        for (bool more = taker.take(i); more; i = next) {
            // Where there are many jobs, take the next before this one, so that its weights can be fetched meanwhile.
            if (many) more = taker.take(next);
            k.visit(layer, jobs[i].leaf, order + jobs[i].start, jobs[i].count, x, y,
                    many && more ? jobs[next].leaf : -1, memory);
            if (!many) more = taker.take(next);
        }
    });
}

// Fewer rows than threads: several threads share a row. Each computes the output of some of the leaf's neurons; the
// sum follows. Where `leaf` is -1, the first to come finds it; another that comes meanwhile does so, too, and need not
// wait.
void split(const Kernels& k, const Layer& layer, const char* x, int64_t* leaf, char* y, int64_t batch, int64_t parts,
           int threads) {
    thread_local Buffer<float> buffer;
    float* sums = buffer.get(batch * parts * layer.out);
    int64_t size = element_size(layer);
    Tickets tickets(batch * parts, int(batch * parts));
    parallel(int(batch * parts), threads, [&] {
        float* memory = scratch(k, layer);
        Tickets::Taker taker(tickets);
        for (int64_t i; taker.take(i);) {
            int64_t b = i / parts, part = i % parts, j = __atomic_load_n(leaf + b, __ATOMIC_RELAXED);
            const char* row = x + b * layer.in * size;
            if (j < 0) {
                k.descend(layer, row, 1, &j, memory);
                __atomic_store_n(leaf + b, j, __ATOMIC_RELAXED);
            }
            int64_t first = layer.leaf_width * part / parts, last = layer.leaf_width * (part + 1) / parts;
            k.visit_part(layer, j, row, first, last, sums + i * layer.out, memory);
        }
    });
    for (int64_t b = 0; b < batch; b++)
        k.add_parts(layer, leaf[b], sums + b * parts * layer.out, parts, y + b * layer.out * size);
}

// Threads share a row only where each gets this many multiply-adds of the leaf, some 50 us. With less, two threads gain
// nothing (8.3 us for 8.0 at 49,000) or little (54 us for 62 at 262,000), and the one that another process keeps off its
// core makes the caller wait for milliseconds (Xeon, 2 cores).
constexpr int64_t shared_row_work = 1 << 18;

int64_t parts_per_row(const Layer& layer, int64_t batch, int threads) {
    if (batch >= threads) return 1;
    return std::clamp<int64_t>(leaf_work(layer) / shared_row_work, 1, std::min<int64_t>(threads / batch, layer.leaf_width));
}

// leaf is given, or else found first.
void run(const Call& call, int64_t* leaf, bool given) {
    const Kernels& k = *kernels.load(std::memory_order_relaxed);
    const Layer& layer = *call.layer;
    auto x = static_cast<const char*>(call.x);
    auto y = static_cast<char*>(call.y);
    int threads = int(call.threads);
    if (call.batch == 0) return;
    if (int64_t parts = parts_per_row(layer, call.batch, threads); parts > 1) {
        if (!given) std::fill(leaf, leaf + call.batch, -1);
        return split(k, layer, x, leaf, y, call.batch, parts, threads);
    }
    if (call.batch == 1) {  // nothing to group
        float* memory = scratch(k, layer);
        int32_t row = 0;
        if (!given) k.descend(layer, x, 1, leaf, memory);
        return k.visit(layer, *leaf, &row, 1, x, y, -1, memory);
    }
    if (!given) descend(k, layer, x, call.batch, leaf, threads);
    visit(k, layer, x, leaf, y, call.batch, threads);
}

}  // namespace
}  // namespace fastff

using namespace fastff;

void fastff_route(const Call* call) {
    descend(*kernels.load(), *call->layer, static_cast<const char*>(call->x), call->batch, call->leaf,
            int(call->threads));
}

int fastff_visit(const Call* call) {
    for (int64_t b = 0; b < call->batch; b++)
        if (call->leaf[b] < 0 || call->leaf[b] >= call->layer->leaves) return 1;
    run(*call, call->leaf, true);
    return 0;
}

void fastff_hard(const Call* call) {
    thread_local Buffer<int64_t> buffer;
    run(*call, call->leaf ? call->leaf : buffer.get(call->batch), false);
}

void fastff_use_openmp(void* address) { gomp_parallel = reinterpret_cast<GompParallel>(address); }

const char* fastff_isa() { return kernels.load()->name; }

int fastff_use_isa(const char* name) {
#if defined(FASTFF_X86)
    const Kernels* all[] = {&kernels_portable, &kernels_avx2, &kernels_avx512};
#else
    const Kernels* all[] = {&kernels_portable};
#endif
    for (const Kernels* k : all) {
        if (std::strcmp(k->name, name) == 0) {
            kernels = k;
            return 1;
        }
        if (k == best_kernels()) break;  // the list rises
    }
    return 0;
}
