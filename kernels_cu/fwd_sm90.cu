// Attention forward for Hopper (sm_90a) in 16-bit types: TMA, mbarriers, wgmma.
//
//     s = scale * q k^T    m, l = running row maximum and sum of p = exp(s - m)    out = p v / l
//
// A block stays on its SM and takes one piece of work after the other: kBlockM queries of one head.
//
//     who                       registers  does
//     warp 0, one lane          few        producer: hands out pieces, loads keys and values
//     warp 1                    few        loads queries, and blocks of a staged array
//     warps 2, 3                few        where keys are hidden by a band or by the caller's
//                                          score: replace hidden inf and NaN in values
//     warpgroups 1 ..           many       consumers: 64 rows of queries each
//
//     barrier         arrives                              waits
//     piece_full[2]   producer                             everybody else, for what to work on
//     piece_empty[2]  everybody else, when done with it    producer
//     q_full[place]   loader of queries + TMA bytes        the consumer warpgroup
//     q_empty[..]     its warps, after the last S          loader of queries
//     k_full[stage]   producer + TMA bytes                 consumers
//     k_empty[..]     each consumer warp after S           producer
//     v_full[..]      producer + TMA bytes                 consumers, or with a band cleaners
//     v_clean[..]     cleaners                             consumers
//     v_empty[..]     each consumer warp after P V, and    producer
//                     each cleaner
//     staged_full[]   loader of queries + TMA bytes        the consumer warpgroup
//     staged_empty[]  its warps, once it is in registers   loader of queries
//
// Shared memory, in panels of 64 columns as wgmma reads them: kQSlots x q | kStages x k | kStages x
// v | a staged block for each warpgroup | kOutPanels of the output on its way out (in place of q where
// there is no room) | barriers | pieces.
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
// With a block map a piece has a list of blocks: n counts its places, and those that need a look
// pair by pair come first (attn/block_map.cuh). Late steps begin behind the first full block.
//
// The output leaves by a tensor map, 16 rows of a warp at a time, while the warp goes on: by way of
// registers it kept a warpgroup 1,400 cycles a piece at D = 64, 2,000 at 128 and 3,300 at 256, in
// which neither products nor exponentials ran.
//
// With kLazy nobody looks for hidden inf and NaN until an output is not finite: then the piece
// fails.
//
// The caller's options (struct Score) enter between a product and its softmax. Before S(n) or while
// it runs a warp reads what the block's keys need and draws dropout's bits (attn/score_rows.cuh):
// that costs registers, so that these kernels have tiles of their own (families/sm90.py). A 16-bit
// array of queries by keys comes as keys do where a tensor map can describe it, kStaged: 551 TFLOP/s
// for 415 with reads from global memory, bfloat16 at 128, 8192 keys.
//
// Measured on an H200, bfloat16, batch * seqlen = 16384, heads * head_dim = 2048: ratio to cuDNN in
// the same process, full | causal at 512, 2048 and 16384. Runs differ by 2 %, sessions by more: the
// tiles of the table came to 0.99, 0.95 and 0.98 at 512 causal in bench/results.
//
//     D    tile, stages  form         full               causal
//     64   192 x 128, 4  exact        1.14  1.14  1.16   1.01  1.15  1.16
//     64   192 x 128, 4  late, turns  1.17  1.23  1.27   0.99  1.15  1.25
//     64   128 x 128, 3  exact        0.96  0.98   -     0.87  0.99   -
//     128  192 x 80, 3   exact        1.02  1.15   -     0.93  1.22   -
//     128  192 x 80, 3   late         0.98  1.17  1.20   0.94  1.26  1.36
//     128  192 x 64, 4   exact        1.06  1.10  1.08   1.02  1.25  1.23
//     128  128 x 128, 2  exact        1.07  1.11  1.11   0.97  1.26  1.26
//     256  128 x 80, 2   late         1.01  1.13  1.19   0.88  1.11  1.28
//     256  128 x 64, 2   exact        1.16  1.18  1.18   0.99  1.22  1.31
//     256  128 x 64, 2   exact, turns 1.19  1.21  1.20   0.99  1.22  1.32
//     256  128 x 64, 2   late, turns  1.15  1.19  1.20   0.96  1.19  1.26
//
// At D = 256 a step of 80 keys leaves no room for the output, which then waits for the queries'
// place and they for it: 6,000 of a piece's 22,000 cycles at 512 causal.
//
// Tried and left: the next piece's first S before this piece's last P V (2 to 8 % slower); a wait
// for O only after all exponentials, forced by a basic block's end (1 to 8 % slower); one place for
// queries (up to 5 % slower at 512, nothing at 4096); kLazy at 64 and 128 (1 to 4 % slower, at 256
// 1 to 3 % faster); 128 x 176 at 128 (0.83 at 512, 1.08 at 4096); 48 keys at 256 (0.98 to 1.06).
#include "attn/score.cuh"
#include "attn/score_rows.cuh"
#include "attn/softmax.cuh"
#include "fwd_sm90_pieces.cuh"
#include "ptx/bulk.cuh"

