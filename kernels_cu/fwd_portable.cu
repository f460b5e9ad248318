// Attention forward for every GPU from sm_75 on, with mma.sync.
//
//     s = scale * q k^T    m, l = running row maximum and sum of p = exp(s - m)    out = p v / l
//
// One block computes kBlockM rows of one head; each warp owns kBlockM / kWarps of them for the
// whole loop, so that the softmax and both products need no exchange between warps. Blocks of
// kBlockN keys arrive in a ring of kStages buffers:
//
//     who             waits for                      then
//     every thread    its own cp.async of block n    __syncthreads: block n is complete, and nobody
//                                                    reads the buffer of block n + 1 any more
//     every thread    -                              starts copying block n - (kStages - 1) into it
//     every warp      -                              S = Q K^T, softmax, O += P V for its own rows
//
// so there is one barrier a step (two with one stage, where loading and computing alternate). P
// never leaves registers: an accumulator fragment is an operand (tile/atom.cuh).
//
// Shared memory: q [kBlockM][kHeadDim] | kStages x (k [kBlockN][kHeadDim], v [kBlockN][kHeadDimV]);
// at the end the same bytes stage out [kBlockM][kHeadDimV] so that rows are written in 16-byte
// pieces | the addresses of k and v, the range of keys, the block's work, with a block map the
// address of its list. With kDirect there is no room for the first two: q, k and v are read from
// global memory (tile/direct_tile.cuh), and the ring's steps only keep the warps together, so that
// they find each other's reads in L1.
//
// Schedule: keys run from the last visible block to the first, so that the masked ends of the range
// and the long full middle are one loop. With a band, blocks of queries run from the last to the
// first, the longest first, over sections of heads whose keys fit in L2 together (attn/work.cuh).
//
// With a block map the range is one of places in the block's list (attn/block_map.cuh), and masks
// are looked at in the places at its end only.
//
// With kStats the kernel writes, in place of out, the row's maximum and sum (attn/stats.cuh) for
// the rows whose lse is so large that float rounding of it would spoil exp(s - lse) in backward;
// blocks without such a row end at once.
#include "attn/block_map.cuh"
#include "attn/dropout.cuh"
#include "attn/mask.cuh"
#include "attn/range.cuh"
#include "attn/score.cuh"
#include "attn/stats.cuh"
#include "attn/softmax.cuh"
#include "attn/work.cuh"
#include "tile/copy.cuh"
#include "tile/direct_tile.cuh"
#include "tile/fragment.cuh"

using T = Plan::Element;
using Accum = AccumOf<T>;
using Atom = AtomFor<T, Plan::kTf32>::type;

inline constexpr int kThreads = Plan::kWarps * kWarpSize;
inline constexpr int kWarpRows = Plan::kBlockM / Plan::kWarps;
inline constexpr int kRowTiles = kWarpRows / 16;
inline constexpr int kRowsPerLane = 2 * kRowTiles;
static_assert(kWarpRows % 16 == 0, "a warp's rows are whole tiles of 16");
static_assert(Plan::kBlockN % 16 == 0, "P is an operand with 16 keys a step");
static_assert(Plan::kHeadDim % 16 == 0 && Plan::kHeadDimV % 16 == 0, "fragments come in pairs");

// With a band, one body for masked steps and one for the long middle, which is then a single block
// for the compiler to order. The wide types' bodies are too long to compile twice.
inline constexpr bool kTwoBodies = Plan::kBand && !Score::kHides && sizeof(T) == 2;
// Whether keys of the sequence may be hidden from a query.
inline constexpr bool kHidden = Plan::kBand || Score::kHides;

// Of the product for the scores. Beside two bodies, or addresses of single elements, operands read
// as far ahead as a product in full allows would spill registers.
inline constexpr int kScoreUnroll =
    kTwoBodies || Plan::kCopyBytes == 0 ? min_of(kSmemUnroll<T>, 4) : kSmemUnroll<T>;

