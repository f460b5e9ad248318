// What happens to a score between the product and the mask: functions of the value and its place,
// never of a thread.
#pragma once
#include "../types.cuh"
#include "program.cuh"

// The softmax works with |scale|; a negative scale turns the scores round, and zero keeps only
// their NaN and inf.
template <int kSign, class Scores> __device__ __forceinline__ void apply_scale_sign(Scores& s) {
    if constexpr (kSign != 1) s.for_each(0, 0, [](auto& x, int, int) { x *= kSign; });
}

// Which pairs count: those of the band whose key the score does not hide, inside the sequences.
template <class Mask, class Score> struct Visible {
    Mask mask;
    Score score;

    // The nearest pair inside the sequences: the score knows no other.
    __device__ __forceinline__ int query(int i) const { return min_of(i, mask.seqlen_q - 1); }
    __device__ __forceinline__ int key(int j) const { return min_of(j, mask.seqlen_k - 1); }
    // Without a branch, so that reads of a mask do not wait for each other.
    __device__ __forceinline__ bool operator()(int i, int j) const {
        if constexpr (!Score::kHides) return mask(i, j);
        return mask(i, j) & score.visible(query(i), key(j));
    }
    __device__ __forceinline__ bool transposed(int j, int i) const {
        if constexpr (!Score::kHides) return mask.transposed(j, i);
        return mask.transposed(j, i) & score.visible(query(i), key(j));
    }
};
