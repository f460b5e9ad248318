// Attention forward for Hopper (sm_90a) in 16-bit types: TMA, mbarriers, wgmma.
//
//     s = scale * q k^T    m, l = running row maximum and sum of p = exp(s - m)    out = p v / l
//
// A block stays on its SM and takes one piece of work after the other: kBlockM queries of one head.
//
//     who                       registers  does
//     warpgroup 0, one lane     few        producer: loads q, k and v, and hands out the work
//     warpgroups 1 ..           many       consumers: 64 rows of queries each
//
//     barrier        arrives                        waits
//     q_full         producer + TMA bytes           consumers
//     q_empty        each consumer warp, when its   producer
//                    last S and its output's copy
//                    in shared memory are done with
//     k_full[stage]  producer + TMA bytes           consumers
//     k_empty[..]    each consumer warp after S     producer
//     v_full[..]     producer + TMA bytes           consumers
//     v_empty[..]    each consumer warp after P V   producer
//     work_full      producer                       consumers, for the number of the next piece
//     work_empty     each consumer warp             producer
//
// Shared memory, in panels of 64 columns as wgmma reads them: q | kStages x k | kStages x v | the
// output on its way out (in place of q where there is no room) | barriers.
//
// Schedule of a consumer: S of the next block of keys is issued before the softmax of this one's
// result is used, so that a product runs while exponentials are computed:
//
//     S(n)                       on the tensor core
//     O *= what P(n + 1) needs     meanwhile; usually nothing (attn/softmax.cuh)
//     O += P(n + 1) V(n + 1)     on the tensor core
//     wait for S(n), softmax of it   meanwhile
//     wait for O, P(n) to 16 bits
//
// Keys run from the last visible block to the first. With a band, blocks of queries differ in
// length: work is handed out by a counter, longest first (attn/work.cuh).
//
// Measured on an H200, bfloat16, TFLOP/s full / causal at 4096 and at 16384 (cuDNN in the same
// process: D=64 479/429, 478/456; D=128 643/552, 671/589; D=256 711/581, 729/634):
//
//     D    tile, stages  form                                4096      16384
//     64   192 x 128, 3  (s - m) * c, all rows' blocks       461/342   505/416
//     64   192 x 128, 3  fused, own blocks                   475/372   515/442
//     64   192 x 96, 3   (s - m) * c                         432/375   464/436
//     64   128 x 128, 4  fused, own blocks                   432/346   444/394
//     128  192 x 80, 3   (s - m) * c, all rows' blocks       629/444   642/493
//     128  192 x 80, 3   fused, own blocks                   638/504   683/557
//     128  128 x 128, 2  fused, all rows' blocks             640/514   627/584
//     128  128 x 176, 2  (s - m) * c                         572/463   626/574
//     256  128 x 80, 2   (s - m) * c, all rows' blocks       699/552   748/699
//     256  128 x 80, 2   fused, own blocks                   688/561   726/663
//
// Warpgroups taking turns at the tensor core (named barriers) lost 5 to 20 % everywhere.
#include "attn/band.cuh"
#include "attn/mask.cuh"
#include "attn/score.cuh"
#include "attn/softmax.cuh"
#include "attn/work.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/copy.cuh"
#include "tile/fragment.cuh"

using T = Plan::Element;

inline constexpr int kConsumers = Plan::kBlockM / 64;
inline constexpr int kConsumerThreads = kConsumers * kWarpgroupSize;
inline constexpr int kConsumerWarps = kConsumerThreads / kWarpSize;
static_assert(sizeof(T) == 2, "wgmma with 16-bit operands");
static_assert(Plan::kBlockM % 64 == 0 && Plan::kBlockM <= 256, "a box has at most 256 rows");
static_assert(Plan::kBlockN % 16 == 0 && Plan::kBlockN <= 256, "P is an operand of 16 keys a step");
static_assert(Plan::kHeadDim % 16 == 0 && Plan::kHeadDimV % 16 == 0, "k is 16");

