// What a score function, hidden keys and dropout do to a block of scores in bwd_portable.cu:
// between S^T and P^T, and between dP^T and dS^T.
#pragma once
#include "attn/mask.cuh"
#include "attn/score.cuh"
#include "bwd_portable_tiles.cuh"

// Whether keys of the sequence may be hidden from a query.
inline constexpr bool kHidden = Plan::kBand || Score::kHides;

using Sees = Visible<MaskFor<Plan::kBand>, Score>;
using Bits = FragmentBits<Scores::kRowTiles, Scores::kColTiles>;
static_assert(Score::kProgram || (!Score::kDropout && !Score::kSinks),
              "weights and dS then know of neither");

// What dS needs to know of a block's scores: with a score function, what it was a function of or
// its derivative, and with it or dropout one bit for each pair.
struct Kept {
    Scores s;     // only where Score::kKeepsScore or !Score::kUnit
    Bits seen;    // visible and inside the sequences; only where Score::kProgram
    Bits weighs;  // kept by dropout; only where Score::kDropout
};

struct BackwardScores : BackwardBlock {
    const MaskFor<Plan::kBand> mask;

    __device__ __forceinline__ BackwardScores(const Params& params, BlockWork w, u32 smem_base)
        : BackwardBlock(params, w, smem_base),
          mask(mask_of(p)) {}

    __device__ __forceinline__ int slice() const { return Plan::kSlices == 1 ? 0 : work().slice; }
    // Of the current head.
    __device__ __forceinline__ Score score() const {
        if constexpr (!Score::kProgram) return {p, 0, 0};
        const u32 batch = work().batch;
        return {p, batch, head - batch * p.num_heads};
    }
    __device__ __forceinline__ Sees visible() const { return {mask, score()}; }

    // f(x of c, value of row i) with the statistic `which` of each query, which runs along the
    // columns of S^T.
    template <class F>
    __device__ __forceinline__ void with_stats(Scores& c, int stage, int which, F f) const {
        const auto stats = stats_tile(stage).part<kQueries>(0, share * kQueries);
#pragma unroll
        for (int n = 0; n < Scores::kColTiles; ++n) {
            Accum value[2];
            StatsTile::load_two(stats.address(0, 8 * n, which, lane_id() % 4 * 2), value);
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
                for (int r = 0; r < 4; ++r) f(c.x[m][n][r], value[r % 2]);
        }
    }
    template <class F> __device__ __forceinline__ void for_each(Scores& c, int m_block, F f) const {
        c.for_each(first_key() + warp_row, m_block * Plan::kBlockM + share * kQueries,
                   [&](Accum& x, int j, int i) { f(x, i, j); });
    }

    // S^T to the scores that the softmax sees, and what dS needs of them.
    __device__ __forceinline__ void apply_score(Scores& s, Kept& kept, int m_block,
                                                bool masked) const {
        const Sees sees = visible();
        const int first_j = first_key() + warp_row;
        const int first_i = m_block * Plan::kBlockM + share * kQueries;
        kept.seen.fill(!masked);
        for_each_place<Scores::kRowTiles, Scores::kColTiles>([&](int m, int n, int r) {
            const int j = first_j + row_in_fragment(m, r), i = first_i + col_in_fragment(n, r);
            const int key = sees.key(j), query = sees.query(i);
            const Accum x = sees.score.scaled(s.x[m][n][r]);
            if constexpr (Score::kKeepsScore)
                kept.s.x[m][n][r] = x;
            else if constexpr (!Score::kUnit)
                kept.s.x[m][n][r] = sees.score.derivative(x, query, key);
            s.x[m][n][r] = sees.score.value(x, query, key);
            if (masked) kept.seen.add(m, n, r, sees.transposed(j, i));
        });
        if constexpr (Score::kDropout)
            sees.score.dropout().keep_transposed(kept.weighs, first_j, first_i);
    }

    __device__ __forceinline__ void hide(Scores& c, const Kept& kept, int m_block) const {
        if constexpr (Score::kProgram) {
            for_each_place<Scores::kRowTiles, Scores::kColTiles>([&](int m, int n, int r) {
                c.x[m][n][r] = kept.seen.get(m, n, r) ? c.x[m][n][r] : Accum(0);
            });
        } else {
            for_each(c, m_block,
                     [&](Accum& x, int i, int j) { x = mask.transposed(j, i) ? x : Accum(0); });
        }
    }
    // Of weights, or of dP, those that dropout keeps, scaled so that their mean stays.
    __device__ __forceinline__ void drop(Scores& c, const Kept& kept) const {
        const Accum scale = score().keep_scale();
        for_each_place<Scores::kRowTiles, Scores::kColTiles>([&](int m, int n, int r) {
            c.x[m][n][r] = kept.weighs.get(m, n, r) ? c.x[m][n][r] * scale : Accum(0);
        });
    }
    // From the gradient by what the softmax sees to that by the scaled product; on the way, what
    // the score's arrays receive.
    __device__ __forceinline__ void to_score(Scores& ds, const Kept& kept, int m_block) const {
        const Sees sees = visible();
        const int first_j = first_key() + warp_row;
        const int first_i = m_block * Plan::kBlockM + share * kQueries;
        if (slice() == 0)  // the others have the same scores
            sees.score.for_each_gradient([&](const auto& gradient) {
                add_gradient(gradient, ds, kept.s, kept.seen, first_j, first_i);
            });
        if constexpr (!Score::kUnit)
            for_each_place<Scores::kRowTiles, Scores::kColTiles>([&](int m, int n, int r) {
                const int j = first_j + row_in_fragment(m, r), i = first_i + col_in_fragment(n, r);
                const Accum s = kept.s.x[m][n][r];
                ds.x[m][n][r] *=
                    Score::kKeepsScore ? sees.score.derivative(s, sees.query(i), sees.key(j)) : s;
            });
    }
};
