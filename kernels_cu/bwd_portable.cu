// Attention backward for every GPU from sm_75 on, with mma.sync.
//
//     p = exp(s - lse)    dp = dout v^T          ds = p (dp - delta)
//     dv = p^T dout       dk = scale * ds^T q    dq = scale * ds k
//
// One block owns kBlockN keys of one key/value head and walks over the query heads of its group and
// their blocks of kBlockM queries. Everything is computed transposed: a warp owns key rows of S^T =
// K Q^T and of dP^T = V dO^T, so P^T and dS^T are accumulators that become left operands of dV and
// dK without leaving registers. dK and dV stay in registers for the whole walk, summed over the
// group in float32 and in a fixed order. Only dS^T goes through shared memory, for dQ, whose sum
// runs over all warps' keys.
//
//     barrier (all threads)    what it orders
//     start of a step          block m's copies are complete, and nobody reads block m + 1's
//                              buffers or dS^T any more
//     after dS^T is written    dS^T (and P^T where warps share keys) is complete
//     masked steps only        all have read q and dout before their inf and NaN become zero
//
// With kShare = 2, two warps share their keys: each takes half of the queries in S^T and dP^T, then
// half of the columns in dK and dV, with the other's P^T and dS^T from shared memory. Warps then
// hold twice the rows and read a fifth less: faster at head_dim 128 (296 against 269 TFLOP/s at
// seqlen 4096), slower at 64 (247 against 281). Tried and dropped: one warp of a pair for S and dV,
// the other for dP and dK (275, and P rounded before dS); operands read ahead by hand (no change);
// padded rows (LDGSTS writes each line twice).
//
// dQ sums over key blocks, which are different thread blocks: each adds its part to dq_accum in L2
// (float32, laid out as accumulator fragments, so that a warp adds 512 contiguous bytes at a time).
// With kDeterministic they take turns (attn/turn.cuh), the last key block first: with a causal band
// it is the one whose first queries these are, so all start at once and nobody waits.
//
// With a block map blocks are places in a list of the block's own for each query head
// (attn/block_map.cuh); masks are looked at in the places at its end only. Turns are counted among
// the blocks of keys that visit the block of queries.
//
// With kSlices > 1, blocks share the keys and each computes kSliceDim columns of dk and dq and
// kSliceDimV of dv, where all of them would not fit the registers. bwd_portable_tiles.cuh has the
// constants and the shared-memory map, bwd_portable_scores.cuh what a score function, hidden keys
// and dropout do to a block of S^T and dS^T.
#include "attn/stats.cuh"
#include "bwd_portable_scores.cuh"

// With a band, one body for masked steps and one for the long middle, which is then a single block
// for the compiler to order. The wide types' bodies are too long to compile twice; where products
// are calls, or every element of the next block is waited for, there is little to order. On
// recent GPUs two bodies without dQ exceed the registers.
inline constexpr bool kTwoBodies = Plan::kBand && !Score::kHides && sizeof(T) == 2 &&
                                   Plan::kCopyBytes > 0 && Atom::kTensorCore &&
                                   (Plan::kNeedDq || !kRecent);
// Of the product for dQ: written out in full, its operands are read so far ahead, beside dK and dV,
// that registers spill.
inline constexpr int kDqUnroll =
    min_of(kSmemUnroll<T>, kRecent && Plan::kCopyBytes == 0 ? 2 : 4);

struct Backward : BackwardScores {
    const Accum scale_log2;
    // What held inf or NaN: k; or a masked block of q or dout, where they were replaced by zero.
    enum Dirty : u32 { kDirtyK = 1, kDirtyQ = 2, kDirtyDout = 4 };
    u32 dirty = 0;
    int place = 0;  // of the current block, with a block map

    __device__ __forceinline__ Backward(const Params& params, BlockWork w, u32 smem_base)
        : BackwardScores(params, w, smem_base),
          scale_log2(Accum(p.scale_log2)) {}

