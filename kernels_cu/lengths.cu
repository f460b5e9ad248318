// Lengths of batch entries as kernels read them (attn/lengths.cuh): the caller's, whatever they hold,
// from 0 to the arrays' ends.
#include "tile/rows.cuh"

template <class Given>
__device__ __forceinline__ int length_at(const void* given, const Strides& strides,
                                         const i32 (&sizes)[kBatchDims], u32 batch, int most) {
    if (given == nullptr) return most;
    const Given x = *head_start<const Given>(given, strides, sizes, batch, 0);
    return x < Given(1) ? 0 : u64(x) < u64(most) ? int(x) : most;
}

extern "C" __global__ void __launch_bounds__(Plan::kThreads)
    lengths(const __grid_constant__ Params p) {
    const u32 batch = blockIdx.x * Plan::kThreads + threadIdx.x;
    if (batch >= p.count) return;
    i32* to = static_cast<i32*>(p.lengths) + 2 * i64(batch);
    to[0] = length_at<Plan::GivenQ>(p.q_given, p.q_given_strides, p.batch_sizes, batch, p.seqlen_q);
    to[1] = length_at<Plan::GivenK>(p.k_given, p.k_given_strides, p.batch_sizes, batch, p.seqlen_k);
}
