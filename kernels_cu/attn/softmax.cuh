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
    static constexpr int kMostGrowth = 96;        // powers of two: sums stay finite

    // Starts at the lowest finite value, not at -inf: a hidden score is then -inf above nothing and
    // weighs 0 without a special case, and every finite score still counts.
    Accum reference[kRows];
    Accum sum[kRows];  // this lane's columns only, until finish()

    __device__ __forceinline__ void init() {
#pragma unroll
        for (int q = 0; q < kRows; ++q) reference[q] = lowest<Accum>(), sum[q] = 0;
    }

    // The highest score of each row, in every lane of its quad.
    static __device__ __forceinline__ void reduce(Accum (&highest)[kRows]) {
#pragma unroll
        for (int q = 0; q < kRows; ++q) {
            highest[q] = fmax_of(highest[q], __shfl_xor_sync(kFullWarp, highest[q], 1));
            highest[q] = fmax_of(highest[q], __shfl_xor_sync(kFullWarp, highest[q], 2));
        }
    }
    // Moves the references so that they suit scores up to `highest` and calls rescale(factor) when
    // an earlier sum or output of the warp must change. A row's arithmetic never depends on other
    // rows. kLate: scores up to `highest` are weighed already, with the old reference; where that
    // went out of range, the row becomes NaN.
    template <bool kLate = false, class Rescale>
    __device__ __forceinline__ void adjust(const Accum (&highest)[kRows], Accum scale,
                                           Rescale rescale) {
        bool changed = false;
#pragma unroll
        for (int q = 0; q < kRows; ++q) changed |= (highest[q] - reference[q]) * scale > kSlack;
        if (__any_sync(kFullWarp, changed)) {
            Accum factor[kRows];
#pragma unroll
            for (int q = 0; q < kRows; ++q) {
                factor[q] = 1;
                if ((highest[q] - reference[q]) * scale > kSlack) {
                    factor[q] = exp2_of((reference[q] - highest[q]) * scale);
                    if (kLate && !((highest[q] - reference[q]) * scale <= kMostGrowth))
                        factor[q] = infinity<Accum>() * 0;
                    reference[q] = highest[q];
                    sum[q] *= factor[q];
                }
            }
            rescale(factor);
        }
    }
    // What weigh() subtracts. Where offsets would be large, the scores are changed.
    template <class Scores>
    __device__ __forceinline__ void offsets(Scores& s, Accum scale, Accum (&offset)[kRows]) const {
        bool large = false;
#pragma unroll
        for (int q = 0; q < kRows; ++q) {
            offset[q] = reference[q] * scale;
            large |= !(fabs(offset[q]) < kLargeOffset);
        }
        if (__any_sync(kFullWarp, large)) {
            Accum shift[kRows];
#pragma unroll
            for (int q = 0; q < kRows; ++q) {  // of this row only: others keep every bit
                const bool own = !(fabs(offset[q]) < kLargeOffset);
                shift[q] = own ? reference[q] : Accum(0);
                offset[q] = own ? Accum(0) : offset[q];
            }
            s.for_each_row([&](Accum& x, int q) { x -= shift[q]; });
        }
    }
    // Moves the references, then replaces the scores by p.
    template <class Scores, class Rescale>
    __device__ __forceinline__ void update(Scores& s, Accum scale, Rescale rescale) {
        Accum highest[kRows];
#pragma unroll
        for (int q = 0; q < kRows; ++q) highest[q] = -infinity<Accum>();
        s.for_each_row([&](Accum& x, int q) { highest[q] = fmax_of(highest[q], x); });
        reduce(highest);
        adjust(highest, scale, rescale);
        Accum offset[kRows] = {};
        if constexpr (kFused) offsets(s, scale, offset);
        s.for_each_row([&](Accum& x, int q) {
            x = exp2_of(kFused ? fma_of(x, scale, -offset[q]) : (x - reference[q]) * scale);
            sum[q] += x;
        });
    }

    // The same of scores relative to the references, as powers of two, where these stay.
    template <class Scores> __device__ __forceinline__ void add(Scores& s) {
        s.for_each_row([&](Accum& x, int q) { x = exp2_of(x), sum[q] += x; });
    }

    // The same, but the scores are weighed with the references as they are, and only then these
    // move: exponentials need not wait for the maximum. Rows whose scores grow by more than
    // 2^kMostGrowth at once become NaN.
    template <class Scores, class Rescale>
    __device__ __forceinline__ void update_late(Scores& s, Accum scale, Rescale rescale) {
        Accum highest[kRows], offset[kRows] = {};
#pragma unroll
        for (int q = 0; q < kRows; ++q) highest[q] = -infinity<Accum>();
        if constexpr (kFused) offsets(s, scale, offset);
        s.for_each_row([&](Accum& x, int q) {
            highest[q] = fmax_of(highest[q], x);
            x = exp2_of(kFused ? fma_of(x, scale, -offset[q]) : (x - reference[q]) * scale);
            sum[q] += x;
        });
        reduce(highest);
        adjust<true>(highest, scale, [&](const Accum(&factor)[kRows]) {
            s.for_each_row([&](Accum& x, int q) { x *= factor[q]; });
            rescale(factor);
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

// The end of a row that a sink joins: a score beside those of the keys, with no value to add. The
// scores are in natural units, as the sink is.
//
//     above = max(reference, sink)    total = sum exp(reference - above) + exp(sink - above)
template <class Accum> struct RowEnd {
    Accum above;  // by how much the sink exceeds the reference, or 0
    Accum total;  // relative to the larger of the two
    Accum lse;
    Accum inverse;  // what the output, relative to the reference, is multiplied by

    __device__ __forceinline__ RowEnd(Accum reference, Accum sum, Accum sink) {
        constexpr double kLog2e = 1.44269504088896340736;
        const Accum distance = (sink - reference) * Accum(kLog2e);
        const bool sink_leads = sum == 0 || distance > 0;
        const Accum factor = sum == 0 ? Accum(0) : exp2_of(sink_leads ? -distance : Accum(0));
        above = sink_leads ? distance : Accum(0);
        total = sum * factor + (sink_leads ? Accum(1) : exp2_of(distance));
        lse = (sink_leads ? sink : reference) + log_of(total);
        if (sum == 0) lse = sink;
        inverse = factor / total;
    }
};
