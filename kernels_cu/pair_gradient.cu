// After backward: the gradient of an array with an entry for each pair, from squares of 64 queries
// and 64 keys as attn/squares.cuh leaves them, in the order of accumulator fragments of dS^T, to any
// strides and the array's dtype. Pairs outside the band are 0: there may be nothing in their squares.
//
// A block turns one square round in shared memory, so that both sides are contiguous.
#include "attn/mask.cuh"
#include "ptx/cvt.cuh"
#include "tile/bits.cuh"
#include "tile/rows.cuh"

inline constexpr int kSide = 64;
inline constexpr int kPitch = kSide + 4;  // the lanes of a warp write to different banks

extern "C" __global__ void __launch_bounds__(Plan::kThreads)
    pair_gradient(const __grid_constant__ Params p) {
    using T = Plan::Element;
    __shared__ float square[kSide * kPitch];
    u32 index = blockIdx.x;
    const int first_j = int(index % p.num_key_blocks) * kSide;
    index /= p.num_key_blocks;
    const int first_i = int(index % p.num_blocks) * kSide;
    const u32 outer = index / p.num_blocks, batch = outer / p.num_heads;
    const Mask<Plan::kBand> mask{p.band_lo, p.band_hi, p.seqlen_q, p.seqlen_k};
    const float4* from =
        static_cast<const float4*>(p.squares) + i64(blockIdx.x) * (kSide * kSide / 4);
#pragma unroll
    for (int piece = int(threadIdx.x); piece < kSide * kSide / 4; piece += Plan::kThreads) {
        // Column tiles of queries, in each 64 keys by warps.
        const int n = piece / 128, m = piece % 128 / kWarpSize;
        bool seen[4];
        bool any = false;
        for_each_place<1, 1>([&](int, int, int r) {
            seen[r] = mask(first_i + col_in_fragment(n, r), first_j + row_in_fragment(m, r));
            any |= seen[r];
        });
        float4 four{};
        if (any) four = from[piece];
        const float x[4] = {four.x, four.y, four.z, four.w};
        for_each_place<1, 1>([&](int, int, int r) {
            square[col_in_fragment(n, r) * kPitch + row_in_fragment(m, r)] = seen[r] ? x[r] : 0.f;
        });
    }
    __syncthreads();
    T* const to = head_start<T>(p.gradient, p.gradient_strides, p.batch_sizes, batch,
                                outer - batch * p.num_heads);
#pragma unroll 4
    for (int n = int(threadIdx.x); n < kSide * kSide; n += Plan::kThreads) {
        const int i = first_i + n / kSide, j = first_j + n % kSide;
        if (i < p.seqlen_q && j < p.seqlen_k)
            to[i * p.gradient_strides.row + j * p.gradient_strides.col] =
                from_float<T>(square[n / kSide * kPitch + n % kSide]);
    }
}
