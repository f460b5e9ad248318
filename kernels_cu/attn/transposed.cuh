// What a score function, hidden keys and dropout do to a block of transposed scores, in which keys
// are rows and queries columns: between S^T and P^T, and between dP^T and dS^T. Both families'
// backward kernels take their blocks through it.
#pragma once
#include "../tile/bits.cuh"
#include "../tile/fragment.cuh"
#include "mask.cuh"
#include "score.cuh"

// Whether keys of the arrays may be hidden from a query.
inline constexpr bool kHidden = Plan::kBand || Plan::kLengths || Score::kHides;

using Sees = Visible<MaskFor<Plan::kBand>, Score>;
static_assert(Score::kProgram || (!Score::kDropout && !Score::kSinks),
              "weights and dS then know of neither");

// What dS needs to know of a block's scores: with a score function, what it was a function of or
// its derivative, and with it or dropout one bit for each pair.
template <class Scores> struct KeptOf {
    using Bits = FragmentBits<Scores::kRowTiles, Scores::kColTiles>;
    Scores s;     // only where Score::kKeepsScore or !Score::kUnit
    Bits seen;    // visible and inside the sequences; only where Score::kProgram
    Bits weighs;  // kept by dropout; only where Score::kDropout
};

// The block whose corner is at key first_j and query first_i.
template <class Scores> struct TransposedBlock {
    static constexpr int kM = Scores::kRowTiles, kN = Scores::kColTiles;
    using Kept = KeptOf<Scores>;
    const Sees& sees;
    const int first_j, first_i;

    // A pair's score as the softmax sees it, and what dS needs of it: Kept::s.
    struct Scored {
        Accum value, kept;
    };
    __device__ __forceinline__ int key(int m, int r) const {
        return first_j + row_in_fragment(m, r);
    }
    __device__ __forceinline__ int query(int n, int r) const {
        return first_i + col_in_fragment(n, r);
    }
    __device__ __forceinline__ Accum derivative(Accum s, int m, int n, int r) const {
        return sees.score.derivative(s, sees.query(query(n, r)), sees.key(key(m, r)));
    }
    __device__ __forceinline__ Scored scored(Accum product, int m, int n, int r) const {
        const int i = sees.query(query(n, r)), j = sees.key(key(m, r));
        const Accum s = sees.score.scaled(product);
        Scored scored{0, s};
        if constexpr (!Score::kKeepsScore && !Score::kUnit)
            sees.score.value_and_derivative(s, i, j, scored.value, scored.kept);
        else
            scored.value = sees.score.value(s, i, j);
        return scored;
    }
    __device__ __forceinline__ bool seen(int m, int n, int r) const {
        return sees.transposed(key(m, r), query(n, r));
    }
    // Which pairs count, in a loop: no more elements of masks on their way than there are registers
    // for.
    __device__ __forceinline__ void see(Kept& kept) const {
        static_assert(!Score::kProgram || kM * kN == 8, "a word of bits");
        if constexpr (Score::kBitsByKey) {
            kept.seen.words[0] = bits_of_keys();
            return;
        }
        u32 word = 0;
#pragma unroll 1
        for (int first = 0; first < 8; first += 4) {
            u32 bits = 0;
            for_each_place<1, 4>([&](int m, int n, int r) {
                bits |= u32(seen(m, first + n, r)) << (4 * n + r);
            });
            word |= bits << 4 * first;
        }
        kept.seen.words[0] = word;
    }
    // The same from a mask's bits (mask_bits.cu), which the band is a part of: two words of queries
    // for each of a lane's two keys. The block begins with a word; rows are long enough for it.
    template <class AnyScore = Score> __device__ __forceinline__ u32 bits_of_keys() const {
        static_assert(kM == 1 && kN == 8, "two words of queries");
        const AnyScore& score = sees.score;
        u32 word = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int j = key(0, 2 * half);
            const u32* row = score.bits_of_key(sees.key(j)) + (first_i >> 5);
            u32 words[2];
            read_words(words, row);
            const int shift = col_in_fragment(0, 0);
            const u32 found =
                pairs_of_bytes(words[0] >> shift) | pairs_of_bytes(words[1] >> shift) << 16;
            word |= (j < sees.mask.seqlen_k ? found : 0) << 2 * half;
        }
        return word;
    }
    // The two lowest bits of each byte, as those of nibbles.
    static __device__ __forceinline__ u32 pairs_of_bytes(u32 x) {
        x &= 0x03030303u;
        x = (x | x >> 4) & 0x00330033u;
        return (x | x >> 8) & 0x3333u;
    }
    // Which pairs dropout keeps.
    __device__ __forceinline__ void draw(Kept& kept) const {
        if constexpr (Score::kDropout)
            sees.score.dropout().keep_transposed(kept.weighs, first_j, first_i);
    }

    // S^T to the scores that the softmax sees, and what dS needs of them.
    __device__ __forceinline__ void apply_score(Scores& s, Kept& kept, bool masked) const {
        kept.seen.fill(!masked);
        for_each_place<kM, kN>([&](int m, int n, int r) {
            const Scored pair = scored(s.x[m][n][r], m, n, r);
            if constexpr (Score::kKeepsScore || !Score::kUnit) kept.s.x[m][n][r] = pair.kept;
            s.x[m][n][r] = pair.value;
            if (masked) kept.seen.add(m, n, r, seen(m, n, r));
        });
        draw(kept);
    }
    // From the gradient by what the softmax sees to that by the scaled product; on the way, if it
    // `sums`, what the score's arrays receive.
    __device__ __forceinline__ void to_score(Scores& ds, const Kept& kept, bool sums) const {
        if (sums)
            sees.score.for_each_gradient([&](const auto& gradient) {
                add_gradient(gradient, ds, kept.s, kept.seen, first_j, first_i);
            });
        if constexpr (!Score::kUnit)
            for_each_place<kM, kN>([&](int m, int n, int r) {
                const Accum s = kept.s.x[m][n][r];
                ds.x[m][n][r] *= Score::kKeepsScore ? derivative(s, m, n, r) : s;
            });
    }
};

template <class Scores>
__device__ __forceinline__ void hide_unseen(Scores& c, const KeptOf<Scores>& kept) {
    // Where there are registers for it.
    constexpr bool kAskAgain = Score::kBitsByKey && Score::kUnit;
    const auto seen = kAskAgain ? kept.seen.anew() : kept.seen;
    for_each_place<Scores::kRowTiles, Scores::kColTiles>([&](int m, int n, int r) {
        c.x[m][n][r] = seen.get(m, n, r) ? c.x[m][n][r] : Accum(0);
    });
}
// Of weights, or of dP, those that dropout keeps, scaled so that their mean stays.
template <class Scores>
__device__ __forceinline__ void drop(Scores& c, const KeptOf<Scores>& kept, Accum keep_scale) {
    for_each_place<Scores::kRowTiles, Scores::kColTiles>([&](int m, int n, int r) {
        c.x[m][n][r] = kept.weighs.get(m, n, r) ? c.x[m][n][r] * keep_scale : Accum(0);
    });
}
