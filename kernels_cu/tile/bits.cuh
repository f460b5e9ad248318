// One bit for each element that a thread holds of a fragment: what would cost a register each, or
// must not be computed twice.
#pragma once
#include "../ptx/misc.cuh"
#include "lanes.cuh"

// f(m, n, r) for the places of a thread's elements.
template <int kRowTiles, int kColTiles, class F>
__device__ __forceinline__ void for_each_place(F f) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int n = 0; n < kColTiles; ++n)
#pragma unroll
            for (int r = 0; r < 4; ++r) f(m, n, r);
}

template <int kRowTileCount, int kColTileCount> struct FragmentBits {
    static constexpr int kRowTiles = kRowTileCount;
    static constexpr int kColTiles = kColTileCount;
    u32 words[ceil_div(kRowTiles * kColTiles, 8)];

    __device__ __forceinline__ void fill(bool value) {
#pragma unroll
        for (u32& word : words) word = value ? ~0u : 0u;
    }
    __device__ __forceinline__ bool get(int m, int n, int r) const {
        const int tile = m * kColTiles + n;
        return words[tile / 8] >> (tile % 8 * 4 + r) & 1;
    }
    // The same bits, unknown to the compiler: what it found out of each, for one use, it would keep
    // for the next by one more instruction to clear its place and one to set it.
    __device__ __forceinline__ FragmentBits anew() const {
        FragmentBits bits;
#pragma unroll
        for (int n = 0; n < int(sizeof(words) / sizeof(u32)); ++n)
            bits.words[n] = u32(opaque(int(words[n])));
        return bits;
    }
    // Into bits that are 0: those of one 16 x 8 tile from r on.
    __device__ __forceinline__ void add(int m, int n, int r, u32 bits) {
        const int tile = m * kColTiles + n;
        words[tile / 8] |= bits << (tile % 8 * 4 + r);
    }
    // f(row, column) of each element, the fragment's corner at (row, col).
    template <class F> __device__ __forceinline__ void set(int row, int col, F f) {
        fill(false);
        for_each_place<kRowTiles, kColTiles>([&](int m, int n, int r) {
            add(m, n, r, f(row + row_in_fragment(m, r), col + col_in_fragment(n, r)));
        });
    }
};
