// Attention backward for Hopper (sm_90a) in 16-bit types, head dimensions above 128: as bwd_sm90.cu,
// but dk and dv of 128 keys would not fit the registers. A block owns 64 keys, and its two consumer
// warpgroups divide the products:
//
//     warpgroup 1                                 warpgroup 2
//     S^T = K Q^T, P^T to warpgroup 2             dP^T = V dO^T
//     dV += P^T dO                                dS^T = P^T (dP^T - delta), to shared memory
//     S^T of the next block                       dK += dS^T Q
//     columns 0 .. 63, 128 .. of dQ = dS K        columns 64 .. 127, 192 .. of dQ
//                                                 dP^T of the next block
//
// Each holds one gradient of all columns, its left operand stays in registers and the right one is
// read once for all columns. P^T crosses over in float32, so that dS is as exact as anywhere; with a
// score function also what else dS needs of the scores (KeptOf in attn/transposed.cuh).
//
//     named barrier    arrives                     waits
//     kWeightsFull     warpgroup 1: P^T is there   warpgroup 2; it may also write dS anew, since
//                                                  warpgroup 1 has finished its dQ of the last step
//     kDsFull          warpgroup 2: dS is there,   warpgroup 1
//                      P^T has been read
//     kOwnDsFull       warpgroup 2 itself
//
// Shared memory: k | v | kStages x q | kStagesV x dout | dS | P^T | a part of dQ for each warpgroup |
// statistics | barriers. At the end dk and dv are staged over k and v. Between dS and the next P^T
// a second part of warpgroup 1's dQ leaves through the place of P^T (kDqBuffers == 3): it need not
// wait until the first has left.
#include "attn/backward_consumer.cuh"

static_assert(Plan::kBlockN == 64 && Plan::kBlockM == 64 && Plan::kExchange, "64 keys for both");
static_assert(Plan::kDsStages == 1, "the barriers see to it that one is enough");
static_assert(Scores::kColTiles == 8, "a word of bits for a thread's 32 pairs");

// f(part of dQ) for each of a warpgroup's parts.
template <int kFirst, class F> __device__ __forceinline__ void each_part(F f) {
#pragma unroll
    for (int part = kFirst; part < kDqParts; part += 2) f(part);
}

struct Half : Consumer {
    Cursor<Plan::kStages> q;
    Cursor<Plan::kStagesV> dout;

    __device__ __forceinline__ void start_dq(QueryGrad& dq, int part) const {
        multiply_keys(dq, descriptor(smem.ds(0)),
                      descriptor(smem.k() + part * kKeyPanel, kKeyPanel));
        wgmma_commit_group();
    }
    // Of the step.
    __device__ __forceinline__ u32 parity() const { return Plan::kStages == 1 ? q.phase : q.stage; }
    __device__ __forceinline__ u32 bits() const {
        return smem.exchange() + kFragments * kFragmentBytes + thread * 8;
    }
};

// Whether a part of dQ leaves through P^T's place.
inline constexpr bool kThird = Plan::kDqBuffers == 3 && Plan::kNeedDq;

