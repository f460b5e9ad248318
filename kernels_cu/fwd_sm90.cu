// Attention forward for Hopper (sm_90a) in 16-bit types: TMA, mbarriers, wgmma.
//
//     s = scale * q k^T    m, l = running row maximum and sum of p = exp(s - m)    out = p v / l
//
// A block stays on its SM and takes one piece of work after the other: kBlockM queries of one head.
//
//     who                       registers  does
//     warp 0, one lane          few        producer: hands out pieces, loads keys and values
//     warp 1                    few        loads queries
//     warps 2, 3                few        with a band: replace hidden inf and NaN in values
//     warpgroups 1 ..           many       consumers: 64 rows of queries each
//
//     barrier         arrives                              waits
//     piece_full[2]   producer                             everybody else, for what to work on
//     piece_empty[2]  everybody else, when done with it    producer
//     q_full[group]   loader of queries + TMA bytes        the consumer warpgroup
//     q_empty[..]     its warps, after the last S          loader of queries
//     k_full[stage]   producer + TMA bytes                 consumers
//     k_empty[..]     each consumer warp after S           producer
//     v_full[..]      producer + TMA bytes                 consumers, or with a band cleaners
//     v_clean[..]     cleaners                             consumers
//     v_empty[..]     each consumer warp after P V, and    producer
//                     each cleaner
//
// Shared memory, in panels of 64 columns as wgmma reads them: q | kStages x k | kStages x v | the
// output on its way out (in place of q where there is no room) | barriers | pieces.
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
// Keys run from the last visible block to the first: blocks that some rows do not see wholly, full
// ones, and with a window again partly visible ones. A warpgroup leaves out blocks that none of its
// rows see. Where pieces differ in length they are handed out by a counter, longest first
// (attn/work.cuh).
//
// With kLate full blocks are weighed with the references that the blocks before left, and only then
// these move (Softmax::update_late). Should that go out of range, or an output not be finite for
// whatever reason, the piece fails and comes again, in exact steps only.
//
// Measured on an H200, bfloat16, batch * seqlen = 16384, heads * head_dim = 2048: ratio to cuDNN in
// the same process, full | causal at 1024, 4096 and 16384. Runs differ by 3 %.
//
//     D    tile, stages  form         full               causal
//     64   192 x 128, 3  exact        1.02  1.08  1.13   0.88  1.06  1.18
//     64   192 x 128, 3  late, turns  1.00  1.11  1.16   0.86  1.02  1.11
//     64   192 x 128, 3  late         0.97  1.04  1.04   0.84  0.99  1.07
//     64   192 x 128, 4  late         0.88  0.96  0.98   0.85  1.05  1.16
//     64   128 x 128, 4  late         0.92  0.99  1.03   0.77  0.88  0.91
//     128  192 x 80, 3   exact        0.97  1.03  1.04   0.97  1.07  1.13
//     128  192 x 80, 3   late         0.88  1.05  1.08   0.85  1.02  1.10
//     128  192 x 80, 3   late, turns  0.90  1.00  1.04   0.89  1.06  1.10
//     128  128 x 128, 2  exact        0.93  0.98  0.98   0.89  0.96  0.92
//     128  128 x 128, 2  late, turns  0.87  0.97  1.00   0.85  0.96  1.03
//     128  128 x 176, 2  late         0.81  0.95  1.00   0.72  0.92  1.01
//     256  128 x 80, 2   exact        0.97  0.97  1.01   0.91  1.11  1.14
//     256  128 x 80, 2   exact, turns 0.91  0.95  1.01   0.87  1.01  1.03
//     256  128 x 80, 2   late         0.92  0.95  1.02   0.84  1.00  1.04
//
// Tried and left: the next piece's first S before this piece's last P V, with two places for
// queries (2 to 8 % slower); a wait for O only after all exponentials, forced by a basic block's end
// (1 to 8 % slower but for 64 full, where it gains 5 %); two places for queries alone.
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
inline constexpr int kCleaners = Plan::kBand ? 2 : 0;  // warps; the producer's warpgroup has them
static_assert(sizeof(T) == 2, "wgmma with 16-bit operands");
static_assert(Plan::kBlockM % 64 == 0 && Plan::kBlockM <= 256, "a box has at most 256 rows");
static_assert(Plan::kBlockN % 16 == 0 && Plan::kBlockN <= 256, "P is an operand of 16 keys a step");
static_assert(Plan::kHeadDim % 16 == 0 && Plan::kHeadDimV % 16 == 0, "k is 16");

