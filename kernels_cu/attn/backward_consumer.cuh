// What the consumers of Hopper's two backward kernels share: the arithmetic between the products,
// dQ's and dS^T's way through shared memory, inf and NaN in hidden elements, the results.
#pragma once
#include "backward_sm90.cuh"

// Column tile n of a thread's part of a fragment in shared memory.
__device__ __forceinline__ void store_tile_of(u32 fragment, int n, const float (&x)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(fragment +
                                                                  n * kWarpgroupSize * 16),
                 "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
}
__device__ __forceinline__ void load_tile_of(float (&x)[4], u32 fragment, int n) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(fragment + n * kWarpgroupSize * 16)
                 : "memory");
}

struct Consumer {
    const Params& p;
    const Shared smem;
    const Work<1> work;
    const int warpgroup;  // the same in all lanes, as the compiler can tell
    const int thread;     // of the warpgroup
    const int first_key;  // of the warpgroup
    // What held inf or NaN: k; or a masked block of q or dout, where they were replaced by zero.
    enum Dirty : u32 { kDirtyK = 1, kDirtyQ = 2, kDirtyDout = 4 };
    u32 dirty = 0;
    u32 k_phase = 0;
    u32 dq_phase = 1;

    __device__ __forceinline__ int all_thread() const {
        return warpgroup * kWarpgroupSize + thread;
    }
    __device__ __forceinline__ int warp_row() const { return thread / kWarpSize * 16; }
    __device__ __forceinline__ void release(u32 barrier) const {
        __syncwarp();
        if (lane_id() == 0) mbarrier_arrive(barrier);
    }

    // What the score makes of a query head. The starts of its arrays come from shared memory:
    // kept from one step to the next they would fill the registers.
    __device__ __forceinline__ Sees sees(u32 head) const {
        return {mask_of(p, work.batch),
                Score(p, work.batch, head, [&](int n) {
                    return __cvta_global_to_generic(smem.start(n).get());
                })};
    }
    // Of a step's query head.
    __device__ __forceinline__ Sees sees(const Walk& walk) const {
        u32 head = work.head * p.group;
        if (Score::kProgram && p.group > 1) head += walk.head_of_group(p.group);
        return sees(head);
    }

    // ---- between the products ----

    // Whether one of the lane's rows has a statistic, of those that begin at these addresses, for
    // which f is true. Row after row beside a score function, which leaves no registers.
    template <class F, class... Addresses>
    __device__ __forceinline__ bool row_has(F f, Addresses... statistics) const {
        bool any = false;
#pragma unroll(Score::kProgram ? 1 : Plan::kBlockM / kWarpSize)
        for (int row = lane_id(); row < Plan::kBlockM; row += kWarpSize) {
            float x[sizeof...(statistics)];
            int n = 0;
            (load_float(x[n++], statistics + row * 4), ...);
            for (float statistic : x) any |= f(statistic);
        }
        return any;
    }
    static __device__ __forceinline__ void load_float(float& x, u32 address) {
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
    }
    // Whether a query of the stage has its statistics relative to its maximum (attn/stats.cuh).
    __device__ __forceinline__ bool refined(int stage) const {
        return __any_sync(kFullWarp, row_has([](float x) { return x != 0; }, smem.row_max(stage)));
    }
    __device__ __forceinline__ void hide(Scores& s, int m) const {
        const auto visible = mask_of(p, work.batch);
        s.for_each(opaque(first_key + warp_row()), opaque(m * Plan::kBlockM),
                   [&](float& x, int j, int i) { x = visible.transposed(j, i) ? x : 0.f; });
    }
    // S^T to P^T.
    template <bool kMasked>
    __device__ __forceinline__ void to_weights(Scores& s, int m, int stage,
                                               bool any_refined) const {
        apply_scale_sign<Plan::kScaleSign>(s);
        if (any_refined)
            with_stats(s, smem.row_max(stage), [](float& x, float row_max) { x -= row_max; });
        const float scale = float(p.scale_log2);
        with_stats(s, smem.row_sum(stage),
                   [&](float& x, float sum) { x = weight<T>(x * scale, sum); });
        if constexpr (kMasked) hide(s, m);
    }
    __device__ __forceinline__ void subtract_delta(Scores& dp, int stage) const {
        with_stats(dp, smem.delta(stage), [](float& x, float delta) { x -= delta; });
    }
    static __device__ __forceinline__ void multiply(Scores& ds, const Scores& weights) {
#pragma unroll
        for (int n = 0; n < Scores::kColTiles; ++n)
#pragma unroll
            for (int r = 0; r < 4; ++r) ds.x[0][n][r] *= weights.x[0][n][r];
    }
    // dP^T to dS^T.
    template <bool kMasked>
    __device__ __forceinline__ void to_ds(Scores& ds, const Scores& weights, int m,
                                          int stage) const {
        subtract_delta(ds, stage);
        multiply(ds, weights);
        if constexpr (kMasked) hide(ds, m);
    }