static_assert(!Plan::kDirect || Plan::kStages == 1, "there is nothing to copy ahead");
template <int kRows, int kCols> using Input = InputTile<Plan::kDirect, T, kRows, kCols>;
using QTile = Input<Plan::kBlockM, Plan::kHeadDim>;
using KTile = Input<Plan::kBlockN, Plan::kHeadDim>;
using VTile = Input<Plan::kBlockN, Plan::kHeadDimV>;
using OTile = SmemTile<T, kWarpRows, Plan::kHeadDimV>;
inline constexpr int kStageBytes = KTile::kBytes + (Plan::kStats ? 0 : VTile::kBytes);
inline constexpr int kInputBytes = QTile::kBytes + Plan::kStages * kStageBytes;
inline constexpr int kOutputBytes = Plan::kStats ? 0 : Plan::kWarps * OTile::kBytes;
inline constexpr int kTileBytes = max_of(kInputBytes, kOutputBytes);
// Addresses of k and v, the range of keys, the block's work: what a step needs once at most does
// not occupy a register.
inline constexpr int kSharedValues = Plan::kBlockMap ? 5 : 4;
static_assert(kTileBytes + kSharedValues * 16 == Plan::kSmemBytes, "plan.py's sum is this one");

using BlockWork = Work<Plan::kSlices>;
using Scores = Fragment<Accum, kRowTiles, Plan::kBlockN / 8>;
using Output = Fragment<Accum, kRowTiles, Plan::kHeadDimV / 8>;
using Sees = Visible<MaskFor<Plan::kBand>, Score>;

struct Forward {
    const Params& p;
    const u32 smem;
    const int warp_row;
    const MaskFor<Plan::kBand> mask;
    const Accum scale_log2;
    Softmax<Accum, kRowTiles> softmax;
    bool dirty = false;  // v held inf or NaN in a masked block, which were replaced by zero

    __device__ __forceinline__ Forward(const Params& params, BlockWork w, u32 smem_base)
        : p(params),
          smem(smem_base),
          warp_row(int(threadIdx.x) / kWarpSize * kWarpRows),
          mask(mask_of(p, w.batch)),
          scale_log2(Accum(p.scale_log2)) {
        softmax.init();
        if (threadIdx.x == 0) {
            shared_work().set(w);
            k_start().set(
                head_start<const T>(p.k, p.k_strides, p.batch_sizes, w.batch, w.head / p.group));
            v_start().set(
                head_start<const T>(p.v, p.v_strides, p.batch_sizes, w.batch, w.head / p.group));
            const int first_row = w.block * Plan::kBlockM;
            const Lengths ends = lengths_of(p, w.batch);
            const int last_row = min_of(first_row + Plan::kBlockM, ends.seqlen_q) - 1;
            if constexpr (Plan::kBlockMap) {
                const BlockList list = list_of(p, w.batch, w.head, w.block);
                shared_list().set(list.row);
                range().set(list.range());
            } else {
                range().set(key_blocks(p, ends, first_row, last_row));
            }
        }
        __syncthreads();
    }

    __device__ __forceinline__ SharedValue<const T*> k_start() const { return {smem + kTileBytes}; }
    __device__ __forceinline__ SharedValue<const T*> v_start() const {
        return {smem + kTileBytes + 16};
    }
    // The blocks of keys that these queries see, or their places in the list.
    __device__ __forceinline__ SharedValue<BlockRange> range() const {
        return {smem + kTileBytes + 32};
    }
    __device__ __forceinline__ SharedValue<const int*> shared_list() const {
        return {smem + kTileBytes + 64};
    }
    __device__ __forceinline__ int block_at(int place) const {
        if constexpr (Plan::kBlockMap) return BlockList{shared_list().get()}.block(place);
        return place;
    }
    __device__ __forceinline__ SharedValue<BlockWork> shared_work() const {
        return {smem + kTileBytes + 48};
    }
    __device__ __forceinline__ BlockWork work() const { return shared_work().get().folded(); }
    __device__ __forceinline__ int first_row() const { return work().block * Plan::kBlockM; }
    __device__ __forceinline__ Score score() const {
        const BlockWork w = work();
        return {p, w.batch, w.head};
    }
    __device__ __forceinline__ Sees visible() const { return {mask, score()}; }