inline constexpr int kPanels = (Plan::kHeadDim + 63) / 64;
inline constexpr int kPanelsV = (Plan::kHeadDimV + 63) / 64;
inline constexpr int kQPanel = 64 * kPanelBytes;
inline constexpr int kKeyPanel = Plan::kBlockN * kPanelBytes;
inline constexpr int kQBytes = kPanels * kQPanel;  // of a consumer warpgroup's 64 queries
inline constexpr int kKBytes = kPanels * kKeyPanel;
inline constexpr int kVBytes = kPanelsV * kKeyPanel;
using OTile = SmemTile<T, 16, Plan::kHeadDimV>;
inline constexpr int kOBytes = kConsumerWarps * OTile::kBytes;
inline constexpr int kQPlace =
    Plan::kOutInQ ? max_of(kQBytes, (kOBytes / kConsumers + 1023) / 1024 * 1024) : kQBytes;
inline constexpr int kQEnd = kConsumers * kQPlace;
inline constexpr int kRingEnd = kQEnd + Plan::kStages * (kKBytes + kVBytes);
inline constexpr int kBarriers = kRingEnd + (Plan::kOutInQ ? 0 : kOBytes);
inline constexpr int kPieceSlots = 2;
inline constexpr int kNumBarriers = 4 + 2 * kConsumers + 5 * Plan::kStages;
inline constexpr int kPieces = kBarriers + (8 * kNumBarriers + 15) / 16 * 16;
static_assert(kPieces + 64 + 1024 == Plan::kSmemBytes, "families/sm90.py's sum is this one");

using Scores = Fragment<float, 1, Plan::kBlockN / 8>;
using Output = Fragment<float, 1, Plan::kHeadDimV / 8>;

// A piece of work: kBlockM queries of one head. No more work: first_row is negative.
struct Piece {
    int first_row;
    u32 head, batch;
    u32 state;  // number of the piece among this thread block's, from 1 on; kExact

    static constexpr u32 kExact = 1u << 31;  // every step looks for the maximum first
    __device__ __forceinline__ u32 number() const { return state & ~kExact; }
    __device__ __forceinline__ bool exact() const { return state >= kExact; }

    // The blocks of keys that `rows` rows of queries see, from the piece's row `row` on.
    __device__ __forceinline__ BlockRange keys(const Params& p, int row = 0,
                                               int rows = Plan::kBlockM) const {
        const int first = first_row + row, last = min_of(first + rows, p.seqlen_q) - 1;
        return band_range<Plan::kBand>(first, last, p.band_lo, p.band_hi, Plan::kBlockN,
                                       p.seqlen_k);
    }
};

// A place in a ring and how often it was passed.
template <int kCount> struct Cursor {
    int stage = 0;
    u32 phase = 0;
    __device__ __forceinline__ void next() {
        if (kCount == 1 || ++stage == kCount) stage = 0, phase ^= 1;
    }
};

// Addresses of everything in shared memory.
struct Shared {
    u32 base;