    // ---- the same with a score function, hidden keys or dropout ----

    __device__ __forceinline__ Block block(const Sees& sees, int m) const {
        return {sees, opaque(first_key + warp_row()), opaque(m * Plan::kBlockM)};
    }
    // Which pairs count, before their scores are there: what this reads or draws takes its time
    // while the tensor cores work, and leaves a bit for each pair.
    __device__ __forceinline__ void look(Kept& kept, const Block& at, bool masked) const {
        kept.seen.fill(true);
        if (kMasks && masked) at.see(kept);
        at.draw(kept);
    }
    // 0, which neither the compiler nor the assembler knows: what comes from it waits for x.
    __device__ __forceinline__ int zero_after(float x) const {
        return int(__float_as_uint(x) & (p.group >> 31));
    }
    // S^T to P^T, with kFolds times the score's derivative, and as an operand what dropout leaves
    // of P^T: pair by pair, so that neither derivatives nor both forms of P^T are a fragment. No more
    // than kAhead column tiles are begun before the first of them is done: more of the elements that
    // the score reads would not fit the registers.
    __device__ __forceinline__ void weigh(Weights& weights, Scores& s, Kept& kept,
                                          const Block& at, int stage) const {
        constexpr float kLog2e = 1.44269504f;  // p.scale_log2: scores are scaled
        const float keep_scale = at.sees.score.keep_scale();
#pragma unroll
        for (int n = 0; n < Scores::kColTiles; ++n) {
            float row_max[2], row_sum[2], left[4];
            load_stats(row_max, row_sum, smem, stage, n);
            const int done = n < Plan::kAhead ? 0 : zero_after(s.x[0][n - Plan::kAhead][0]);
            const Block own{at.sees, at.first_j, at.first_i + done};
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const auto pair = own.scored(s.x[0][n][r], 0, n, r);
                float x = weight<T>((pair.value - row_max[r % 2]) * kLog2e, row_sum[r % 2]);
                if constexpr (kMasks) x = kept.seen.get(0, n, r) ? x : 0.f;
                if constexpr (kKeepsFragment) kept.s.x[0][n][r] = pair.kept;
                left[r] = x;
                if constexpr (Score::kDropout)
                    left[r] = kept.weighs.get(0, n, r) ? x * keep_scale : 0.f;
                s.x[0][n][r] = kFolds ? x * pair.kept : x;
            }
            if constexpr (kKeepsFragment) store_tile_of(fragment(1), n, kept.s.x[0][n]);
            weights[n / 2][n % 2 * 2] = pack<T>(left[0], left[1]);
            weights[n / 2][n % 2 * 2 + 1] = pack<T>(left[2], left[3]);
        }
    }
    // dP^T to dS^T.
    __device__ __forceinline__ void differentiate(Scores& ds, const Scores& weights,
                                                  const Kept& kept, const Block& at,
                                                  int stage) const {
        wait_for_square(stage ^ 1);
        if constexpr (Score::kDropout) drop(ds, kept, at.sees.score.keep_scale());
        subtract_delta(ds, stage);
        multiply(ds, weights);
        finish_ds(ds, kept, at);
    }
    __device__ __forceinline__ void finish_ds(Scores& ds, const Kept& kept, const Block& at) const {
        if constexpr (Score::kGradients) to_score(ds, kept, at);
        if constexpr (kMasks) hide_unseen(ds, kept);
        if constexpr (Score::kSquares) hand_square(ds);
    }
    // dS^T to warp 3, then the gradient by the scaled product.
    __device__ __forceinline__ void hand_square(Scores& ds) const {
#pragma unroll
        for (int n = 0; n < Scores::kColTiles; ++n) store_tile_of(fragment(0), n, ds.x[0][n]);
        fence_proxy_async();
        release(smem.square_full(own_square()));
        if constexpr (!Score::kUnit) {
            Scores slopes;
#pragma unroll
            for (int n = 0; n < Scores::kColTiles; ++n)
                load_tile_of(slopes.x[0][n], fragment(1), n);
            multiply(ds, slopes);
        }
    }
    // Until the square of a step of that parity has left fragment(0).
    __device__ __forceinline__ void wait_for_square(u32 parity) const {
        if constexpr (Score::kSquares) mbarrier_wait(smem.square_empty(own_square()), parity);
    }
    __device__ __forceinline__ int own_square() const { return Plan::kExchange ? 0 : warpgroup; }
    // This thread's place in a fragment in shared memory, 16 bytes a column tile: nobody else comes
    // there but the thread of the same number in a warpgroup that shares its keys.
    __device__ __forceinline__ u32 fragment(int n) const {
        return smem.exchange() + n * kFragmentBytes + own_square() * kSquareBytes + thread * 16;
    }
    // What the score's arrays receive, then the gradient by the scaled product: with dS^T in shared
    // memory, since registers are full, and in loops, since a score's functions may be long. (A
    // template, as the plain Score has neither batch nor head.)
    template <class AnyScore = Score>
    __device__ __forceinline__ void to_score(Scores& ds, const Kept& kept,
                                             const Block& of_step) const {
        static_assert(!Score::kProgram || Scores::kColTiles == 8, "a word of bits");
        // Anew for each step: kept from one to the next, where entries begin would fill the
        // registers.
        const AnyScore& score = of_step.sees.score;
        const Sees own{of_step.sees.mask,
                       Score(p, u32(opaque(int(score.batch))), u32(opaque(int(score.head))))};
        const Block at{own, of_step.first_j, of_step.first_i};
#pragma unroll
        for (int n = 0; n < Scores::kColTiles; ++n) store_tile_of(fragment(0), n, ds.x[0][n]);
        const auto read = [&](int n, auto& own, auto& s) {
            load_tile_of(own.x[0][0], fragment(0), n);
            if constexpr (kKeepsFragment) load_tile_of(s.x[0][0], fragment(1), n);
        };
        at.sees.score.for_each_gradient([&](const auto& gradient) {
            add_gradient_by_tiles<float, Scores::kColTiles>(gradient, kept.seen.words[0],
                                                            at.first_j, at.first_i, read);
        });
        if constexpr (!Score::kUnit) {
#pragma unroll 1
            for (int n = 0; n < Scores::kColTiles; ++n) {
                float x[4], s[4];
                load_tile_of(x, fragment(0), n);
                load_tile_of(s, fragment(1), n);
#pragma unroll
                for (int r = 0; r < 4; ++r)
                    x[r] *= Score::kKeepsScore ? at.derivative(s[r], 0, n, r) : s[r];
                store_tile_of(fragment(0), n, x);
            }
        }
#pragma unroll
        for (int n = 0; n < Scores::kColTiles; ++n) load_tile_of(ds.x[0][n], fragment(0), n);
    }

    // ---- dS^T and dQ ----

    // dS^T to dS, rows of queries with 64 keys in a panel, as dQ's left operand.
    __device__ __forceinline__ void store_ds(const Weights& ds, u32 panel) const {
        const int lane = lane_id(), row = lane / 16 * 8 + lane % 8;
        const int piece = thread / kWarpSize * 2 + lane / 8 % 2;
        const u32 own = panel + row * kPanelBytes + ((piece ^ lane % 8) << 4);
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
            stmatrix_x4_trans(own + step * 16 * kPanelBytes, ds[step][0], ds[step][1], ds[step][2],
                              ds[step][3]);
    }
    // A part of dQ to the reducer of the step whose q is in `stage`.
    __device__ __forceinline__ void hand_over(const QueryGrad& dq, int buffer, int stage) {
        if (!is_third(buffer)) {  // which is waited for where P^T is written
            mbarrier_wait(smem.dq_empty(buffer), dq_phase);
            dq_phase ^= 1;
        }
        const u32 own = smem.dq(buffer) + thread / kWarpSize * kDqWarpBytes + lane_id() * 16;
#pragma unroll
        for (int n = 0; n < kDqTiles; ++n)
            asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(own + n * 512),
                         "f"(dq.x[0][n][0]), "f"(dq.x[0][n][1]), "f"(dq.x[0][n][2]),
                         "f"(dq.x[0][n][3])
                         : "memory");
        fence_proxy_async();
        release(smem.dq_full(buffer, Plan::kReducers == 1 ? 0 : stage));
    }

    // ---- inf and NaN in hidden elements ----
    // 0 * NaN is NaN: a query and a key that do not see each other must not reach each other's
    // gradients. All consumers take part in each of these.

    // Whether a row of q or dout in hand may hold any, as the rows' statistics tell without a look
    // at the tiles: delta is a sum of products with all of dout's row; and products with a row of q
    // that holds one are inf or NaN with every key, so that lse is inf, NaN, or -inf as of a row
    // that sees nothing. That counts on scores that are products plus something, and on no sink in
    // lse.
    static constexpr bool kSumsTell = Score::kUnit && !Score::kSinks;
    __device__ __forceinline__ bool may_be_nonfinite(int stage, int dout_stage) const {
        return __any_sync(kFullWarp,
                          row_has([](float x) { return is_nonfinite(x); }, smem.row_max(stage),
                                  smem.row_sum(stage), smem.delta(dout_stage)));
    }
    __device__ __forceinline__ bool finds_nonfinite(u32 tile, int bytes) const {
        bool found = false;
#pragma unroll 2
        for (int offset = 16 * all_thread(); offset < bytes; offset += 16 * kConsumerThreads) {
            uint4 piece;
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w)
                         : "r"(tile + offset)
                         : "memory");
            found |= has_nonfinite<T>(piece);
        }
        return barrier_any<kAllConsumers, kConsumerThreads>(found);
    }
    __device__ __forceinline__ void replace_nonfinite(u32 tile, int bytes) const {
#pragma unroll 1
        for (int offset = 2 * all_thread(); offset < bytes; offset += 2 * kConsumerThreads) {
            T x;
            asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x.bits) : "r"(tile + offset) : "memory");
            if (is_nonfinite(x))
                asm volatile("st.shared.u16 [%0], %1;" ::"r"(tile + offset), "h"(u16(0))
                             : "memory");
        }
        fence_proxy_async();
        consumers_sync();
    }
    __device__ __forceinline__ void find_in_k() {
        if (finds_nonfinite(smem.k(), kKBytes)) dirty |= kDirtyK;
    }
    // `masked`: whether the step's block holds hidden pairs; the same for all.
    // By a vote, so that the assembler sees a branch which no warp takes in part: it serialises
    // products around others (C7519).
    __device__ __forceinline__ bool k_is_dirty() const {
        return __any_sync(kFullWarp, (dirty & kDirtyK) != 0);
    }
    // After all have S^T and dP^T of a masked block, before anyone's dV and dK...
    __device__ __forceinline__ void clean_queries(int stage, int dout_stage, bool masked) {
        if (!Plan::kNeedDkv || !masked) return;
        if (kSumsTell && !may_be_nonfinite(stage, dout_stage)) return;
        const bool in_q = finds_nonfinite(smem.q(stage), kQBytes);
        const bool in_dout = finds_nonfinite(smem.dout(dout_stage), kDoutBytes);
        if (in_q) replace_nonfinite(smem.q(stage), kQBytes), dirty |= kDirtyQ;
        if (in_dout) replace_nonfinite(smem.dout(dout_stage), kDoutBytes), dirty |= kDirtyDout;
    }
    // ... and before dQ.
    __device__ __forceinline__ void clean_k(bool masked) const {
        if (!Plan::kNeedDq || !masked || !k_is_dirty()) return;
        consumers_sync();  // nobody's scores read k now
        replace_nonfinite(smem.k(), kKBytes);
    }
    // After dQ: k as it is again, for the next scores.
    __device__ __forceinline__ void reload_k(bool masked) {
        if constexpr (!Plan::kNeedDq) return;
        if (masked && k_is_dirty()) {
            consumers_sync();
            if (all_thread() == 0) load_k(p, smem, work);
            k_phase ^= 1;
        }
        // Whether or not it was loaded: a loop that only some threads may enter would also have the
        // products serialised.
        mbarrier_wait(smem.k_full(), k_phase);
    }

    // Among which queries those of this block are; with a block map lists say which.
    __device__ __forceinline__ BlockRange all_queries() const {
        if constexpr (Plan::kBlockMap) return {0, 0, 0, int(p.num_m_blocks)};
        return smem.range().get();
    }
    __device__ __forceinline__ bool meets(u32 head_of_group, int i) const {
        if constexpr (!Plan::kBlockMap) return true;
        return smem.lists().get().of(head_of_group).has(i / Plan::kBlockM);
    }
    // What the zeros have kept out of 16 rows of dk or dv, for the queries that see a key.
    template <bool kWeight, class Tile>
    __device__ __forceinline__ void restore_keys(const Tile& tile, const void* array,
                                                 const Strides& strides, i32 dim) const {
        const BlockRange range = all_queries();
        for (u32 head = work.head * p.group; head < (work.head + 1) * p.group; ++head) {
            const Sees visible = sees(head);
            const Rows<const T> rows(
                head_start<const T>(array, strides, p.batch_sizes, work.batch, head), strides,
                p.seqlen_q, dim);
            restore_nonfinite<kWeight>(tile, first_key + warp_row(), rows,
                                       range.begin * Plan::kBlockM, range.end * Plan::kBlockM,
                                       [&](int j, int i) {
                                           return visible.transposed(j, i) &&
                                                  meets(head - work.head * p.group, i);
                                       });
        }
        __syncwarp();
    }
    // The same for dq. NaN plus anything is NaN, so these additions need no turn of their own; but
    // the first addition may be a write, which this block's own turn comes after.
    __device__ __forceinline__ void restore_queries() const {
        const BlockRange range = all_queries();
        const Rows<const T> keys(
            head_start<const T>(p.k, p.k_strides, p.batch_sizes, work.batch, work.head),
            p.k_strides, p.seqlen_k, p.head_dim);
        const int first = range.begin * Plan::kBlockM;
        const int last = min_of(range.end * Plan::kBlockM, p.seqlen_q);
        const int first_j = work.block * Plan::kBlockN;
        const int last_j = min_of(first_j + Plan::kBlockN, p.seqlen_k);
        for (u32 head = 0; head < p.group; ++head) {
            const Sees visible = sees(work.head * p.group + head);
            const i64 row = i64(work.batch) * p.num_heads + work.head * p.group + head;
            float* accum = static_cast<float*>(p.dq_accum) + row * p.accum_pitch;
            if constexpr (Plan::kStoreFirst) {
                const u32* flags = static_cast<const u32*>(p.flags) + row * p.num_m_blocks;
                for (int m = range.begin; m < range.end; ++m)
                    while (load_relaxed(flags + m) <= turn_of(p, work, m)) {}
            }
            for (int j = first_j; j < last_j; ++j)
                for (int d = 0; d < keys.dim; ++d) {
                    const T raw = *keys.at(j, d);
                    if (!is_nonfinite(raw)) continue;
                    for (int i = first + all_thread(); i < last; i += kConsumerThreads)
                        if (visible(i, j) && meets(head, i))
                            red_add(accum + fragment_index<true, Plan::kAccumTiles>(i, d),
                                    to_float(raw) * 0);
                }
        }
    }

    // ---- results ----

    // 64 rows of dk or dv, staged in shared memory at `to` so that rows leave in 16-byte pieces.
    // restore(tile): what must still be done to a warp's 16 rows.
    template <class Grad, class Restore>
    __device__ __forceinline__ void store(const Grad& c, u32 to, void* array,
                                          const Strides& strides, i32 dim, Restore restore) const {
        using Tile = SmemTile<T, 16, 8 * Grad::kColTiles>;
        const Tile tile{to + thread / kWarpSize * Tile::kBytes};
        store_fragment(tile.part(0, 0), c);
        __syncwarp();
        restore(tile);
        T* start = head_start<T>(array, strides, p.batch_sizes, work.batch, work.head);
        store_tile<Plan::kStoreBytes, kWarpSize>(tile, Rows<T>(start, strides, p.seqlen_k, dim),
                                                 first_key + warp_row(), lane_id());
    }
    __device__ __forceinline__ void store_dk(KeyGrad& dk, u32 to) const {
        const float scale = float(p.scale);
        dk.for_each(0, 0, [&](float& x, int, int) { x *= scale; });
        store(dk, to, p.dk, p.dk_strides, p.head_dim, [&](const auto& tile) {
            if (kHidden && (dirty & kDirtyQ))
                restore_keys<false>(tile, p.q, p.q_strides, p.head_dim);
        });
    }
    __device__ __forceinline__ void store_dv(const ValueGrad& dv, u32 to) const {
        store(dv, to, p.dv, p.dv_strides, p.head_dim_v, [&](const auto& tile) {
            if (kHidden && (dirty & kDirtyDout))
                restore_keys<true>(tile, p.dout, p.dout_strides, p.head_dim_v);
        });
    }
};

