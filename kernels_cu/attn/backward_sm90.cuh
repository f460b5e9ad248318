// What Hopper's two backward kernels share (bwd_sm90.cu, bwd_sm90_wide.cu): the thread that loads, the
// thread that adds dQ, and what consumers do with scores.
//
//     barrier             arrives                           waits
//     k_full, v_full      producer + TMA bytes              consumers; loaded once, k anew after
//                                                           NaN in it was replaced (Clean)
//     q_full[stage]       producer + bytes of q, row_max,   consumers
//                         row_sum
//     q_empty[stage]      each consumer warp, after dK      producer
//     dout_full[stage]    producer + bytes of dout, delta   consumers
//     dout_empty[stage]   each consumer warp, after dV      producer
//     dq_full[buffer]     the four warps of a warpgroup     the step's reducer, each on its own
//     dq_empty[buffer]    reducer, once the buffer is read  that warpgroup
//     square_full,        as dq's, of each warpgroup's      warp 3; who writes fragment(0)
//     square_empty        square
//
// dQ sums over blocks of keys, which are different thread blocks. A part of it leaves through a
// buffer in shared memory, in the order of attn/turn.cuh's fragments, which cast.cu reads: a bulk
// copy adds it in L2. With kDeterministic the reducer waits for its turn, and raises the flag once
// its additions are complete, not merely read. Seeing the flag, adding, completion and raising the
// flag take longer than a step; two reducers therefore take steps in turn, so that the next part
// leaves while the last one's completion is waited for. The first to add to a sum writes it
// (kStoreFirst), so nothing needs to be zero before.
//
// Blocks of keys that start together would all add to the same queries, and in turns all but one
// would wait. Without a band each therefore starts at a different block of queries and goes round
// (Walk); the turns follow the order of time. Whoever is waited for may then have a later ticket,
// but never beyond those of a group of p.turn_group blocks of each of p.section heads, which are at
// most as many as there are SMs: all of a group run at once before any of them waits for ever. With
// a band ranges are staggered by themselves, and tickets are in the order of the turns. So they are
// with packed sequences (attn/interval.cuh), though blocks of one sequence without a window begin at
// the same queries: then each is a step behind the one before it.
//
// With a block map blocks of queries are places in a list for each head (attn/block_map.cuh).
// Tickets are in the order of the turns, which are counted among the blocks of keys that visit the
// same queries; without turns the lists begin at different blocks. Every sum then begins with 0.
//
// dS is also the gradient of an array added to the score, summed over the heads that share it: warp 3
// adds squares of 64 queries and 64 keys as their fragments lie. In turns heads of a section, which
// has no more of them than SMs, go step by step: who is waited for is at an earlier step, or at the
// same one of an earlier head.
#pragma once
#include "../ptx/bulk.cuh"
#include "../ptx/matrix.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"
#include "../tile/copy.cuh"
#include "../tile/fragment.cuh"
#include "backward_smem.cuh"
#include "block_map.cuh"
#include "range.cuh"
#include "stats.cuh"
#include "transposed.cuh"
#include "turn.cuh"
#include "work.cuh"

__device__ __forceinline__ Work<1> work_of(const Params& p, u32 index) {
    Work<1> work(index, p.num_blocks, p.num_heads / p.group, p.section, p.num_sectioned);
    if constexpr (kOrdered && (Plan::kBand || Plan::kBlockMap))
        work.block = int(p.num_blocks) - 1 - work.block;
    return work;
}

// The blocks of queries that see a block of keys.
__device__ __forceinline__ BlockRange queries_of(const Params& p, const Work<1>& w) {
    const int first_key = w.block * Plan::kBlockN;
    const Lengths ends = lengths_of(p, w.batch);
    const int last_key = min_of(first_key + Plan::kBlockN, ends.seqlen_k) - 1;
    BlockRange range = query_blocks(p, ends, first_key, last_key);
    // Keys beyond the end are zeros, not hidden, and their weights may overflow: every step of the
    // last block is masked.
    if (first_key + Plan::kBlockN > ends.seqlen_k) range.full_begin = range.full_end = range.end;
    return range;
}