using Scores = Fragment<float, 1, Plan::kBlockN / 8>;
using Output = Fragment<float, 1, Plan::kHeadDimV / 8>;

// Whether steps before the full blocks look at single pairs. Without a band or a map only the first
// does.
inline constexpr bool kMaskedSteps =
    Plan::kBand || (Plan::kBlockMap && (Plan::kTail || Score::kHides));

struct Consumer {
    const Params& p;
    const Shared smem;
    const int warp;  // among all consumers
    Pieces pieces;
    Cursor<Plan::kStages> k_cursor, v_cursor;
    Softmax<float, 1, Plan::kFused> softmax;
    float factor[2];
    bool rescale;  // O must be multiplied by factor before the next P V
    u32 weights[Plan::kBlockN / 16][4];
    ScoreRows<Score, Plan::kBlockN / 8> options;
    u32 staged_phase = 0;

    __device__ __forceinline__ Piece piece() const { return pieces.current(); }
    __device__ __forceinline__ float scale() const { return p.scale_log2; }

    __device__ __forceinline__ int q_place() const {
        return Shared::q_place(pieces.cursor, warp / 4);
    }
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
        const u64 q = matrix_descriptor(smem.q(q_place()), 0);
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
        const bool clean = kCleaners > 0 && (!Plan::kLazy || piece().exact());
        mbarrier_wait(clean ? smem.v_clean(v_cursor.stage) : smem.v_full(v_cursor.stage),
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
    __device__ __forceinline__ void release_q() { warp_arrive(smem.q_empty(q_place())); }
    __device__ __forceinline__ void rescale_output(Output& o) {
        if (rescale) o.for_each_row([&](float& x, int q) { x *= factor[q]; });
    }

    // Returns whether the scores are relative to the softmax's references, which stay.
    template <bool kMasked>
    __device__ __forceinline__ bool apply_score_and_mask(Scores& s, int n_block) const {
        if constexpr (!Score::kChanges) apply_scale_sign<Plan::kScaleSign>(s);
        const bool settled = options.template apply<kMasked || !Plan::kBlockMap>(
            p, s, n_block * Plan::kBlockN, softmax.reference);
        if constexpr (kMasked && (Plan::kBand || Plan::kTail)) apply_mask(s, n_block);
        return settled;
    }
    __device__ __forceinline__ void apply_mask(Scores& s, int n_block) const {
        const Piece piece = this->piece();
        const auto visible = mask_of(p, piece.batch);
        const int row = piece.first_row + 16 * warp, col = n_block * Plan::kBlockN;
        const auto hide = [&](auto seen) {
            s.for_each(row, col, [&](float& x, int i, int j) {
                x = seen(i, j) ? x : -infinity<float>();
            });
        };
        if (Plan::kBand && col < first_key(p, row + 15))
            hide(visible);
        else
            hide([&](int i, int j) { return visible.below_last(i, j); });
    }
    // S becomes unrounded P.
    template <bool kLate> __device__ __forceinline__ void update_softmax(Scores& s, bool settled) {
        const auto note = [&](const float (&f)[2]) {
            factor[0] = f[0], factor[1] = f[1], rescale = true;
        };
        rescale = false;
        if (Score::kCapped && settled)
            softmax.add(s);
        else if constexpr (kLate)
            softmax.update_late(s, scale(), note);
        else
            softmax.update(s, scale(), note);
        options.drop(s);
    }
    __device__ __forceinline__ void round_weights(const Scores& s) {
#pragma unroll
        for (int step = 0; step < Plan::kBlockN / 16; ++step)
#pragma unroll
            for (int r = 0; r < 4; ++r)
                weights[step][r] = pack<T>(s.x[0][2 * step + r / 2][r % 2 * 2],
                                           s.x[0][2 * step + r / 2][r % 2 * 2 + 1]);
    }
    // The block's part of a staged array to registers; its place is free for the next.
    template <bool kRead = true> __device__ __forceinline__ void take_staged() {
        if constexpr (Plan::kStaged) {
            mbarrier_wait(smem.staged_full(warp / 4), staged_phase);
            if constexpr (kRead)
                options.read_staged(smem.staged(warp / 4) + warp % 4 * 16 * kPanelBytes);
            warp_arrive(smem.staged_empty(warp / 4));
            staged_phase ^= 1;
        }
    }
    // A block of keys of which this warpgroup's rows see none.
    __device__ __forceinline__ void skip() {
        take_staged<false>();
        take_turn();
        pass_turn();
        mbarrier_wait(smem.k_full(k_cursor.stage), k_cursor.phase);
        release_k();
        wait_v();
        release_v();
    }

    template <bool kMasked> __device__ __forceinline__ void first_step(int n) {
        Scores s;
        // Read while the product runs.
        const int block = kMasked || Score::kProgram ? pieces.block_at(n) : n;
        options.template read<true>(p, block * Plan::kBlockN);
        take_turn();
        start_scores(s);
        pass_turn();
        options.template read<false>(p, block * Plan::kBlockN);
        take_staged();
        wgmma_wait_group<0>();
        release_k();
        update_softmax<false>(s, apply_score_and_mask<kMasked>(s, block));
        round_weights(s);
    }
    // The scores of block n while the weights of the block behind it meet their values. kLate:
    // weighed before their maximum is known, where every row sees every key.
    template <bool kMasked, bool kLate> __device__ __forceinline__ void step(Output& o, int n) {
        Scores s;
        const int block = kMasked || Score::kProgram ? pieces.block_at(n) : n;
        options.template read<true>(p, block * Plan::kBlockN);
        take_turn();
        start_scores(s);
        rescale_output(o);
        start_output(o);
        pass_turn();
        options.template read<false>(p, block * Plan::kBlockN);
        take_staged();
        wgmma_wait_group<1>();
        release_k();
        update_softmax<kLate>(s, apply_score_and_mask<kMasked>(s, block));
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
        first_step<kMaskedSteps || Plan::kTail>(n);
        // Masked blocks, then full ones, then masked ones where the band has a lower end.
#pragma unroll 1
        for (int until = full_end;; until = range.begin) {
            if constexpr (kMaskedSteps || Plan::kLate) {
#pragma unroll 1
                while (n > until) step<kMaskedSteps, false>(o, --n);
                if (n == range.begin) break;
            }
#pragma unroll 1
            while (n > full_begin) step<false, Plan::kLate>(o, --n);
            if (!Plan::kBand) break;
        }
        last_step(o);
    }
    // The blocks of keys that this warpgroup's rows see.
    __device__ __forceinline__ BlockRange own_range(const BlockRange& range) const {
        const Piece piece = this->piece();
        const int row = warp / 4 * 64;
        BlockRange own = Plan::kSkip ? piece.keys(p, row, 64) : range;
        if (!piece.any_exists(p, row) || own.begin >= own.end)
            return {range.begin, range.begin, range.begin, range.begin};
        // Full blocks count on references: before them each row must have seen a key.
        if constexpr (Plan::kBlockMap) {
            if (Plan::kLate && own.full_end < own.end) own.full_end = max_of(own.full_end - 1, 0);
        } else if constexpr (Plan::kBand && Plan::kLate) {
            const int first = Piece::existing(piece.first_row + (Plan::kSkip ? row : 0));
            const Lengths ends = lengths_of(p, piece.batch);
            own.full_end = min_of(own.full_end, last_key(p, ends, first) / Plan::kBlockN);
        }
        return own;
    }
    __device__ __forceinline__ void compute_all(Output& o) {
        const BlockRange own = own_range(pieces.keys());
#pragma unroll 1
        for (int n = pieces.keys().end - 1; n >= own.end; --n) skip();
        if (own.begin < own.end)
            compute(o, own);
        else if constexpr (!Plan::kOutInQ)
            release_q();
#pragma unroll 1
        for (int n = own.begin - 1; n >= pieces.keys().begin; --n) skip();
    }

    // What the cleaners took away, to the rows that see it, in a panel of the output.
    __device__ __forceinline__ void restore(const OTile& tile, int panel) const {
        const Piece piece = this->piece();
        const T* start =
            head_start<const T>(p.v, p.v_strides, p.batch_sizes, piece.batch, piece.head / p.group);
        Rows<const T> rows = Rows<const T>(start, p.v_strides, p.seqlen_k, p.head_dim_v)
                                 .from_column(64 * panel);
        rows.dim = min_of(rows.dim, 64);
        const BlockRange range = pieces.keys();
        const Visible<MaskFor<Plan::kBand>, Score> visible{mask_of(p, piece.batch),
                                                           {p, piece.batch, piece.head}};
        if constexpr (Plan::kBlockMap) {
            for (int place = range.full_end; place < range.end; ++place)
                restore_nonfinite(tile, piece.first_row + 16 * warp, rows,
                                  pieces.block_at(place) * Plan::kBlockN,
                                  (pieces.block_at(place) + 1) * Plan::kBlockN, visible);
            return;
        }
        restore_nonfinite(tile, piece.first_row + 16 * warp, rows, range.begin * Plan::kBlockN,
                          range.end * Plan::kBlockN, visible);
    }
    __device__ __forceinline__ bool is_dirty() const {
        const u32 number = piece().number(), words = smem.dirty(pieces.cursor.stage);
        return load_shared(words) == number || load_shared(words + 4) == number;
    }
    __device__ __forceinline__ Score score() const {
        const Piece piece = this->piece();
        return {p, piece.batch, piece.head};
    }
    // The end of a row that its sink joins, in natural units.
    __device__ __forceinline__ RowEnd<float> row_end(int q) const {
        const bool natural = Score::kChanges && !Score::kCapped;
        const float unit = natural ? 1.f : scale() * 0.693147180559945309f;
        return {softmax.reference[q] * unit, softmax.sum[q], score().sink()};
    }
    __device__ __forceinline__ float lse(int q) const {
        if constexpr (Score::kSinks) return row_end(q).lse;
        return softmax.lse(q, scale());
    }
    // What the output is multiplied by.
    __device__ __forceinline__ float inverse_sum(int q) const {
        float inverse = softmax.inverse_sum(q);
        if constexpr (Score::kSinks) inverse = row_end(q).inverse;
        if constexpr (Score::kDropout) inverse *= score().keep_scale();
        return inverse;
    }
    __device__ __forceinline__ void store(Output& o) {
        const Piece piece = this->piece();
        const int first_row = piece.first_row + 16 * warp;
        if (Plan::kBand && first_row < 0) return;
        softmax.finish();
        // Rows behind the last query saw keys, since only masked steps look.
        const int end = lengths_of(p, piece.batch).seqlen_q;
        const auto exists = [&](int q) { return first_row + 8 * q + lane_id() / 4 < end; };
        if (p.lse != nullptr && lane_id() % 4 == 0) {
            float* lse =
                head_start<float>(p.lse, p.lse_strides, p.batch_sizes, piece.batch, piece.head);
            for (int q = 0; q < 2; ++q) {
                const int row = first_row + 8 * q + lane_id() / 4;
                if (row < p.seqlen_q)
                    lse[row * p.lse_strides.row] =
                        !Plan::kLengths || exists(q) ? this->lse(q) : -infinity<float>();
            }
        }
        const float inverse[2] = {inverse_sum(0), inverse_sum(1)};
        float check[2] = {0, 0};  // NaN where an output is not finite
        o.for_each_row([&](float& x, int q) {
            x *= inverse[q];
            if constexpr (Plan::kLengths) x = exists(q) ? x : 0.f;
            check[q] = fma_of(x, 0.f, check[q]);
        });
        if constexpr (Plan::kLate || Plan::kLazy) {
            bool failed = false;
            for (int q = 0; q < 2; ++q)
                failed |= check[q] != 0 && exists(q);
            if (failed && !piece.exact()) store_shared(smem.failed(pieces.cursor.stage), 1);
        }
        const bool dirty = kCleaners > 0 && is_dirty();
        const Loader box(p, piece, 1);
#pragma unroll
        for (int first = 0; first < kPanelsV; first += Plan::kOutPanels) {
            // A piece that comes again writes where its first output goes: two copies on their way
            // keep no order.
            wait_out((Plan::kLate || Plan::kLazy) && piece.exact());
            store_panels(o, first, box, dirty);
        }
    }
    // Until what left last was read, or has arrived.
    __device__ __forceinline__ void wait_out(bool arrived = false) const {
        if (kByTma && lane_id() == 0) {
            if (arrived)
                bulk_wait_all();
            else
                bulk_wait_read<0>();
        }
        __syncwarp();
    }
    // Panels first .. first + kOutPanels of the output, to shared memory and on to where they
    // belong.
    __device__ __forceinline__ void store_panels(const Output& o, int first, const Loader& box,
                                                 bool dirty) const {
        const Piece piece = this->piece();
        const int row = piece.first_row + 16 * warp;
        const auto tile = [&](int panel) {
            return OTile{smem.out(warp) + (panel - first) * OTile::kBytes};
        };
#pragma unroll
        for (int panel = first; panel < min_of(first + Plan::kOutPanels, kPanelsV); ++panel)
            store_fragment(tile(panel).part(0, 0), o, 8 * panel);
        __syncwarp();
        if (dirty)
            for (int panel = first; panel < min_of(first + Plan::kOutPanels, kPanelsV); ++panel)
                restore(tile(panel), panel);
        if constexpr (kByTma) {
            fence_proxy_async();
            __syncwarp();
            if (lane_id() != 0) return;
#pragma unroll
            for (int panel = first; panel < min_of(first + Plan::kOutPanels, kPanelsV); ++panel)
                tma_store(p.out_map, tile(panel).base, 64 * panel, row, int(box.head),
                          int(box.inner), int(box.outer));
            bulk_commit_group();
        } else {
            __syncwarp();
            T* start = head_start<T>(p.out, p.out_strides, p.batch_sizes, piece.batch, piece.head);
            const Rows<T> rows(start, p.out_strides, p.seqlen_q, p.head_dim_v);
            for (int panel = first; panel < min_of(first + Plan::kOutPanels, kPanelsV); ++panel)
                store_tile<0, kWarpSize>(tile(panel), rows.from_column(64 * panel), row, lane_id());
        }
    }

    __device__ __forceinline__ void begin_options() {
        if constexpr (Score::kProgram) {
            const Piece piece = this->piece();
            options.begin(p, piece.batch, piece.head,
                          Piece::existing(piece.first_row + 16 * warp));
        }
    }
    __device__ __forceinline__ void run() {
        if (Plan::kTurns && warp / 4 == kConsumers - 1) pass_turn();
        for (; pieces.wait(); pieces.release()) {
            Output o;
            o.fill(0);
            softmax.init();
            begin_options();
            mbarrier_wait(smem.q_full(q_place()), Shared::q_phase(pieces.cursor));
            compute_all(o);
            if constexpr (Plan::kOutInQ) {
                named_barrier_sync(1 + warp / 4, kWarpgroupSize);  // nobody reads q any more
                store(o);
                fence_proxy_async();
                wait_out();
                release_q();
            } else {
                store(o);
            }
        }
        wait_out();  // shared memory goes with the thread block
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
        prefetch_tensormap(p.out_map);
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
        Consumer consumer{p, smem, warp - kWarpgroupSize / kWarpSize, {smem}};
        consumer.run();
    }
}
