// The shared memory of Hopper's backward kernels: how large everything is, where it lies, and the
// fragments that go with it. attn/backward_sm90.cuh says who uses it when.
#pragma once
#include "../ptx/mbarrier.cuh"
#include "../ptx/wgmma.cuh"
#include "../tile/fragment.cuh"
#include "block_map.cuh"
#include "range.cuh"
#include "transposed.cuh"

using T = Plan::Element;

inline constexpr int kConsumerThreads = 2 * kWarpgroupSize;
inline constexpr int kConsumerWarps = kConsumerThreads / kWarpSize;
static_assert(sizeof(T) == 2, "wgmma with 16-bit operands");
static_assert(Plan::kHeadDim % 16 == 0 && Plan::kHeadDimV % 16 == 0, "k is 16");
static_assert(Plan::kBlockM == 64 || Plan::kBlockM == 128, "dq is cut into parts of 64 rows");

inline constexpr int kPanels = (Plan::kHeadDim + 63) / 64;
inline constexpr int kPanelsV = (Plan::kHeadDimV + 63) / 64;
inline constexpr int kKeyPanel = Plan::kBlockN * kPanelBytes;
inline constexpr int kQueryPanel = Plan::kBlockM * kPanelBytes;
inline constexpr int kKBytes = kPanels * kKeyPanel;
inline constexpr int kVBytes = kPanelsV * kKeyPanel;
inline constexpr int kQBytes = kPanels * kQueryPanel;
inline constexpr int kDoutBytes = kPanelsV * kQueryPanel;
inline constexpr int kDsBytes = Plan::kBlockN / 64 * kQueryPanel;
// What dS needs of the scores: their derivative enters the weights where nothing else needs these
// as they are, else it or the scores themselves are kept.
inline constexpr bool kSums = Score::kGradients || Score::kSquares;
inline constexpr bool kKeepsFragment = kSums && (Score::kKeepsScore || !Score::kUnit);
inline constexpr bool kFolds = Score::kProgram && !Score::kUnit && !kKeepsFragment;
// Fragments in shared memory: P^T on its way from one warpgroup to the other, dS^T while gradients
// of arrays are summed or it leaves as a square; what is kept.
inline constexpr int kFragmentBytes = Plan::kBlockM * Plan::kBlockN * 4;
inline constexpr int kFragments = kKeepsFragment ? 2 : Plan::kExchange || kSums ? 1 : 0;
// Two words of bits for each thread, from one warpgroup to the other.
inline constexpr int kBitsBytes = Plan::kExchange && Score::kProgram ? 8 * kWarpgroupSize : 0;
inline constexpr int kExchangeBytes = kFragments * kFragmentBytes + kBitsBytes;
inline constexpr int kRowBytes = Plan::kBlockM * 4;  // of one statistic

// A part of dQ is 64 rows: of all columns where a block has 128 rows, of one panel's otherwise.
inline constexpr bool kDqByRows = Plan::kBlockM == 128;
inline constexpr int kDqParts = kDqByRows ? 2 : kPanels;
inline constexpr int kDqCols = kDqByRows ? Plan::kHeadDim : 64;
inline constexpr int kDqTiles = kDqCols / 8;
inline constexpr int kDqWarpBytes = kDqTiles * 512;
inline constexpr int kDqBytes = Plan::kNeedDq ? 4 * kDqWarpBytes : 0;
static_assert(Plan::kAccumTiles == (kDqByRows ? kDqTiles : 8 * kPanels), "cast.cu reads this");
// The buffer that a part leaves through; where there is a third, it is P^T's place.
static_assert(Plan::kDqBuffers == 2 || (Plan::kExchange && kDqParts > 2), "P^T is not there");
__device__ constexpr bool is_third(int buffer) { return Plan::kDqBuffers == 3 && buffer == 2; }
__device__ constexpr int dq_buffer(int part) { return is_third(part) ? 2 : part % 2; }
inline constexpr int kSquareBytes = 64 * 64 * 4;
inline constexpr int kSquares = Score::kSquares ? Plan::kBlockN / 64 : 0;  // of a step
static_assert(kSquares == 0 || Plan::kBlockM == 64, "64 queries and a warpgroup's 64 keys");
inline constexpr bool kOrdered = Plan::kDeterministic && (Plan::kNeedDq || Score::kSquares);

inline constexpr int kVBegin = kKBytes;
inline constexpr int kQBegin = kVBegin + kVBytes;
inline constexpr int kDoutBegin = kQBegin + Plan::kStages * kQBytes;
inline constexpr int kDsBegin = kDoutBegin + Plan::kStagesV * kDoutBytes;
inline constexpr int kExchangeBegin = kDsBegin + Plan::kDsStages * kDsBytes;
inline constexpr int kDqBegin = kExchangeBegin + kExchangeBytes;
inline constexpr int kStatsBegin = kDqBegin + 2 * kDqBytes;
inline constexpr int kDeltaBegin = kStatsBegin + Plan::kStages * 2 * kRowBytes;
inline constexpr int kBarriers = kDeltaBegin + Plan::kStagesV * kRowBytes;
// Barriers before those of the rings.
inline constexpr int kRings = 2 + Plan::kDqBuffers * (1 + Plan::kReducers);
inline constexpr int kSquareBarriers = kRings + 2 * (Plan::kStages + Plan::kStagesV);
inline constexpr int kNumBarriers = kSquareBarriers + 2 * kSquares;
static_assert(Plan::kReducers == 1 || Plan::kStages == 2, "a stage of q is a reducer's step");
static_assert(!Plan::kStoreFirst || kOrdered, "somebody is the first");
inline constexpr int kRangeBegin = kBarriers + (8 * kNumBarriers + 15) / 16 * 16;
static_assert(kRangeBegin + 16 * (1 + Score::kStarts) + 1024 == Plan::kSmemBytes,
              "families/sm90_backward.py's sum is this one");

