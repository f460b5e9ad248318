// Packed sequences: what each query and each key sees (attn/interval.cuh), from the offsets at which
// the sequences begin and the window around i + shift in each of them.
//
//     queries[i] = keys_start + [i' + shift - left, i' + shift + right], inside the sequence's keys
//     keys[j] = queries_start + [j' - shift - right, j' - shift + left], inside its queries
//
// with i' and j' counted in the sequence; one thread for each row. Rows behind the last sequence see
// nothing.
#include "attn/interval.cuh"

// The sequence whose rows, from offsets[n] to below offsets[n + 1], hold `row`; its number is
// `sequences` where it lies behind all of them.
__device__ __forceinline__ int find(const i32* offsets, int sequences, int row) {
    int low = 0, high = sequences;  // offsets[low] <= row, and the answer is at most high
    while (low < high) {
        const int middle = low + (high - low + 1) / 2;
        if (offsets[middle] <= row)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}
__device__ __forceinline__ int between(i64 low, i64 x, i64 high) {
    return int(x < low ? low : x > high ? high : x);
}

// One side of a sequence: its rows and those of the other side, from start to below end.
struct Side {
    int start, other_start, other_end;
};
// The rows of the other side that `row` sees: from `before` before row + shift to `behind` behind it.
__device__ __forceinline__ Interval seen_from(int row, const Side& side, i64 before, i64 behind,
                                              i64 shift, int other_count) {
    const i64 center = side.other_start + (row - side.start) + shift;
    const int first = between(side.other_start, center - before, side.other_end);
    const int last = between(side.other_start - 1, center + behind, side.other_end - 1);
    return {first < other_count ? first : kNowhere, last};
}

extern "C" __global__ void __launch_bounds__(Plan::kThreads)
    intervals(const __grid_constant__ Params p) {
    const i32* q_offsets = static_cast<const i32*>(p.q_offsets);
    const i32* k_offsets = static_cast<const i32*>(p.k_offsets);
    const i64 rows_q = i64(p.seqlen_q) + kSpareRows, rows_k = i64(p.seqlen_k) + kSpareRows;
    i64 index = i64(blockIdx.x) * Plan::kThreads + threadIdx.x;
    const bool of_queries = index < rows_q;
    if (!of_queries) index -= rows_q;
    if (!of_queries && index >= rows_k) return;

    const int row = int(index), count = of_queries ? p.seqlen_q : p.seqlen_k;
    const int n = find(of_queries ? q_offsets : k_offsets, p.sequences, row);
    const bool inside = n < p.sequences;
    const int q_start = q_offsets[n], k_start = k_offsets[n];
    const int q_end = inside ? q_offsets[n + 1] : q_start;
    const int k_end = inside ? k_offsets[n + 1] : k_start;
    const i64 shift = p.bottom_right ? i64(k_end - k_start) - (q_end - q_start) : i64(p.shift);
    Interval seen{kNowhere, row < count ? (of_queries ? k_end : q_end) - 1 : -1};
    if (inside && row < count)
        seen = of_queries ? seen_from(row, {q_start, k_start, k_end}, p.left, p.right, shift,
                                      p.seqlen_k)
                          : seen_from(row, {k_start, q_start, q_end}, p.right, p.left, -shift,
                                      p.seqlen_q);
    static_cast<Interval*>(of_queries ? p.q_intervals : p.k_intervals)[row] = seen;
    void* places = of_queries ? p.q_places : p.k_places;
    if (places != nullptr) static_cast<int4*>(places)[row] = {n, q_start, k_start, 0};
}
