// The caller's options on a warp's 16 queries for kernels that keep these for a whole piece of work:
// what no key changes is found once, elements are read while the product still runs, and pairs cost
// what is left. struct Score then has, beside what program.cuh says (cuflash/score_rows.py),
//
//     Query, query(i)      what a query's pairs share
//     first_key(query)     where its keys are counted from: its sequence, if several are packed
//     Ahead, read_ahead()  elements of a block of keys, in registers before they are needed
//     read_staged()        those that come by way of shared memory
//     Elements, elements() those of a pair
//     value, visible       of a pair; value<kNear>: where `near` allows; kAdds: in the product's
//                          units, kChanges: in natural ones, kCapped: in those of log2
//     series               kCapped: whose scores are c * tanh(s / c)
//     reach, near          kReaches: how large arguments of tanh get, and up to which value value<true>
//                          serves; below 0: nowhere
#pragma once
#include "../ptx/matrix.cuh"
#include "../tile/bits.cuh"
#include "../tile/fragment.cuh"
#include "program.cuh"
#include "score_keys.cuh"

// A warp's 16 rows of a matrix of 16-bit elements in shared memory, in panels of 64 columns and 64
// rows in 128-byte swizzle: the words of a lane's two rows.
template <int kTiles, class Element>
__device__ __forceinline__ void read_panels(Two<Element> (&to)[2][kTiles], u32 rows) {
    static_assert(sizeof(Element) == 2, "two neighbours are a word");
    const int row = lane_id() % 16, turned = row % 8 ^ lane_id() / 16;
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
        u32 x[4];
        ldmatrix_x4(x, rows + row * 128 + n / 8 * (64 * 128) + (n % 8 ^ turned) * 16);
#pragma unroll
        for (int m = 0; m < 4; ++m) to[m % 2][n + m / 2].words[0] = x[m];
    }
}

template <class Score, int kColTiles, bool kOptions = Score::kProgram> struct ScoreRows {
    using Scores = Fragment<float, 1, kColTiles>;

    __device__ __forceinline__ void begin(const Params&, u32, u32, int) {}
    template <bool> __device__ __forceinline__ void read(const Params&, int) {}
    template <bool>
    __device__ __forceinline__ bool apply(const Params&, Scores&, int, const float (&)[2]) const {
        return false;
    }
    __device__ __forceinline__ void drop(Scores&) const {}
    __device__ __forceinline__ void read_staged(u32) {}
};

