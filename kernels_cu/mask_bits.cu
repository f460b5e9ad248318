// What a call's masks and its band let through, a bit for each pair. Rows, of row_words words, go on
// with zeros behind the sequence's end (cuflash/mask_bits.py).
//
//     kByKey   a row is      a word holds
//     false    a query       of 128 neighbouring keys those that one lane of a quad has in tiles of
//                            eight: word n keys 8 t + 2 n and the next, as bits 2 t and 2 t + 1
//     true     a key         32 neighbouring queries
//
// A thread block looks at 256 queries and 256 keys, and writes 8 words of each of its rows. Lanes
// take keys near each other, as masks lie in memory: words of keys are votes, those of queries are
// gathered by the lane that has the key.
#include "attn/mask.cuh"
#include "attn/score.cuh"

inline constexpr int kTile = 256;
inline constexpr int kWords = kTile / 32;
inline constexpr int kWarps = 8;
static_assert(kTile == 32 * kWarps, "a warp has 32 queries, or 32 keys");

using Sees = Visible<Mask<Plan::kBand>, Score>;

__device__ __forceinline__ void store_words(u32* to, const u32 (&words)[kWords]) {
#pragma unroll
    for (int n = 0; n < kWords; n += 4)
        *reinterpret_cast<uint4*>(to + n) =
            make_uint4(words[n], words[n + 1], words[n + 2], words[n + 3]);
}

// Words of keys: query by query, each lane with the key whose bit it votes on.
__device__ __forceinline__ void write_queries(const Sees& sees, u32* bits, i64 pitch, int first_i,
                                              int first_j) {
    const int end = min_of(first_i + 32, sees.mask.seqlen_q);
#pragma unroll 1
    for (int i = first_i; i < end; ++i) {
        u32 words[kWords];
#pragma unroll
        for (int n = 0; n < kWords; ++n)
            words[n] = __ballot_sync(
                kFullWarp, sees(i, first_j + n / 4 * 128 + lane_id() / 2 * 8 + n % 4 * 2 +
                                       lane_id() % 2));
        if (lane_id() == 0) store_words(bits + i * pitch + first_j / 32, words);
    }
}

// Words of queries: each lane those of its key.
__device__ __forceinline__ void write_key(const Sees& sees, u32* bits, i64 pitch, int first_i,
                                          int j) {
    u32 words[kWords];
#pragma unroll
    for (int n = 0; n < kWords; ++n) {
        u32 word = 0;
#pragma unroll 4
        for (int bit = 0; bit < 32; ++bit) word |= u32(sees(first_i + 32 * n + bit, j)) << bit;
        words[n] = word;
    }
    if (j < sees.mask.seqlen_k) store_words(bits + j * pitch + first_i / 32, words);
}

extern "C" __global__ void __launch_bounds__(kWarps* kWarpSize)
    mask_bits(const __grid_constant__ Params p) {
    u32 index = blockIdx.x;
    const int first_j = int(index % p.num_key_blocks) * kTile;
    index /= p.num_key_blocks;
    const int first_i = int(index % p.num_blocks) * kTile;
    const u32 outer = index / p.num_blocks, batch = outer / p.num_heads;
    const Sees sees{{p.band_lo, p.band_hi, p.seqlen_q, p.seqlen_k},
                    {p, batch, outer - batch * p.num_heads}};
    const i64 pitch = p.row_words;
    const int warp = int(threadIdx.x) / kWarpSize;
    u32* bits = static_cast<u32*>(p.bits) +
                i64(outer) * (Plan::kByKey ? p.seqlen_k : p.seqlen_q) * pitch;
    if constexpr (Plan::kByKey)
        write_key(sees, bits, pitch, first_i, first_j + warp * 32 + lane_id());
    else
        write_queries(sees, bits, pitch, first_i + 32 * warp, first_j);
}