    __device__ __forceinline__ u32 q(int group) const { return base + group * kQPlace; }
    __device__ __forceinline__ u32 k(int stage) const { return base + kQEnd + stage * kKBytes; }
    __device__ __forceinline__ u32 v(int stage) const {
        return base + kQEnd + Plan::kStages * kKBytes + stage * kVBytes;
    }
    __device__ __forceinline__ u32 out(int warp) const {
        return Plan::kOutInQ ? q(warp / 4) + warp % 4 * OTile::kBytes
                             : base + kRingEnd + warp * OTile::kBytes;
    }
    __device__ __forceinline__ u32 barrier(int n) const { return base + kBarriers + 8 * n; }
    __device__ __forceinline__ u32 piece_full(int slot) const { return barrier(slot); }
    __device__ __forceinline__ u32 piece_empty(int slot) const { return barrier(2 + slot); }
    __device__ __forceinline__ u32 q_full(int group) const { return barrier(4 + group); }
    __device__ __forceinline__ u32 q_empty(int group) const {
        return barrier(4 + kConsumers + group);
    }
    __device__ __forceinline__ u32 ring(int kind, int stage) const {
        return barrier(4 + 2 * kConsumers + kind * Plan::kStages + stage);
    }
    __device__ __forceinline__ u32 k_full(int stage) const { return ring(0, stage); }
    __device__ __forceinline__ u32 k_empty(int stage) const { return ring(1, stage); }
    __device__ __forceinline__ u32 v_full(int stage) const { return ring(2, stage); }
    __device__ __forceinline__ u32 v_empty(int stage) const { return ring(3, stage); }
    __device__ __forceinline__ u32 v_clean(int stage) const { return ring(4, stage); }
    __device__ __forceinline__ SharedValue<Piece> piece(int slot) const {
        return {base + kPieces + 16 * slot};
    }
    // Not zero: the slot's piece must be computed again.
    __device__ __forceinline__ u32 failed(int slot) const { return base + kPieces + 48 + 4 * slot; }
    // How many pieces were handed out: registers of the producer are full.
    __device__ __forceinline__ u32 count() const { return base + kPieces + 56; }
    // The last piece in whose values a warp found inf or NaN, a word for each cleaner.
    __device__ __forceinline__ SharedValue<uint4> dirty() const { return {base + kPieces + 32}; }

    __device__ __forceinline__ void init() const {
        for (int group = 0; group < kConsumers; ++group) {
            mbarrier_init(q_full(group), 1);
            mbarrier_init(q_empty(group), kWarpgroupSize / kWarpSize);
        }
        for (int slot = 0; slot < kPieceSlots; ++slot) {
            mbarrier_init(piece_full(slot), 1);
            mbarrier_init(piece_empty(slot), kConsumerWarps + kCleaners + 1);
        }
        for (int stage = 0; stage < Plan::kStages; ++stage) {
            mbarrier_init(k_full(stage), 1);
            mbarrier_init(k_empty(stage), kConsumerWarps);
            mbarrier_init(v_full(stage), 1);
            mbarrier_init(v_empty(stage), kConsumerWarps + kCleaners);
            mbarrier_init(v_clean(stage), max_of(1, kCleaners));
        }
        dirty().set(uint4{0, 0, 0, 0});
        for (int slot = 0; slot < kPieceSlots; ++slot) store_shared(failed(slot), 0);
        store_shared(count(), 0);
        fence_mbarrier_init();
    }
};

// A warp's arrival, once all its lanes are there.
__device__ __forceinline__ void warp_arrive(u32 barrier) {
    __syncwarp();
    if (lane_id() == 0) mbarrier_arrive(barrier);
}
__device__ __forceinline__ bool is_masked(const BlockRange& range, int n) {
    return n >= range.full_end || n < range.full_begin;
}

// ---- producer ----------------------------------------------------------------------------------

// Boxes of one head's matrix, one for each panel.
struct Loader {
    u32 head, inner, outer;  // place among the heads and the two batch axes