// 64 keys of a warpgroup and the block's queries.
using Scores = Fragment<float, 1, Plan::kBlockM / 8>;
using KeyGrad = Fragment<float, 1, Plan::kHeadDim / 8>;
using ValueGrad = Fragment<float, 1, Plan::kHeadDimV / 8>;
using QueryGrad = Fragment<float, 1, kDqTiles>;
// Whether there are steps in which pairs do not count.
inline constexpr bool kMasks = kHidden || Plan::kTail;
using Kept = KeptOf<Scores>;
using Block = TransposedBlock<Scores>;
// P^T or dS^T as the left operand of a product: 16 queries a step.
inline constexpr int kSteps = Plan::kBlockM / 16;
using Weights = u32[kSteps][4];

struct Shared {
    u32 base;

    __device__ __forceinline__ u32 k() const { return base; }
    __device__ __forceinline__ u32 v() const { return base + kVBegin; }
    __device__ __forceinline__ u32 q(int stage) const { return base + kQBegin + stage * kQBytes; }
    __device__ __forceinline__ u32 dout(int stage) const {
        return base + kDoutBegin + stage * kDoutBytes;
    }
    __device__ __forceinline__ u32 ds(int stage) const {
        return base + kDsBegin + stage * kDsBytes;
    }
    __device__ __forceinline__ u32 exchange() const { return base + kExchangeBegin; }
    __device__ __forceinline__ u32 dq(int buffer) const {
        return is_third(buffer) ? exchange() : base + kDqBegin + buffer * kDqBytes;
    }
    __device__ __forceinline__ u32 row_max(int stage) const {
        return base + kStatsBegin + stage * 2 * kRowBytes;
    }
    __device__ __forceinline__ u32 row_sum(int stage) const { return row_max(stage) + kRowBytes; }
    __device__ __forceinline__ u32 delta(int stage) const {
        return base + kDeltaBegin + stage * kRowBytes;
    }
    __device__ __forceinline__ u32 barrier(int n) const { return base + kBarriers + 8 * n; }
    __device__ __forceinline__ u32 k_full() const { return barrier(0); }
    __device__ __forceinline__ u32 v_full() const { return barrier(1); }
    __device__ __forceinline__ u32 dq_empty(int buffer) const { return barrier(2 + buffer); }
    __device__ __forceinline__ u32 dq_full(int buffer, int reducer) const {
        return barrier(2 + Plan::kDqBuffers * (1 + reducer) + buffer);
    }
    __device__ __forceinline__ u32 q_full(int stage) const { return barrier(kRings + stage); }
    __device__ __forceinline__ u32 q_empty(int stage) const {
        return barrier(kRings + Plan::kStages + stage);
    }
    __device__ __forceinline__ u32 dout_full(int stage) const {
        return barrier(kRings + 2 * Plan::kStages + stage);
    }
    __device__ __forceinline__ u32 dout_empty(int stage) const {
        return barrier(kRings + 2 * Plan::kStages + Plan::kStagesV + stage);
    }
    __device__ __forceinline__ u32 square_full(int n) const { return barrier(kSquareBarriers + n); }
    __device__ __forceinline__ u32 square_empty(int n) const {
        return barrier(kSquareBarriers + kSquares + n);
    }
    // The blocks of queries that see the block's keys: for all threads, registers are full.
    __device__ __forceinline__ SharedValue<BlockRange> range() const {
        return {base + kRangeBegin};
    }
    // Of the score's arrays, where the batch entry's begin: as an address in global memory, which
    // the compiler could not tell of a pointer from here.
    __device__ __forceinline__ SharedValue<u64> start(int n) const {
        return {base + kRangeBegin + 16 * (1 + n)};
    }
    // In its place with a block map.
    __device__ __forceinline__ SharedValue<GroupLists> lists() const {
        return {base + kRangeBegin};
    }
    __device__ __forceinline__ void init() const {
        for (int n = 0; n < kRings; ++n)
            mbarrier_init(barrier(n), n < 2 + Plan::kDqBuffers ? 1 : 4);
        for (int n = 0; n < Plan::kStages; ++n) {
            mbarrier_init(q_full(n), 1);
            mbarrier_init(q_empty(n), kConsumerWarps);
        }
        for (int n = 0; n < Plan::kStagesV; ++n) {
            mbarrier_init(dout_full(n), 1);
            mbarrier_init(dout_empty(n), kConsumerWarps);
        }
        for (int n = 0; n < kSquares; ++n)
            mbarrier_init(square_full(n), 4), mbarrier_init(square_empty(n), 1);
        fence_mbarrier_init();
    }
};

// A place in a ring and how often it was passed.
template <int kStages> struct Cursor {
    int stage = 0;
    u32 phase = 0;
    __device__ __forceinline__ void next() {
        if (++stage == kStages) stage = 0, phase ^= 1;
    }
};