// The block's threads to their roles; consume(smem, work, warpgroup of the consumers).
template <class Consume>
__device__ __forceinline__ void run_block(const Params& p, Consume consume) {
    extern __shared__ __align__(1024) unsigned char dynamic_smem[];
    const Shared smem{(smem_address(dynamic_smem) + 1023) / 1024 * 1024};
    const Work<1> work = work_of(p, take_ticket<kOrdered>(p.ticket, smem.base));
    if (threadIdx.x == 0) {
        smem.init();
        if constexpr (Plan::kBlockMap)
            smem.lists().set(group_lists(p, work.batch, work.head, work.block));
        else
            smem.range().set(queries_of(p, work));
        Score::for_each_start(p, work.batch,
                              [&](int n, const void* start) {
                                  smem.start(n).set(__cvta_generic_to_global(start));
                              });
        prefetch_tensormap(p.q_map);
        prefetch_tensormap(p.k_map);
        prefetch_tensormap(p.v_map);
        prefetch_tensormap(p.dout_map);
    }
    __syncthreads();
    const int warp = __shfl_sync(kFullWarp, int(threadIdx.x) / kWarpSize, 0);
    if (warp < 4) {
        setmaxnreg_dec<Plan::kProducerRegisters>();
        if (threadIdx.x == 0) produce(p, smem, work);
        if (Plan::kNeedDq && warp >= 1 && warp <= Plan::kReducers && lane_id() == 0)
            reduce(p, smem, work, warp - 1);
        if constexpr (Score::kSquares)
            if (warp == 3 && lane_id() == 0) add_squares(p, smem, work);
    } else {
        setmaxnreg_inc<Plan::kConsumerRegisters>();
        consume(smem, work, warp / 4 - 1);
    }
}
