// Which blocks a block of the plan at hand needs: by a band for all rows, or by intervals.
#pragma once
#include "band.cuh"
#include "interval.cuh"

// The blocks of keys that queries first .. last see, and of queries that see keys first .. last.
template <class Params>
__device__ __forceinline__ BlockRange key_blocks(const Params& p, int first, int last) {
    if constexpr (Plan::kIntervals)
        return interval_range(p.q_intervals, first, last, Plan::kBlockN);
    else
        return band_range<Plan::kBand>(first, last, p.band_lo, p.band_hi, Plan::kBlockN,
                                       p.seqlen_k);
}
template <class Params>
__device__ __forceinline__ BlockRange query_blocks(const Params& p, int first, int last) {
    if constexpr (Plan::kIntervals)
        return interval_range(p.k_intervals, first, last, Plan::kBlockM);
    else
        return band_range<Plan::kBand>(first, last, -p.band_hi, -p.band_lo, Plan::kBlockM,
                                       p.seqlen_q);
}
