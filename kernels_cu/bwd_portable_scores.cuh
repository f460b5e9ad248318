// What a score function, hidden keys and dropout do to a block of scores in bwd_portable.cu:
// between S^T and P^T, and between dP^T and dS^T.
#pragma once
#include "attn/transposed.cuh"
#include "bwd_portable_tiles.cuh"

using Kept = KeptOf<Scores>;

struct BackwardScores : BackwardBlock {
    const MaskFor<Plan::kBand> mask;

    __device__ __forceinline__ BackwardScores(const Params& params, BlockWork w, u32 smem_base)
        : BackwardBlock(params, w, smem_base),
          mask(mask_of(p, w.batch)) {}

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

    // The warp's part of a block of queries.
    __device__ __forceinline__ TransposedBlock<Scores> block(const Sees& sees, int m_block) const {
        return {sees, first_key() + warp_row, m_block * Plan::kBlockM + share * kQueries};
    }
    __device__ __forceinline__ void apply_score(Scores& s, Kept& kept, int m_block,
                                                bool masked) const {
        const Sees sees = visible();
        block(sees, m_block).apply_score(s, kept, masked);
    }
    __device__ __forceinline__ void to_score(Scores& ds, const Kept& kept, int m_block) const {
        const Sees sees = visible();
        block(sees, m_block).to_score(ds, kept, slice() == 0);  // the others have the same scores
    }
    __device__ __forceinline__ void hide(Scores& c, const Kept& kept, int m_block) const {
        if constexpr (Score::kProgram) {
            hide_unseen(c, kept);
        } else {
            for_each(c, m_block,
                     [&](Accum& x, int i, int j) { x = mask.transposed(j, i) ? x : Accum(0); });
        }
    }
    __device__ __forceinline__ void drop_from(Scores& c, const Kept& kept) const {
        drop(c, kept, score().keep_scale());
    }
};