    // P^T of one block.
    __device__ __forceinline__ void compute_weights(Scores& s, Kept& kept, int m_block, int stage,
                                                    bool masked) const {
        const auto k = k_tile().part(warp_row, 0);
        const auto q = q_tile(m_block, stage).part(share * kQueries, 0);
        s.fill(0);
        gemm<Atom, Plan::kHeadDim / Atom::kK, kSmemUnroll<T>>(
            s, [&](int m, int step) { return Atom::load_a(k, 16 * m, step * Atom::kK); },
            [&](Atom::B(&b)[2], int n, int step) { Atom::load_b(b, q, 16 * n, step * Atom::kK); });
        if constexpr (Score::kProgram)
            apply_score(s, kept, m_block, masked);
        else
            apply_scale_sign<Plan::kScaleSign>(s);
        with_stats(s, stage, 0, [&](Accum& x, Accum row_max) { x -= row_max; });
        with_stats(s, stage, 1, [&](Accum& x, Accum sum) { x = weight<T>(x * scale_log2, sum); });
        if (masked) hide(s, kept, m_block);
    }
    // dP^T of one block.
    __device__ __forceinline__ void multiply_dout(Scores& dp, int m_block, int stage) const {
        const auto v = v_tile().part(warp_row, 0);
        const auto dout = dout_tile(m_block, stage).part(share * kQueries, 0);
        dp.fill(0);
        gemm<Atom, Plan::kHeadDimV / Atom::kK, kSmemUnroll<T>>(
            dp, [&](int m, int step) { return Atom::load_a(v, 16 * m, step * Atom::kK); },
            [&](Atom::B(&b)[2], int n, int step) {
                Atom::load_b(b, dout, 16 * n, step * Atom::kK);
            });
    }
    // dP^T to dS^T.
    __device__ __forceinline__ void to_ds(Scores& ds, Scores& weights, const Kept& kept,
                                          int m_block, int stage, bool masked) const {
        if constexpr (Score::kDropout) drop_from(ds, kept);
        with_stats(ds, stage, 2, [&](Accum& x, Accum delta) { x -= delta; });
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
            for (int n = 0; n < Scores::kColTiles; ++n)
#pragma unroll
                for (int r = 0; r < 4; ++r) ds.x[m][n][r] *= weights.x[m][n][r];
        if constexpr (Score::kGradients || !Score::kUnit) to_score(ds, kept, m_block);
        if (masked) hide(ds, kept, m_block);
    }
    // c += (this warp's keys x queries) * (columns of a tile stored [query][dim]), for the queries
    // whose weights this warp computed...
    template <class C, class Tile>
    __device__ __forceinline__ void accumulate_own(C& c, const Scores& own, Tile tile,
                                                   int first_col) const {
        const auto columns = tile.template part<8 * C::kColTiles>(share * kQueries, first_col);
        const Operand<Atom, kRowTiles, kQueries / Atom::kK> operand(own);
        gemm<Atom, kQueries / Atom::kK, kQueries>(
            c, [&](int m, int step) { return operand.a[m][step]; },
            [&](Atom::B(&b)[2], int n, int step) {
                Atom::load_b_trans(b, columns, 16 * n, step * Atom::kK);
            });
    }
    // ... and for those of the warp that shares its keys, from their common tile.
    template <class C, class Tile>
    __device__ __forceinline__ void accumulate_other(C& c, DsTile common, Tile tile,
                                                     int first_col) const {
        const int other = (1 - share) * kQueries;
        const auto columns = tile.template part<8 * C::kColTiles>(other, first_col);
        const auto rows = common.part<kQueries>(warp_row, other);
        gemm<Atom, kQueries / Atom::kK, kQueries>(
            c, [&](int m, int step) { return Atom::load_a(rows, 16 * m, step * Atom::kK); },
            [&](Atom::B(&b)[2], int n, int step) {
                Atom::load_b_trans(b, columns, 16 * n, step * Atom::kK);
            });
    }
    __device__ __forceinline__ int column() const {
        return slice() * Plan::kSliceDim + share * kColumns;
    }
    __device__ __forceinline__ int column_v() const {
        return slice() * Plan::kSliceDimV + share * kColumnsV;
    }

