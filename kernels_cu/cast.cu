// After backward: dq = scale * dq_accum, from the order of accumulator fragments to any strides, in
// q's dtype.
#include "ptx/cvt.cuh"
#include "tile/fragment.cuh"
#include "tile/rows.cuh"

using T = Plan::Element;
using Accum = AccumOf<T>;

extern "C" __global__ void __launch_bounds__(Plan::kThreads)
    cast(const __grid_constant__ Params p) {
    const u32 block = blockIdx.x % p.num_blocks, outer = blockIdx.x / p.num_blocks;
    const u32 batch = outer / p.num_heads, head = outer % p.num_heads;
    const Rows<T> dq(head_start<T>(p.dq, p.dq_strides, p.batch_sizes, batch, head), p.dq_strides,
                     p.seqlen_q, p.head_dim);
    const Accum* accum = static_cast<const Accum*>(p.accum) + i64(outer) * p.accum_pitch;
    const Accum scale = Accum(p.scale);
    // Two neighbours a thread: they are neighbours in the fragment too, and a quad writes one
    // sector of a row.
    constexpr int kPairs = Plan::kAccumTiles * 4;
    for (int i = threadIdx.x; i < Plan::kBlockRows * kPairs; i += Plan::kThreads) {
        const i64 row = i64(block) * Plan::kBlockRows + i / kPairs;
        const int col = i % kPairs * 2;
        if (row >= p.seqlen_q || col >= p.head_dim) continue;
        const T first = from_float<T>(
            accum[fragment_index<Plan::kAccumVector, Plan::kAccumTiles>(row, col)] * scale);
        const T second = from_float<T>(
            accum[fragment_index<Plan::kAccumVector, Plan::kAccumTiles>(row, col + 1)] * scale);
        if (Plan::kPairStore && col + 1 < p.head_dim) {
            struct alignas(2 * sizeof(T)) Pair {
                T first, second;
            };
            *reinterpret_cast<Pair*>(dq.at(row, col)) = {first, second};
        } else {
            *dq.at(row, col) = first;
            if (col + 1 < p.head_dim) *dq.at(row, col + 1) = second;
        }
    }
}