// Warpgroup 1.
struct WeightHalf : Half {
    // S^T of the block at `at`, started. The caller has waited for it.
    __device__ __forceinline__ void start_scores(Scores& s, int stage) const {
        multiply_rows<Plan::kHeadDim>(s, descriptor(smem.k()), kKeyPanel, descriptor(smem.q(stage)),
                                      kQueryPanel);
        wgmma_commit_group();
    }
    __device__ __forceinline__ void send(const Scores& s, const Kept& kept) const {
        if constexpr (kThird)
            mbarrier_wait(smem.dq_empty(2), dq_phase);
        else
            wait_for_square(parity() ^ 1);
#pragma unroll
        for (int n = 0; n < Scores::kColTiles; ++n) store_tile_of(fragment(0), n, s.x[0][n]);
        if constexpr (Score::kProgram)
            asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(bits()),
                         "r"(kept.seen.words[0]), "r"(Score::kDropout ? kept.weighs.words[0] : 0)
                         : "memory");
        barrier_arrive<kWeightsFull, kConsumerThreads>();
    }
    // With S^T of block m in `s`; leaves that of the next one there.
    template <bool kMasked>
    __device__ __forceinline__ void step(Scores& s, ValueGrad& dv, const Sees& seen_by, int m,
                                         bool last, bool masked = true) {
        Weights weights;
        Kept kept;
        if constexpr (Score::kProgram) {
            const Block at = block(seen_by, m);
            look(kept, at, masked);
            weigh(weights, s, kept, at, q.stage);
        } else {
            to_weights<kMasked>(s, m, q.stage, refined(q.stage));
        }
        mbarrier_wait(smem.dout_full(dout.stage), dout.phase);
        if constexpr (kMasked && kHidden) clean_queries(q.stage, dout.stage, masked);
        send(s, kept);
        if constexpr (!Score::kProgram) round_to(weights, s);
        release(smem.q_empty(q.stage));
        // After the last block there is none, and S^T of what lies there is not used.
        Cursor<Plan::kStages> next = q;
        if (!last) next.next();
        mbarrier_wait(smem.q_full(next.stage), next.phase);
        wgmma_fence();
        if constexpr (Plan::kNeedDkv)
            multiply_queries(dv, weights, descriptor(smem.dout(dout.stage), kQueryPanel));
        wgmma_commit_group();
        start_scores(s, next.stage);
        wgmma_wait_group<1>();
        release(smem.dout_empty(dout.stage));
        if constexpr (kMasked && kHidden) {
            wgmma_wait_group<0>();
            clean_k(masked);
        }
        barrier_sync<kDsFull, kConsumerThreads>();
        if constexpr (Plan::kNeedDq)
            each_part<0>([&](int part) {
                QueryGrad dq;
                wgmma_fence();
                start_dq(dq, part);
                wgmma_wait_group<0>();
                if (is_third(dq_buffer(part))) wait_for_square(parity());
                hand_over(dq, dq_buffer(part), q.stage);
            });
        wgmma_wait_group<0>();
        if constexpr (kMasked && kHidden) reload_k(masked);
        q = next;
        dout.next();
    }

    __device__ __forceinline__ void run() {
        Walk walk(p, smem, work);
        ValueGrad dv;
        dv.fill(0);
        if (walk.more() > 0) {
            mbarrier_wait(smem.k_full(), 0);
            if constexpr (kHidden) find_in_k();
            Scores s;
            mbarrier_wait(smem.q_full(0), 0);
            wgmma_fence();
            start_scores(s, 0);
            wgmma_wait_group<0>();
            for (; walk.more() > 0; walk.next()) {
                if constexpr (Score::kProgram)
                    step<kMasks>(s, dv, sees(walk), walk.block(), walk.last(),
                                 __any_sync(kFullWarp, walk.masked()));
                else if (walk.masked())
                    step<kMasks>(s, dv, sees(walk), walk.block(), walk.last());
                else
                    step<false>(s, dv, sees(walk), walk.block(), walk.last());
            }
        }
        if constexpr (Plan::kNeedDkv) {
            barrier_arrive<kWeightsFull, kConsumerThreads>();  // nobody reads k any more
            barrier_sync<kDsFull, kConsumerThreads>();         // nor v
            store_dv(dv, smem.v());
        }
    }
};

