// After backward: the gradient of an array with an entry for each pair, from squares of dS
// (attn/backward_sm90.cuh). Pairs outside the band are 0: their squares may hold nothing.
//
// Lanes have neighbouring keys; what they leave of a line, others of the block find in L1.
#include "attn/mask.cuh"
#include "ptx/cvt.cuh"
#include "tile/rows.cuh"

extern "C" __global__ void __launch_bounds__(Plan::kThreads)
    pair_gradient(const __grid_constant__ Params p) {
    using T = Plan::Element;
    const u32 row = blockIdx.x / p.num_key_blocks, outer = row / p.num_blocks;
    const u32 batch = outer / p.num_heads, head = outer - batch * p.num_heads;
    const Rows<T> to(head_start<T>(p.gradient, p.gradient_strides, p.batch_sizes, batch, head),
                     p.gradient_strides, p.seqlen_q, p.seqlen_k);
    const Mask<Plan::kBand> mask{p.band_lo, p.band_hi, p.seqlen_q, p.seqlen_k};
    const float2* square = static_cast<const float2*>(p.squares) + i64(blockIdx.x) * 2048;
    const int key = int(threadIdx.x) % 64;
    const int j = int(blockIdx.x % p.num_key_blocks) * 64 + key;
#pragma unroll 4
    for (int query = int(threadIdx.x) / 64 * 2; query < 64; query += Plan::kThreads / 32) {
        // As fragments lie: 8 queries, 16 keys, a lane, two keys.
        const int lane = key % 8 * 4 + query % 8 / 2;
        const int place = (query / 8 * 4 + key / 16) * 32 + lane;
        const int i = int(row % p.num_blocks) * 64 + query;
        float2 two{};
        if (mask(i, j) || mask(i + 1, j)) two = square[2 * place + key % 16 / 8];
        if (i < p.seqlen_q && j < p.seqlen_k)
            *to.at(i, j) = from_float<T>(mask(i, j) ? two.x : 0.f);
        if (i + 1 < p.seqlen_q && j < p.seqlen_k)
            *to.at(i + 1, j) = from_float<T>(mask(i + 1, j) ? two.y : 0.f);
    }
}