    // The blocks of keys that a block of queries sees end here.
    __device__ __forceinline__ int end_of_keys(int m_block) const {
        if constexpr (!Plan::kBand) return int(p.num_blocks);
        const int first = m_block * Plan::kBlockM;
        const int last = min_of(first + Plan::kBlockM, p.seqlen_q) - 1;
        return key_blocks(p, {p.seqlen_q, p.seqlen_k}, first, last).end;
    }
    __device__ __forceinline__ void accumulate_dq(int m_block, KTile k_input) {
        const int warp = detached(int(threadIdx.x)) / kWarpSize;
        if (kDqWarps < Plan::kWarps && warp >= kDqWarps) return;
        const int row = warp % Plan::kDqWarpsM * kDqRows, col = warp / Plan::kDqWarpsM * kDqCols;
        const BlockWork w = work();
        const int slice_col = w.slice * Plan::kSliceDim + col;
        const i64 sums = (i64(head) * Plan::kSlices + w.slice) * p.num_m_blocks + m_block;
        const u32 seen =
            turn.look(static_cast<u32*>(p.flags) + sums * kDqWarps + warp,
                      Plan::kBlockMap ? list(head).turn(place, p.num_m_blocks)
                                      : u32(end_of_keys(m_block) - 1 - w.block));
        const auto ds = ds_tile().part<kDqRows>(0, row);
        const auto k = k_input.template part<kDqCols>(0, slice_col);
        QueryGrad dq;
        dq.fill(0);
        gemm<Atom, Plan::kBlockN / Atom::kK, kDqUnroll>(
            dq, [&](int m, int step) { return Atom::load_a_trans(ds, 16 * m, step * Atom::kK); },
            [&](Atom::B(&b)[2], int n, int step) {
                Atom::load_b_trans(b, k, 16 * n, step * Atom::kK);
            });
        turn.wait(seen);
        add_dq(dq, m_block, row, slice_col);
    }

    __device__ __forceinline__ void add_dq(QueryGrad& dq, int m_block, int row, int col) const {
        Accum* accum = static_cast<Accum*>(p.dq_accum) + i64(head) * p.accum_pitch;
        const i64 tile_row = (i64(m_block) * Plan::kBlockM + row) / 16;
#pragma unroll
        for (int m = 0; m < QueryGrad::kRowTiles; ++m)
#pragma unroll
            for (int n = 0; n < QueryGrad::kColTiles; ++n)
                add_fragment<Plan::kAccumVector>(
                    accum + ((tile_row + m) * Plan::kAccumTiles + col / 8 + n) * 128, dq.x[m][n]);
    }

    __device__ __forceinline__ Rows<T> grad_rows(void* array, const Strides& strides,
                                                 i32 dim) const {
        const BlockWork w = work();
        T* start = head_start<T>(array, strides, p.batch_sizes, w.batch, w.head);
        return {start, strides, p.seqlen_k, dim};
    }
    // dk, dv of this block, staged in shared memory so that rows leave in 16-byte pieces.
    __device__ __forceinline__ void store(KeyGrad& dk, ValueGrad& dv) const {
        __syncthreads();  // other warps may still read k
        const Accum scale = Accum(p.scale);
        dk.for_each(0, 0, [&](Accum& x, int, int) { x *= scale; });
        const DkTile dk_tile{smem};
        const DvTile dv_tile{smem + kVBegin};
        store_fragment(dk_tile.part<kColumns>(warp_row, share * kColumns), dk);
        store_fragment(dv_tile.part<kColumnsV>(warp_row, share * kColumnsV), dv);
        __syncthreads();
        store_tile<Plan::kStoreBytes, kThreads>(
            dk_tile,
            grad_rows(p.dk, p.dk_strides, p.head_dim).from_column(slice() * Plan::kSliceDim),
            first_key(), detached(int(threadIdx.x)));
        store_tile<Plan::kStoreBytes, kThreads>(
            dv_tile,
            grad_rows(p.dv, p.dv_strides, p.head_dim_v).from_column(slice() * Plan::kSliceDimV),
            first_key(), detached(int(threadIdx.x)));
    }

