// The C interface, as backends/native.py calls it.
#pragma once
#include <cstdint>

#include "layer.h"

#define FASTFF_API extern "C" __attribute__((visibility("default")))

// The arguments in a struct: ctypes takes half as long over one pointer as over six arguments.
struct Call {
    const fastff::Layer* layer;
    const void* x;  // (batch, in)
    int64_t* leaf;  // (batch,)
    void* y;        // (batch, out)
    int64_t batch, threads;
};

// leaf = where the tree sends x.
FASTFF_API void fastff_route(const Call*);
// y = the output of the leaves that `leaf` names. Returns 1, and writes nothing, if one of them is not there; else 0.
FASTFF_API int fastff_visit(const Call*);
// Both; leaf may be null.
FASTFF_API void fastff_hard(const Call*);

// The address of GOMP_parallel in the OpenMP runtime whose threads to use, or null.
FASTFF_API void fastff_use_openmp(void* address);
// The instruction set in use; and, for tests, another one, by name, if this processor has it. Returns whether it does.
FASTFF_API const char* fastff_isa();
FASTFF_API int fastff_use_isa(const char* name);
