// Gradients of the score's array arguments: sums over many pairs in whatever order thread blocks
// run, repeatable bit by bit, since they are sums of integers.
//
// A term becomes a multiple of 2^-k, the unit, in 64 bits; k is chosen on the device from a bound
// on the terms (cuflash/launch_gradients.py). A second word takes what the first one rounds off:
// for doubles, and where the bound had to be measured, by a first run of the kernel, since it then
// says less about the sum. Terms that are not finite are noted instead, three bits an entry.
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

template <int kWords> struct FixedPoint {
    static constexpr int kLowBits = 40;  // of the second word
    i64 words[kWords] = {};

    // Adds x, in units.
    __device__ __forceinline__ void add(float x) {
        words[0] += __float2ll_rn(x);
        if constexpr (kWords == 2)
            words[1] += __float2ll_rn((x - rintf(x)) * float(1ull << kLowBits));
    }
    __device__ __forceinline__ void add(double x) {
        words[0] += __double2ll_rn(x);
        if constexpr (kWords == 2)
            words[1] += __double2ll_rn((x - rint(x)) * double(1ull << kLowBits));
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

template <class Gradient, class Sum>
__device__ __forceinline__ void store_sum(const Gradient& gradient, const Sum& sum, int i, int j) {
    const i64 entry = gradient.entry(i, j);
    if (entry >= 0) sum.store(gradient.sums(), entry);
}

// One argument's terms of a block of transposed scores. ds: gradient by value; s: what `term`
// takes. Pairs that are not `seen` count nothing.
template <class Gradient, class Scores, class Bits, class Accum> struct GradientTerms {
    using Sum = FixedPoint<Gradient::kWords>;
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
    __device__ __forceinline__ Accum term(int m, int n, int r) const {
        return ds.x[m][n][r] * gradient.term(s.x[m][n][r], query(n, r), key(m, r));
    }
    __device__ __forceinline__ void add(Sum& sum, int m, int n, int r) const {
        if (!seen.get(m, n, r)) return;
        const int i = query(n, r), j = key(m, r);
        const Accum x = term(m, n, r);
        if (!is_nonfinite(x)) {
            sum.add(x * unit);
        } else if (const i64 entry = gradient.entry(i, j); entry >= 0) {
            gradient.sums().note(entry, x != x ? kNan : x > 0 ? kPlusInf : kMinusInf);
        }
    }
    __device__ __forceinline__ void store(const Sum& sum, int i, int j) const {
        store_sum(gradient, sum, i, j);
    }
    // The largest of this lane's terms.
    __device__ __forceinline__ Accum most() const {
        Accum most = 0;
        for_each_place<Scores::kRowTiles, Scores::kColTiles>([&](int m, int n, int r) {
            if (!seen.get(m, n, r)) return;
            const Accum x = fabs(term(m, n, r));
            most = fmax_of(most, is_nonfinite(x) ? Accum(0) : x);
        });
        return most;
    }
    // Of all thread blocks, as the bits of a double.
    static __device__ __forceinline__ void measure(u64* largest, Accum most) {
#pragma unroll
        for (int distance = 1; distance < kWarpSize; distance *= 2)
            most = fmax_of(most, __shfl_xor_sync(kFullWarp, most, distance));
        if (lane_id() == 0) atomicMax(largest, u64(__double_as_longlong(double(most))));
    }
    // Terms that meet in one entry are added in the lane and the warp first.
    __device__ __forceinline__ void add_all() const {
        constexpr int kM = Scores::kRowTiles, kN = Scores::kColTiles;
        if constexpr (Gradient::kAlongI && Gradient::kAlongJ) {
            for_each_place<kM, kN>([&](int m, int n, int r) {
                Sum sum;
                add(sum, m, n, r);
                if (seen.get(m, n, r)) store(sum, query(n, r), key(m, r));
            });
        } else if constexpr (Gradient::kAlongJ) {
#pragma unroll
            for (int row = 0; row < 2 * kM; ++row) {
                Sum sum;
#pragma unroll
                for (int x = 0; x < 2 * kN; ++x) add(sum, row / 2, x / 2, row % 2 * 2 + x % 2);
                sum.add_lane(1), sum.add_lane(2);
                const int j = key(row / 2, row % 2 * 2);
                if (lane_id() % 4 == 0 && j < gradient.seqlen_k()) store(sum, 0, j);
            }
        } else if constexpr (Gradient::kAlongI) {
#pragma unroll
            for (int col = 0; col < 2 * kN; ++col) {
                Sum sum;
#pragma unroll
                for (int x = 0; x < 2 * kM; ++x) add(sum, x / 2, col / 2, x % 2 * 2 + col % 2);
                sum.add_lane(4), sum.add_lane(8), sum.add_lane(16);
                const int i = query(col / 2, col % 2);
                if (lane_id() < 4 && i < gradient.seqlen_q()) store(sum, i, 0);
            }
        } else {
            Sum sum;
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
    const GradientTerms<Gradient, Scores, Bits, Accum> terms{
        gradient, ds, s, seen, first_j, first_i, gradient.unit()};
    if constexpr (Gradient::kMeasured)
        if (gradient.largest() != nullptr)
            return terms.measure(gradient.largest(), terms.most());
    terms.add_all();
}

// The same for scores of one row tile that do not lie in registers, so that their columns can be a
// loop: where a score's functions are long, the code is not. read(n, ds, s) fetches column tile n.
template <class Accum, int kColTiles, class Gradient, class Read>
__device__ __forceinline__ void add_gradient_by_tiles(const Gradient& gradient, u32 seen,
                                                      int first_j, int first_i, Read read) {
    static_assert(kColTiles <= 8, "a word of bits");
    using Tile = Fragment<Accum, 1, 1>;
    using Bits = FragmentBits<1, 1>;
    using Terms = GradientTerms<Gradient, Tile, Bits, Accum>;
    const Accum unit = gradient.unit();
    bool measures = false;
    if constexpr (Gradient::kMeasured) measures = gradient.largest() != nullptr;
    Accum most = 0;
    typename Terms::Sum sums[2];  // of this lane's two keys, where queries share an entry
#pragma unroll 1
    for (int n = 0; n < kColTiles; ++n) {
        Tile ds, s;
        read(n, ds, s);
        const Bits bits{{seen >> 4 * n}};
        const Terms terms{gradient, ds, s, bits, first_j, first_i + 8 * n, unit};
        if (Gradient::kMeasured && measures) {
            most = fmax_of(most, terms.most());
        } else if constexpr (Gradient::kAlongI) {
            terms.add_all();
        } else {
#pragma unroll
            for (int r = 0; r < 4; ++r) terms.add(sums[Gradient::kAlongJ ? r / 2 : 0], 0, 0, r);
        }
    }
    if (Gradient::kMeasured && measures) return Terms::measure(gradient.largest(), most);
    if constexpr (!Gradient::kAlongI) {
        constexpr int kEnd = Gradient::kAlongJ ? 4 : kWarpSize;
#pragma unroll
        for (int h = 0; h < (Gradient::kAlongJ ? 2 : 1); ++h) {
#pragma unroll
            for (int distance = 1; distance < kEnd; distance *= 2) sums[h].add_lane(distance);
            const int j = first_j + row_in_fragment(0, 2 * h);
            if (lane_id() % kEnd == 0 && j < gradient.seqlen_k())
                store_sum(gradient, sums[h], 0, Gradient::kAlongJ ? j : 0);
        }
    }
}