    // Built where they are used: strides and lengths come from constant memory and need not live in
    // registers.
    __device__ __forceinline__ Rows<const T> q_rows() const {
        const BlockWork w = work();
        return {head_start<const T>(p.q, p.q_strides, p.batch_sizes, w.batch, w.head), p.q_strides,
                p.seqlen_q, p.head_dim};
    }
    __device__ __forceinline__ Rows<const T> k_rows() const {
        return {k_start().get(), p.k_strides, p.seqlen_k, p.head_dim};
    }
    __device__ __forceinline__ Rows<const T> v_rows() const {
        const Rows<const T> rows(v_start().get(), p.v_strides, p.seqlen_k, p.head_dim_v);
        if constexpr (Plan::kSlices == 1) return rows;
        return rows.from_column(work().slice * Plan::kHeadDimV);
    }
    // A block of keys is where the ring keeps it, or where it lies.
    __device__ __forceinline__ QTile q_tile() const {
        return input_tile<QTile>(smem, [&] { return q_rows(); }, [&] { return first_row(); });
    }
    __device__ __forceinline__ KTile k_tile(int n_block, int stage) const {
        return input_tile<KTile>(
            smem + QTile::kBytes + stage * kStageBytes, [&] { return k_rows(); },
            [&] { return n_block * Plan::kBlockN; });
    }
    __device__ __forceinline__ VTile v_tile(int n_block, int stage) const {
        return input_tile<VTile>(
            smem + QTile::kBytes + stage * kStageBytes + KTile::kBytes, [&] { return v_rows(); },
            [&] { return n_block * Plan::kBlockN; });
    }

    __device__ __forceinline__ void load_q() const {
        load_tile<Plan::kCopyBytes, kThreads>(q_tile(), q_rows(), first_row());
    }
    __device__ __forceinline__ void load_kv(int n_block, int stage) const {
        load_tile<Plan::kCopyBytes, kThreads>(k_tile(n_block, stage), k_rows(),
                                              n_block * Plan::kBlockN);
        if constexpr (!Plan::kStats)
            load_tile<Plan::kCopyBytes, kThreads>(v_tile(n_block, stage), v_rows(),
                                                  n_block * Plan::kBlockN);
    }

    __device__ __forceinline__ void compute_scores(Scores& s, int n_block, int stage) const {
        const auto q = q_tile().part(warp_row, 0);
        const auto k = k_tile(n_block, stage).part(0, 0);
        s.fill(0);
        gemm<Atom, Plan::kHeadDim / Atom::kK, kScoreUnroll>(
            s, [&](int m, int step) { return Atom::load_a(q, 16 * m, step * Atom::kK); },
            [&](Atom::B(&b)[2], int n, int step) { Atom::load_b(b, k, 16 * n, step * Atom::kK); });
    }

    __device__ __forceinline__ void apply_score_and_mask(Scores& s, int n_block,
                                                         bool masked) const {
        const Sees sees = visible();
        if constexpr (Score::kProgram) {
            s.for_each(detached(first_row() + warp_row), n_block * Plan::kBlockN,
                       [&](Accum& x, int i, int j) {
                           x = sees.score.value(sees.score.scaled(x), sees.query(i), sees.key(j));
                       });
        } else {
            apply_scale_sign<Plan::kScaleSign>(s);
        }
        if (!masked) return;
        const int row = first_row() + warp_row;
        s.for_each(Score::kHides ? detached(row) : row, n_block * Plan::kBlockN,
                   [&](Accum& x, int i, int j) { x = sees(i, j) ? x : -infinity<Accum>(); });
    }
    // Weights that dropout does not keep become 0; the others are scaled with the output.
    __device__ __forceinline__ void drop(Scores& s, int n_block) const {
        FragmentBits<Scores::kRowTiles, Scores::kColTiles> kept;
        score().dropout().keep(kept, first_row() + warp_row, n_block * Plan::kBlockN);
        for_each_place<Scores::kRowTiles, Scores::kColTiles>([&](int m, int n, int r) {
            s.x[m][n][r] = kept.get(m, n, r) ? s.x[m][n][r] : Accum(0);
        });
    }