template <class Score, int kColTiles> struct ScoreRows<Score, kColTiles, true> {
    using Scores = Fragment<float, 1, kColTiles>;
    using Query = typename Score::Query;
    static constexpr bool kEvaluates = Score::kChanges || Score::kAdds;
    // Powers of two, less than Softmax::kSlack: with a look for the maximum no reference would move.
    static constexpr float kMostGrowth = 7.5f;
    Query queries[2];
    decltype(static_cast<const Score*>(nullptr)->dropout()) dropout;
    int first_row;
    // Of the block of keys in hand.
    typename Score::template Ahead<kColTiles> ahead;
    FragmentBits<1, kColTiles> kept;

    // The queries from `row` on of a head.
    __device__ __forceinline__ void begin(const Params& p, u32 batch, u32 head, int row) {
        const Score score(p, batch, head);
#pragma unroll
        for (int half = 0; half < 2; ++half)
            queries[half] = score.query(row + 8 * half + lane_id() / 4);
        if constexpr (Score::kDropout) dropout = score.dropout(), first_row = row;
    }
    // Opaque: addresses and numbers made of it are not carried from block to block in registers.
    static __device__ __forceinline__ int first_key(int col) {
        return opaque(col + lane_id() % 4 * 2);
    }
    // What pairs are computed with would begin before the product's end, and all pairs at once, with
    // registers for each: where that is much, it waits for a score. (No length is negative, which
    // the assembler cannot know.)
    template <bool kWaits>
    static __device__ __forceinline__ int after(const Params& p, float x) {
        return kWaits ? __float_as_int(x) & (p.seqlen_k >> 31) : 0;
    }

    // What the keys from `col` on need: before their product is started where that is a word or two,
    // which then is there when the product is; else while it runs, since the tensor cores would wait.
    template <bool kBefore> __device__ __forceinline__ void read(const Params& p, int col) {
        if constexpr (kBefore != Score::kReadsLittle) return;
        if (col + 8 * kColTiles <= p.seqlen_k)
            Score::template read_ahead<true>(p, ahead, queries, first_key(col));
        else
            Score::template read_ahead<false>(p, ahead, queries, first_key(col));
        if constexpr (Score::kDropout) dropout.keep(kept, first_row, col);
    }
    // What a warp's queries have of a staged block, which begins there.
    __device__ __forceinline__ void read_staged(u32 rows) { Score::read_staged(ahead, rows); }
    // f(score, query, half, n, r, key)
    template <bool kWaits = Score::kLong, class F>
    __device__ __forceinline__ void for_each(const Params& p, Scores& s, int col, F f) const {
        int first = first_key(col) + after<kWaits>(p, s.x[0][0][0]);
#pragma unroll
        for (int n = 0; n < kColTiles; ++n) {
            if (n > 0 && n % 2 == 0) first += after<kWaits>(p, s.x[0][n - 1][3]);
#pragma unroll
            for (int r = 0; r < 4; ++r)
                f(s.x[0][n][r], queries[r / 2], r / 2, n, r % 2,
                  Key{first - Score::first_key(queries[r / 2]), 8 * n + r % 2});
        }
    }
    // kShifted: relative to the references that the softmax has.
    template <bool kNear, bool kLooks, bool kShifted = false>
    __device__ __forceinline__ void evaluate(const Params& p, Scores& s, int col,
                                             const float (&reference)[2]) const {
        constexpr bool kWaits = Score::kLong || !kNear;
        const auto one = [&](float& x, const Query& q, int half, int n, int r, Key j) {
            const auto at = Score::elements(p, ahead, q, half, n, r, j);
            if constexpr (kEvaluates) x = Score::template value<kNear>(p, x, q, j, at);
            if constexpr (kShifted) x -= reference[half];
            if constexpr (kLooks && Score::kHides)
                x = Score::visible(p, q, j, at) ? x : -infinity<float>();
        };
        for_each<kWaits>(p, s, col, one);
    }
    // The product becomes the score, -inf where the key is hidden if it `kLooks`. Keys behind the
    // sequence's end get any value. Returns whether the scores are relative to the references, which
    // then may stay: no score of the warp's exceeds its row's by more than kMostGrowth.
    template <bool kLooks>
    __device__ __forceinline__ bool apply(const Params& p, Scores& s, int col,
                                          const float (&reference)[2]) const {
        if constexpr (!Score::kBends) {
            if constexpr (kEvaluates || (kLooks && Score::kHides))
                evaluate<true, kLooks>(p, s, col, reference);
            return false;
        } else {
            float most[2] = {0, 0};
            if constexpr (Score::kReaches)
                for_each(p, s, col, [&](float& x, const Query& q, int half, int n, int r, Key j) {
                    const auto at = Score::elements(p, ahead, q, half, n, r, j);
                    most[half] = fmax_of(most[half], Score::reach(p, x, q, j, at));
                });
            bool near = true, small = true;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Query& q = queries[half];
                const int first = first_key(col) - Score::first_key(q);
                near &= most[half] <= Score::near(q, first, 8 * kColTiles);
                if constexpr (Score::kCapped)
                    small &= Score::series(q).bound(most[half]) - reference[half] <= kMostGrowth;
            }
            if constexpr (Score::kCapped) {
                if (__all_sync(kFullWarp, near && small)) {
                    evaluate<true, kLooks, true>(p, s, col, reference);
                    return true;
                }
            }
            if (__all_sync(kFullWarp, near))
                evaluate<true, kLooks>(p, s, col, reference);
            else
                evaluate<false, kLooks>(p, s, col, reference);
            return false;
        }
    }
    // Weights that dropout does not keep become 0; the others are scaled with the output.
    __device__ __forceinline__ void drop(Scores& s) const {
        if constexpr (Score::kDropout)
            for_each_place<1, kColTiles>([&](int m, int n, int r) {
                s.x[m][n][r] = kept.get(m, n, r) ? s.x[m][n][r] : 0.f;
            });
    }
};