    __device__ __forceinline__ void step(KeyGrad& dk, ValueGrad& dv, int m_block, int stage,
                                         bool masked) {
        Scores weights, ds;
        Kept kept;
        compute_weights(weights, kept, m_block, stage, masked);
        turn.announce();
        // Nothing else keeps the next product's operands from being read beside all of this one's.
        if constexpr (Plan::kBand && !Plan::kNeedDq) __syncwarp();
        multiply_dout(ds, m_block, stage);
        QTile q = q_tile(m_block, stage);
        DoutTile dout = dout_tile(m_block, stage);
        // 0 * NaN is NaN: a query and a key that do not see each other must not reach each other's
        // gradients.
        if constexpr (kHidden && Plan::kNeedDkv)
            if (masked) {
                __syncthreads();  // all have read q and dout as they are
                if (find_nonfinite<true, kThreads, 1>(q)) dirty |= kDirtyQ;
                if (find_nonfinite<true, kThreads, 1>(dout)) dirty |= kDirtyDout;
            }
        constexpr bool kShared = Plan::kShare > 1;
        Scores dropped = weights;
        if constexpr (Score::kDropout) drop_from(dropped, kept);
        if constexpr (kShared)
            store_fragment(weights_tile().part<kQueries>(warp_row, share * kQueries), dropped);
        // dV stands between dP and dS, so that the tensor cores work while dS is formed.
        if constexpr (Plan::kNeedDkv) accumulate_own(dv, dropped, dout, column_v());
        to_ds(ds, weights, kept, m_block, stage, masked);
        if constexpr (Plan::kNeedDq || kShared) {
            store_fragment(ds_tile().part<kQueries>(warp_row, share * kQueries), ds);
            __syncthreads();
        }
        if constexpr (Plan::kNeedDkv) {
            if constexpr (kShared) accumulate_other(dv, weights_tile(), dout, column_v());
            accumulate_own(dk, ds, q, column());
            if constexpr (kShared) accumulate_other(dk, ds_tile(), q, column());
        }
        if constexpr (Plan::kNeedDq) {
            KTile k = k_tile();
            if (kHidden && (dirty & kDirtyK)) find_nonfinite<true, kThreads, 1>(k);
            accumulate_dq(m_block, k);
            if (kHidden && (dirty & kDirtyK)) {  // the next scores need k as it is
                __syncthreads();
                load_tile<Plan::kCopyBytes, kThreads>(k, k_rows(), first_key());
                cp_async_commit_group();
            }
        }
    }

