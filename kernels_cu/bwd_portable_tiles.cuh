// What bwd_portable.cu keeps where: its constants and tiles, the shared memory, and how a thread
// block finds its inputs there and in global memory.
//
// Shared memory: k [kBlockN][kHeadDim] | v [kBlockN][kHeadDimV] | kStages x (q [kBlockM][kHeadDim],
// dout [kBlockM][kHeadDimV], row_max, row_sum, delta [kBlockM]) | ds^T, p^T [kBlockN][kBlockM] |
// the addresses of q and dout, the range of queries, the work, with a block map the address of the
// lists, turns; at the end dk and dv are
// staged over k and v. With kDirect there is no room for k, v, q and dout: they are read from
// global memory (tile/direct_tile.cuh).
#pragma once
#include "attn/block_map.cuh"
#include "attn/range.cuh"
#include "attn/turn.cuh"
#include "attn/work.cuh"
#include "tile/copy.cuh"
#include "tile/direct_tile.cuh"
#include "tile/fragment.cuh"

using T = Plan::Element;
using Accum = AccumOf<T>;
using Atom = AtomFor<T, Plan::kTf32>::type;

inline constexpr int kThreads = Plan::kWarps * kWarpSize;
inline constexpr int kWarpRows = Plan::kBlockN / (Plan::kWarps / Plan::kShare);
inline constexpr int kRowTiles = kWarpRows / 16;
inline constexpr int kQueries = Plan::kBlockM / Plan::kShare;    // of a warp, in S^T and dP^T
inline constexpr int kColumns = Plan::kSliceDim / Plan::kShare;  // of a warp, in dK
inline constexpr int kColumnsV = Plan::kSliceDimV / Plan::kShare;
static_assert(kWarpRows % 16 == 0, "a warp's keys are whole tiles of 16");
static_assert(kQueries % 16 == 0 && kColumns % 16 == 0 && kColumnsV % 16 == 0,
              "fragments come in pairs");
static_assert(Plan::kShare == 1 || (Plan::kShare == 2 && sizeof(T) == 2),
              "only 16-bit operands keep k's order in shared memory");
static_assert(Plan::kBlockM % 16 == 0, "P^T is an operand with 16 queries a step");

// From sm_100 on the compiler keeps more values in registers than there are.
#if __CUDA_ARCH__ >= 1000
inline constexpr bool kRecent = true;
#else
inline constexpr bool kRecent = false;
#endif
inline constexpr bool kOrdered = Plan::kDeterministic && Plan::kNeedDq;

// Warps that compute dQ: kDqWarpsM along the queries, kDqWarpsD along the head dimension.
inline constexpr int kDqWarps = Plan::kDqWarpsM * Plan::kDqWarpsD;
inline constexpr int kDqRows = Plan::kBlockM / Plan::kDqWarpsM;
inline constexpr int kDqCols = Plan::kSliceDim / Plan::kDqWarpsD;
static_assert(kDqWarps <= Plan::kWarps && kDqRows % 16 == 0 && kDqCols % 16 == 0,
              "dq divides into whole fragments");

static_assert(!Plan::kDirect || Plan::kStages == 1, "there is nothing to copy ahead");
template <int kRows, int kCols> using Input = InputTile<Plan::kDirect, T, kRows, kCols>;
using KTile = Input<Plan::kBlockN, Plan::kHeadDim>;
using VTile = Input<Plan::kBlockN, Plan::kHeadDimV>;
using QTile = Input<Plan::kBlockM, Plan::kHeadDim>;
using DoutTile = Input<Plan::kBlockM, Plan::kHeadDimV>;
using DkTile = SmemTile<T, Plan::kBlockN, Plan::kSliceDim>;
using DvTile = SmemTile<T, Plan::kBlockN, Plan::kSliceDimV>;
using DsTile = SmemTile<T, Plan::kBlockN, Plan::kBlockM>;
using StatsTile = SmemTile<Accum, 3, Plan::kBlockM>;  // row_max, row_sum (attn/stats.cuh), delta
inline constexpr int kStageBytes =
    QTile::kBytes + DoutTile::kBytes + ceil_div(StatsTile::kBytes, 128) * 128;
inline constexpr int kVBegin = max_of(KTile::kBytes, DkTile::kBytes);
inline constexpr int kRingBegin = kVBegin + max_of(VTile::kBytes, DvTile::kBytes);
inline constexpr int kDsBegin = kRingBegin + Plan::kStages * kStageBytes;
inline constexpr int kWeightsBegin =
    kDsBegin + (Plan::kNeedDq || Plan::kShare > 1 ? DsTile::kBytes : 0);
