// Attention backward for Hopper (sm_90a) in 16-bit types, head dimensions up to 128: TMA, mbarriers,
// wgmma.
//
//     p = exp(s - lse)    dp = dout v^T          ds = p (dp - delta)
//     dv = p^T dout       dk = scale * ds^T q    dq = scale * ds k
//
// A block owns 128 keys of one key/value head and meets the blocks of kBlockM queries that see them,
// over all query heads of its group: dk and dv stay in registers, summed in float32 and in a fixed
// order.
//
//     who                     registers  does
//     warpgroup 0, warp 0     few        producer: loads k, v, then q, dout and row statistics
//     warpgroup 0, warp 1     few        reducer: adds parts of dQ in L2; if deterministic,
//                  and 2                 in turns, each every other step
//     warpgroup 0, warp 3     few        adds squares of dS, where they are a gradient
//     warpgroups 1, 2         many       consumers: 64 keys each
//
// attn/backward_sm90.cuh has the barriers between them. Everything is computed transposed, so that
// P^T and dS^T are accumulators which become left operands of dV and dK in registers; dS^T goes
// through shared memory for dQ, whose sum runs over the keys of both warpgroups. A step:
//
//     S^T = K Q^T, dP^T = V dO^T        on the tensor cores
//     P^T                               while dP^T runs
//     dS^T, to shared memory
//     dV += P^T dO                      on the tensor cores
//     all consumers meet                dS is complete, and nobody reads the one before last
//     dQ = dS K: 64 rows of queries or 64 columns for each warpgroup
//     dK += dS^T Q                      on the tensor cores while dQ leaves
//
// Shared memory, in panels of 64 columns as wgmma reads them: k | v | kStages x q | kStages x dout |
// 2 x dS | a part of dQ for each warpgroup | statistics | barriers. At the end dk and dv are staged
// over k and v.
//
// With softcap beside a band at head dimension 128 four registers (16 bytes) are spilled in steps of
// some 1,500 instructions.
#include "attn/backward_consumer.cuh"

static_assert(Plan::kBlockN == 128 && !Plan::kExchange, "64 keys for each of two warpgroups");
static_assert(Plan::kStages == 2 && Plan::kStagesV == 2 && Plan::kDsStages == 2, "one cursor");
static_assert(kDqParts <= 2, "a part for each warpgroup");

struct KeyOwner : Consumer {
    Cursor<2> ring;

    // S^T and dP^T, started.
    __device__ __forceinline__ void start_scores(Scores& s, Scores& dp) {
        const u32 rows = warpgroup * 64 * kPanelBytes;
        mbarrier_wait(smem.q_full(ring.stage), ring.phase);
        wgmma_fence();
        multiply_rows<Plan::kHeadDim>(s, descriptor(smem.k() + rows), kKeyPanel,
                                      descriptor(smem.q(ring.stage)), kQueryPanel);
        wgmma_commit_group();
        mbarrier_wait(smem.dout_full(ring.stage), ring.phase);
        wgmma_fence();
        multiply_rows<Plan::kHeadDimV>(dp, descriptor(smem.v() + rows), kKeyPanel,
                                       descriptor(smem.dout(ring.stage)), kQueryPanel);
        wgmma_commit_group();
    }
    __device__ __forceinline__ void start_dv(ValueGrad& dv, const Weights& weights) const {
        if constexpr (Plan::kNeedDkv) {
            wgmma_fence();
            multiply_queries(dv, weights, descriptor(smem.dout(ring.stage), kQueryPanel));
        }
        wgmma_commit_group();
    }
    __device__ __forceinline__ void start_dk(KeyGrad& dk, const Weights& ds) const {
        if constexpr (Plan::kNeedDkv)
            multiply_queries(dk, ds, descriptor(smem.q(ring.stage), kQueryPanel));
        wgmma_commit_group();
    }
    __device__ __forceinline__ void start_dq(QueryGrad& dq) const {
        const u32 ds = smem.ds(ring.stage) + (kDqByRows ? warpgroup * 64 * kPanelBytes : 0);
        const u32 k = smem.k() + (kDqParts == 2 && !kDqByRows ? warpgroup * kKeyPanel : 0);
        multiply_keys(dq, descriptor(ds), descriptor(k, kKeyPanel));
        wgmma_commit_group();
    }

