// Before backward: one pass over out and dout.
//
//     delta = rowsum(dout * out) - dlse        row_max = 0        row_sum = lse * log2(e)
//
// and the statistics as attn/stats.cuh defines them, before any are refined. Rows up to
// stats_pitch, which nothing reads as queries, are written too: workspaces hold no stale bits.
//
// One warp computes a row at a time; kVector: rows of out and dout are read in 16-byte pieces.
#include "attn/stats.cuh"
#include "ptx/cvt.cuh"
#include "ptx/misc.cuh"
#include "tile/rows.cuh"

using T = Plan::Element;
using Accum = AccumOf<T>;

inline constexpr int kPerPiece = 16 / int(sizeof(T));

union Piece {
    uint4 words;
    T values[kPerPiece];
    __device__ Piece() : words{0, 0, 0, 0} {}
};

__device__ __forceinline__ Accum row_product(const Rows<const T>& a, const Rows<const T>& b,
                                             i64 row, int lane) {
    Accum sum = 0;
    if constexpr (Plan::kVector) {
        for (int col = lane * kPerPiece; col < a.dim; col += kWarpSize * kPerPiece) {
            Piece x, y;
            x.words = *reinterpret_cast<const uint4*>(a.at(row, col));
            y.words = *reinterpret_cast<const uint4*>(b.at(row, col));
#pragma unroll
            for (int i = 0; i < kPerPiece; ++i)
                sum += Accum(to_float(x.values[i])) * Accum(to_float(y.values[i]));
        }
    } else {
        for (int col = lane; col < a.dim; col += kWarpSize)
            sum += Accum(to_float(*a.at(row, col))) * Accum(to_float(*b.at(row, col)));
    }
#pragma unroll
    for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(kFullWarp, sum, other);
    return sum;
}

extern "C" __global__ void __launch_bounds__(Plan::kWarps* kWarpSize)
    delta(const __grid_constant__ Params p) {
    constexpr double kLog2e = 1.44269504088896340736;
    const int lane = threadIdx.x % kWarpSize;
    const u32 block = blockIdx.x % p.num_blocks, outer = blockIdx.x / p.num_blocks;
    const u32 batch = outer / p.num_heads, head = outer % p.num_heads;
    const Rows<const T> out(head_start<const T>(p.out, p.out_strides, p.batch_sizes, batch, head),
                            p.out_strides, p.seqlen_q, p.head_dim_v);
    const Rows<const T> dout(
        head_start<const T>(p.dout, p.dout_strides, p.batch_sizes, batch, head), p.dout_strides,
        p.seqlen_q, p.head_dim_v);
    const Accum* lse = head_start<const Accum>(p.lse, p.lse_strides, p.batch_sizes, batch, head);
    const Accum* dlse = head_start<const Accum>(p.dlse, p.dlse_strides, p.batch_sizes, batch, head);
    Accum* stats = static_cast<Accum*>(p.stats) + i64(outer) * 3 * p.stats_pitch;

    const i64 first = i64(block) * Plan::kBlockRows + threadIdx.x / kWarpSize;
    for (i64 row = first; row < min_of(i64(block + 1) * Plan::kBlockRows, p.stats_pitch);
         row += Plan::kWarps) {
        const bool exists = row < p.seqlen_q;
        Accum sum = exists ? row_product(out, dout, row, lane) : Accum(0);
        if (lane != 0) continue;
        if (Plan::kDlse && exists) sum -= dlse[row * p.dlse_strides.row];
        const Accum value = exists ? lse[row * p.lse_strides.row] : -infinity<Accum>();
        stats[row] = 0;
        stats[p.stats_pitch + row] =
            value == -infinity<Accum>() ? empty_row_sum<T, Accum>() : value * Accum(kLog2e);
        stats[2 * p.stats_pitch + row] = sum;
    }
}