// Warpgroup 2.
struct DsHalf : Half {
    __device__ __forceinline__ void start_dp(Scores& dp, int stage) const {
        multiply_rows<Plan::kHeadDimV>(dp, descriptor(smem.v()), kKeyPanel,
                                       descriptor(smem.dout(stage)), kQueryPanel);
        wgmma_commit_group();
    }
    // dP^T - delta to dS^T.
    template <bool kMasked> __device__ __forceinline__ void receive(Scores& ds, int m) const {
        barrier_sync<kWeightsFull, kConsumerThreads>();
        multiply_received(ds);
        if constexpr (kMasked) hide(ds, m);
    }
    // The same with a score function, hidden keys or dropout, which comes before delta.
    __device__ __forceinline__ void receive(Scores& ds, const Block& at) const {
        Kept kept;
        barrier_sync<kWeightsFull, kConsumerThreads>();
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                     : "=r"(kept.seen.words[0]), "=r"(kept.weighs.words[0])
                     : "r"(bits())
                     : "memory");
        if constexpr (Score::kDropout) {
            drop(ds, kept, at.sees.score.keep_scale());
            subtract_delta(ds, dout.stage);
        }
        multiply_received(ds);
        finish_ds(ds, kept, at);
    }
    __device__ __forceinline__ void multiply_received(Scores& ds) const {
#pragma unroll
        for (int n = 0; n < Scores::kColTiles; ++n) {
            float weight[4];
            load_tile_of(weight, fragment(0), n);
#pragma unroll
            for (int r = 0; r < 4; ++r) ds.x[0][n][r] *= weight[r];
        }
    }
    // With dP^T of block m in `dp`; leaves that of the next one there.
    template <bool kMasked>
    __device__ __forceinline__ void step(Scores& dp, KeyGrad& dk, const Sees& seen_by, int m,
                                         bool last, bool masked = true) {
        if constexpr (!Score::kDropout) subtract_delta(dp, dout.stage);
        mbarrier_wait(smem.q_full(q.stage), q.phase);
        if constexpr (kMasked && kHidden) clean_queries(q.stage, dout.stage, masked);
        Weights ds;
        if constexpr (!Score::kDropout) release(smem.dout_empty(dout.stage));
        if constexpr (Score::kProgram)
            receive(dp, block(seen_by, m));
        else
            receive<kMasked>(dp, m);
        if constexpr (Score::kDropout) release(smem.dout_empty(dout.stage));
        round_to(ds, dp);
        if constexpr (Plan::kNeedDq) store_ds(ds, smem.ds(0));
        fence_proxy_async();
        barrier_arrive<kDsFull, kConsumerThreads>();
        if constexpr (kMasked && kHidden) clean_k(masked);
        if constexpr (Plan::kNeedDq) barrier_sync<kOwnDsFull, kWarpgroupSize>();
        wgmma_fence();
        if constexpr (Plan::kNeedDkv)
            multiply_queries(dk, ds, descriptor(smem.q(q.stage), kQueryPanel));
        wgmma_commit_group();
        Cursor<Plan::kStagesV> next = dout;
        if (!last) next.next();
        const auto start_next = [&] {
            mbarrier_wait(smem.dout_full(next.stage), next.phase);
            wgmma_fence();
            start_dp(dp, next.stage);
        };
        constexpr int kLast = (kDqParts - 2) / 2 * 2 + 1;  // of this warpgroup's parts
        if constexpr (Plan::kNeedDq)
            each_part<1>([&](int part) {
                QueryGrad dq;
                wgmma_fence();
                start_dq(dq, part);
                if (Plan::kDpEarly && part == kLast) {
                    start_next();
                    wgmma_wait_group<1>();
                } else {
                    wgmma_wait_group<0>();
                }
                if (Plan::kDpEarly && part == kLast) release(smem.q_empty(q.stage));
                hand_over(dq, 1, q.stage);
            });
        if constexpr (!(Plan::kDpEarly && Plan::kNeedDq && kDqParts > 1)) {
            start_next();
            wgmma_wait_group<1>();
            release(smem.q_empty(q.stage));
        }
        wgmma_wait_group<0>();
        if constexpr (kMasked && kHidden) reload_k(masked);
        dout = next;
        q.next();
    }

    __device__ __forceinline__ void run() {
        Walk walk(p, smem, work);
        KeyGrad dk;
        dk.fill(0);
        if (walk.more() > 0) {
            if constexpr (kHidden) {
                mbarrier_wait(smem.k_full(), 0);
                find_in_k();
            }
            Scores dp;
            mbarrier_wait(smem.v_full(), 0);
            mbarrier_wait(smem.k_full(), 0);
            mbarrier_wait(smem.dout_full(0), 0);
            wgmma_fence();
            start_dp(dp, 0);
            wgmma_wait_group<0>();
            for (; walk.more() > 0; walk.next()) {
                if constexpr (Score::kProgram)
                    step<kMasks>(dp, dk, sees(walk), walk.block(), walk.last(),
                                 __any_sync(kFullWarp, walk.masked()));
                else if (walk.masked())
                    step<kMasks>(dp, dk, sees(walk), walk.block(), walk.last());
                else
                    step<false>(dp, dk, sees(walk), walk.block(), walk.last());
            }
        }
        if (kHidden && Plan::kNeedDq && (dirty & kDirtyK)) restore_queries();
        if constexpr (Plan::kNeedDkv) {
            barrier_arrive<kDsFull, kConsumerThreads>();
            barrier_sync<kWeightsFull, kConsumerThreads>();
            store_dk(dk, smem.k());
        }
    }
};

extern "C" __global__ void __launch_bounds__(kConsumerThreads + kWarpgroupSize, 1)
    bwd_sm90_wide(const __grid_constant__ Params p) {
    run_block(p, [&](const Shared& smem, const Work<1>& work, int warpgroup) {
        const Consumer consumer{p,
                                smem,
                                work,
                                warpgroup,
                                int(threadIdx.x) % kWarpgroupSize,
                                work.block * Plan::kBlockN};
        if (warpgroup == 0)
            WeightHalf{{consumer}}.run();
        else
            DsHalf{{consumer}}.run();
    });
}
