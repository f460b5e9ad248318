// Gradients of the score's array arguments: sums over many pairs in whatever order thread blocks
// run, repeatable bit by bit, since they are sums of integers.
//
// A term becomes a multiple of 2^-k, the unit, in 64 bits; k is chosen on the device from a bound
// on the terms (cuflash/launch_gradients.py). Doubles have a second word for what the first one
// rounds off. Terms that are not finite are noted instead, three bits an entry.
#pragma once
#include "../ptx/misc.cuh"
#include "../tile/bits.cuh"
#include "../tile/fragment.cuh"

enum NonfiniteTerm : u32 { kNan = 1, kPlusInf = 2, kMinusInf = 4 };

// Where the entries of one argument's gradient are summed. The notes of four entries share a word.
struct GradientSums {
    u64* words;
    u32* notes;
    i64 count;  // entries

    __device__ __forceinline__ void note(i64 entry, u32 kind) const {
        atomicOr(notes + entry / 4, kind << entry % 4 * 8);
    }
};

template <class Accum> struct FixedPoint {
    static constexpr int kWords = sizeof(Accum) == 8 ? 2 : 1;
    static constexpr int kLowBits = 40;  // of the second word
    i64 words[kWords] = {};

    // Adds x, in units.
    __device__ __forceinline__ void add(float x) { words[0] += __float2ll_rn(x); }
    __device__ __forceinline__ void add(double x) {
        const double whole = rint(x);
        words[0] += __double2ll_rn(whole);
        words[kWords - 1] += __double2ll_rn((x - whole) * double(1ull << kLowBits));
    }
    __device__ __forceinline__ void add_lane(int distance) {
#pragma unroll
        for (i64& word : words) word += __shfl_xor_sync(kFullWarp, word, distance);
    }
    __device__ __forceinline__ void store(const GradientSums& sums, i64 entry) const {
#pragma unroll
        for (int n = 0; n < kWords; ++n)
            if (words[n] != 0) atomicAdd(sums.words + n * sums.count + entry, u64(words[n]));
    }
};

// One argument's terms of a block of transposed scores. ds: gradient by value; s: what `term`
// takes. Pairs that are not `seen` count nothing.
template <class Gradient, class Scores, class Bits, class Accum> struct GradientTerms {
    const Gradient& gradient;
    const Scores& ds;
    const Scores& s;
    const Bits& seen;
    int first_j, first_i;
    Accum unit;  // 2^k

    __device__ __forceinline__ int key(int m, int r) const {
        return first_j + row_in_fragment(m, r);
    }
    __device__ __forceinline__ int query(int n, int r) const {
        return first_i + col_in_fragment(n, r);
    }
    __device__ __forceinline__ void add(FixedPoint<Accum>& sum, int m, int n, int r) const {
        if (!seen.get(m, n, r)) return;
        const int i = query(n, r), j = key(m, r);
        const Accum x = ds.x[m][n][r] * gradient.term(s.x[m][n][r], i, j);
        if (!is_nonfinite(x)) {
            sum.add(x * unit);
        } else if (const i64 entry = gradient.entry(i, j); entry >= 0) {
            gradient.sums().note(entry, x != x ? kNan : x > 0 ? kPlusInf : kMinusInf);
        }
    }
    __device__ __forceinline__ void store(const FixedPoint<Accum>& sum, int i, int j) const {
        const i64 entry = gradient.entry(i, j);
        if (entry >= 0) sum.store(gradient.sums(), entry);
    }
    // Terms that meet in one entry are added in the lane and the warp first.
    __device__ __forceinline__ void add_all() const {
        constexpr int kM = Scores::kRowTiles, kN = Scores::kColTiles;
        if constexpr (Gradient::kAlongI && Gradient::kAlongJ) {
            for_each_place<kM, kN>([&](int m, int n, int r) {
                FixedPoint<Accum> sum;
                add(sum, m, n, r);
                if (seen.get(m, n, r)) store(sum, query(n, r), key(m, r));
            });
        } else if constexpr (Gradient::kAlongJ) {
#pragma unroll
            for (int row = 0; row < 2 * kM; ++row) {
                FixedPoint<Accum> sum;
#pragma unroll
                for (int x = 0; x < 2 * kN; ++x) add(sum, row / 2, x / 2, row % 2 * 2 + x % 2);
                sum.add_lane(1), sum.add_lane(2);
                const int j = key(row / 2, row % 2 * 2);
                if (lane_id() % 4 == 0 && j < gradient.seqlen_k()) store(sum, 0, j);
            }
        } else if constexpr (Gradient::kAlongI) {
#pragma unroll
            for (int col = 0; col < 2 * kN; ++col) {
                FixedPoint<Accum> sum;
#pragma unroll
                for (int x = 0; x < 2 * kM; ++x) add(sum, x / 2, col / 2, x % 2 * 2 + col % 2);
                sum.add_lane(4), sum.add_lane(8), sum.add_lane(16);
                const int i = query(col / 2, col % 2);
                if (lane_id() < 4 && i < gradient.seqlen_q()) store(sum, i, 0);
            }
        } else {
            FixedPoint<Accum> sum;
            for_each_place<kM, kN>([&](int m, int n, int r) { add(sum, m, n, r); });
#pragma unroll
            for (int distance = 1; distance < kWarpSize; distance *= 2) sum.add_lane(distance);
            if (lane_id() == 0) store(sum, 0, 0);
        }
    }
};

template <class Gradient, class Accum, int kRowTiles, int kColTiles, class Bits>
__device__ __forceinline__ void add_gradient(const Gradient& gradient,
                                             const Fragment<Accum, kRowTiles, kColTiles>& ds,
                                             const Fragment<Accum, kRowTiles, kColTiles>& s,
                                             const Bits& seen, int first_j, int first_i) {
    using Scores = Fragment<Accum, kRowTiles, kColTiles>;
    GradientTerms<Gradient, Scores, Bits, Accum>{gradient, ds,      s,              seen,
                                                 first_j,  first_i, gradient.unit()}
        .add_all();
}
