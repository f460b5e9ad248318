// Which elements are visible: a function of (i, j), the query's and the key's index in their own
// sequences.
#pragma once
#include "../ptx/cvt.cuh"
#include "../ptx/misc.cuh"
#include "../tile/rows.cuh"
#include "../types.cuh"
#include "interval.cuh"

// How many queries and keys a batch entry has: the arrays', or with kLengths no more than the caller says.
struct Lengths {
    int seqlen_q, seqlen_k;
};
template <class Params>
__device__ __forceinline__ Lengths lengths_of(const Params& p, u32 batch) {
    if constexpr (Plan::kLengths) {
        const auto end = [&](int most, const void* given) {
            return min_of(most, max_of(load_constant(static_cast<const int*>(given) + batch), 0));
        };
        return {end(p.seqlen_q, p.q_lengths), end(p.seqlen_k, p.k_lengths)};
    }
    return {p.seqlen_q, p.seqlen_k};
}

template <bool kBand> struct Mask {
    int lo, hi;  // the band, as in attn/band.cuh
    int seqlen_q, seqlen_k;

    // As an interval of keys for each query: along a row of scores its ends are computed once.
    __device__ __forceinline__ bool operator()(int i, int j) const {
        const int first = kBand ? i + lo : 0;
        const int last = i >= seqlen_q ? -1 : kBand ? min_of(i + hi, seqlen_k - 1) : seqlen_k - 1;
        return j >= first && j <= last;
    }
    // Where no key is below the band's lower end: one comparison in place of two.
    __device__ __forceinline__ bool below_last(int i, int j) const {
        return j <= (i >= seqlen_q ? -1 : kBand ? min_of(i + hi, seqlen_k - 1) : seqlen_k - 1);
    }
    // The same as an interval of queries for each key, for transposed scores.
    __device__ __forceinline__ bool transposed(int j, int i) const {
        const int first = kBand ? j - hi : 0;
        const int last = j >= seqlen_k ? -1 : kBand ? min_of(j - lo, seqlen_q - 1) : seqlen_q - 1;
        return i >= first && i <= last;
    }
};

// The same where each row has an interval of its own (attn/interval.cuh), empty beyond the end.
struct IntervalMask {
    const void *queries, *keys;
    int seqlen_q, seqlen_k;

    __device__ __forceinline__ bool operator()(int i, int j) const {
        const Interval seen = interval_at(queries, i);
        return j >= seen.first && j <= seen.last;
    }
    __device__ __forceinline__ bool below_last(int i, int j) const {
        return j <= interval_at(queries, i).last;
    }
    __device__ __forceinline__ bool transposed(int j, int i) const {
        const Interval seen = interval_at(keys, j);
        return i >= seen.first && i <= seen.last;
    }
};

// The plan's mask. kBand: as the plan has it, or true where the code runs with a band only.
template <bool kBand>
using MaskFor = typename Select<Plan::kIntervals, IntervalMask, Mask<kBand>>::type;
template <bool kBand = Plan::kBand, class Params>
__device__ __forceinline__ MaskFor<kBand> mask_of(const Params& p, u32 batch) {
    // Equal reads are one.
    if constexpr (Plan::kIntervals)
        return {p.q_intervals, p.k_intervals, p.seqlen_q, p.seqlen_k};
    else
        return {p.band_lo, p.band_hi, lengths_of(p, batch).seqlen_q, lengths_of(p, batch).seqlen_k};
}

// After products whose right operands had inf and NaN replaced by zero, since 0 * NaN is NaN and
// hidden elements must add nothing: gives them back to the elements that see them. Once more does
// no harm, so one pass at the end serves for all tiles. c's element (row, col) sees row r of
// `rows`, first <= r < last, when visible(row, r). With kWeight they count with a positive weight,
// so that inf stays inf; without, the weight has no known sign and the result is NaN.
template <bool kWeight, class C, class T, class Visible>
__device__ __forceinline__ void restore_nonfinite(C& c, int row, int col, const Rows<T>& rows,
                                                  int first, int last, Visible visible) {
    for (int r = first; r < min_of(last, rows.count); ++r)
        for (int d = col; d < min_of(col + 8 * C::kColTiles, rows.dim); ++d) {
            const T raw = *rows.at(r, d);
            if (!is_nonfinite(raw)) continue;
            const auto value = kWeight ? to_float(raw) : to_float(raw) * 0;
            c.for_each(row, col, [&](auto& x, int i, int column) {
                if (column == d && visible(i, r)) x += value;
            });
        }
}

// The same for a warp's 16 rows of a result, complete, in a tile of shared memory: one lane for
// each row and half of the columns. The caller has made the tile visible to the warp.
template <bool kWeight = true, class Tile, class T, class Visible>
__device__ __forceinline__ void restore_nonfinite(Tile tile, int row, const Rows<T>& rows,
                                                  int first, int last, Visible visible) {
    static_assert(Tile::kRows == 16, "two lanes a row");
    const int lane = detached(int(threadIdx.x)) % kWarpSize;  // rarely needed: no register for it
    for (int r = first; r < min_of(last, rows.count); ++r) {
        if (!visible(row + lane / 2, r)) continue;
        for (int d = lane % 2; d < rows.dim; d += 2) {
            const T raw = *rows.at(r, d);
            if (!is_nonfinite(raw)) continue;
            using Element = typename Tile::Element;
            const auto value = kWeight ? to_float(raw) : to_float(raw) * 0;
            tile.store(lane / 2, d, from_float<Element>(to_float(tile.load(lane / 2, d)) + value));
        }
    }
}
