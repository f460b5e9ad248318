// The largest norm among the rows of one array, of those whose elements are all finite: what a
// gradient's terms are bounded by (attn/score_gradients.cuh). The maximum is that of the bits of
// doubles, which order as the numbers do.
#include "ptx/cvt.cuh"
#include "ptx/misc.cuh"
#include "tile/rows.cuh"

using T = Plan::Element;

extern "C" __global__ void __launch_bounds__(Plan::kWarps* kWarpSize)
    row_norm(const __grid_constant__ Params p) {
    const int lane = threadIdx.x % kWarpSize;
    const u32 block = blockIdx.x % p.num_blocks, outer = blockIdx.x / p.num_blocks;
    const Rows<const T> rows(head_start<const T>(p.x, p.x_strides, p.batch_sizes,
                                                 outer / p.num_heads, outer % p.num_heads),
                             p.x_strides, p.seqlen_q, p.head_dim);
    double most = 0;
    const i64 first = i64(block) * Plan::kBlockRows + threadIdx.x / kWarpSize;
    for (i64 row = first; row < min_of<i64>(i64(block + 1) * Plan::kBlockRows, rows.count);
         row += Plan::kWarps) {
        double sum = 0;
        for (int col = lane; col < rows.dim; col += kWarpSize) {
            const double x = to_float(*rows.at(row, col));
            sum = fma(x, x, sum);
        }
#pragma unroll
        for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(kFullWarp, sum, other);
        if (!is_nonfinite(sum)) most = fmax_of(most, sum);
    }
    if (lane == 0 && most > 0)
        atomicMax(static_cast<u64*>(p.most), u64(__double_as_longlong(sqrt(most))));
}