    // What the zeros in place of inf and NaN have kept out of dk and dv, for the queries that see a
    // key...
    __device__ __forceinline__ void restore_dkv(KeyGrad& dk, ValueGrad& dv, int first, int last) {
        const int first_row = first_key() + warp_row;
        for (head = end_head() - p.group; head < end_head(); ++head) {
            const Sees visible = this->visible();
            const auto sees = [&](int j, int i) {
                return visible.transposed(j, i) && meets(i / Plan::kBlockM);
            };
            if (dirty & kDirtyDout)
                restore_nonfinite<true>(dv, first_row, 0, dout_rows().from_column(column_v()),
                                        first, last, sees);
            if (dirty & kDirtyQ)
                restore_nonfinite<false>(dk, first_row, 0, q_rows().from_column(column()), first,
                                         last, sees);
        }
    }
    // ... and out of dq. NaN plus anything is NaN, so these additions need no turn.
    __device__ __forceinline__ void restore_dq(int first, int last) {
        const Rows<const T> keys = k_rows();
        const int first_j = first_key(), last_j = min_of(first_j + Plan::kBlockN, keys.count);
        for (head = end_head() - p.group; head < end_head(); ++head) {
            const Sees sees = visible();
            Accum* accum = static_cast<Accum*>(p.dq_accum) + i64(head) * p.accum_pitch;
#pragma unroll 1
            for (int j = first_j; j < last_j; ++j)
#pragma unroll 1
                for (int d = 0; d < keys.dim; ++d) {
                    const T raw = *keys.at(j, d);
                    if (!is_nonfinite(raw)) continue;
#pragma unroll 1
                    for (int i = first + int(threadIdx.x); i < last; i += kThreads)
                        if (sees(i, j) && meets(i / Plan::kBlockM))
                            red_add(
                                accum + fragment_index<Plan::kAccumVector, Plan::kAccumTiles>(i, d),
                                Accum(to_float(raw)) * 0);
                }
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, Plan::kBlocksPerSm)
    bwd_portable(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) unsigned char smem[];
    const u32 base = smem_address(smem);
    const u32 ticket = take_ticket<kOrdered>(p.ticket, base);
    BlockWork work(ticket, p.num_blocks, p.num_heads / p.group, p.section, p.num_sectioned);
    if constexpr (Plan::kDeterministic) work.block = int(p.num_blocks) - 1 - work.block;
    Backward backward(p, work, base);

    KeyGrad dk;
    ValueGrad dv;
    dk.fill(0);
    dv.fill(0);
    backward.load_kv();
    int place = backward.range().get().begin, stage = 0;
    bool more = place < backward.range().get().end;
    if constexpr (Plan::kBlockMap) {
        while (backward.head < backward.end_head() && backward.list(backward.head).count() == 0)
            ++backward.head;
        place = 0, more = backward.head < backward.end_head();
    }
    if (Plan::kStages > 1 && more) backward.load_q(backward.block_at(place), 0);
    cp_async_commit_group();
    if constexpr (kHidden) {
        cp_async_wait_group<0>();
        __syncthreads();
        KTile k = backward.k_tile();
        if (find_nonfinite<false, kThreads>(k)) backward.dirty |= Backward::kDirtyK;
    }
    while (more) {
        const BlockRange range = backward.queries();
        const int m_block = backward.block_at(place);
        const auto heads_on = backward.heads_on(place, range);
        more = !heads_on || backward.head + heads_on < backward.end_head();
        if constexpr (Plan::kBlockMap) backward.place = place;
        if constexpr (Plan::kStages == 1) {
            __syncthreads();
            backward.load_q(m_block, 0);
            cp_async_commit_group();
            cp_async_wait_group<0>();
            __syncthreads();
        } else {
            cp_async_wait_group<0>();
            __syncthreads();
            if (more) {
                backward.head += heads_on;
                backward.load_q(backward.block_at(heads_on ? range.begin : place + 1), stage ^ 1);
                cp_async_commit_group();
                backward.head -= heads_on;
            }
        }
        const bool masked = (Score::kHides && !Plan::kBlockMap) || place >= range.full_end ||
                            place < range.full_begin;
        if constexpr (!kTwoBodies) {
            backward.step(dk, dv, m_block, stage, (kHidden || Plan::kTail) && masked);
        } else if (masked) {
            backward.step(dk, dv, m_block, stage, true);
        } else {
            backward.step(dk, dv, m_block, stage, false);
        }
        backward.head += heads_on;
        place = heads_on ? (Plan::kBlockMap ? 0 : backward.range().get().begin) : place + 1;
        if (Plan::kStages > 1) stage ^= 1;
    }
    cp_async_wait_group<0>();
    backward.turn.announce();
    if constexpr (kHidden) {
        const BlockRange range = backward.range().get();
        const int first = Plan::kBlockMap ? 0 : range.begin * Plan::kBlockM;
        const int last =
            Plan::kBlockMap ? p.seqlen_q : min_of(range.end * Plan::kBlockM, p.seqlen_q);
        if (Plan::kNeedDq && (backward.dirty & Backward::kDirtyK)) backward.restore_dq(first, last);
        if (Plan::kNeedDkv && (backward.dirty & (Backward::kDirtyQ | Backward::kDirtyDout)))
            backward.restore_dkv(dk, dv, first, last);
    }
    if constexpr (Plan::kNeedDkv) backward.store(dk, dv);
}
