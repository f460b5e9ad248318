// What the consumers of Hopper's two backward kernels share: the arithmetic between the products,
// dQ's and dS^T's way through shared memory, inf and NaN in hidden elements, the results.
#pragma once
#include "backward_sm90.cuh"

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

    __device__ __forceinline__ int all_thread() const { return warpgroup * kWarpgroupSize + thread; }
    __device__ __forceinline__ int warp_row() const { return thread / kWarpSize * 16; }
    __device__ __forceinline__ void release(u32 barrier) const {
        __syncwarp();
        if (lane_id() == 0) mbarrier_arrive(barrier);
    }

    // ---- between the products ----

    // Whether a query of the stage has its statistics relative to its maximum (attn/stats.cuh).
    __device__ __forceinline__ bool refined(int stage) const {
        bool any = false;
#pragma unroll
        for (int i = 0; i < Plan::kBlockM / kWarpSize; ++i) {
            float row_max;
            asm volatile("ld.shared.f32 %0, [%1];"
                         : "=f"(row_max)
                         : "r"(smem.row_max(stage) + (i * kWarpSize + lane_id()) * 4)
                         : "memory");
            any |= row_max != 0;
        }
        return __any_sync(kFullWarp, any);
    }
    template <class F> __device__ __forceinline__ void hide(Scores& s, int m, F f) const {
        const Mask<Plan::kBand> visible{p.band_lo, p.band_hi, p.seqlen_q, p.seqlen_k};
        s.for_each(opaque(first_key + warp_row()), opaque(m * Plan::kBlockM),
                   [&](float& x, int j, int i) { x = visible.transposed(j, i) ? x : f(); });
    }
    // S^T to P^T.
    template <bool kMasked>
    __device__ __forceinline__ void to_weights(Scores& s, int m, int stage, bool any_refined) const {
        apply_scale_sign<Plan::kScaleSign>(s);
        if (any_refined)
            with_stats(s, smem.row_max(stage), [](float& x, float row_max) { x -= row_max; });
        const float scale = float(p.scale_log2);
        with_stats(s, smem.row_sum(stage),
                   [&](float& x, float sum) { x = weight<T>(x * scale, sum); });
        if constexpr (kMasked) hide(s, m, [] { return 0.f; });
    }
    // dP^T to dS^T.
    template <bool kMasked>
    __device__ __forceinline__ void to_ds(Scores& ds, const Scores& weights, int m,
                                          int stage) const {
        with_stats(ds, smem.delta(stage), [](float& x, float delta) { x -= delta; });
#pragma unroll
        for (int n = 0; n < Scores::kColTiles; ++n)
#pragma unroll
            for (int r = 0; r < 4; ++r) ds.x[0][n][r] *= weights.x[0][n][r];
        if constexpr (kMasked) hide(ds, m, [] { return 0.f; });
    }
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
    // A part of dQ to the reducer.
    __device__ __forceinline__ void hand_over(const QueryGrad& dq, int buffer) {
        mbarrier_wait(smem.dq_empty(buffer), dq_phase);
        dq_phase ^= 1;
        const u32 own = smem.dq(buffer) + thread / kWarpSize * kDqWarpBytes + lane_id() * 16;
#pragma unroll
        for (int n = 0; n < kDqTiles; ++n)
            asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(own + n * 512),
                         "f"(dq.x[0][n][0]), "f"(dq.x[0][n][1]), "f"(dq.x[0][n][2]),
                         "f"(dq.x[0][n][3])
                         : "memory");
        fence_proxy_async();
        release(smem.dq_full(buffer));
    }

    // ---- inf and NaN in hidden elements ----
    // 0 * NaN is NaN: a query and a key that do not see each other must not reach each other's
    // gradients. All consumers take part in each of these.

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
    // After all have S^T and dP^T of the block.
    __device__ __forceinline__ void clean_queries(int stage, int dout_stage) {
        const bool in_q = finds_nonfinite(smem.q(stage), kQBytes);
        const bool in_dout = finds_nonfinite(smem.dout(dout_stage), kDoutBytes);
        if (in_q) replace_nonfinite(smem.q(stage), kQBytes), dirty |= kDirtyQ;
        if (in_dout) replace_nonfinite(smem.dout(dout_stage), kDoutBytes), dirty |= kDirtyDout;
    }
    // k without inf and NaN for dQ, while no product reads it...
    __device__ __forceinline__ void clean_k() const {
        consumers_sync();
        replace_nonfinite(smem.k(), kKBytes);
    }
    // ... and as it is again, for the next scores.
    __device__ __forceinline__ void reload_k() {
        consumers_sync();
        if (all_thread() == 0) load_k(p, smem, work);
        k_phase ^= 1;
        mbarrier_wait(smem.k_full(), k_phase);
    }

    template <class Array>
    __device__ __forceinline__ Rows<const T> query_rows(const Array* array, const Strides& strides,
                                                        i32 dim, u32 head) const {
        return {head_start<const T>(array, strides, p.batch_sizes, work.batch, head), strides,
                p.seqlen_q, dim};
    }
    // What the zeros have kept out of dk or dv, for the queries that see a key.
    template <bool kWeight, class Grad>
    __device__ __noinline__ void restore_keys(Grad& c, const void* array, const Strides& strides,
                                              i32 dim, const BlockRange& range) const {
        const Mask<true> visible{p.band_lo, p.band_hi, p.seqlen_q, p.seqlen_k};
        for (u32 head = work.head * p.group; head < (work.head + 1) * p.group; ++head)
            restore_nonfinite<kWeight>(c, first_key + warp_row(), 0,
                                       query_rows(array, strides, dim, head),
                                       range.begin * Plan::kBlockM,
                                       min_of(range.end * Plan::kBlockM, p.seqlen_q),
                                       [&](int j, int i) { return visible.transposed(j, i); });
    }
    // The same for dq. NaN plus anything is NaN, so these additions need no turn.
    __device__ __forceinline__ void restore_queries(const BlockRange& range) const {
        const Mask<true> visible{p.band_lo, p.band_hi, p.seqlen_q, p.seqlen_k};
        const Rows<const T> keys(
            head_start<const T>(p.k, p.k_strides, p.batch_sizes, work.batch, work.head),
            p.k_strides, p.seqlen_k, p.head_dim);
        const int first = range.begin * Plan::kBlockM;
        const int last = min_of(range.end * Plan::kBlockM, p.seqlen_q);
        const int first_j = work.block * Plan::kBlockN;
        const int last_j = min_of(first_j + Plan::kBlockN, p.seqlen_k);
        for (u32 head = 0; head < p.group; ++head) {
            const i64 row = i64(work.batch) * p.num_heads + work.head * p.group + head;
            float* accum = static_cast<float*>(p.dq_accum) + row * p.accum_pitch;
            for (int j = first_j; j < last_j; ++j)
                for (int d = 0; d < keys.dim; ++d) {
                    const T raw = *keys.at(j, d);
                    if (!is_nonfinite(raw)) continue;
                    for (int i = first + all_thread(); i < last; i += kConsumerThreads)
                        if (visible(i, j))
                            red_add(accum + fragment_index<true, Plan::kAccumTiles>(i, d),
                                    to_float(raw) * 0);
                }
        }
    }

    // ---- results ----

    // 64 rows of dk or dv, staged in shared memory at `to` so that rows leave in 16-byte pieces.
    template <class Grad>
    __device__ __forceinline__ void store(const Grad& c, u32 to, void* array,
                                          const Strides& strides, i32 dim) const {
        using Tile = SmemTile<T, 16, 8 * Grad::kColTiles>;
        const Tile tile{to + thread / kWarpSize * Tile::kBytes};
        store_fragment(tile.part(0, 0), c);
        __syncwarp();
        T* start = head_start<T>(array, strides, p.batch_sizes, work.batch, work.head);
        store_tile<Plan::kStoreBytes, kWarpSize>(tile, Rows<T>(start, strides, p.seqlen_k, dim),
                                                 first_key + warp_row(), lane_id());
    }
};