    // O += P V.
    __device__ __forceinline__ void accumulate(Output& o, const Scores& s, int n_block, int stage,
                                               bool masked) {
        VTile v = v_tile(n_block, stage);
        if constexpr (kHidden)
            if (masked) dirty |= find_nonfinite<true, kThreads>(v);
        const Operand<Atom, kRowTiles, Plan::kBlockN / Atom::kK> weights(s);
        const auto columns = v.part(0, 0);
        gemm<Atom, Plan::kBlockN / Atom::kK, Plan::kBlockN>(
            o, [&](int m, int step) { return weights.a[m][step]; },
            [&](Atom::B(&b)[2], int n, int step) {
                Atom::load_b_trans(b, columns, 16 * n, step * Atom::kK);
            });
    }

    __device__ __forceinline__ void step(Output& o, int n_block, int stage, bool masked) {
        Scores s;
        compute_scores(s, n_block, stage);
        apply_score_and_mask(s, n_block, masked);
        softmax.update(s, scale_log2, [&](const Accum(&factor)[kRowsPerLane]) {
            if constexpr (!Plan::kStats) o.for_each_row([&](Accum& x, int q) { x *= factor[q]; });
        });
        if constexpr (Score::kDropout && !Plan::kStats) drop(s, n_block);
        if constexpr (!Plan::kStats) accumulate(o, s, n_block, stage, masked);
    }
    __device__ __forceinline__ RowEnd<Accum> end(int q) const {
        return {softmax.reference[q], softmax.sum[q], score().sink()};
    }

    // f(row of the sequence, q) once for each row of this quad that exists.
    template <class F> __device__ __forceinline__ void for_each_row(F f) const {
        if (lane_id() % 4 != 0) return;
        const int first = first_row() + warp_row + lane_id() / 4;
#pragma unroll
        for (int q = 0; q < kRowsPerLane; ++q) {
            const int row = first + 16 * (q / 2) + 8 * (q % 2);
            if (row < p.seqlen_q) f(row, q);
        }
    }

    __device__ __forceinline__ void store_out(Output& o) const {
        Accum inverse[kRowsPerLane];
#pragma unroll
        for (int q = 0; q < kRowsPerLane; ++q) {
            inverse[q] = Score::kSinks ? end(q).inverse : softmax.inverse_sum(q);
            if constexpr (Score::kDropout) inverse[q] *= score().keep_scale();
        }
        o.for_each_row([&](Accum& x, int q) { x *= inverse[q]; });
        const OTile tile{smem + int(threadIdx.x) / kWarpSize * OTile::kBytes};
        __syncthreads();  // other warps may still read the tiles under this one
        store_fragment(tile.part(0, 0), o);
        __syncwarp();
        const BlockWork w = work();
        T* start = head_start<T>(p.out, p.out_strides, p.batch_sizes, w.batch, w.head);
        const Rows<T> rows(start, p.out_strides, p.seqlen_q, p.head_dim_v);
        store_tile<Plan::kStoreBytes, kWarpSize>(tile, rows.from_column(w.slice * Plan::kHeadDimV),
                                                 w.block * Plan::kBlockM + warp_row,
                                                 detached(lane_id()));
    }
    __device__ __forceinline__ Accum* lse_start() const {
        const BlockWork w = work();
        return head_start<Accum>(p.lse, p.lse_strides, p.batch_sizes, w.batch, w.head);
    }
    __device__ __forceinline__ void store_lse() const {
        Accum* lse = lse_start();
        for_each_row([&](int row, int q) {
            lse[row * p.lse_strides.row] =
                Score::kSinks ? end(q).lse : softmax.lse(q, scale_log2);
        });
    }