inline constexpr int kPanels = (Plan::kHeadDim + 63) / 64;
inline constexpr int kPanelsV = (Plan::kHeadDimV + 63) / 64;
inline constexpr int kQPanel = Plan::kBlockM * kPanelBytes;
inline constexpr int kKeyPanel = Plan::kBlockN * kPanelBytes;
inline constexpr int kQBytes = kPanels * kQPanel;
inline constexpr int kKBytes = kPanels * kKeyPanel;
inline constexpr int kVBytes = kPanelsV * kKeyPanel;
using OTile = SmemTile<T, 16, Plan::kHeadDimV>;
inline constexpr int kOBytes = kConsumerWarps * OTile::kBytes;
inline constexpr int kRing =
    Plan::kOutInQ ? max_of(kQBytes, (kOBytes + 1023) / 1024 * 1024) : kQBytes;
inline constexpr int kRingEnd = kRing + Plan::kStages * (kKBytes + kVBytes);
inline constexpr int kBarriers = kRingEnd + (Plan::kOutInQ ? 0 : kOBytes);
inline constexpr int kNumBarriers = 4 + 4 * Plan::kStages;
static_assert(kBarriers + 8 * kNumBarriers + 16 + 32 * kConsumerWarps + 1024 == Plan::kSmemBytes,
              "families/sm90.py's sum is this one");

using Scores = Fragment<float, 1, Plan::kBlockN / 8>;
using Output = Fragment<float, 1, Plan::kHeadDimV / 8>;

// Addresses of everything in shared memory.
struct Shared {
    u32 base;

    __device__ __forceinline__ u32 k(int stage) const { return base + kRing + stage * kKBytes; }
    __device__ __forceinline__ u32 v(int stage) const {
        return base + kRing + Plan::kStages * kKBytes + stage * kVBytes;
    }
    __device__ __forceinline__ u32 out() const { return base + (Plan::kOutInQ ? 0 : kRingEnd); }
    __device__ __forceinline__ u32 barrier(int n) const { return base + kBarriers + 8 * n; }
    __device__ __forceinline__ u32 q_full() const { return barrier(0); }
    __device__ __forceinline__ u32 q_empty() const { return barrier(1); }
    __device__ __forceinline__ u32 work_full() const { return barrier(2); }
    __device__ __forceinline__ u32 work_empty() const { return barrier(3); }
    __device__ __forceinline__ u32 k_full(int stage) const { return barrier(4 + stage); }
    __device__ __forceinline__ u32 k_empty(int stage) const {
        return barrier(4 + Plan::kStages + stage);
    }
    __device__ __forceinline__ u32 v_full(int stage) const {
        return barrier(4 + 2 * Plan::kStages + stage);
    }
    __device__ __forceinline__ u32 v_empty(int stage) const {
        return barrier(4 + 3 * Plan::kStages + stage);
    }
    __device__ __forceinline__ u32 next_work() const { return barrier(kNumBarriers); }
    __device__ __forceinline__ u32 ranges() const { return barrier(kNumBarriers) + 16; }

    __device__ __forceinline__ void init() const {
        for (int n = 0; n < kNumBarriers; ++n) {
            const bool full = n == 0 || n == 2 || (n >= 4 && (n - 4) / Plan::kStages % 2 == 0);
            mbarrier_init(barrier(n), full ? 1 : kConsumerWarps);
        }
        fence_mbarrier_init();
    }
};

// A place in a ring and how often it was passed.
struct Cursor {
    int stage = 0;
    u32 phase = 0;
    __device__ __forceinline__ void next() {
        if (++stage == Plan::kStages) stage = 0, phase ^= 1;
    }
};

