// Which elements are visible: a function of (i, j), the query's and the key's index in their own sequences.
#pragma once
#include "../ptx/cvt.cuh"
#include "../tile/rows.cuh"
#include "../types.cuh"

template <bool kBand>
struct Mask {
    int lo, hi;  // the band, as in attn/band.cuh
    int seqlen_q, seqlen_k;

    __device__ __forceinline__ bool operator()(int i, int j) const {
        bool visible = i < seqlen_q && j < seqlen_k;
        if constexpr (kBand) visible = visible && j - i >= lo && j - i <= hi;
        return visible;
    }
};

// After a product whose right operand's tile (rows first .. first + count of `rows`) had its inf and NaN replaced by
// zero: give them back to the elements that see them, and to no other. c's element (row, col) sees row r of the operand
// when visible(row, r). With kWeight they count with a positive weight, so that inf stays inf; without, the weight has
// no known sign and the result is NaN.
template <bool kWeight, class C, class T, class Visible>
__device__ __forceinline__ void restore_nonfinite(C& c, int row, int col, const Rows<T>& rows, int first, int count,
                                               Visible visible) {
    for (int r = first; r < min_of(first + count, rows.count); ++r)
        for (int d = col; d < min_of(col + 8 * C::kColTiles, rows.dim); ++d) {
            const T raw = *rows.at(r, d);
            if (!is_nonfinite(raw)) continue;
            const auto value = kWeight ? to_float(raw) : to_float(raw) * 0;
            c.for_each(row, col, [&](auto& x, int i, int column) {
                if (column == d && visible(i, r)) x += value;
            });
        }
}