    // Whether any row of a block needs new statistics: asked before anything is set up for it,
    // since hardly any does. They all read their lse again in store_stats.
    static __device__ __forceinline__ bool any_large_lse(const Params& p, const BlockWork& w) {
        const Accum* lse =
            head_start<const Accum>(p.lse, p.lse_strides, p.batch_sizes, w.batch, w.head);
        const int first = w.block * Plan::kBlockM, end = min_of(first + Plan::kBlockM, p.seqlen_q);
        bool large = false;
        for (int row = first + int(threadIdx.x); row < end; row += kThreads)
            large |= is_large(p, lse[row * p.lse_strides.row]);
        return __syncthreads_or(large);
    }
    static __device__ __forceinline__ bool is_large(const Params& p, Accum lse) {
        return fabs(lse) > Accum(p.lse_threshold) && lse != -infinity<Accum>();
    }
    __device__ __forceinline__ void store_stats() const {
        Accum* lse = lse_start();
        const BlockWork w = work();
        for_each_row([&](int row, int q) {
            if (!is_large(p, lse[row * p.lse_strides.row])) return;
            Accum* stats = static_cast<Accum*>(p.stats) +
                           (i64(w.batch) * p.num_heads + w.head) * 3 * p.stats_pitch;
            stats[row] = softmax.reference[q];
            if constexpr (Score::kSinks) {
                const RowEnd<Accum> row_end = end(q);
                stats[p.stats_pitch + row] =
                    sizeof(T) == 2 ? log2_of(row_end.total) + row_end.above : row_end.inverse;
            } else {
                stats[p.stats_pitch + row] = row_sum_of<T>(softmax.sum[q]);
            }
        });
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, Plan::kBlocksPerSm)
    fwd_portable(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) unsigned char smem[];
    BlockWork work(blockIdx.x, p.num_blocks, p.num_heads, p.section, p.num_sectioned);
    if constexpr (Plan::kBand) work.block = int(p.num_blocks) - 1 - work.block;
    if constexpr (Plan::kStats)
        if (!Forward::any_large_lse(p, work)) return;
    Forward forward(p, work, smem_address(smem));

    Output o;
    o.fill(0);
    forward.load_q();
    int place = forward.range().get().end - 1, stage = 0;
    for (int ahead = 0; ahead < Plan::kStages - 1; ++ahead) {
        if (place - ahead >= forward.range().get().begin)
            forward.load_kv(forward.block_at(place - ahead), ahead);
        cp_async_commit_group();
    }
    for (; place >= forward.range().get().begin; --place) {
        const BlockRange range = forward.range().get();
        const int n_block = forward.block_at(place);
        if constexpr (Plan::kStages == 1) {
            __syncthreads();
            forward.load_kv(n_block, 0);
            cp_async_commit_group();
            cp_async_wait_group<0>();
            __syncthreads();
        } else {
            cp_async_wait_group<Plan::kStages - 2>();
            __syncthreads();
            const int next = place - (Plan::kStages - 1);
            if (next >= range.begin)
                forward.load_kv(forward.block_at(next),
                                (stage + Plan::kStages - 1) % Plan::kStages);
            cp_async_commit_group();
        }
        const bool masked = (Score::kHides && !Plan::kBlockMap) || place >= range.full_end ||
                            place < range.full_begin;
        if constexpr (!kTwoBodies) {
            forward.step(o, n_block, stage, (kHidden || Plan::kTail) && masked);
        } else if (masked) {
            forward.step(o, n_block, stage, true);
        } else {
            forward.step(o, n_block, stage, false);
        }
        stage = (stage + 1) % Plan::kStages;
    }
    cp_async_wait_group<0>();

    if constexpr (kHidden && !Plan::kStats)
        if (forward.dirty) {
            const int first_row = forward.first_row() + forward.warp_row;
            if constexpr (Plan::kBlockMap)
                for (int at = forward.range().get().full_end; at < forward.range().get().end; ++at)
                    restore_nonfinite<true>(o, first_row, 0, forward.v_rows(),
                                            forward.block_at(at) * Plan::kBlockN,
                                            (forward.block_at(at) + 1) * Plan::kBlockN,
                                            forward.visible());
            else
                restore_nonfinite<true>(o, first_row, 0, forward.v_rows(),
                                        forward.range().get().begin * Plan::kBlockN,
                                        forward.range().get().end * Plan::kBlockN,
                                        forward.visible());
        }
    forward.softmax.finish();
    if constexpr (Plan::kStats) {
        forward.store_stats();
    } else {
        if (p.lse != nullptr && forward.work().slice == 0) forward.store_lse();
        forward.store_out(o);
    }
}
