// After backward: the gradient of an array with an entry for each pair, from squares as add_squares
// (attn/backward_sm90.cuh) leaves them, in the order of dS^T's fragments, to any strides and the
// array's dtype. Pairs outside the band are 0: there may be nothing in their squares.
//
// A block makes one square rows. Lanes have neighbouring keys; what they leave of a line, others of
// the block find in L1.
#include "attn/mask.cuh"
#include "ptx/cvt.cuh"
#include "tile/rows.cuh"

extern "C" __global__ void __launch_bounds__(Plan::kThreads)
    pair_gradient(const __grid_constant__ Params p) {
    using T = Plan::Element;
    const u32 row = blockIdx.x / p.num_key_blocks, outer = row / p.num_blocks;
    const u32 batch = outer / p.num_heads;
    const Mask<Plan::kBand> mask{p.band_lo, p.band_hi, p.seqlen_q, p.seqlen_k};
    const float2* square = static_cast<const float2*>(p.squares) + i64(blockIdx.x) * 2048;
    T* const to = head_start<T>(p.gradient, p.gradient_strides, p.batch_sizes, batch,
                                outer - batch * p.num_heads);
    const int key = int(threadIdx.x) % 64;
    const int j = int(blockIdx.x % p.num_key_blocks) * 64 + key;
#pragma unroll 4
    for (int query = int(threadIdx.x) / 64 * 2; query < 64; query += Plan::kThreads / 32) {
        // Column tiles of 8 queries: of 16 keys for each warp, two queries of two keys a lane.
        const int lane = key % 8 * 4 + query % 8 / 2;
        const int place = (query / 8 * 4 + key / 16) * 32 + lane;
        const int i = int(row % p.num_blocks) * 64 + query;
        const bool seen[2] = {mask(i, j), mask(i + 1, j)};
        float2 two{};
        if (seen[0] || seen[1]) two = square[2 * place + key % 16 / 8];
        for (int r = 0; r < 2; ++r)
            if (i + r < p.seqlen_q && j < p.seqlen_k)
                to[(i + r) * p.gradient_strides.row + j * p.gradient_strides.col] =
                    from_float<T>(!seen[r] ? 0 : r ? two.y : two.x);
    }
}
