// What happens to a score between the product and the mask: functions of the value and its place,
// never of a thread.
#pragma once
#include "../types.cuh"

// The softmax works with |scale|; a negative scale turns the scores round, and zero keeps only
// their NaN and inf.
template <int kSign, class Scores> __device__ __forceinline__ void apply_scale_sign(Scores& s) {
    if constexpr (kSign != 1) s.for_each(0, 0, [](auto& x, int, int) { x *= kSign; });
}