// Addresses of q and dout, the range of queries, the block's work: what a step needs once at most
// does not occupy a register.
inline constexpr int kSharedValues = Plan::kBlockMap ? 5 : 4;
inline constexpr int kValuesBegin = kWeightsBegin + (Plan::kShare > 1 ? DsTile::kBytes : 0);
inline constexpr int kTurnsBegin = kValuesBegin + kSharedValues * 16;
static_assert(kTurnsBegin + Plan::kWarps * 16 == Plan::kSmemBytes, "plan.py's sum is this one");

using Scores = Fragment<Accum, kRowTiles, kQueries / 8>;
using KeyGrad = Fragment<Accum, kRowTiles, kColumns / 8>;
using ValueGrad = Fragment<Accum, kRowTiles, kColumnsV / 8>;
using QueryGrad = Fragment<Accum, kDqRows / 16, kDqCols / 8>;
using BlockWork = Work<Plan::kSlices>;

// One thread block's inputs, and the place of this warp in them.
struct BackwardBlock {
    const Params& p;
    const u32 smem;
    const int warp_row;
    // Which part of the queries, then of the columns, this warp takes for its keys.
    const int share;
    u32 head;  // the query head of the current step, counted over all batch entries
    const Turn<kOrdered> turn;

    __device__ __forceinline__ BackwardBlock(const Params& params, BlockWork w, u32 smem_base)
        : p(params),
          smem(smem_base),
          warp_row(int(threadIdx.x) / kWarpSize / Plan::kShare * kWarpRows),
          share(int(threadIdx.x) / kWarpSize % Plan::kShare),
          head(first_head(w)),
          turn{{smem_base + kTurnsBegin + threadIdx.x / kWarpSize * 16}} {
        turn.init();
        if (threadIdx.x == 0) {
            shared_work().set(w);
            const i64 before = i64(w.batch) * p.num_heads;
            q_start().set(head_start<const T>(p.q, p.q_strides, p.batch_sizes, w.batch, 0) -
                          before * p.q_strides.head);
            dout_start().set(
                head_start<const T>(p.dout, p.dout_strides, p.batch_sizes, w.batch, 0) -
                before * p.dout_strides.head);
            const int first_key = w.block * Plan::kBlockN;
            const int last_key = min_of(first_key + Plan::kBlockN, p.seqlen_k) - 1;
            BlockRange queries = query_blocks(p, {p.seqlen_q, p.seqlen_k}, first_key, last_key);
            // Keys beyond the end are zeros, not hidden, and their weights may overflow: every step
            // of the last block is masked.
            if (first_key + Plan::kBlockN > p.seqlen_k)
                queries.full_begin = queries.full_end = queries.end;
            range().set(queries);
            if constexpr (Plan::kBlockMap) lists_start().set(even_lists(p, w.batch));
        }
        __syncthreads();
    }

    // Where head 0 of batch entry 0 were if all heads were a stride apart: `head` strides from
    // there is the current one.
    __device__ __forceinline__ SharedValue<const T*> q_start() const {
        return {smem + kValuesBegin};
    }
    __device__ __forceinline__ SharedValue<const T*> dout_start() const {
        return {smem + kValuesBegin + 16};
    }
    // The blocks of queries that see these keys.
    __device__ __forceinline__ SharedValue<BlockRange> range() const {
        return {smem + kValuesBegin + 32};
    }
    __device__ __forceinline__ SharedValue<BlockWork> shared_work() const {
        return {smem + kValuesBegin + 48};
    }
    __device__ __forceinline__ SharedValue<const int*> lists_start() const {
        return {smem + kValuesBegin + 64};
    }
    // With a block map: a head's list of blocks of queries...
    __device__ __forceinline__ BlockList list(u32 of_head) const {
        if constexpr (Plan::kBlockMap)
            return list_at(p, lists_start().get(), of_head, work().block);
        return {nullptr};
    }
    // ... whose places count in place of blocks.
    __device__ __forceinline__ BlockRange queries() const {
        if constexpr (Plan::kBlockMap) return list(head).range();
        return range().get();
    }
    __device__ __forceinline__ int block_at(int place) const {
        if constexpr (Plan::kBlockMap) return list(head).block(place);
        return place;
    }
    // Whether this block visits a block of queries of the current head.
    __device__ __forceinline__ bool meets(int m_block) const {
        if constexpr (!Plan::kBlockMap) return true;
        return list(head).has(m_block);
    }
    // How many heads on the block behind this one is, not counting those without any.
    __device__ __forceinline__ auto heads_on(int place, const BlockRange& range) const {
        if constexpr (!Plan::kBlockMap) {
            return place + 1 == range.end;
        } else {
            u32 on = place + 1 == range.end;
            while (on > 0 && head + on < end_head() && list(head + on).count() == 0) ++on;
            return on;
        }
    }
    // Its head counts key/value heads.
    __device__ __forceinline__ BlockWork work() const { return shared_work().get().folded(); }
    __device__ __forceinline__ int first_key() const { return work().block * Plan::kBlockN; }
    // The query heads of this key/value head: from here on, p.group of them.
    __device__ __forceinline__ u32 first_head(const BlockWork& w) const {
        return w.batch * p.num_heads + w.head * p.group;
    }
    __device__ __forceinline__ u32 end_head() const { return first_head(work()) + p.group; }

