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
// read once for all columns. P^T crosses over in float32, so that dS is as exact as anywhere.
//
//     named barrier    arrives                     waits
//     kWeightsFull     warpgroup 1: P^T is there   warpgroup 2; it may also write dS anew, since
//                                                  warpgroup 1 has finished its dQ of the last step
//     kDsFull          warpgroup 2: dS is there,   warpgroup 1
//                      P^T has been read
//     kOwnDsFull       warpgroup 2 itself
//
// Shared memory: k | v | kStages x q | kStagesV x dout | dS | P^T | a part of dQ for each warpgroup |
// statistics | barriers. At the end dk and dv are staged over k and v.
#include "attn/backward_consumer.cuh"

static_assert(Plan::kBlockN == 64 && Plan::kBlockM == 64 && Plan::kExchange, "64 keys for both");
static_assert(Plan::kDsStages == 1, "the barriers see to it that one is enough");

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
    __device__ __forceinline__ u32 exchange() const { return smem.exchange() + thread * 16; }
};

// Warpgroup 1.
struct WeightHalf : Half {
    // S^T of the block at `at`, started. The caller has waited for it.
    __device__ __forceinline__ void start_scores(Scores& s, int stage) const {
        multiply_rows<Plan::kHeadDim>(s, descriptor(smem.k()), kKeyPanel, descriptor(smem.q(stage)),
                                      kQueryPanel);
        wgmma_commit_group();
    }
    __device__ __forceinline__ void send(const Scores& s) const {
#pragma unroll
        for (int n = 0; n < Scores::kColTiles; ++n)
            asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(exchange() +
                                                                          n * kWarpgroupSize * 16),
                         "f"(s.x[0][n][0]), "f"(s.x[0][n][1]), "f"(s.x[0][n][2]), "f"(s.x[0][n][3])
                         : "memory");
        barrier_arrive<kWeightsFull, kConsumerThreads>();
    }
    // With S^T of block m in `s`; leaves that of the next one there.
    template <bool kMasked>
    __device__ __forceinline__ void step(Scores& s, ValueGrad& dv, int m, bool last) {
        to_weights<kMasked>(s, m, q.stage, refined(q.stage));
        mbarrier_wait(smem.dout_full(dout.stage), dout.phase);
        if constexpr (kMasked && Plan::kBand) clean_queries(q.stage, dout.stage);
        send(s);
        Weights weights;
        round_to(weights, s);
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
        if constexpr (kMasked && Plan::kBand) {
            wgmma_wait_group<0>();
            clean_k();
        }
        barrier_sync<kDsFull, kConsumerThreads>();
        if constexpr (Plan::kNeedDq)
            each_part<0>([&](int part) {
                QueryGrad dq;
                wgmma_fence();
                start_dq(dq, part);
                wgmma_wait_group<0>();
                hand_over(dq, 0);
            });
        wgmma_wait_group<0>();
        if constexpr (kMasked && Plan::kBand) reload_k();
        q = next;
        dout.next();
    }

    __device__ __forceinline__ void run() {
        Walk walk(p, smem, work);
        ValueGrad dv;
        dv.fill(0);
        if (walk.more() > 0) {
            mbarrier_wait(smem.k_full(), 0);
            if constexpr (Plan::kBand) find_in_k();
            Scores s;
            mbarrier_wait(smem.q_full(0), 0);
            wgmma_fence();
            start_scores(s, 0);
            wgmma_wait_group<0>();
            for (; walk.more() > 0; walk.next()) {
                if (walk.masked())
                    step<Plan::kBand || Plan::kTail>(s, dv, walk.block(), walk.last());
                else
                    step<false>(s, dv, walk.block(), walk.last());
            }
        }
        consumers_sync();  // nobody reads k and v any more
        if constexpr (Plan::kNeedDkv) store_dv(dv, smem.v());
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
#pragma unroll
        for (int n = 0; n < Scores::kColTiles; ++n) {
            float weight[4];
            asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(weight[0]), "=f"(weight[1]), "=f"(weight[2]), "=f"(weight[3])
                         : "r"(exchange() + n * kWarpgroupSize * 16)
                         : "memory");
#pragma unroll
            for (int r = 0; r < 4; ++r) ds.x[0][n][r] *= weight[r];
        }
        if constexpr (kMasked) hide(ds, m);
    }
    // With dP^T of block m in `dp`; leaves that of the next one there.
    template <bool kMasked>
    __device__ __forceinline__ void step(Scores& dp, KeyGrad& dk, int m, bool last) {
        subtract_delta(dp, dout.stage);
        mbarrier_wait(smem.q_full(q.stage), q.phase);
        if constexpr (kMasked && Plan::kBand) clean_queries(q.stage, dout.stage);
        release(smem.dout_empty(dout.stage));
        Weights ds;
        receive<kMasked>(dp, m);
        round_to(ds, dp);
        if constexpr (Plan::kNeedDq) store_ds(ds, smem.ds(0));
        fence_proxy_async();
        barrier_arrive<kDsFull, kConsumerThreads>();
        if constexpr (kMasked && Plan::kBand) clean_k();
        if constexpr (Plan::kNeedDq) barrier_sync<kOwnDsFull, kWarpgroupSize>();
        wgmma_fence();
        if constexpr (Plan::kNeedDkv)
            multiply_queries(dk, ds, descriptor(smem.q(q.stage), kQueryPanel));
        wgmma_commit_group();
        if constexpr (Plan::kNeedDq)
            each_part<1>([&](int part) {
                QueryGrad dq;
                wgmma_fence();
                start_dq(dq, part);
                wgmma_wait_group<0>();
                hand_over(dq, 1);
            });
        Cursor<Plan::kStagesV> next = dout;
        if (!last) next.next();
        mbarrier_wait(smem.dout_full(next.stage), next.phase);
        wgmma_fence();
        start_dp(dp, next.stage);
        wgmma_wait_group<1>();
        release(smem.q_empty(q.stage));
        wgmma_wait_group<0>();
        if constexpr (kMasked && Plan::kBand) reload_k();
        dout = next;
        q.next();
    }

    __device__ __forceinline__ void run() {
        Walk walk(p, smem, work);
        KeyGrad dk;
        dk.fill(0);
        if (walk.more() > 0) {
            if constexpr (Plan::kBand) {
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
                if (walk.masked())
                    step<Plan::kBand || Plan::kTail>(dp, dk, walk.block(), walk.last());
                else
                    step<false>(dp, dk, walk.block(), walk.last());
            }
        }
        consumers_sync();  // nobody reads k and v any more
        if (Plan::kBand && Plan::kNeedDq && (dirty & kDirtyK)) restore_queries();
        if constexpr (Plan::kNeedDkv) store_dk(dk, smem.k());
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