    __device__ __forceinline__ Loader(const Params& p, const Piece& piece, u32 group)
        : head(piece.head / group), outer(piece.batch / u32(p.batch_sizes[2])) {
        inner = piece.batch - outer * u32(p.batch_sizes[2]);
    }
    template <int kCount>
    __device__ __forceinline__ void load(u32 to, int panel_bytes, const TensorMap& map, u32 bar,
                                         int row) const {
        mbarrier_arrive_expect_tx(bar, kCount * panel_bytes);
#pragma unroll
        for (int panel = 0; panel < kCount; ++panel)
            tma_load(to + panel * panel_bytes, map, bar, 64 * panel, row, int(head), int(inner),
                     int(outer));
    }
};

// One lane that hands out pieces and loads keys and values.
struct Producer {
    const Params& p;
    const Shared smem;
    Cursor<Plan::kStages> k_cursor, v_cursor;
    Cursor<kPieceSlots> pieces;

    __device__ __forceinline__ void load_k(const Loader& loader, int n_block) {
        mbarrier_wait(smem.k_empty(k_cursor.stage), k_cursor.phase ^ 1);
        loader.load<kPanels>(smem.k(k_cursor.stage), kKeyPanel, p.k_map,
                             smem.k_full(k_cursor.stage), n_block * Plan::kBlockN);
        k_cursor.next();
    }
    __device__ __forceinline__ void load_v(const Loader& loader, int n_block) {
        mbarrier_wait(smem.v_empty(v_cursor.stage), v_cursor.phase ^ 1);
        loader.load<kPanelsV>(smem.v(v_cursor.stage), kKeyPanel, p.v_map,
                              smem.v_full(v_cursor.stage), n_block * Plan::kBlockN);
        v_cursor.next();
    }

    __device__ __forceinline__ Piece piece_of(u32 index) const {
        Work<1> work(index, p.num_blocks, p.num_heads, p.section, p.num_sectioned, p.num_work);
        const int block = Plan::kBand ? int(p.num_blocks) - 1 - work.block : work.block;
        const u32 number = load_shared(smem.count()) + 1;
        store_shared(smem.count(), number);
        return {block * Plan::kBlockM, work.head, work.batch, number};
    }
    __device__ __forceinline__ void hand_out(const Piece& piece) {
        smem.piece(pieces.stage).set(piece);
        mbarrier_arrive(smem.piece_full(pieces.stage));
        pieces.next();
    }
    // Waits until the piece in a slot is finished. If it failed, `piece` is that one once more.
    __device__ __forceinline__ bool is_failed(const Cursor<kPieceSlots>& slot, Piece& piece) const {
        mbarrier_wait(smem.piece_empty(slot.stage), slot.phase ^ 1);
        if (load_shared(smem.failed(slot.stage)) == 0) return false;
        store_shared(smem.failed(slot.stage), 0);
        piece = smem.piece(slot.stage).get();
        piece.state |= Piece::kExact;
        return true;
    }
    // The next piece; false when there is none.
    __device__ __forceinline__ bool next_piece(u32& index, Piece& piece) const {
        Cursor<kPieceSlots> other = pieces;
        other.next();
        if (is_failed(pieces, piece)) return true;
        if (index >= p.num_work) return is_failed(other, piece);
        piece = piece_of(index);
        index = take(index);
        return true;
    }
    // Without a ticket pieces go round all blocks in turn.
    __device__ __forceinline__ u32 take(u32 index) const {
        if (p.ticket == nullptr) return index + gridDim.x;
        return gridDim.x + atomicAdd(static_cast<u32*>(p.ticket), 1u);
    }

    __device__ __forceinline__ void run() {
        u32 index = blockIdx.x;
        Piece piece;
#pragma unroll 1
        while (next_piece(index, piece)) {
            hand_out(piece);
            const Loader loader(p, piece, p.group);
            const BlockRange range = piece.keys(p);
            if (range.begin >= range.end) continue;
            load_k(loader, range.end - 1);
#pragma unroll 1
            for (int n = range.end - 1; n > range.begin; --n)
                load_k(loader, n - 1), load_v(loader, n);
            load_v(loader, range.begin);
        }
        hand_out({-1, 0, 0, 0});
    }
};

