// After backward: dq = scale * dq_accum, from the order of accumulator fragments to any strides, in
// q's dtype.
//
// A warp takes two neighbouring column tiles of 16 rows at a time, as it would hold them as a
// fragment: a lane has four pairs of neighbours, and those of its quad are 8 columns of 4 rows'
// parts. Where rows are 16-byte pieces, the quad exchanges pairs so that each lane has one piece.
//
// kEmptyRows: dq_accum holds nothing for a block of so many queries that sees no key; its dq is 0.
#include "attn/mask.cuh"
#include "ptx/cvt.cuh"
#include "ptx/misc.cuh"
#include "tile/fragment.cuh"
#include "tile/rows.cuh"

using T = Plan::Element;
using Accum = AccumOf<T>;

inline constexpr int kWarps = Plan::kThreads / kWarpSize;
inline constexpr int kPairsOfTiles = Plan::kAccumTiles / 2;
inline constexpr int kUnits = Plan::kBlockRows / 16 * kPairsOfTiles;
inline constexpr int kBatch = 2;  // units whose reads overlap
static_assert(Plan::kAccumTiles % 2 == 0 && Plan::kBlockRows % 16 == 0, "units are whole");
static_assert(Plan::kStoreBytes < 16 || sizeof(T) == 2, "four pairs are one piece");

// x[tile][r], r as in a fragment: rows g and g + 8, two columns each.
__device__ __forceinline__ void load_unit(const Accum* from, Accum (&x)[2][4]) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
        if constexpr (Plan::kAccumVector) {
            const float4 four = *reinterpret_cast<const float4*>(from + 128 * tile + 4 * lane_id());
            x[tile][0] = four.x, x[tile][1] = four.y, x[tile][2] = four.z, x[tile][3] = four.w;
        } else {
#pragma unroll
            for (int r = 0; r < 4; ++r) x[tile][r] = from[128 * tile + kWarpSize * r + lane_id()];
        }
}

// 16 rows from `row` on, 16 columns from `col` on.
template <class Out>
__device__ __forceinline__ void store_unit(const Rows<Out>& dq, i64 row, int col, Accum scale,
                                           const Accum (&x)[2][4]) {
    const int g = lane_id() / 4, t = lane_id() % 4;
    if constexpr (Plan::kStoreBytes == 16) {
        // word[n]: columns 2t and 2t + 1 of part n: tile n % 2 of row g + n / 2 * 8.
        u32 word[4];
#pragma unroll
        for (int n = 0; n < 4; ++n)
            word[n] = pack<Out>(x[n % 2][n / 2 * 2] * scale, x[n % 2][n / 2 * 2 + 1] * scale);
        // Lane t keeps part t: a transposition in two halvings, by distances 2 and 1.
#pragma unroll
        for (int distance = 2; distance > 0; distance /= 2)
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                if (n & distance) continue;
                const bool upper = t & distance;
                const u32 give = upper ? word[n] : word[n + distance];
                const u32 got = __shfl_xor_sync(kFullWarp, give, distance);
                (upper ? word[n] : word[n + distance]) = got;
            }
        const i64 own_row = row + g + t / 2 * 8;
        const int own_col = col + t % 2 * 8;
        if (own_row < dq.count && own_col < dq.dim)
            store_global_v4(dq.at(own_row, own_col), uint4{word[0], word[1], word[2], word[3]});
    } else {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const i64 own_row = row + g + n / 2 * 8;
            const int own_col = col + n % 2 * 8 + 2 * t;
            if (own_row >= dq.count) continue;
            const Out first = from_float<Out>(x[n % 2][n / 2 * 2] * scale);
            const Out second = from_float<Out>(x[n % 2][n / 2 * 2 + 1] * scale);
            if (own_col < dq.dim) *dq.at(own_row, own_col) = first;
            if (own_col + 1 < dq.dim) *dq.at(own_row, own_col + 1) = second;
        }
    }
}

// Whether nothing was added for the block of queries that holds `row`.
__device__ __forceinline__ bool is_empty(const Params& p, u32 batch, i64 row) {
    if constexpr (Plan::kEmptyRows == 0) return false;
    constexpr int kRows = Plan::kEmptyRows > 0 ? Plan::kEmptyRows : 1;
    const int first = int(row) / kRows * kRows;
    const Lengths ends = lengths_of(p, batch);
    const int last = min_of(first + kRows, ends.seqlen_q) - 1;
    const BlockRange keys =
        band_range<Plan::kBand>(first, last, p.band_lo, p.band_hi, 1, ends.seqlen_k);
    return (Plan::kLengths && first > last) || keys.begin == keys.end;
}

extern "C" __global__ void __launch_bounds__(Plan::kThreads)
    cast(const __grid_constant__ Params p) {
    const u32 block = blockIdx.x % p.num_blocks, outer = blockIdx.x / p.num_blocks;
    const u32 batch = outer / p.num_heads, head = outer % p.num_heads;
    const Rows<T> dq(head_start<T>(p.dq, p.dq_strides, p.batch_sizes, batch, head), p.dq_strides,
                     p.seqlen_q, p.head_dim);
    const Accum* accum = static_cast<const Accum*>(p.accum) + i64(outer) * p.accum_pitch;
    const i64 first_row = i64(block) * Plan::kBlockRows;
    const int warp = threadIdx.x / kWarpSize;
#pragma unroll 1
    for (int begin = warp; begin < kUnits; begin += kBatch * kWarps) {
        Accum x[kBatch][2][4];
        const auto unit = [&](int b) { return begin + b * kWarps; };
        const auto row = [&](int b) { return first_row + unit(b) / kPairsOfTiles * 16; };
#pragma unroll
        for (int b = 0; b < kBatch; ++b)
            if (unit(b) < kUnits && row(b) < p.seqlen_q) {
                load_unit(accum + (first_row / 16 * kPairsOfTiles + unit(b)) * 256, x[b]);
                if (is_empty(p, batch, row(b)))
                    for (Accum(&tile)[4] : x[b])
                        for (Accum& value : tile) value = 0;
            }
#pragma unroll
        for (int b = 0; b < kBatch; ++b)
            if (unit(b) < kUnits && row(b) < p.seqlen_q)
                store_unit(dq, row(b), unit(b) % kPairsOfTiles * 16, Accum(p.scale), x[b]);
    }
}
