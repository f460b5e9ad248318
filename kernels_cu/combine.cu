// Merges attention over parts of the keys: out = sum of w_s out_s with w_s = exp(lse_s - lse), lse
// = log(sum exp(lse_s)).
//
// outs is [count][rows][head_dim_v] and lses [count][rows], both contiguous. A part without a
// visible key has lse_s = -inf and no weight; a row without one in any part gets out 0 and lse
// -inf. One warp computes a row at a time.
#include "ptx/cvt.cuh"
#include "ptx/misc.cuh"

using T = Plan::Element;
using Accum = AccumOf<T>;

extern "C" __global__ void __launch_bounds__(Plan::kWarps* kWarpSize)
    combine(const __grid_constant__ Params p) {
    const T* outs = static_cast<const T*>(p.outs);
    const Accum* lses = static_cast<const Accum*>(p.lses);
    const int lane = threadIdx.x % kWarpSize;
    for (i64 row = i64(blockIdx.x) * Plan::kWarps + threadIdx.x / kWarpSize; row < p.rows;
         row += i64(gridDim.x) * Plan::kWarps) {
        Accum highest = -infinity<Accum>(), sum = 0;
        for (int s = 0; s < p.count; ++s) {
            const Accum lse = lses[s * p.rows + row];
            highest = lse > highest || lse != lse ? lse : highest;
        }
        const Accum base = highest == -infinity<Accum>() ? Accum(0) : highest;
#pragma unroll 1
        for (int s = 0; s < p.count; ++s) sum += exp_of(lses[s * p.rows + row] - base);
        const Accum inverse = sum == 0 ? Accum(0) : 1 / sum;
        for (int col = lane; col < p.head_dim_v; col += kWarpSize) {
            Accum x = 0;
#pragma unroll 1
            for (int s = 0; s < p.count; ++s) {
                const Accum lse = lses[s * p.rows + row];
                if (lse == -infinity<Accum>()) continue;  // whatever that part's out holds
                x += exp_of(lse - base) * inverse *
                     Accum(to_float(outs[(s * p.rows + row) * p.head_dim_v + col]));
            }
            static_cast<T*>(p.out)[row * p.head_dim_v + col] = from_float<T>(x);
        }
        if (lane == 0)
            static_cast<Accum*>(p.lse)[row] = sum == 0 ? -infinity<Accum>() : base + log_of(sum);
    }
}
