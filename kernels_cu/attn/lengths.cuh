// How far a batch entry's queries and keys reach: to the arrays' ends, or with kLengths as far as
// lengths.cu wrote. A band counts from the same offset either way.
#pragma once
#include "../ptx/misc.cuh"
#include "../types.cuh"

struct Lengths {
    int seqlen_q, seqlen_k;
};

template <class P> __device__ __forceinline__ Lengths lengths_of(const P& p, u32 batch) {
    if constexpr (Plan::kLengths) {
        const int2 found = load_constant(static_cast<const int2*>(p.lengths) + batch);
        return {found.x, found.y};
    } else {
        return {p.seqlen_q, p.seqlen_k};
    }
}