// Tickets without a band: a block's place in its group, and the group's size.
struct Place {
    u32 place, size, num_m_blocks;
    __device__ __forceinline__ Place(const Params& p, const Work<1>& w) {
        const u32 outer = w.batch * (p.num_heads / p.group) + w.head;
        const u32 group = outer < p.num_sectioned ? p.turn_group : p.last_turn_group;
        place = u32(w.block) % group;
        u32 num_blocks = p.num_blocks;
        num_m_blocks = p.num_m_blocks;
        if constexpr (Plan::kLengths) {
            const Lengths ends = lengths_of(p, w.batch);
            num_m_blocks = ceil_div(ends.seqlen_q, Plan::kBlockM);
            // Blocks behind the last key take no turns.
            num_blocks = max_of(ceil_div(ends.seqlen_k, Plan::kBlockN), w.block + 1);
        }
        size = min_of(group, num_blocks - (u32(w.block) - place));
    }

    // Where a block starts: places are spread over the blocks of queries.
    __device__ __forceinline__ int start() const {
        return int(num_m_blocks >= size ? place * (num_m_blocks / size)
                                        : place * num_m_blocks / size);
    }
    // How many of the group add to block m of queries earlier: those that started latest before m
    // come first, then round.
    __device__ __forceinline__ u32 turn(int m) const {
        const u32 latest = num_m_blocks >= size ? min_of(u32(m) / (num_m_blocks / size), size - 1)
                                                : (u32(m + 1) * size - 1) / num_m_blocks;
        return latest >= place ? latest - place : latest + size - place;
    }
};

// How many add to block m of queries before this block of keys does: with a band, the blocks of
// keys behind it.
__device__ __forceinline__ u32 turn_of(const Params& p, const Work<1>& w, int m) {
    if constexpr (Plan::kBand) {
        const int first = m * Plan::kBlockM;
        const Lengths ends = lengths_of(p, w.batch);
        const int last = min_of(first + Plan::kBlockM, ends.seqlen_q) - 1;
        return u32(key_blocks_end(p, ends, first, last) - 1 - w.block);
    } else {
        const Place place(p, w);
        return u32(w.block) - place.place + place.turn(m);
    }
}

// The order in which a block of keys meets its blocks of queries: from one of them round to where it
// began, once for each query head of the group.
struct RangeWalk {
    const Shared& smem;
    int m;
    int left;  // steps over all heads

    __device__ __forceinline__ RangeWalk(const Params& p, const Shared& shared, const Work<1>& w)
        : smem(shared) {
        const BlockRange range = smem.range().get();
        m = Plan::kBand ? range.begin : Place(p, w).start();
        left = (range.end - range.begin) * int(p.group);
    }
    __device__ __forceinline__ void next() {
        const BlockRange range = smem.range().get();
        m = m + 1 == range.end ? range.begin : m + 1;
        --left;
    }
    __device__ __forceinline__ bool masked() const {
        if constexpr (Score::kHides) return true;
        if constexpr (!Plan::kBand && !Plan::kTail) return false;
        const BlockRange range = smem.range().get();
        return m >= range.full_end || m < range.full_begin;
    }
    // So that the assembler sees a branch which no warp takes in part.
    __device__ __forceinline__ bool masked_by_vote() const {
        if constexpr (Score::kHides) return true;
        return __any_sync(kFullWarp, masked());
    }
    // More than 0 while there is a step. As a bool it would cost the assembler 2 % more code.
    __device__ __forceinline__ int more() const { return left; }
    __device__ __forceinline__ bool last() const { return left == 1; }
    __device__ __forceinline__ int block() const { return m; }
    __device__ __forceinline__ u32 head_of_group(u32 group) const {
        const BlockRange range = smem.range().get();
        return group - ceil_div(u32(left), u32(range.end - range.begin));
    }
};
// The same along a block map's lists. Consumers hardly ever ask which block it is.
struct ListWalk {
    const Params& p;
    const Shared& smem;
    int place = 0;
    u32 head = 0;  // of the group

    __device__ __forceinline__ ListWalk(const Params& params, const Shared& shared, const Work<1>&)
        : p(params), smem(shared) {
        skip_empty(head);
    }
    __device__ __forceinline__ BlockList list_of(u32 n) const { return smem.lists().get().of(n); }
    __device__ __forceinline__ BlockList list() const { return list_of(head); }
    // On to a head whose list has blocks.
    __device__ __forceinline__ void skip_empty(u32& n) const {
        while (n < p.group && list_of(n).count() == 0) ++n;
    }
    __device__ __forceinline__ int more() const { return head < p.group; }
    __device__ __forceinline__ bool last() const {
        if (place + 1 < list().count()) return false;
        u32 next = head + 1;
        skip_empty(next);
        return next == p.group;
    }
    __device__ __forceinline__ void next() {
        if (++place == list().count()) ++head, place = 0, skip_empty(head);
    }
    __device__ __forceinline__ bool masked() const {
        if constexpr (!kMasks) return false;
        return place >= list().range().full_end;
    }
    __device__ __forceinline__ bool masked_by_vote() const {
        return __any_sync(kFullWarp, masked());
    }
    __device__ __forceinline__ int block() const { return list().block(place); }
    __device__ __forceinline__ u32 head_of_group(u32) const { return head; }
};
using Walk = Select<Plan::kBlockMap, ListWalk, RangeWalk>::type;