    // S^T and dP^T, which run, to P^T as an operand and to dS^T.
    template <bool kMasked>
    __device__ __forceinline__ void plain_block(Weights& weights, Scores& s, Scores& dp, int m) {
        const bool any_refined = refined(ring.stage);
        wgmma_wait_group<1>();
        to_weights<kMasked>(s, m, ring.stage, any_refined);
        wgmma_wait_group<0>();
        if constexpr (kMasked && kHidden) clean(true);
        round_to(weights, s);
        to_ds<kMasked>(dp, s, m, ring.stage);
    }
    __device__ __forceinline__ void score_block(Weights& weights, Scores& s, Scores& dp,
                                                const Block& at, const Walk& walk) {
        Kept kept;
        look(kept, at, walk.masked_by_vote());
        wgmma_wait_group<1>();
        weigh(weights, s, kept, at, ring.stage);
        wgmma_wait_group<0>();
        if constexpr (kHidden) clean(walk.masked_by_vote());
        differentiate(dp, s, kept, at, ring.stage);
    }
    __device__ __forceinline__ void clean(bool masked) {
        clean_queries(ring.stage, ring.stage, masked);
        clean_k(masked);
    }

    // kMasked: with pairs that do not count; the same body with and without them where a score
    // function makes it long.
    template <bool kMasked>
    __device__ __forceinline__ void step(KeyGrad& dk, ValueGrad& dv, const Walk& walk) {
        Weights weights, ds;
        {
            Scores s, dp;
            start_scores(s, dp);
            if constexpr (Score::kProgram)
                score_block(weights, s, dp, block(sees(walk), walk.block()), walk);
            else
                plain_block<kMasked>(weights, s, dp, walk.block());
            round_to(ds, dp);
        }
        if constexpr (Plan::kNeedDq) store_ds(ds, smem.ds(ring.stage) + warpgroup * kQueryPanel);
        start_dv(dv, weights);
        if constexpr (Plan::kNeedDq) {
            fence_proxy_async();
            consumers_sync();
            QueryGrad dq;
            start_dq(dq);
            wgmma_wait_group<1>();
            release(smem.dout_empty(ring.stage));
            start_dk(dk, ds);
            wgmma_wait_group<1>();
            // Where dQ is a single part, both compute it and one adds it.
            if (kDqParts == 2 || __any_sync(kFullWarp, warpgroup == 0))
                hand_over(dq, warpgroup, ring.stage);
        } else {
            start_dk(dk, ds);
            wgmma_wait_group<1>();
            release(smem.dout_empty(ring.stage));
        }
        wgmma_wait_group<0>();
        if constexpr (kMasked && kHidden) reload_k(!Score::kProgram || walk.masked_by_vote());
        release(smem.q_empty(ring.stage));
        ring.next();
    }

    __device__ __forceinline__ void finish(KeyGrad& dk, ValueGrad& dv) {
        if (kHidden && Plan::kNeedDq && (dirty & kDirtyK)) restore_queries();
        if constexpr (Plan::kNeedDkv) {
            consumers_sync();  // nobody reads k and v any more
            store_dk(dk, smem.k() + warpgroup * (kKBytes / 2));
            store_dv(dv, smem.v() + warpgroup * (kVBytes / 2));
        }
    }

    __device__ __forceinline__ void run() {
        KeyGrad dk;
        ValueGrad dv;
        dk.fill(0);
        dv.fill(0);
        Walk walk(p, smem, work);
        if (walk.more() > 0) {
            mbarrier_wait(smem.k_full(), 0);
            if constexpr (kHidden) find_in_k();
            mbarrier_wait(smem.v_full(), 0);
        }
        for (; walk.more() > 0; walk.next()) {
            if (Score::kProgram || walk.masked())
                step<kMasks>(dk, dv, walk);
            else
                step<false>(dk, dv, walk);
        }
        finish(dk, dv);
    }
};

extern "C" __global__ void __launch_bounds__(kConsumerThreads + kWarpgroupSize, 1)
    bwd_sm90(const __grid_constant__ Params p) {
    run_block(p, [&](const Shared& smem, const Work<1>& work, int warpgroup) {
        KeyOwner{{p, smem, work, warpgroup, int(threadIdx.x) % kWarpgroupSize,
                  work.block * Plan::kBlockN + warpgroup * 64}}
            .run();
    });
}
