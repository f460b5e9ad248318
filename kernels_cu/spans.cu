// Segment ids of queries and keys as scores read them, 32 bits wide and one behind the other, and the
// least and the largest of each 32 neighbours.
//
// A thread has one id, a warp 32 neighbours of one batch entry: queries, up to a multiple of 32, then
// keys.
#include "attn/program.cuh"

template <class Given>
__device__ __forceinline__ int id_at(const void* given, const Strides& strides, i64 stride,
                                     const i32 (&sizes)[kBatchDims], u32 batch, int n) {
    return read_int(head_start<const Given>(given, strides, sizes, batch, 0)[n * stride]);
}

extern "C" __global__ void __launch_bounds__(Plan::kThreads)
    spans(const __grid_constant__ Params p) {
    const i64 thread = i64(blockIdx.x) * Plan::kThreads + threadIdx.x;
    const u32 batch = u32(thread / p.pitch);
    if (batch >= p.count) return;  // all of a warp
    const int place = int(thread - i64(batch) * p.pitch), key = place - p.first_key;
    const bool of_query = key < 0, exists = of_query ? place < p.seqlen_q : key < p.seqlen_k;
    int id = 0;
    if (exists)
        id = of_query ? id_at<Plan::GivenQ>(p.q_given, p.q_given_strides, p.q_given_strides.row,
                                            p.batch_sizes, batch, place)
                      : id_at<Plan::GivenK>(p.k_given, p.k_given_strides, p.k_given_strides.col,
                                            p.batch_sizes, batch, key);
    static_cast<i32*>(p.ids)[thread] = id;
    const int least = __reduce_min_sync(kFullWarp, exists ? id : 0x7fffffff);
    const int largest = __reduce_max_sync(kFullWarp, exists ? id : -0x7fffffff - 1);
    if (thread % kWarpSize == 0) static_cast<int2*>(p.spans)[thread / kWarpSize] = {least, largest};
}