__device__ __forceinline__ u32 turn_of(const Params& p, const Work<1>& w, const RangeWalk& walk) {
    return turn_of(p, w, walk.m);
}
__device__ __forceinline__ u32 turn_of(const Params& p, const Work<1>&, const ListWalk& walk) {
    return walk.list().turn(walk.place, p.num_m_blocks);
}
// Counts the heads of a walk.
struct HeadCounter {
    const Shared& smem;
    u32 head;
    int until_next;

    __device__ __forceinline__ HeadCounter(const Shared& shared, u32 first)
        : smem(shared), head(first), until_next(steps()) {}
    __device__ __forceinline__ int steps() const {
        if constexpr (Plan::kBlockMap) return 0;
        const BlockRange range = smem.range().get();
        return range.end - range.begin;
    }
    __device__ __forceinline__ void next() {
        if (!Plan::kBlockMap && --until_next == 0) ++head, until_next = steps();
    }
    __device__ __forceinline__ u32 of(const RangeWalk&) const { return head; }
    __device__ __forceinline__ u32 of(const ListWalk& walk) const { return head + walk.head; }
};

// ---- producer ----------------------------------------------------------------------------------

template <int kCount>
__device__ __forceinline__ void load_panels(u32 to, int panel_bytes, const TensorMap& map, u32 bar,
                                            int row, u32 head, const Params& p, u32 batch) {
    const u32 inner = u32(p.batch_sizes[2]);
#pragma unroll
    for (int panel = 0; panel < kCount; ++panel)
        tma_load(to + panel * panel_bytes, map, bar, 64 * panel, row, int(head), int(batch % inner),
                 int(batch / inner));
}
__device__ __forceinline__ void load_k(const Params& p, const Shared& smem, const Work<1>& w) {
    mbarrier_arrive_expect_tx(smem.k_full(), kKBytes);
    load_panels<kPanels>(smem.k(), kKeyPanel, p.k_map, smem.k_full(), w.block * Plan::kBlockN,
                         w.head, p, w.batch);
}

__device__ __forceinline__ void produce(const Params& p, const Shared& smem, const Work<1>& w) {
    Walk walk(p, smem, w);
    if (walk.more() == 0) return;
    load_k(p, smem, w);
    Cursor<Plan::kStages> q;
    Cursor<Plan::kStagesV> dout;
    HeadCounter heads(smem, w.head * p.group);
#pragma unroll 1
    for (bool first = true; walk.more() > 0; walk.next(), heads.next(), first = false) {
        const int m = walk.block();
        const u32 head = heads.of(walk);
        const float* stats = static_cast<const float*>(p.stats) +
                             i64(w.batch * p.num_heads + head) * 3 * p.stats_pitch +
                             i64(m) * Plan::kBlockM;
        mbarrier_wait(smem.q_empty(q.stage), q.phase ^ 1);
        mbarrier_arrive_expect_tx(smem.q_full(q.stage), kQBytes + 2 * kRowBytes);
        load_panels<kPanels>(smem.q(q.stage), kQueryPanel, p.q_map, smem.q_full(q.stage),
                             m * Plan::kBlockM, head, p, w.batch);
        bulk_load(smem.row_max(q.stage), stats, kRowBytes, smem.q_full(q.stage));
        bulk_load(smem.row_sum(q.stage), stats + p.stats_pitch, kRowBytes, smem.q_full(q.stage));
        if (first) {
            mbarrier_arrive_expect_tx(smem.v_full(), kVBytes);
            load_panels<kPanelsV>(smem.v(), kKeyPanel, p.v_map, smem.v_full(),
                                  w.block * Plan::kBlockN, w.head, p, w.batch);
        }
        mbarrier_wait(smem.dout_empty(dout.stage), dout.phase ^ 1);
        mbarrier_arrive_expect_tx(smem.dout_full(dout.stage), kDoutBytes + kRowBytes);
        load_panels<kPanelsV>(smem.dout(dout.stage), kQueryPanel, p.dout_map,
                              smem.dout_full(dout.stage), m * Plan::kBlockM, head, p, w.batch);
        bulk_load(smem.delta(dout.stage), stats + 2 * p.stats_pitch, kRowBytes,
                  smem.dout_full(dout.stage));
        q.next(), dout.next();
    }
}