// The pieces that the producer hands out, as the other warps see them: in shared memory, registers
// are full.
struct Pieces {
    const Shared smem;
    Cursor<kPieceSlots> cursor;

    __device__ __forceinline__ Piece current() const {
        const Piece piece = smem.piece(cursor.stage).get();
        return {uniform(piece.first_row), uniform(piece.head), uniform(piece.batch),
                uniform(piece.state)};
    }
    // False when there is no more.
    __device__ __forceinline__ bool wait() const {
        mbarrier_wait(smem.piece_full(cursor.stage), cursor.phase);
        return current().first_row >= 0;
    }
    __device__ __forceinline__ void release() {
        warp_arrive(smem.piece_empty(cursor.stage));
        cursor.next();
    }
};

// A warp that loads queries, for each warpgroup as soon as it is done with its last ones.
struct QueryProducer {
    const Params& p;
    const Shared smem;

    __device__ __forceinline__ void run() const {
        Pieces pieces{smem};
        u32 phase = 0;
#pragma unroll 1
        for (; pieces.wait(); pieces.release(), phase ^= 1) {
            const Piece piece = pieces.current();
            const Loader loader(p, piece, 1);
#pragma unroll 1
            for (int group = 0; group < kConsumers; ++group) {
                mbarrier_wait(smem.q_empty(group), phase ^ 1);
                if (lane_id() == 0)
                    loader.load<kPanels>(smem.q(group), kQPanel, p.q_map, smem.q_full(group),
                                         piece.first_row + 64 * group);
            }
        }
    }
};

// ---- cleaners ----------------------------------------------------------------------------------

// With a band: warps that replace inf and NaN by zero in values that some rows of the piece do not
// see, since a hidden key's weight 0 times NaN is NaN.
struct Cleaner {
    const Params& p;
    const Shared smem;
    const int warp;

    __device__ __forceinline__ bool clean(u32 tile) const {
        constexpr int kStep = 16 * kWarpSize * kCleaners;
        const int first = 16 * (warp * kWarpSize + lane_id());
        bool found = false;
        for (int offset = first; offset < kVBytes; offset += kStep) {
            uint4 piece;
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w)
                         : "r"(tile + offset)
                         : "memory");
            found |= has_nonfinite<T>(piece);
        }
        if (__any_sync(kFullWarp, found))
            for (int offset = first; offset < kVBytes; offset += kStep)
                for (int at = tile + offset; at < tile + offset + 16; at += 2) {
                    T x;
                    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x.bits) : "r"(at) : "memory");
                    if (is_nonfinite(x))
                        asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"(u16(0)) : "memory");
                }
        return found;
    }
    __device__ __forceinline__ void run() const {
        Pieces pieces{smem};
        Cursor<Plan::kStages> cursor;
        for (; pieces.wait(); pieces.release()) {
            const Piece piece = pieces.current();
            const BlockRange range = piece.keys(p);
            for (int n = range.end - 1; n >= range.begin; --n) {
                mbarrier_wait(smem.v_full(cursor.stage), cursor.phase);
                if (is_masked(range, n)) {
                    if (clean(smem.v(cursor.stage)))
                        store_shared(smem.dirty().address + 4 * warp, piece.number());
                    fence_proxy_async();
                }
                warp_arrive(smem.v_clean(cursor.stage));
                warp_arrive(smem.v_empty(cursor.stage));
                cursor.next();
            }
        }
    }
};

// ---- consumers ---------------------------------------------------------------------------------

struct Consumer {
    const Params& p;
    const Shared smem;
    const int warp;  // among all consumers
    Pieces pieces;
    u32 q_phase;
    Cursor<Plan::kStages> k_cursor, v_cursor;
    Softmax<float, 1, Plan::kFused> softmax;
    float factor[2];
    bool rescale;  // O must be multiplied by factor before the next P V
    u32 weights[Plan::kBlockN / 16][4];

