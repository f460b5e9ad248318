// After backward: the gradient of an array with an entry for each pair, from squares of dS
// (attn/backward_sm90.cuh). Pairs outside the band are 0: their squares may hold nothing.
//
// Lanes have neighbouring keys; what they leave of a line, others of the block find in L1.
#include "attn/mask.cuh"
#include "ptx/cvt.cuh"
#include "tile/rows.cuh"

extern "C" __global__ void __launch_bounds__(256)
    pair_gradient(const __grid_constant__ Params p) {
    using T = Plan::Element;
    const u32 row = blockIdx.x / p.num_key_blocks, outer = row / p.num_blocks;
    const u32 batch = outer / p.num_heads, head = outer - batch * p.num_heads;
    const Rows<T> to(head_start<T>(p.gradient, p.gradient_strides, p.batch_sizes, batch, head),
                     p.gradient_strides, p.seqlen_q, p.seqlen_k);
    const Mask<Plan::kBand> mask{p.band_lo, p.band_hi, p.seqlen_q, p.seqlen_k};
    // A warpgroup's 64 keys; of 8 queries a lane has two of two keys, and each tile lies as the last.
    const int key = int(threadIdx.x) % 64, t = int(threadIdx.x) / 64;
    const int j = int(blockIdx.x % p.num_key_blocks) * 64 + key;
    const int first_i = int(row % p.num_blocks) * 64 + 2 * t;
    const float2* own = static_cast<const float2*>(p.squares) + i64(blockIdx.x) * 2048 +
                        (key / 16 * 32 + key % 8 * 4 + t) * 2 + key % 16 / 8;
    float2 two[8];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        const int i = first_i + 8 * n;
        two[n] = mask(i, j) | mask(i + 1, j) ? own[256 * n] : float2{};
    }
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = first_i + 8 * n + r;
            if (i < p.seqlen_q && j < p.seqlen_k)
                *to.at(i, j) = from_float<T>(!mask(i, j) ? 0.f : r ? two[n].y : two[n].x);
        }
}