// ---- reducer -----------------------------------------------------------------------------------

// One reducer's steps: every kReducers-th from its own on.
__device__ __forceinline__ void reduce(const Params& p, const Shared& smem, const Work<1>& w,
                                       int reducer) {
    u32 phases = 0;  // a bit for each buffer
    HeadCounter heads(smem, w.batch * p.num_heads + w.head * p.group);
    int others = reducer;  // steps of others before the next own one
#pragma unroll 1
    for (Walk walk(p, smem, w); walk.more() > 0; walk.next(), heads.next()) {
        if constexpr (Plan::kReducers > 1) {
            if (others > 0) {
                --others;
                continue;
            }
            others = Plan::kReducers - 1;
        }
        const int m = walk.block();
        u32 turn = 0;
        if constexpr (kOrdered) turn = u32(opaque(int(turn_of(p, w, walk))));
        const i64 head = heads.of(walk);
        float* const accum = static_cast<float*>(p.dq_accum) + head * p.accum_pitch +
                             i64(m) * (Plan::kBlockM / 16 * Plan::kAccumTiles * 128);
        u32* const flag = static_cast<u32*>(p.flags) + head * p.num_m_blocks + m;
        const bool first = Plan::kStoreFirst && turn == 0;
        // Before the part is there: what is long true need not be asked then.
        if constexpr (kOrdered)
            while (load_relaxed(flag) != turn) {}
#pragma unroll
        for (int part = 0; part < kDqParts; ++part) {
            const int buffer = dq_buffer(part);
            mbarrier_wait(smem.dq_full(buffer, reducer), phases >> buffer & 1);
            phases ^= 1u << buffer;
            // The rows of a warp, 16 each, are contiguous, and so are all where they are whole.
            constexpr int kPieces = kDqTiles == Plan::kAccumTiles ? 1 : 4;
            constexpr u32 kPieceBytes = 4 * kDqWarpBytes / kPieces;
            float* const to = accum + part * (kDqByRows ? 4 * kDqWarpBytes / 4 : kDqWarpBytes / 4);
#pragma unroll
            for (int piece = 0; piece < kPieces; ++piece) {
                float* const piece_to = to + piece * Plan::kAccumTiles * 128;
                const u32 from = smem.dq(buffer) + piece * kPieceBytes;
                if (first)
                    bulk_store(piece_to, from, kPieceBytes);
                else
                    bulk_add(piece_to, from, kPieceBytes);
            }
            bulk_commit_group();
            if (part > 0) {
                bulk_wait_read<1>();
                mbarrier_arrive(smem.dq_empty(dq_buffer(part - 1)));
            }
        }
        bulk_wait_read<0>();
        mbarrier_arrive(smem.dq_empty(dq_buffer(kDqParts - 1)));
        if constexpr (kOrdered) {
            bulk_wait_all();
            store_release(flag, turn + 1);
        }
    }
    bulk_wait_all();
}

template <class AnyParams>
__device__ __forceinline__ void add_squares(const AnyParams& p, const Shared& smem,
                                            const Work<1>& w) {
    HeadCounter heads(smem, w.head * p.group);
    u32* const flags = static_cast<u32*>(p.square_flags);  // null: no square is shared
    const u32 columns = ceil_div(p.seqlen_k, 128) * 2;
    u32 phase = 0, last = 0, turn = 0;  // last: the last step's flag, from 1 on
    const auto complete = [&] {
        bulk_wait_all();
        if (last > 0) store_release(flags + last - 1, turn + 1);
    };
#pragma unroll 1
    for (Walk walk(p, smem, w); walk.more() > 0; walk.next(), heads.next(), phase ^= 1) {
        const u32 batch = u32(opaque(int(w.batch))), head = heads.of(walk);
        const u32 entry = batch * p.square_batch + head * p.square_head;
        const u32 row = entry * p.num_m_blocks + u32(walk.block());
        bool first = Plan::kDeterministic;
        if (Plan::kDeterministic && flags != nullptr) {
            const u32 place = row * p.num_blocks + u32(w.block);
            u32 seen = load_relaxed(flags + place);  // while the last step's are waited for
            complete();
            last = place + 1;
            turn = square_turn(p, batch, w.head, head - w.head * p.group);
            while (seen != turn) seen = load_relaxed(flags + place);
            first = turn == 0;
        }
        const i64 square = i64(row) * columns + w.block * kSquares;
#pragma unroll
        for (int n = 0; n < kSquares; ++n) {
            float* const to = static_cast<float*>(p.squares) + (square + n) * (kSquareBytes / 4);
            const u32 from = smem.exchange() + n * kSquareBytes;
            mbarrier_wait(smem.square_full(n), phase);
            if (first)
                bulk_store(to, from, kSquareBytes);
            else
                bulk_add(to, from, kSquareBytes);
            bulk_commit_group();
            bulk_wait_read<0>();
            mbarrier_arrive(smem.square_empty(n));
        }
    }
    complete();
}

