// The kernels, compiled once per instruction set: FASTFF_ISA is its name, FASTFF_KERNELS the table to fill.
#include "descend.h"
#include "leaf.h"

namespace fastff {
namespace FASTFF_ISA {
namespace {

template <class F>
INLINE void with_type(const Layer& layer, F&& f) {
    if (layer.dtype == float32)
        f(float{});
    else
        f(bf16{});
}

// The same with the type of the leaves' weights.
template <class F>
INLINE void with_types(const Layer& layer, F&& f) {
    with_type(layer, [&](auto e) {
        if (layer.in_scale)
            f(e, int8_t{});
        else
            f(e, e);
    });
}

void descend_any(const Layer& layer, const void* x, int64_t count, int64_t* leaf, float* scratch) {
    with_type(layer, [&](auto e) { descend(layer, (const decltype(e)*)x, count, leaf, scratch); });
}

void visit_any(const Layer& layer, int64_t leaf, const int32_t* rows, int64_t count, const void* x, void* y,
               int64_t next, float* scratch) {
    with_types(layer, [&](auto e, auto q) {
        visit<decltype(q)>(layer, leaf, rows, count, (const decltype(e)*)x, (decltype(e)*)y, next, scratch);
    });
}

void visit_part_any(const Layer& layer, int64_t leaf, const void* x, int64_t first, int64_t last, float* part,
                    float* scratch) {
    with_types(layer, [&](auto e, auto q) {
        visit_part<decltype(q)>(layer, leaf, (const decltype(e)*)x, first, last, part, scratch);
    });
}

void add_parts_any(const Layer& layer, int64_t leaf, const float* parts, int64_t count, void* y) {
    with_type(layer, [&](auto e) { add_parts(layer, leaf, parts, count, (decltype(e)*)y); });
}

}  // namespace
}  // namespace FASTFF_ISA

#define FASTFF_STRING(name) FASTFF_STRING_(name)
#define FASTFF_STRING_(name) #name
const Kernels FASTFF_KERNELS = {
    FASTFF_STRING(FASTFF_ISA), FASTFF_ISA::scratch_floats, FASTFF_ISA::descend_any,
    FASTFF_ISA::visit_any,     FASTFF_ISA::visit_part_any, FASTFF_ISA::add_parts_any,
};

}  // namespace fastff
