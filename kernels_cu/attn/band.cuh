// Which blocks of columns a block of rows needs: one function for causal, windows and both
// directions.
#pragma once
#include "../types.cuh"

// Blocks [begin, end) hold a visible element; of them [full_begin, full_end) hold no hidden one.
struct BlockRange {
    int begin, full_begin, full_end, end;
};

// Column j is visible to row i when i + lo <= j <= i + hi and 0 <= j < length. Rows first .. last,
// both included. Rows as keys and columns as queries (the backward direction) take lo = -hi, hi =
// -lo.
template <bool kBand>
__device__ __forceinline__ BlockRange band_range(int first, int last, int lo, int hi, int block,
                                                 int length) {
    BlockRange range{0, 0, length / block, ceil_div(length, block)};
    if constexpr (kBand) {
        // Backward counts on both directions visiting the same pairs of blocks (attn/turn.cuh), so
        // a range that begins at or after its end, if in one block, must be empty.
        const int first_column = max_of(0, first + lo), end_column = min_of(length, last + hi + 1);
        if (first_column >= end_column) return BlockRange{0, 0, 0, 0};
        range.begin = first_column / block;
        range.end = ceil_div(end_column, block);
        range.full_begin = ceil_div(max_of(0, last + lo), block);
        range.full_end = max_of(0, min_of(length, first + hi + 1)) / block;
        range.full_begin = min_of(max_of(range.full_begin, range.begin), range.end);
        range.full_end = max_of(range.full_begin, min_of(range.full_end, range.end));
    }
    return range;
}