// ---- consumers ---------------------------------------------------------------------------------

// Named barriers.
enum : int { kAllConsumers = 1, kWeightsFull, kDsFull, kOwnDsFull };

__device__ __forceinline__ void consumers_sync() {
    barrier_sync<kAllConsumers, kConsumerThreads>();
}

// Flat accumulators, as the products take them.
template <int kTiles>
__device__ __forceinline__ float (&flat(Fragment<float, 1, kTiles>& c))[4 * kTiles] {
    return reinterpret_cast<float (&)[4 * kTiles]>(c.x);
}

// Computed anew each time: descriptors of all steps of all products, kept from one block of queries
// to the next, would fill the registers.
__device__ __forceinline__ u64 descriptor(u32 address, u32 panel_bytes = 0) {
    return matrix_descriptor(u32(opaque(int(address))), panel_bytes);
}

// c = A B^T over kDepth columns of both.
template <int kDepth, class C>
__device__ __forceinline__ void multiply_rows(C& c, u64 a, int a_panel, u64 b, int b_panel) {
#pragma unroll
    for (int step = 0; step < kDepth / 16; ++step)
        wgmma(flat(c), advance(a, step / 4 * a_panel + step % 4 * 32),
              advance(b, step / 4 * b_panel + step % 4 * 32), step > 0);
}
// c += weights^T B, B's rows being the block's queries.
template <class C>
__device__ __forceinline__ void multiply_queries(C& c, const Weights& weights, u64 b) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
        wgmma(flat(c), weights[step], advance(b, step * 16 * kPanelBytes), true);
}
// A part of dQ = dS K, 64 rows from `ds` and columns from `k` on.
__device__ __forceinline__ void multiply_keys(QueryGrad& dq, u64 ds, u64 k) {
#pragma unroll
    for (int step = 0; step < Plan::kBlockN / 16; ++step)
        wgmma_transposed(flat(dq), advance(ds, step / 4 * kQueryPanel + step % 4 * 32),
                         advance(k, step * 16 * kPanelBytes), step > 0);
}

__device__ __forceinline__ void round_to(Weights& weights, const Scores& s) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int r = 0; r < 4; ++r)
            weights[step][r] = pack<T>(s.x[0][2 * step + r / 2][r % 2 * 2],
                                       s.x[0][2 * step + r / 2][r % 2 * 2 + 1]);
}

// f(x of c, value of its query), `values` one statistic of the block's queries in shared memory.
template <class F> __device__ __forceinline__ void with_stats(Scores& c, u32 values, F f) {
    const u32 own = values + lane_id() % 4 * 8;
#pragma unroll
    for (int n = 0; n < Scores::kColTiles; ++n) {
        float value[2];
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                     : "=f"(value[0]), "=f"(value[1])
                     : "r"(own + 32 * n)
                     : "memory");
#pragma unroll
        for (int r = 0; r < 4; ++r) f(c.x[0][n][r], value[r % 2]);
    }
}

// The row_max and row_sum of column tile n's two queries in this lane. Without a clobber of memory,
// so that reads of the score's arrays need not be repeated around it.
__device__ __forceinline__ void load_stats(float (&row_max)[2], float (&row_sum)[2],
                                           const Shared& smem, int stage, int n) {
    const u32 own = smem.row_max(stage) + lane_id() % 4 * 8 + 32 * n;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(row_max[0]), "=f"(row_max[1])
                 : "r"(own));
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(row_sum[0]), "=f"(row_sum[1])
                 : "r"(own + kRowBytes));
}
