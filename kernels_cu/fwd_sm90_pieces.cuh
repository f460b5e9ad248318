// What surrounds the consumers of fwd_sm90.cu: shared memory, pieces of work, and the warps that
// hand them out, load them and look through their values.
#pragma once
#include "attn/block_map.cuh"
#include "attn/mask.cuh"
#include "attn/range.cuh"
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
// Whether keys of the arrays may be hidden from a query.
inline constexpr bool kHidden = Plan::kBand || Plan::kLengths || Score::kHides;
inline constexpr int kCleaners = kHidden ? 2 : 0;  // warps; the producer's warpgroup has them
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
// A warp's output leaves by panels, kOutPanels at a time.
using OTile = SmemTile<T, 16, 64>;
inline constexpr int kOWarpBytes = Plan::kOutPanels * OTile::kBytes;
inline constexpr int kOBytes = kConsumerWarps * kOWarpBytes;
inline constexpr int kQPlace = Plan::kOutInQ ? max_of(kQBytes, kOBytes / kConsumers) : kQBytes;
inline constexpr int kQEnd = Plan::kQSlots * kConsumers * kQPlace;
// With kStaged each warpgroup has room for a block of an array of the caller's, in panels of its 64
// queries.
inline constexpr int kStagedPanels = Plan::kStaged ? Plan::kBlockN / 64 : 0;
inline constexpr int kStagedBytes = kStagedPanels * kQPanel;
static_assert(!Plan::kStaged || Plan::kBlockN % 64 == 0, "whole panels");
inline constexpr int kStagedBegin = kQEnd + Plan::kStages * (kKBytes + kVBytes);
inline constexpr int kRingEnd = kStagedBegin + kConsumers * kStagedBytes;
inline constexpr int kBarriers = kRingEnd + (Plan::kOutInQ ? 0 : kOBytes);
inline constexpr bool kByTma = Plan::kStoreBytes == 16;  // the output leaves by a tensor map
inline constexpr int kPieceSlots = 2;
static_assert(Plan::kQSlots == 1 || Plan::kQSlots == kPieceSlots, "a piece's queries go with it");
inline constexpr int kQPlaces = Plan::kQSlots * kConsumers;
inline constexpr int kStagedBarriers = 4 + 2 * kQPlaces + 5 * Plan::kStages;
inline constexpr int kNumBarriers = kStagedBarriers + (Plan::kStaged ? 2 * kConsumers : 0);
inline constexpr int kPieces = kBarriers + (8 * kNumBarriers + 15) / 16 * 16;
inline constexpr int kPieceBytes = Plan::kBlockMap ? 128 : 96;
static_assert(kPieces + kPieceBytes + 1024 == Plan::kSmemBytes,
              "families/sm90.py's sum is this one");

// A piece of work: kBlockM queries of one head. With a band the last piece ends where the queries
// end, up to a warpgroup's rows, and the first may begin before them: a warpgroup without rows then
// costs least, where few keys are seen. (At 512 causal 192 rows see 2, 5, 8 blocks of 64 keys, not
// 3, 6, 8.) With a block map pieces are blocks of queries, from the first on.
struct Piece {
    static constexpr int kNone = -(1 << 30);  // of first_row: no more work

    int first_row;
    u32 head, batch;
    u32 state;  // how many this thread block was given, with this one; kExact

    static constexpr u32 kExact = 1u << 31;  // every step looks for the maximum first
    __device__ __forceinline__ u32 number() const { return state & ~kExact; }
    __device__ __forceinline__ bool exact() const { return state >= kExact; }

