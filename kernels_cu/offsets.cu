// Packed sequences: the caller's offsets made safe, in one block, whatever they hold: they begin
// with 0, never fall and end inside the arrays. Those that already do stay as they are.
//
//     q_offsets[n], k_offsets[n] = min(max of the first n + 1, count of rows)
//     shifts[n] = keys - queries of sequence n
//
// Each thread takes a run of offsets: its maximum, then what came before it, then its own again.
#include "types.cuh"

using Given = Plan::Offset;

// The largest of this thread's `x` and those of all threads before it; -1 for the first one.
__device__ __forceinline__ int before(int x, int* shared) {
    const int thread = threadIdx.x;
    for (int distance = 1; distance < Plan::kThreads; distance *= 2) {
        shared[thread] = x;
        __syncthreads();
        if (thread >= distance) x = max_of(x, shared[thread - distance]);
        __syncthreads();
    }
    shared[thread] = x;
    __syncthreads();
    const int found = thread == 0 ? 0 : shared[thread - 1];
    __syncthreads();
    return found;
}

__device__ __forceinline__ void clean(const Given* given, i32* offsets, int count, int total,
                                      int* shared) {
    const int run = ceil_div(count, Plan::kThreads);
    const int first = min_of(int(threadIdx.x) * run, count), end = min_of(first + run, count);
    const auto value = [&](int n) {
        const i64 x = n == 0 ? 0 : i64(given[n]);
        return int(x < 0 ? 0 : x > total ? total : x);
    };
    int most = 0;
    for (int n = first; n < end; ++n) most = max_of(most, value(n));
    most = before(most, shared);
    for (int n = first; n < end; ++n) offsets[n] = most = max_of(most, value(n));
}

extern "C" __global__ void __launch_bounds__(Plan::kThreads)
    offsets(const __grid_constant__ Params p) {
    __shared__ int shared[Plan::kThreads];
    i32* q_offsets = static_cast<i32*>(p.q_offsets);
    i32* k_offsets = static_cast<i32*>(p.k_offsets);
    const int count = p.sequences + 1;
    clean(static_cast<const Given*>(p.q_given), q_offsets, count, p.seqlen_q, shared);
    clean(static_cast<const Given*>(p.k_given), k_offsets, count, p.seqlen_k, shared);
    __syncthreads();
    for (int n = threadIdx.x; n < p.sequences; n += Plan::kThreads)
        static_cast<i32*>(p.shifts)[n] =
            k_offsets[n + 1] - k_offsets[n] - (q_offsets[n + 1] - q_offsets[n]);
}