    __device__ __forceinline__ Piece piece() const { return pieces.current(); }
    __device__ __forceinline__ float scale() const { return p.scale_log2; }

    // Warpgroups start their products in turn.
    __device__ __forceinline__ void take_turn() const {
        if constexpr (Plan::kTurns) named_barrier_sync(5 + warp / 4, 2 * kWarpgroupSize);
    }
    __device__ __forceinline__ void pass_turn() const {
        if constexpr (Plan::kTurns)
            named_barrier_arrive(5 + (warp / 4 + 1) % kConsumers, 2 * kWarpgroupSize);
    }
    // S = Q K^T, started.
    __device__ __forceinline__ void start_scores(Scores& s) {
        mbarrier_wait(smem.k_full(k_cursor.stage), k_cursor.phase);
        float (&c)[Plan::kBlockN / 2] = reinterpret_cast<float (&)[Plan::kBlockN / 2]>(s.x);
        const u64 q = matrix_descriptor(smem.q(warp / 4), 0);
        const u64 k = matrix_descriptor(smem.k(k_cursor.stage), 0);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Plan::kHeadDim / 16; ++step)
            wgmma(c, advance(q, step / 4 * kQPanel + step % 4 * 32),
                  advance(k, step / 4 * kKeyPanel + step % 4 * 32), step > 0);
        wgmma_commit_group();
    }
    __device__ __forceinline__ void release_k() {
        warp_arrive(smem.k_empty(k_cursor.stage));
        k_cursor.next();
    }
    __device__ __forceinline__ void wait_v() const {
        mbarrier_wait(Plan::kBand ? smem.v_clean(v_cursor.stage) : smem.v_full(v_cursor.stage),
                      v_cursor.phase);
    }
    // O += P V, started.
    __device__ __forceinline__ void start_output(Output& o) {
        wait_v();
        float (&c)[Plan::kHeadDimV / 2] = reinterpret_cast<float (&)[Plan::kHeadDimV / 2]>(o.x);
        const u64 v = matrix_descriptor(smem.v(v_cursor.stage), kKeyPanel);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Plan::kBlockN / 16; ++step)
            wgmma(c, weights[step], advance(v, step * 16 * kPanelBytes), true);
        wgmma_commit_group();
    }
    __device__ __forceinline__ void release_v() {
        warp_arrive(smem.v_empty(v_cursor.stage));
        v_cursor.next();
    }
    __device__ __forceinline__ void release_q() { warp_arrive(smem.q_empty(warp / 4)); }
    __device__ __forceinline__ void rescale_output(Output& o) {
        if (rescale) o.for_each_row([&](float& x, int q) { x *= factor[q]; });
    }

    template <bool kMasked>
    __device__ __forceinline__ void apply_score_and_mask(Scores& s, int n_block) const {
        apply_scale_sign<Plan::kScaleSign>(s);
        if constexpr (!kMasked) return;
        const Mask<Plan::kBand> visible{p.band_lo, p.band_hi, p.seqlen_q, p.seqlen_k};
        s.for_each(piece().first_row + 16 * warp, n_block * Plan::kBlockN,
                   [&](float& x, int i, int j) { x = visible(i, j) ? x : -infinity<float>(); });
    }
    __device__ __forceinline__ void set_factor(const float (&f)[2]) {
        factor[0] = f[0], factor[1] = f[1], rescale = true;
    }
    // S becomes unrounded P.
    __device__ __forceinline__ void update_softmax(Scores& s) {
        rescale = false;
        softmax.update(s, scale(), [&](const float (&f)[2]) { set_factor(f); });
    }
    __device__ __forceinline__ void update_softmax_late(Scores& s) {
        rescale = false;
        softmax.update_late(s, scale(), [&](const float (&f)[2]) { set_factor(f); });
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
    __device__ __forceinline__ void skip() {
        take_turn();
        pass_turn();
        mbarrier_wait(smem.k_full(k_cursor.stage), k_cursor.phase);
        release_k();
        wait_v();
        release_v();
    }

    template <bool kMasked> __device__ __forceinline__ void first_step(int n) {
        Scores s;
        take_turn();
        start_scores(s);
        pass_turn();
        wgmma_wait_group<0>();
        release_k();
        apply_score_and_mask<kMasked>(s, n);
        update_softmax(s);
        round_weights(s);
    }
    // The scores of block n while the weights of the block behind it meet their values.
    template <bool kMasked> __device__ __forceinline__ void step(Output& o, int n) {
        Scores s;
        take_turn();
        start_scores(s);
        rescale_output(o);
        start_output(o);
        pass_turn();
        wgmma_wait_group<1>();
        release_k();
        apply_score_and_mask<kMasked>(s, n);
        update_softmax(s);
        wgmma_wait_group<0>();
        release_v();
        round_weights(s);
    }
    // The same where every row sees every key.
    __device__ __forceinline__ void full_step(Output& o, int n) {
        if constexpr (!Plan::kLate) return step<false>(o, n);
        Scores s;
        take_turn();
        start_scores(s);
        rescale_output(o);
        start_output(o);
        pass_turn();
        wgmma_wait_group<1>();
        release_k();
        apply_score_and_mask<false>(s, n);
        update_softmax_late(s);
        wgmma_wait_group<0>();
        release_v();
        round_weights(s);
    }
    __device__ __forceinline__ void last_step(Output& o) {
        if constexpr (!Plan::kOutInQ) release_q();
        rescale_output(o);
        start_output(o);
        wgmma_wait_group<0>();
        release_v();
    }
    __device__ __forceinline__ void compute(Output& o, const BlockRange& range) {
        const bool exact = Plan::kLate && piece().exact();
        const int full_end = exact ? range.begin : max_of(range.full_end, range.begin);
        const int full_begin = max_of(range.full_begin, range.begin);
        int n = range.end - 1;
        first_step<Plan::kBand || Plan::kTail>(n);
        // Masked blocks, then full ones, then masked ones where the band has a lower end.
#pragma unroll 1
        for (int until = full_end;; until = range.begin) {
            if constexpr (Plan::kBand || Plan::kLate) {
#pragma unroll 1
                while (n > until) step<Plan::kBand>(o, --n);
                if (n == range.begin) break;
            }
#pragma unroll 1
            while (n > full_begin) full_step(o, --n);
            if (!Plan::kBand) break;
        }
        last_step(o);
    }
    // The blocks of keys that this warpgroup's rows see.
    __device__ __forceinline__ BlockRange own_range(const BlockRange& range) const {
        const Piece piece = this->piece();
        const int row = warp / 4 * 64;
        BlockRange own = Plan::kSkip ? piece.keys(p, row, 64) : range;
        if (piece.first_row + row >= p.seqlen_q || own.begin >= own.end)
            return {range.begin, range.begin, range.begin, range.begin};
        // Full blocks count on references: before them each row must have seen a key.
        if constexpr (Plan::kBand && Plan::kLate) {
            const int first = piece.first_row + (Plan::kSkip ? row : 0);
            own.full_end =
                min_of(own.full_end, min_of(first + p.band_hi, p.seqlen_k - 1) / Plan::kBlockN);
        }
        return own;
    }
    __device__ __forceinline__ void compute_all(Output& o) {
        const BlockRange range = piece().keys(p), own = own_range(range);
#pragma unroll 1
        for (int n = range.end - 1; n >= own.end; --n) skip();
        if (own.begin < own.end)
            compute(o, own);
        else if constexpr (!Plan::kOutInQ)
            release_q();
#pragma unroll 1
        for (int n = own.begin - 1; n >= range.begin; --n) skip();
    }

    // What the cleaners took away, to the rows that see it.
    __device__ __forceinline__ void restore(const OTile& tile) const {
        const Piece piece = this->piece();
        const T* start =
            head_start<const T>(p.v, p.v_strides, p.batch_sizes, piece.batch, piece.head / p.group);
        const Rows<const T> rows(start, p.v_strides, p.seqlen_k, p.head_dim_v);
        const BlockRange range = piece.keys(p);
        restore_nonfinite(tile, piece.first_row + 16 * warp, rows, range.begin * Plan::kBlockN,
                          range.end * Plan::kBlockN,
                          Mask<true>{p.band_lo, p.band_hi, p.seqlen_q, p.seqlen_k});
        __syncwarp();
    }
    // Cleaners may be pieces ahead: then there is nothing to restore, and no harm done.
    __device__ __forceinline__ bool is_dirty() const {
        const uint4 last = smem.dirty().get();
        return max_of(last.x, last.y) >= piece().number();
    }
    __device__ __forceinline__ void store(Output& o) {
        const Piece piece = this->piece();
        const int first_row = piece.first_row + 16 * warp;
        softmax.finish();
        if (p.lse != nullptr && lane_id() % 4 == 0) {
            float* lse =
                head_start<float>(p.lse, p.lse_strides, p.batch_sizes, piece.batch, piece.head);
            for (int q = 0; q < 2; ++q) {
                const int row = first_row + 8 * q + lane_id() / 4;
                if (row < p.seqlen_q) lse[row * p.lse_strides.row] = softmax.lse(q, scale());
            }
        }
        const float inverse[2] = {softmax.inverse_sum(0), softmax.inverse_sum(1)};
        float check[2] = {0, 0};  // NaN where an output is not finite
        o.for_each_row([&](float& x, int q) {
            x *= inverse[q];
            check[q] = fma_of(x, 0.f, check[q]);
        });
        if constexpr (Plan::kLate) {
            bool failed = false;
            for (int q = 0; q < 2; ++q)
                failed |= check[q] != 0 && first_row + 8 * q + lane_id() / 4 < p.seqlen_q;
            if (failed && !piece.exact()) store_shared(smem.failed(pieces.cursor.stage), 1);
        }
        const OTile tile{smem.out(warp)};
        store_fragment(tile.part(0, 0), o);
        __syncwarp();
        if constexpr (Plan::kBand)
            if (is_dirty()) restore(tile);
        T* start = head_start<T>(p.out, p.out_strides, p.batch_sizes, piece.batch, piece.head);
        const Rows<T> rows(start, p.out_strides, p.seqlen_q, p.head_dim_v);
        store_tile<Plan::kStoreBytes, kWarpSize>(tile, rows, first_row, lane_id());
        __syncwarp();
    }

    __device__ __forceinline__ void run() {
        if (Plan::kTurns && warp / 4 == kConsumers - 1) pass_turn();
        for (; pieces.wait(); pieces.release()) {
            Output o;
            o.fill(0);
            softmax.init();
            mbarrier_wait(smem.q_full(warp / 4), q_phase);
            q_phase ^= 1;
            compute_all(o);
            if constexpr (Plan::kOutInQ) {
                named_barrier_sync(1 + warp / 4, kWarpgroupSize);  // nobody reads q any more
                store(o);
                fence_proxy_async();
                release_q();
            } else {
                store(o);
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
    const int warp = uniform(int(threadIdx.x) / kWarpSize);
    if (warp < kWarpgroupSize / kWarpSize) {
        setmaxnreg_dec<Plan::kProducerRegisters>();
        if (threadIdx.x == 0) Producer{p, smem}.run();
        if (warp == 1) QueryProducer{p, smem}.run();
        if (kCleaners > 0 && warp > 1) Cleaner{p, smem, warp - 2}.run();
    } else {
        setmaxnreg_inc<Plan::kConsumerRegisters>();
        Consumer consumer{p, smem, warp - kWarpgroupSize / kWarpSize, {smem}, 0};
        consumer.run();
    }
}