    __device__ __forceinline__ BlockList list(const Params& p) const {
        if constexpr (Plan::kBlockMap) return list_of(p, batch, head, first_row / Plan::kBlockM);
        return {nullptr};
    }
    // The blocks of keys that `rows` rows of queries see, from the piece's row `row` on; with a
    // block map the places in the piece's list.
    __device__ __forceinline__ BlockRange keys(const Params& p, int row = 0,
                                               int rows = Plan::kBlockM) const {
        if constexpr (Plan::kBlockMap) return list(p).range();
        const Lengths ends = lengths_of(p, batch);
        const int first = first_row + row, last = min_of(first + rows, ends.seqlen_q) - 1;
        return key_blocks(p, ends, existing(first), Plan::kIntervals ? existing(last) : last);
    }
    static __device__ __forceinline__ int existing(int row) {
        return Plan::kBand ? max_of(row, 0) : row;
    }
    // Whether the warpgroup whose rows begin at the piece's row `row` has any.
    __device__ __forceinline__ bool any_exists(const Params& p, int row) const {
        return first_row + row < lengths_of(p, batch).seqlen_q &&
               (!Plan::kBand || first_row + row >= 0);
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

    // Of a warpgroup's queries in the piece of that slot: which place, which phase of its barriers.
    static __device__ __forceinline__ int q_place(const Cursor<kPieceSlots>& slot, int group) {
        return (Plan::kQSlots == 1 ? 0 : slot.stage * kConsumers) + group;
    }
    static __device__ __forceinline__ u32 q_phase(const Cursor<kPieceSlots>& slot) {
        return Plan::kQSlots == 1 ? u32(slot.stage) : slot.phase;
    }
    __device__ __forceinline__ u32 q(int place) const { return base + place * kQPlace; }
    __device__ __forceinline__ u32 k(int stage) const { return base + kQEnd + stage * kKBytes; }
    __device__ __forceinline__ u32 v(int stage) const {
        return base + kQEnd + Plan::kStages * kKBytes + stage * kVBytes;
    }
    __device__ __forceinline__ u32 out(int warp) const {
        return Plan::kOutInQ ? q(warp / 4) + warp % 4 * kOWarpBytes
                             : base + kRingEnd + warp * kOWarpBytes;
    }
    __device__ __forceinline__ u32 staged(int group) const {
        return base + kStagedBegin + group * kStagedBytes;
    }
    __device__ __forceinline__ u32 barrier(int n) const { return base + kBarriers + 8 * n; }
    __device__ __forceinline__ u32 piece_full(int slot) const { return barrier(slot); }
    __device__ __forceinline__ u32 piece_empty(int slot) const { return barrier(2 + slot); }
    __device__ __forceinline__ u32 q_full(int place) const { return barrier(4 + place); }
    __device__ __forceinline__ u32 q_empty(int place) const {
        return barrier(4 + kQPlaces + place);
    }
    __device__ __forceinline__ u32 ring(int kind, int stage) const {
        return barrier(4 + 2 * kQPlaces + kind * Plan::kStages + stage);
    }
    __device__ __forceinline__ u32 k_full(int stage) const { return ring(0, stage); }
    __device__ __forceinline__ u32 k_empty(int stage) const { return ring(1, stage); }
    __device__ __forceinline__ u32 v_full(int stage) const { return ring(2, stage); }
    __device__ __forceinline__ u32 v_empty(int stage) const { return ring(3, stage); }
    __device__ __forceinline__ u32 v_clean(int stage) const { return ring(4, stage); }
    __device__ __forceinline__ u32 staged_full(int group) const {
        return barrier(kStagedBarriers + group);
    }
    __device__ __forceinline__ u32 staged_empty(int group) const {
        return barrier(kStagedBarriers + kConsumers + group);
    }
    __device__ __forceinline__ SharedValue<Piece> piece(int slot) const {
        return {base + kPieces + 16 * slot};
    }
    // The blocks of keys that the slot's piece sees.
    __device__ __forceinline__ SharedValue<BlockRange> range(int slot) const {
        return {base + kPieces + 64 + 16 * slot};
    }
    // With a block map, the list of the slot's piece.
    __device__ __forceinline__ SharedValue<const int*> list(int slot) const {
        return {base + kPieces + 96 + 16 * slot};
    }
    // Not zero: the slot's piece must be computed again.
    __device__ __forceinline__ u32 failed(int slot) const { return base + kPieces + 48 + 4 * slot; }
    // How many pieces were handed out: registers of the producer are full.
    __device__ __forceinline__ u32 count() const { return base + kPieces + 56; }
    // The last of the slot's pieces in whose values inf or NaN were found, a word for each cleaner.
    __device__ __forceinline__ u32 dirty(int slot) const { return base + kPieces + 32 + 8 * slot; }

    __device__ __forceinline__ void init() const {
        for (int place = 0; place < kQPlaces; ++place) {
            mbarrier_init(q_full(place), 1);
            mbarrier_init(q_empty(place), kWarpgroupSize / kWarpSize);
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
        for (int group = 0; Plan::kStaged && group < kConsumers; ++group) {
            mbarrier_init(staged_full(group), 1);
            mbarrier_init(staged_empty(group), kWarpgroupSize / kWarpSize);
        }
        for (int slot = 0; slot < kPieceSlots; ++slot) {
            store_shared(failed(slot), 0);
            for (int n = 0; n < 2; ++n) store_shared(dirty(slot) + 4 * n, 0);
        }
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
                                         int row, int col = 0) const {
        mbarrier_arrive_expect_tx(bar, kCount * panel_bytes);
#pragma unroll
        for (int panel = 0; panel < kCount; ++panel)
            tma_load(to + panel * panel_bytes, map, bar, col + 64 * panel, row, int(head),
                     int(inner), int(outer));
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

    // Each entry of the list is read before the wait for the block in front of it.
    __device__ __forceinline__ void load_listed(const Loader& loader, const BlockList& list,
                                                int count) {
        int block = list.block(count - 1);
        int next = list.block(max_of(count - 2, 0));
        load_k(loader, block);
#pragma unroll 1
        for (int place = count - 1; place > 0; --place) {
            const int after = list.block(max_of(place - 2, 0));
            load_k(loader, next), load_v(loader, block);
            block = next, next = after;
        }
        load_v(loader, block);
    }

    __device__ __forceinline__ Piece piece_of(u32 index) const {
        Work<1> work(index, p.num_blocks, p.num_heads, p.section, p.num_sectioned, p.num_work);
        const int end = (p.seqlen_q + 63) / 64 * 64;
        int first_row = Plan::kBand ? end - (work.block + 1) * Plan::kBlockM
                                    : work.block * Plan::kBlockM;
        if constexpr (Plan::kBand && Plan::kBlockMap)
            first_row = (int(p.num_blocks) - 1 - work.block) * Plan::kBlockM;
        return {first_row, work.head, work.batch, 0};
    }
    __device__ __forceinline__ void hand_out(Piece piece) {
        const u32 number = load_shared(smem.count()) + 1;
        store_shared(smem.count(), number);
        piece.state = (piece.state & Piece::kExact) | number;
        smem.piece(pieces.stage).set(piece);
        smem.range(pieces.stage).set(piece.keys(p));
        if constexpr (Plan::kBlockMap) smem.list(pieces.stage).set(piece.list(p).row);
        mbarrier_arrive(smem.piece_full(pieces.stage));
        pieces.next();
    }
    // There is no more: nothing but the piece itself is written, for it has no list and no keys.
    __device__ __forceinline__ void finish() const {
        smem.piece(pieces.stage).set({Piece::kNone, 0, 0, 0});
        mbarrier_arrive(smem.piece_full(pieces.stage));
    }
    // Waits until the piece in a slot is finished. If it failed, `piece` is that one once more.
    __device__ __forceinline__ bool is_failed(const Cursor<kPieceSlots>& slot, Piece& piece) const {
        mbarrier_wait(smem.piece_empty(slot.stage), slot.phase ^ 1);
        if (load_shared(smem.failed(slot.stage)) == 0) return false;
        store_shared(smem.failed(slot.stage), 0);
        piece = smem.piece(slot.stage).get();
        piece.state = Piece::kExact;
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
    // Without a ticket pieces go round all blocks in turn. With one there are as many draws as
    // pieces, and the last leaves 0 for the next kernel.
    __device__ __forceinline__ u32 take(u32 index) const {
        if (p.ticket == nullptr) return index + gridDim.x;
        u32* ticket = static_cast<u32*>(p.ticket);
        const u32 drawn = atomicAdd(ticket, 1u);
        if (drawn == p.num_work - 1) atomicExch(ticket, 0u);
        return gridDim.x + drawn;
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
            if constexpr (Plan::kBlockMap) {
                load_listed(loader, piece.list(p), range.end);
                continue;
            }
            load_k(loader, range.end - 1);
#pragma unroll 1
            for (int n = range.end - 1; n > range.begin; --n)
                load_k(loader, n - 1), load_v(loader, n);
            load_v(loader, range.begin);
        }
        finish();
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
    __device__ __forceinline__ BlockRange keys() const {
        const BlockRange range = smem.range(cursor.stage).get();
        return {uniform(range.begin), uniform(range.full_begin), uniform(range.full_end),
                uniform(range.end)};
    }
    // The block at a place of the range.
    __device__ __forceinline__ int block_at(int place) const {
        if constexpr (Plan::kBlockMap)
            return BlockList{smem.list(cursor.stage).get()}.block(place);
        return place;
    }
    // False when there is no more.
    __device__ __forceinline__ bool wait() const {
        mbarrier_wait(smem.piece_full(cursor.stage), cursor.phase);
        return current().first_row != Piece::kNone;
    }
    __device__ __forceinline__ void release() {
        warp_arrive(smem.piece_empty(cursor.stage));
        cursor.next();
    }
};

// A warp that loads queries, for each warpgroup as soon as it is done with its last ones; with
// kStaged then what belongs to these and a block of keys, block after block.
struct QueryProducer {
    const Params& p;
    const Shared smem;
    u32 staged_phase = 1;

    // (A template, as other kernels' parameters have no such map.)
    template <class Any>
    __device__ __forceinline__ void load_staged(const Any& p, const Pieces& pieces,
                                                const Loader& loader) {
        const int first_row = pieces.current().first_row;
#pragma unroll 1
        for (int n = pieces.keys().end - 1; n >= pieces.keys().begin; --n, staged_phase ^= 1) {
            const int col = pieces.block_at(n) * Plan::kBlockN;
#pragma unroll 1
            for (int group = 0; group < kConsumers; ++group) {
                mbarrier_wait(smem.staged_empty(group), staged_phase);
                if (lane_id() == 0)
                    loader.load<kStagedPanels>(smem.staged(group), kQPanel, p.staged_map,
                                               smem.staged_full(group), first_row + 64 * group,
                                               col);
            }
        }
    }

    __device__ __forceinline__ void run() {
        Pieces pieces{smem};
#pragma unroll 1
        for (; pieces.wait(); pieces.release()) {
            const Piece piece = pieces.current();
            const Loader loader(p, piece, 1);
#pragma unroll 1
            for (int group = 0; group < kConsumers; ++group) {
                const int place = Shared::q_place(pieces.cursor, group);
                mbarrier_wait(smem.q_empty(place), Shared::q_phase(pieces.cursor) ^ 1);
                if (lane_id() == 0)
                    loader.load<kPanels>(smem.q(place), kQPanel, p.q_map, smem.q_full(place),
                                         piece.first_row + 64 * group);
            }
            if constexpr (Plan::kStaged) load_staged(p, pieces, loader);
        }
    }
};

// ---- cleaners ----------------------------------------------------------------------------------

// Where a band or a score hides keys: warps that replace inf and NaN by zero in values that some
// rows of the piece do not see, since a hidden key's weight 0 times NaN is NaN.
struct Cleaner {
    const Params& p;
    const Shared smem;
    const int warp;

    __device__ __forceinline__ bool clean(u32 tile) const {
        constexpr int kStep = 16 * kWarpSize * kCleaners;
        const int first = 16 * (warp * kWarpSize + lane_id());
        bool found = false;
#pragma unroll 2
        for (int offset = first; offset < kVBytes; offset += kStep) {
            uint4 piece;
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w)
                         : "r"(tile + offset)
                         : "memory");
            found |= has_nonfinite<T>(piece);
        }
        if (__any_sync(kFullWarp, found))
#pragma unroll 1
            for (int offset = first; offset < kVBytes; offset += kStep)
#pragma unroll 1
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
#pragma unroll 1
            for (int n = pieces.keys().end - 1; n >= pieces.keys().begin; --n) {
                mbarrier_wait(smem.v_full(cursor.stage), cursor.phase);
                const Piece piece = pieces.current();
                const bool masked =
                    (Score::kHides && !Plan::kBlockMap) || is_masked(pieces.keys(), n);
                if (masked && (!Plan::kLazy || piece.exact())) {
                    if (clean(smem.v(cursor.stage)))
                        store_shared(smem.dirty(pieces.cursor.stage) + 4 * warp, piece.number());
                    fence_proxy_async();
                }
                // With kLazy consumers wait for this barrier in some pieces only; that nobody waited
                // for a phase is an error to synccheck.
                if constexpr (Plan::kLazy)
                    mbarrier_wait(smem.v_clean(cursor.stage), cursor.phase ^ 1);
                warp_arrive(smem.v_clean(cursor.stage));
                warp_arrive(smem.v_empty(cursor.stage));
                cursor.next();
            }
        }
    }
};
