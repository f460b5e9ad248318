// Which blocks a block of the plan at hand needs: by a band for all rows, or by intervals.
#pragma once
#include "band.cuh"
#include "mask.cuh"

// The blocks of keys that queries first .. last see, and of queries that see keys first .. last: rows
// of a batch entry that ends there. With lengths there may be none.
template <class Params>
__device__ __forceinline__ BlockRange key_blocks(const Params& p, const Lengths& ends, int first,
                                                 int last) {
    if (Plan::kLengths && first > last) return {0, 0, 0, 0};
    if constexpr (Plan::kIntervals)
        return interval_range(p.q_intervals, first, last, Plan::kBlockN);
    else
        return band_range<Plan::kBand>(first, last, p.band_lo, p.band_hi, Plan::kBlockN,
                                       ends.seqlen_k);
}
template <class Params>
__device__ __forceinline__ BlockRange query_blocks(const Params& p, const Lengths& ends, int first,
                                                   int last) {
    if (Plan::kLengths && first > last) return {0, 0, 0, 0};
    if constexpr (Plan::kIntervals)
        return interval_range(p.k_intervals, first, last, Plan::kBlockM);
    else
        return band_range<Plan::kBand>(first, last, -p.band_hi, -p.band_lo, Plan::kBlockM,
                                       ends.seqlen_q);
}
// The end of the former, where the queries see any: with fewer registers.
template <class Params>
__device__ __forceinline__ int key_blocks_end(const Params& p, const Lengths& ends, int first,
                                              int last) {
    if constexpr (Plan::kIntervals)
        return ceil_div(interval_end(p.q_intervals, last), Plan::kBlockN);
    else
        return key_blocks(p, ends, first, last).end;
}

// The first and the last key that a query sees; with a band the first may lie before the keys.
template <class Params> __device__ __forceinline__ int first_key(const Params& p, int query) {
    if constexpr (Plan::kIntervals)
        return interval_at(p.q_intervals, query).first;
    else
        return query + p.band_lo;
}
template <class Params>
__device__ __forceinline__ int last_key(const Params& p, const Lengths& ends, int query) {
    if constexpr (Plan::kIntervals)
        return interval_at(p.q_intervals, query).last;
    else
        return min_of(query + p.band_hi, ends.seqlen_k - 1);
}
