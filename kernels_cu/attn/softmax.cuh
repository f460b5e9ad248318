// The running softmax of the rows that one thread shares with the three other lanes of its quad.
#pragma once
#include "../ptx/misc.cuh"
#include "../tile/fragment.cuh"

// p = exp2((s - reference) * scale) with scale = |softmax scale| * log2(e); `sum` adds up p. The
// subtraction comes first: where scores are huge, s * scale and reference * scale round apart, s
// and reference do not.
// With kFused one multiply-add a score, s * scale - offset with offset = reference * scale: its
// rounding moves all weights of a row by one factor, which out and lse do not see. Offsets so large
// that this factor could overflow, and those of rows without a visible key, are subtracted first.
template <class Accum, int kRowTiles, bool kFused = false> struct Softmax {
    static constexpr int kRows = 2 * kRowTiles;
    // The reference is an earlier maximum as long as the true one is within 2^8 of it: most steps
    // then rescale nothing, and the result is the same, since p, sum and the output share the
    // reference.
    static constexpr int kSlack = 8;
    static constexpr int kLargeOffset = 1 << 22;  // rounded to a quarter

    // Starts at the lowest finite value, not at -inf: a hidden score is then -inf above nothing and
    // weighs 0 without a special case, and every finite score still counts.
    Accum reference[kRows];
    Accum sum[kRows];  // this lane's columns only, until finish()

    __device__ __forceinline__ void init() {
#pragma unroll
        for (int q = 0; q < kRows; ++q) reference[q] = lowest<Accum>(), sum[q] = 0;
    }

    // Moves the references so that they suit the scores and calls rescale(factor) when an earlier
    // sum or output of the warp must change; then replaces the scores by p. A row's arithmetic
    // never depends on other rows.
    template <class Scores, class Rescale>
    __device__ __forceinline__ void update(Scores& s, Accum scale, Rescale rescale) {
        Accum highest[kRows];
#pragma unroll
        for (int q = 0; q < kRows; ++q) highest[q] = -infinity<Accum>();
        s.for_each_row([&](Accum& x, int q) { highest[q] = fmax_of(highest[q], x); });
        bool changed = false;
#pragma unroll
        for (int q = 0; q < kRows; ++q) {
            highest[q] = fmax_of(highest[q], __shfl_xor_sync(kFullWarp, highest[q], 1));
            highest[q] = fmax_of(highest[q], __shfl_xor_sync(kFullWarp, highest[q], 2));
            changed |= (highest[q] - reference[q]) * scale > kSlack;
        }
        if (__any_sync(kFullWarp, changed)) {
            Accum factor[kRows];
#pragma unroll
            for (int q = 0; q < kRows; ++q) {
                factor[q] = 1;
                if ((highest[q] - reference[q]) * scale > kSlack) {
                    factor[q] = exp2_of((reference[q] - highest[q]) * scale);
                    reference[q] = highest[q];
                    sum[q] *= factor[q];
                }
            }
            rescale(factor);
        }
        Accum offset[kRows] = {};
        if constexpr (kFused) {
            bool large = false;
#pragma unroll
            for (int q = 0; q < kRows; ++q) {
                offset[q] = reference[q] * scale;
                large |= !(fabs(offset[q]) < kLargeOffset);
            }
            if (__any_sync(kFullWarp, large)) {
                s.for_each_row([&](Accum& x, int q) { x -= reference[q]; });
#pragma unroll
                for (int q = 0; q < kRows; ++q) offset[q] = 0;
            }
        }
        s.for_each_row([&](Accum& x, int q) {
            x = exp2_of(kFused ? fma_of(x, scale, -offset[q]) : (x - reference[q]) * scale);
            sum[q] += x;
        });
    }

    // The sum over the whole row, in every lane of the quad.
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int q = 0; q < kRows; ++q) {
            sum[q] += __shfl_xor_sync(kFullWarp, sum[q], 1);
            sum[q] += __shfl_xor_sync(kFullWarp, sum[q], 2);
        }
    }
    __device__ __forceinline__ Accum inverse_sum(int q) const {
        return sum[q] == 0 ? Accum(0) : 1 / sum[q];
    }
    // Natural logarithm of the row's sum of exponentials; -inf for a row without a visible key.
    __device__ __forceinline__ Accum lse(int q, Accum scale) const {
        constexpr double kLn2 = 0.693147180559945309417;
        return sum[q] == 0 ? -infinity<Accum>()
                           : reference[q] * (scale * Accum(kLn2)) + log_of(sum[q]);
    }
};