__device__ __forceinline__ Work<1> work_of(const Params& p, u32 index) {
    Work<1> work(index, p.num_blocks, p.num_heads, p.section, p.num_sectioned, p.num_work);
    if constexpr (Plan::kBand) work.block = int(p.num_blocks) - 1 - work.block;
    return work;
}
// The blocks of keys that `rows` rows of queries see.
__device__ __forceinline__ BlockRange keys_of(const Params& p, int first_row, int rows) {
    const int last_row = min_of(first_row + rows, p.seqlen_q) - 1;
    return band_range<Plan::kBand>(first_row, last_row, p.band_lo, p.band_hi, Plan::kBlockN,
                                   p.seqlen_k);
}

// ---- producer ----------------------------------------------------------------------------------

struct Producer {
    const Params& p;
    const Shared smem;
    Cursor k_cursor, v_cursor;

    template <int kCount>
    __device__ __forceinline__ void load(u32 to, int panel_bytes, const TensorMap& map, u32 bar,
                                         int row, u32 head, u32 batch) const {
        const int inner = int(batch % u32(p.batch_sizes[2])),
                  outer = int(batch / u32(p.batch_sizes[2]));
        mbarrier_arrive_expect_tx(bar, kCount * panel_bytes);
#pragma unroll
        for (int panel = 0; panel < kCount; ++panel)
            tma_load(to + panel * panel_bytes, map, bar, 64 * panel, row, int(head), inner, outer);
    }
    __device__ __forceinline__ void load_k(const Work<1>& w, int n_block) {
        mbarrier_wait(smem.k_empty(k_cursor.stage), k_cursor.phase ^ 1);
        load<kPanels>(smem.k(k_cursor.stage), kKeyPanel, p.k_map, smem.k_full(k_cursor.stage),
                      n_block * Plan::kBlockN, w.head / p.group, w.batch);
        k_cursor.next();
    }
    __device__ __forceinline__ void load_v(const Work<1>& w, int n_block) {
        mbarrier_wait(smem.v_empty(v_cursor.stage), v_cursor.phase ^ 1);
        load<kPanelsV>(smem.v(v_cursor.stage), kKeyPanel, p.v_map, smem.v_full(v_cursor.stage),
                       n_block * Plan::kBlockN, w.head / p.group, w.batch);
        v_cursor.next();
    }

    __device__ __forceinline__ u32 take(u32 index) const {
        if constexpr (!Plan::kDynamic) return index + gridDim.x;
        return gridDim.x + atomicAdd(static_cast<u32*>(p.ticket), 1u);
    }

    __device__ __forceinline__ void run() {
        u32 q_phase = 0, work_phase = 0;
        for (u32 index = blockIdx.x; index < p.num_work;) {
            const Work<1> w = work_of(p, index);
            const int first_row = w.block * Plan::kBlockM;
            const BlockRange range = keys_of(p, first_row, Plan::kBlockM);
            const bool any = range.begin < range.end;
            if (any) load_k(w, range.end - 1);
            mbarrier_wait(smem.q_empty(), q_phase ^ 1);
            q_phase ^= 1;
            load<kPanels>(smem.base, kQPanel, p.q_map, smem.q_full(), first_row, w.head, w.batch);
            for (int n = range.end - 1; n > range.begin; --n) load_k(w, n - 1), load_v(w, n);
            index = take(index);
            if constexpr (Plan::kDynamic) {
                mbarrier_wait(smem.work_empty(), work_phase ^ 1);
                work_phase ^= 1;
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(smem.next_work()), "r"(index)
                             : "memory");
                mbarrier_arrive(smem.work_full());
            }
            if (any) load_v(w, range.begin);
        }
    }
};

// ---- consumers ---------------------------------------------------------------------------------

// All consumers meet; true for all when any brings true.
__device__ __forceinline__ bool consumers_any(bool x) {
    u32 result;
    asm volatile(
        "{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\n"
        "barrier.cta.red.or.pred q, 1, %2, p;\nselp.u32 %0, 1, 0, q;\n}\n"
        : "=r"(result)
        : "r"(u32(x)), "n"(kConsumerThreads)
        : "memory");
    return result != 0;
}

