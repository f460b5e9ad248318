// Before backward: one pass over out and dout.
//
//     delta = rowsum(dout * out) - dlse        row_max = 0        row_sum = lse * log2(e)
//
// and the statistics as attn/stats.cuh defines them, before any are refined. Rows up to
// stats_pitch, which nothing reads as queries, are written too: workspaces hold no stale bits.
// The flags and the counter of attn/turn.cuh are set to 0 beside it.
//
// kRowLanes lanes share a row, kSteps rows one after the other; kVector: rows of out and dout are
// read in 16-byte pieces, where a row is short one for each lane, and the pieces of all steps are on
// their way before the first is used. (With a warp for each row and no reads ahead 112 us in place of 53
// for 16384 rows of 32 heads of 64; the bytes need 32.)
#include "attn/stats.cuh"
#include "ptx/cvt.cuh"
#include "ptx/misc.cuh"
#include "tile/rows.cuh"

using T = Plan::Element;
using Accum = AccumOf<T>;

inline constexpr int kPerPiece = 16 / int(sizeof(T));

inline constexpr int kGroups = Plan::kWarps * kWarpSize / Plan::kRowLanes;  // rows at a time
inline constexpr int kSteps = Plan::kBlockRows / kGroups;
static_assert(kSteps * kGroups == Plan::kBlockRows, "every step is whole");

union Piece {
    uint4 words;
    T values[kPerPiece];
    __device__ Piece() : words{0, 0, 0, 0} {}
};

// sums[step]: this lane's part of the product of rows first + step * kGroups.
__device__ __forceinline__ void row_products(const Rows<const T>& a, const Rows<const T>& b,
                                             i64 first, int lane, Accum (&sums)[kSteps]) {
    if constexpr (Plan::kVector) {
        for (int col = lane * kPerPiece; col < a.dim; col += Plan::kRowLanes * kPerPiece) {
            Piece x[kSteps], y[kSteps];
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                const i64 row = first + step * kGroups;
                if (row >= a.count) continue;
                x[step].words = *reinterpret_cast<const uint4*>(a.at(row, col));
                y[step].words = *reinterpret_cast<const uint4*>(b.at(row, col));
            }
#pragma unroll
            for (int step = 0; step < kSteps; ++step)
#pragma unroll
                for (int i = 0; i < kPerPiece; ++i)
                    sums[step] += Accum(to_float(x[step].values[i])) *
                                  Accum(to_float(y[step].values[i]));
        }
    } else {
        for (int step = 0; step < kSteps; ++step) {
            const i64 row = first + step * kGroups;
            if (row >= a.count) continue;
            for (int col = lane; col < a.dim; col += Plan::kRowLanes)
                sums[step] += Accum(to_float(*a.at(row, col))) * Accum(to_float(*b.at(row, col)));
        }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int other = Plan::kRowLanes / 2; other > 0; other /= 2)
            sums[step] += __shfl_xor_sync(kFullWarp, sums[step], other);
}

extern "C" __global__ void __launch_bounds__(Plan::kWarps* kWarpSize)
    delta(const __grid_constant__ Params p) {
    constexpr double kLog2e = 1.44269504088896340736;
    const int lane = threadIdx.x % Plan::kRowLanes;
    const i64 thread = i64(blockIdx.x) * (Plan::kWarps * kWarpSize) + threadIdx.x;
    const i64 threads = i64(gridDim.x) * (Plan::kWarps * kWarpSize);
    for (i64 n = thread; n < p.num_flags; n += threads) static_cast<u32*>(p.flags)[n] = 0;
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

    const i64 first = i64(block) * Plan::kBlockRows + threadIdx.x / Plan::kRowLanes;
    Accum sums[kSteps] = {};
    row_products(out, dout, first, lane, sums);
    if (lane != 0) return;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        const i64 row = first + step * kGroups;
        if (row >= p.stats_pitch) continue;
        const bool exists = row < p.seqlen_q;
        Accum sum = sums[step];
        if (Plan::kDlse && exists) sum -= dlse[row * p.dlse_strides.row];
        const Accum value = exists ? lse[row * p.lse_strides.row] : -infinity<Accum>();
        stats[row] = 0;
        stats[p.stats_pitch + row] =
            value == -infinity<Accum>() ? empty_row_sum<T, Accum>() : value * Accum(kLog2e);
        stats[2 * p.stats_pitch + row] = sum;
    }
}