    // A block of queries is where the ring keeps it, or where it lies.
    __device__ __forceinline__ KTile k_tile() const {
        return input_tile<KTile>(smem, [&] { return k_rows(); }, [&] { return first_key(); });
    }
    __device__ __forceinline__ VTile v_tile() const {
        return input_tile<VTile>(
            smem + kVBegin, [&] { return v_rows(); }, [&] { return first_key(); });
    }
    __device__ __forceinline__ QTile q_tile(int m_block, int stage) const {
        return input_tile<QTile>(
            smem + kRingBegin + stage * kStageBytes, [&] { return q_rows(); },
            [&] { return m_block * Plan::kBlockM; });
    }
    __device__ __forceinline__ DoutTile dout_tile(int m_block, int stage) const {
        return input_tile<DoutTile>(
            smem + kRingBegin + stage * kStageBytes + QTile::kBytes, [&] { return dout_rows(); },
            [&] { return m_block * Plan::kBlockM; });
    }
    __device__ __forceinline__ StatsTile stats_tile(int stage) const {
        return {smem + kRingBegin + stage * kStageBytes + QTile::kBytes + DoutTile::kBytes};
    }
    __device__ __forceinline__ DsTile ds_tile() const { return {scores_base() + kDsBegin}; }
    __device__ __forceinline__ DsTile weights_tile() const {
        return {scores_base() + kWeightsBegin};
    }
    // Without lane addresses kept from step to step where they would not fit the registers.
    __device__ __forceinline__ u32 scores_base() const {
        return kRecent ? u32(opaque(int(smem))) : smem;
    }

    __device__ __forceinline__ Rows<const T> k_rows() const {
        const BlockWork w = work();
        return {head_start<const T>(p.k, p.k_strides, p.batch_sizes, w.batch, w.head), p.k_strides,
                p.seqlen_k, p.head_dim};
    }
    __device__ __forceinline__ Rows<const T> v_rows() const {
        const BlockWork w = work();
        return {head_start<const T>(p.v, p.v_strides, p.batch_sizes, w.batch, w.head), p.v_strides,
                p.seqlen_k, p.head_dim_v};
    }
    __device__ __forceinline__ Rows<const T> q_rows() const {
        return {q_start().get() + i64(head) * p.q_strides.head, p.q_strides, p.seqlen_q,
                p.head_dim};
    }
    __device__ __forceinline__ Rows<const T> dout_rows() const {
        return {dout_start().get() + i64(head) * p.dout_strides.head, p.dout_strides, p.seqlen_q,
                p.head_dim_v};
    }

    __device__ __forceinline__ void load_kv() const {
        load_tile<Plan::kCopyBytes, kThreads>(k_tile(), k_rows(), first_key());
        load_tile<Plan::kCopyBytes, kThreads>(v_tile(), v_rows(), first_key());
    }
    __device__ __forceinline__ void load_q(int m_block, int stage) const {
        load_tile<Plan::kCopyBytes, kThreads>(q_tile(m_block, stage), q_rows(),
                                              m_block * Plan::kBlockM);
        load_tile<Plan::kCopyBytes, kThreads>(dout_tile(m_block, stage), dout_rows(),
                                              m_block * Plan::kBlockM);
        // The workspaces are padded to whole blocks, so nothing here needs a bound.
        constexpr int kPieces = Plan::kBlockM * int(sizeof(Accum)) / 16;
        const Accum* first = static_cast<const Accum*>(p.stats) + i64(head) * 3 * p.stats_pitch +
                             i64(m_block) * Plan::kBlockM;
        for (int i = detached(int(threadIdx.x)); i < 3 * kPieces; i += kThreads) {
            const int which = i / kPieces, col = i % kPieces * (16 / int(sizeof(Accum)));
            cp_async<16>(stats_tile(stage).address(which, col),
                         first + which * p.stats_pitch + col);
        }
    }
};