struct Consumer {
    const Params& p;
    const Shared smem;
    const int thread;  // among all consumers
    Cursor k_cursor, v_cursor;
    Softmax<float, 1, Plan::kFused> softmax;
    float factor[2];
    bool rescale;  // O must be multiplied by factor before the next P V
    bool dirty;    // v held inf or NaN in a masked block, which were replaced by zero
    u32 weights[Plan::kBlockN / 16][4];

    __device__ __forceinline__ int warp_row() const { return thread / kWarpSize * 16; }

    __device__ __forceinline__ void release(u32 barrier) const {
        __syncwarp();
        if (lane_id() == 0) mbarrier_arrive(barrier);
    }

    // S = Q K^T, started.
    __device__ __forceinline__ void start_scores(Scores& s) {
        mbarrier_wait(smem.k_full(k_cursor.stage), k_cursor.phase);
        float (&c)[Plan::kBlockN / 2] = reinterpret_cast<float (&)[Plan::kBlockN / 2]>(s.x);
        const u64 q = matrix_descriptor(smem.base + thread / kWarpgroupSize * 64 * kPanelBytes, 0);
        const u64 k = matrix_descriptor(smem.k(k_cursor.stage), 0);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Plan::kHeadDim / 16; ++step)
            wgmma(c, advance(q, step / 4 * kQPanel + step % 4 * 32),
                  advance(k, step / 4 * kKeyPanel + step % 4 * 32), step > 0);
        wgmma_commit_group();
    }
    __device__ __forceinline__ void release_k() {
        release(smem.k_empty(k_cursor.stage));
        k_cursor.next();
    }

    // O += P V, started.
    __device__ __forceinline__ void start_output(Output& o, int n) {
        mbarrier_wait(smem.v_full(v_cursor.stage), v_cursor.phase);
        if constexpr (Plan::kBand)
            if (is_masked(block_range().get(), n)) replace_nonfinite();
        float (&c)[Plan::kHeadDimV / 2] = reinterpret_cast<float (&)[Plan::kHeadDimV / 2]>(o.x);
        const u64 v = matrix_descriptor(smem.v(v_cursor.stage), kKeyPanel);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Plan::kBlockN / 16; ++step)
            wgmma(c, weights[step], advance(v, step * 16 * kPanelBytes), true);
        wgmma_commit_group();
    }
    __device__ __forceinline__ void release_v() {
        release(smem.v_empty(v_cursor.stage));
        v_cursor.next();
    }
    __device__ __forceinline__ void rescale_output(Output& o) {
        if (rescale) o.for_each_row([&](float& x, int q) { x *= factor[q]; });
    }

    // Zero in place of inf and NaN, since a hidden key's weight 0 times NaN is NaN. All consumers
    // take part, so that all know.
    __device__ __forceinline__ void replace_nonfinite() {
        bool found = false;
        const u32 tile = smem.v(v_cursor.stage);
        for (int offset = 16 * thread; offset < kVBytes; offset += 16 * kConsumerThreads) {
            uint4 piece;
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w)
                         : "r"(tile + offset)
                         : "memory");
            found |= has_nonfinite<T>(piece);
        }
        if (!consumers_any(found)) return;
        dirty = true;
        for (int offset = 2 * thread; offset < kVBytes; offset += 2 * kConsumerThreads) {
            T x;
            asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x.bits) : "r"(tile + offset) : "memory");
            if (is_nonfinite(x))
                asm volatile("st.shared.u16 [%0], %1;" ::"r"(tile + offset), "h"(u16(0))
                             : "memory");
        }
        fence_proxy_async();
        consumers_any(false);
    }

    __device__ __forceinline__ void apply_score_and_mask(Scores& s, int first_row,
                                                         int n_block) const {
        apply_scale_sign<Plan::kScaleSign>(s);
        if constexpr (!Plan::kBand && !Plan::kTail) return;
        if (!is_masked(own_range().get(), n_block)) return;
        const Mask<Plan::kBand> visible{p.band_lo, p.band_hi, p.seqlen_q, p.seqlen_k};
        s.for_each(opaque(first_row + warp_row()), n_block * Plan::kBlockN,
                   [&](float& x, int i, int j) { x = visible(i, j) ? x : -infinity<float>(); });
    }
    // S becomes unrounded P.
    __device__ __forceinline__ void update_softmax(Scores& s) {
        rescale = false;
        softmax.update(s, float(p.scale_log2), [&](const float (&f)[2]) {
            factor[0] = f[0], factor[1] = f[1], rescale = true;
        });
    }
    __device__ __forceinline__ void round_weights(const Scores& s) {
#pragma unroll
        for (int step = 0; step < Plan::kBlockN / 16; ++step)
#pragma unroll
            for (int r = 0; r < 4; ++r)
                weights[step][r] = pack<T>(s.x[0][2 * step + r / 2][r % 2 * 2],
                                           s.x[0][2 * step + r / 2][r % 2 * 2 + 1]);
    }

    // A block of keys of which this warpgroup's rows see none.
    __device__ __forceinline__ void skip(int n) {
        mbarrier_wait(smem.k_full(k_cursor.stage), k_cursor.phase);
        release_k();
        mbarrier_wait(smem.v_full(v_cursor.stage), v_cursor.phase);
        if (is_masked(block_range().get(), n)) replace_nonfinite();
        release_v();
    }

    // The keys that the block's rows see, and those that this warpgroup's do: a pair for each warp in
    // shared memory, registers are full.
    __device__ __forceinline__ SharedValue<BlockRange> block_range() const {
        return {smem.ranges() + thread / kWarpSize * 32};
    }
    __device__ __forceinline__ SharedValue<BlockRange> own_range() const {
        return {smem.ranges() + thread / kWarpSize * 32 + 16};
    }
    static __device__ __forceinline__ bool is_masked(const BlockRange& range, int n) {
        return (Plan::kBand || Plan::kTail) && (n >= range.full_end || n < range.full_begin);
    }
    __device__ __forceinline__ void set_ranges(const BlockRange& range, int first_row) const {
        if constexpr (Plan::kBand || Plan::kTail) {
            BlockRange own = range;
            if constexpr (Plan::kBand && Plan::kSkip) {
                const int first = first_row + thread / kWarpgroupSize * 64;
                own = keys_of(p, first, 64);
                if (first >= p.seqlen_q || own.begin >= own.end) own.begin = own.end = range.begin;
            }
            if (lane_id() == 0) block_range().set(range), own_range().set(own);
            __syncwarp();
        }
    }

    __device__ __forceinline__ void compute(Output& o, int first_row, int n, int begin) {
        {
            Scores s;
            start_scores(s);
            wgmma_wait_group<0>();
            release_k();
            apply_score_and_mask(s, first_row, n);
            update_softmax(s);
            round_weights(s);
        }
        for (; n > begin; --n) {
            Scores s;
            start_scores(s);
            rescale_output(o);
            start_output(o, n);
            wgmma_wait_group<1>();
            release_k();
            apply_score_and_mask(s, first_row, n - 1);
            update_softmax(s);
            wgmma_wait_group<0>();
            release_v();
            round_weights(s);
        }
        rescale_output(o);
        start_output(o, n);
        wgmma_wait_group<0>();
        release_v();
    }
    __device__ __forceinline__ void compute_all(Output& o, int first_row, const BlockRange& range) {
        set_ranges(range, first_row);
        if constexpr (Plan::kBand && Plan::kSkip) {
            for (int n = block_range().get().end - 1; n >= own_range().get().end; --n) skip(n);
            const BlockRange own = own_range().get();
            if (own.begin < own.end) compute(o, first_row, own.end - 1, own.begin);
            for (int n = own_range().get().begin - 1; n >= block_range().get().begin; --n) skip(n);
        } else {
            compute(o, first_row, range.end - 1, range.begin);
        }
    }

    // What replace_nonfinite took away, to the rows that see it.
    __device__ __forceinline__ void restore(const OTile& tile, const Work<1>& w,
                                            int first_row) const {
        const T* start =
            head_start<const T>(p.v, p.v_strides, p.batch_sizes, w.batch, w.head / p.group);
        const Rows<const T> rows(start, p.v_strides, p.seqlen_k, p.head_dim_v);
        const BlockRange range = block_range().get();
        restore_nonfinite(tile, first_row + warp_row(), rows, range.begin * Plan::kBlockN,
                          range.end * Plan::kBlockN,
                          Mask<true>{p.band_lo, p.band_hi, p.seqlen_q, p.seqlen_k});
        __syncwarp();
    }
    __device__ __forceinline__ void store(Output& o, const Work<1>& w, int first_row) {
        softmax.finish();
        if (p.lse != nullptr && lane_id() % 4 == 0) {
            float* lse = head_start<float>(p.lse, p.lse_strides, p.batch_sizes, w.batch, w.head);
            for (int q = 0; q < 2; ++q) {
                const int row = first_row + warp_row() + 8 * q + lane_id() / 4;
                if (row < p.seqlen_q)
                    lse[row * p.lse_strides.row] = softmax.lse(q, float(p.scale_log2));
            }
        }
        const float inverse[2] = {softmax.inverse_sum(0), softmax.inverse_sum(1)};
        o.for_each_row([&](float& x, int q) { x *= inverse[q]; });
        const OTile tile{smem.out() + thread / kWarpSize * OTile::kBytes};
        store_fragment(tile.part(0, 0), o);
        __syncwarp();
        if constexpr (Plan::kBand)
            if (dirty) restore(tile, w, first_row);
        T* start = head_start<T>(p.out, p.out_strides, p.batch_sizes, w.batch, w.head);
        const Rows<T> rows(start, p.out_strides, p.seqlen_q, p.head_dim_v);
        store_tile<Plan::kStoreBytes, kWarpSize>(tile, rows, first_row + warp_row(), lane_id());
        __syncwarp();
    }

    __device__ __forceinline__ void run() {
        u32 q_phase = 0, work_phase = 0;
        for (u32 index = blockIdx.x; index < p.num_work;) {
            const Work<1> w = work_of(p, index);
            const int first_row = w.block * Plan::kBlockM;
            const BlockRange range = keys_of(p, first_row, Plan::kBlockM);
            const bool any = range.begin < range.end;
            Output o;
            o.fill(0);
            softmax.init();
            dirty = false;
            mbarrier_wait(smem.q_full(), q_phase);
            q_phase ^= 1;
            if (any) compute_all(o, first_row, range);
            if constexpr (Plan::kOutInQ) {
                consumers_any(false);  // nobody reads q any more
                store(o, w, first_row);
                fence_proxy_async();
                release(smem.q_empty());
            } else {
                release(smem.q_empty());
                store(o, w, first_row);
            }
            if constexpr (Plan::kDynamic) {
                mbarrier_wait(smem.work_full(), work_phase);
                work_phase ^= 1;
                asm volatile("ld.shared.u32 %0, [%1];"
                             : "=r"(index)
                             : "r"(smem.next_work())
                             : "memory");
                release(smem.work_empty());
            } else {
                index += gridDim.x;
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(kConsumerThreads + kWarpgroupSize, 1)
    fwd_sm90(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) unsigned char dynamic_smem[];
    const Shared smem{(smem_address(dynamic_smem) + 1023) / 1024 * 1024};
    if (threadIdx.x == 0) {
        smem.init();
        prefetch_tensormap(p.q_map);
        prefetch_tensormap(p.k_map);
        prefetch_tensormap(p.v_map);
    }
    __syncthreads();
    if (threadIdx.x < kWarpgroupSize) {
        setmaxnreg_dec<Plan::kProducerRegisters>();
        if (threadIdx.x == 0) Producer{p, smem, {}, {}}.run();
    } else {
        setmaxnreg_inc<Plan::kConsumerRegisters>();
        Consumer consumer{p, smem, int(threadIdx.x) - kWarpgroupSize};
        consumer.run();
    }
}
