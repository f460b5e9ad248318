// Packed sequences: which keys a query sees, and which queries see a key, as an interval for each row
// of all sequences, in place of a band.
//
// The sequences lie one behind the other, and i and j count through all of them. Both ends of the
// intervals never fall from one row to the next, those of rows that see nothing included, so a
// block's range follows from its first and its last row. Intervals of keys are the duals of those
// of queries:
//
//     keys[j].first    the first query i with queries[i].last >= j, kNowhere without any
//     keys[j].last     the last query i with queries[i].first <= j, -1 without any
//
// So a block of queries and one of keys meet when the queries' first row begins at or before the
// last key and their last row ends at or behind the first key, and both directions ask the same:
// backward counts on it (attn/turn.cuh). intervals.cu writes them.
#pragma once
#include "../ptx/misc.cuh"
#include "../types.cuh"
#include "band.cuh"

struct Interval {
    int first, last;  // both included; empty when first > last
};

// Where an interval begins that has nothing behind it: as far as sums with a block's rows fit.
inline constexpr int kNowhere = 0x7fffff00;
// Rows that intervals.cu writes behind the last one, empty: so many may a block have beyond the end.
inline constexpr int kSpareRows = 256;

__device__ __forceinline__ Interval interval_at(const void* intervals, int row) {
    const int2 found = load_constant(static_cast<const int2*>(intervals) + row);
    return {found.x, found.y};
}

// One behind its last column.
__device__ __forceinline__ int interval_end(const void* intervals, int row) {
    return load_constant(static_cast<const int*>(intervals) + 2 * i64(row) + 1) + 1;
}

// The blocks of columns that rows first .. last need, both included and inside the arrays.
__device__ __forceinline__ BlockRange interval_range(const void* intervals, int first, int last,
                                                     int block) {
    const Interval top = interval_at(intervals, first), bottom = interval_at(intervals, last);
    BlockRange range;
    range.begin = top.first / block;
    range.end = max_of(range.begin, ceil_div(bottom.last + 1, block));
    range.full_begin = min_of(max_of(ceil_div(bottom.first, block), range.begin), range.end);
    range.full_end = max_of(range.full_begin, min_of((top.last + 1) / block, range.end));
    return range;
}

// The sequence of a query or of a key, and where its rows begin.
struct Sequence {
    int number, q_start, k_start;
};
__device__ __forceinline__ Sequence sequence_at(const void* places, int row) {
    const int4 found = load_constant(static_cast<const int4*>(places) + row);
    return {found.x, found.y, found.z};
}
